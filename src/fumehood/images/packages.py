"""A root file system out of Debian packages, without root and without running what the packages bring.

apt resolves and downloads what the host's own sources offer, and checks signatures and hashes as ever; here the
archives are only unpacked, with every path kept inside the new root. No maintainer script runs, so what those would
do and Python needs is done here: the merged-/usr links, a few files of /etc, the cache of the dynamic loader, and the
compiled standard library (a read-only root could not keep what each start would compile again).
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

from fumehood.errors import PolicyError, StartError

Progress = Callable[[str], None]

#: What an image holds unless asked otherwise: Python with its whole standard library, a shell with the usual tools,
#: time zones, and the C++ runtime that wheels such as numpy's are linked against.
DEFAULT = ("python3", "dash", "coreutils", "tzdata", "libstdc++6")

#: Names as Debian policy 5.6.1 has them, so that no option of apt can be meant.
_PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]+\Z")
_USR_MERGED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_LEFT_OUT = ("usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/lintian", "usr/share/info")
_ETC = {
    "passwd": "root:x:0:0::/root:/bin/sh\nsandbox:x:1000:1000::/tmp:/bin/sh\n",
    "group": "root:x:0:\nsandbox:x:1000:\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    "host.conf": "multi on\n",
}
#: Mount points: the root is read-only when the runtime looks for them.
_FOLDERS = ("work", "tmp", "proc", "sys", "dev", "run", "root", "mnt", "opt/env", "etc", "usr/bin")


def available() -> str:
    """Why packages cannot be had here, or "" if they can."""
    missing = [tool for tool in ("apt-get", "dpkg-deb") if shutil.which(tool) is None]
    return f"{' and '.join(missing)} not found: images are built from Debian packages" if missing else ""


def check(packages: Sequence[str]) -> tuple[str, ...]:
    """``packages`` if every one is a Debian package's name. Raises PolicyError."""
    for name in packages:
        if not _PACKAGE.match(name):
            raise PolicyError(f"{name!r} is not the name of a Debian package")
    return tuple(packages)


def download(packages: Sequence[str], folder: Path, progress: Progress) -> list[Path]:
    """The archives of ``packages`` and all that they depend on, checked by apt, sorted. Raises StartError."""
    if reason := available():
        raise StartError(reason, remedy="build on Debian or a derivative, or use `fumehood image pull`")
    (folder / "partial").mkdir(parents=True, exist_ok=True)
    status = folder / "status"
    status.touch()  # nothing counts as installed, so everything needed is fetched
    options = {
        "Dir::State::status": str(status),
        "Dir::Cache::archives": str(folder),
        "Dir::Cache::pkgcache": "",
        "Dir::Cache::srcpkgcache": "",
        "Debug::NoLocking": "1",
        "APT::Install-Recommends": "0",
        "APT::Sandbox::User": "",
    }
    command = ["apt-get", "-y", "-q", "--download-only", *(f"-o{key}={value}" for key, value in options.items())]
    _run([*command, "install", "--", *packages], progress)
    return sorted(folder.glob("*.deb"))


def unpack(archives: Sequence[Path], root: Path, progress: Progress) -> None:
    """Fill ``root`` from ``archives``. Raises StartError, OSError."""
    root.mkdir(mode=0o755)
    for name in _FOLDERS:
        (root / name).mkdir(parents=True, exist_ok=True)
    for name in _USR_MERGED:
        (root / "usr" / name).mkdir(exist_ok=True)
        (root / name).symlink_to(f"usr/{name}")
    for archive in archives:
        progress(f"unpacking {archive.name}")
        _unpack(archive, root)
    for name in _LEFT_OUT:
        shutil.rmtree(root / name, ignore_errors=True)
    for name, text in _ETC.items():
        (root / "etc" / name).write_text(text)
    shell = root / "usr/bin/sh"
    if not shell.is_symlink() and (root / "usr/bin/dash").exists():
        shell.symlink_to("dash")
    (root / "tmp").chmod(0o1777)


def python_of(root: Path) -> str:
    """The version of the Python in ``root``, "3.11". Raises StartError if there is none."""
    link = root / "usr/bin/python3"
    if link.is_symlink():
        name = os.path.basename(os.readlink(link))
        if re.fullmatch(r"python3\.\d+", name):
            return name.removeprefix("python")
    raise StartError("the packages hold no Python", remedy="add python3 to the packages")


def compile_library(root: Path, progress: Progress) -> None:
    """Compile the standard library by the root's own Python, started through its own loader. Raises StartError."""
    progress("compiling the standard library")
    version = python_of(root)
    loaders = sorted((root / "usr").glob("lib*/ld-linux*.so.*"))
    folders = ":".join(str(p) for p in sorted((root / "usr/lib").glob("*-linux-gnu*")) if p.is_dir())
    if not loaders:
        raise StartError("the packages hold no C library")
    python = [str(loaders[0]), "--library-path", folders, str(root / f"usr/bin/python{version}")]
    library = root / f"usr/lib/python{version}"
    program = (
        "import compileall, sys; compileall.compile_dir(sys.argv[1], stripdir=sys.argv[2], prependdir='/', quiet=2, "
        "invalidation_mode=__import__('py_compile').PycInvalidationMode.UNCHECKED_HASH, workers=1)"
    )
    env = {"PYTHONHOME": str(root / "usr"), "PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}
    _run([*python, "-S", "-s", "-c", program, str(library), str(root)], progress, env=env)


def index_libraries(root: Path, progress: Progress) -> None:
    """Write the loader's cache, without which every start of a program looks for its libraries in forty folders.

    Under gVisor that is 20 ms. The host's own ldconfig does it, where there is one. Raises StartError.
    """
    program = shutil.which("ldconfig", path="/usr/sbin:/sbin:/usr/bin")
    if program is None:
        progress("there is no ldconfig: programs of this image will start more slowly")
        return
    progress("indexing the libraries")
    # -X: links are as their packages made them; -i: no second cache
    _run([program, "-X", "-i", "-r", str(root)], progress, env={"PATH": "/usr/sbin:/usr/bin:/bin", "LC_ALL": "C"})


def _unpack(archive: Path, root: Path) -> None:
    with subprocess.Popen(
        ["dpkg-deb", "--fsys-tarfile", str(archive)], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        with tarfile.open(fileobj=process.stdout, mode="r|") as tar:
            for member in tar:
                _place(member, tar, root)
    if process.returncode:
        raise StartError(f"{archive.name} cannot be unpacked")


def _place(member: tarfile.TarInfo, tar: tarfile.TarFile, root: Path) -> None:
    """One entry of an archive: regular files, folders and links, without owners and without setuid."""
    parts = [p for p in member.name.split("/") if p not in ("", ".")]
    if not parts or ".." in parts:
        return
    if parts[0] in _USR_MERGED:
        parts.insert(0, "usr")
    target = root.joinpath(*parts)
    if not member.isdir():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
    if member.isdir():
        if not target.is_symlink():
            target.mkdir(parents=True, exist_ok=True)
    elif member.issym():
        target.symlink_to(member.linkname)
    elif member.islnk():
        source = [p for p in member.linkname.split("/") if p not in ("", ".")]
        if ".." not in source:
            os.link(root.joinpath(*(["usr", *source] if source[0] in _USR_MERGED else source)), target)
    elif member.isreg():
        content = tar.extractfile(member)
        assert content is not None
        with content, target.open("xb") as file:
            shutil.copyfileobj(content, file, 1 << 20)
        target.chmod(0o755 if member.mode & stat.S_IXUSR else 0o644)


def _run(command: list[str], progress: Progress, env: dict[str, str] | None = None) -> None:
    """Run a tool, its lines told as they come. Raises StartError with its last lines."""
    last: list[str] = []
    own = env if env is not None else {**os.environ, "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=own,
        encoding="utf-8",
        errors="replace",
    ) as process:
        assert process.stdout is not None
        try:
            for raw in process.stdout:
                line = raw.rstrip()
                last = [*last[-9:], line]
                progress(line)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        text = "\n".join(last)
        raise StartError(
            f"{os.path.basename(command[0])} failed with code {process.returncode}:\n{text}",
            remedy="if packages are not found, run `apt-get update` as root",
        )
