"""Images of microVMs: a kernel and a first root file system, built without root, found by name.

The cache folder (:func:`fumehood.environments.cache_folder`) holds::

    microvm/images/<digest>/kernel          a bzImage
    microvm/images/<digest>/initramfs.cpio  Python, tools and the kernel's virtio modules
    microvm/images/<digest>/manifest.json   what it holds, :class:`Image`
    microvm/names/<name>                    which digest a name means, replaced atomically
    microvm/building/                       where a build works; renamed only when complete
    microvm/lock                            held by the one builder at a time

Kernel and Python come from the host's own Debian sources: apt downloads and checks them, and they are only unpacked
(:mod:`fumehood.images.packages`). The digest is that of every package archive. Our own files, init and the guest agent,
are no part of an image: they are a second archive (:func:`own_archive`), made when a template boots.
"""

from __future__ import annotations

import importlib.util
import io
import json
import lzma
import marshal
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import fumehood
from fumehood.errors import StartError
from fumehood.images import packages as debian
from fumehood.images import shelf
from fumehood.images.packages import Progress
from fumehood.tiers.microvm.cpio import Archive

#: How an image is laid out; a change of it makes every image new.
LAYOUT = 1

#: The image that the tier takes if none is named.
DEFAULT_NAME = "python"

#: Debian's kernel without drivers for hardware; it names the newest one by its dependency.
KERNEL_PACKAGE = "linux-image-cloud-amd64"

#: What the guest's devices need, in the order of loading.
MODULES = ("virtio_ring", "virtio", "virtio_mmio", "virtio_console")
_MODULES_HOME = "lib/fumehood-modules"

#: Files of this package that run in the guest, relative to it.
INSIDE = (
    "__init__.py",
    "guest/__init__.py",
    "guest/agent.py",
    "guest/displays.py",
    "linux/__init__.py",
    "linux/capabilities.py",
    "linux/libc.py",
    "linux/mounts.py",
    "linux/namespaces.py",
    "linux/seccomp.py",
    "linux/steps.py",
    "linux/syscalls.py",
    "tiers/__init__.py",
    "tiers/microvm/__init__.py",
    "tiers/microvm/direct.py",
    "tiers/microvm/guest_agent.py",
    "tiers/microvm/guest_files.py",
    "tiers/microvm/guest_init.py",
)
_PACKAGE = Path(fumehood.__file__).parent
_INIT = """\
#!/opt/env/bin/python3 -ISB
import sys
sys.path.insert(0, "/opt/fumehood")
from fumehood.tiers.microvm import guest_init
guest_init.run()
"""
_CODE_HOME = "opt/fumehood"

#: Every byte of the root is memory of every template: what a program does not use is left out.
_LEFT_OUT = (
    *(f"usr/share/{name}" for name in (
        "bug", "bash-completion", "perl5", "common-licenses", "applications", "pixmaps", "debconf", "gdb", "binfmts",
        "python3", "readline", "terminfo", "gcc", "zoneinfo/right", "zoneinfo/posix",
    )),
    *(f"usr/lib/x86_64-linux-gnu/{name}" for name in ("gconv", "perl-base", "audit", "engines-3", "ossl-modules")),
    *(f"usr/lib/{name}" for name in ("valgrind", "locale", "udev", "systemd", "python3/dist-packages")),
    "usr/sbin", "usr/bin/perl", "usr/include", "var",
)  # fmt: skip
_LIBRARY_LEFT_OUT = ("test", "idlelib", "tkinter", "lib2to3", "ensurepip", "turtledemo", "pydoc_data", "turtle.py")
_FOLDERS = ("dev", "proc", "sys", "tmp", "work", "mnt", "root", "opt/env/bin")


@dataclass(frozen=True, slots=True)
class Image:
    """A built image."""

    name: str
    path: Path
    digest: str  # SHA-256 over the package archives, the kernel's included, and LAYOUT
    kernel_release: str
    python: str  # "3.11"
    packages: tuple[str, ...]  # as they were asked for
    initramfs_bytes: int
    built_at: str  # UTC, ISO 8601

    @property
    def kernel(self) -> Path:
        """The kernel's file."""
        return self.path / "kernel"

    @property
    def initramfs(self) -> Path:
        """The archive of the first root file system, not compressed."""
        return self.path / "initramfs.cpio"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {"path": str(self.path)}


def find(name: str = DEFAULT_NAME) -> Image | None:
    """The image called ``name``, or None. Raises PolicyError for a malformed name or an unsafe cache folder."""
    return _load(folder(), shelf.check_name(name))


def build(
    name: str,
    *,
    packages: Sequence[str] = (),
    kernel: Path | None = None,
    progress: Progress = lambda line: None,
) -> Image:
    """Build an image out of the default packages and ``packages``, and call it ``name``.

    ``kernel`` is the operator's own in place of Debian's: a Debian kernel package (.deb), or a bzImage that has
    virtio-mmio, virtio-console, tmpfs, cgroup v2 and ACPI built in. Raises PolicyError (malformed name or package) and
    StartError (apt is missing or failed, with its last lines; no space).
    """
    shelf.check_name(name)
    wanted = debian.check(tuple(dict.fromkeys((*debian.DEFAULT, *packages))))
    place = folder()
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    with shelf.locked(place, progress), shelf.workshop(place) as shop:
        try:
            archives = debian.download(wanted, shop / "archives", progress)
            kernel_archive = kernel or _download_kernel(shop / "kernel-archive", progress)
            digest = shelf.digest_of([*archives, kernel_archive], head=b"%d" % LAYOUT)
            target = place / "images" / digest
            if (target / "manifest.json").exists():
                progress("this image is built already")
            else:
                made = shop / "image"
                made.mkdir()
                manifest = _make(made, archives, kernel_archive, shop, progress)
                manifest |= {"digest": digest, "packages": list(wanted)}
                (made / "manifest.json").write_text(json.dumps(manifest, indent=1))
                shutil.rmtree(target, ignore_errors=True)  # without a manifest: half removed
                target.parent.mkdir(exist_ok=True)
                made.rename(target)
            shelf.point(place, name, digest)
        except OSError as error:
            raise StartError(f"the image could not be built: {error}", tier="microvm") from error
        image = _load(place, name)
    if image is None:
        raise StartError(f"the image {name!r} was removed while it was being built", tier="microvm")
    return image


def list_all() -> tuple[Image, ...]:
    """Every image on this host, sorted by name. Raises PolicyError for an unsafe cache folder."""
    place = folder()
    return tuple(image for name in shelf.names(place) if (image := _load(place, name)) is not None)


def remove(name: str) -> bool:
    """Forget ``name``, and delete every image that no name means and every template; whether there was one.

    Raises PolicyError. A sandbox that runs needs none of these files.
    """
    place = folder()
    if _load(place, shelf.check_name(name)) is None:
        return False
    with shelf.locked(place, lambda line: None):
        (place / "names" / name).unlink(missing_ok=True)
        named = {image.digest for image in list_all()}
        shelf.sweep(place / "images", named)
        shutil.rmtree(place / "templates", ignore_errors=True)
    return True


def folder() -> Path:
    """Where images and templates are kept. Raises PolicyError if somebody else could change what is in it."""
    return shelf.own_folder("microvm")


def own_archive(python: str) -> bytes:
    """Our files in the guest, as an archive that follows an image's.

    They are compiled where ``python``, the guest's version, is this process's: it halves the time to boot. Made once
    in a process, whose own code they are to fit: it takes as long as a machine needs to start.
    """
    return _own_archive(python, _PACKAGE)


@lru_cache(maxsize=2)
def _own_archive(python: str, package: Path) -> bytes:
    ours = f"{sys.version_info.major}.{sys.version_info.minor}" == python
    file = io.BytesIO()
    archive = Archive(file)
    archive.folder(_CODE_HOME)
    for folder in ("", "/guest", "/linux", "/tiers", "/tiers/microvm"):
        archive.folder(f"{_CODE_HOME}/fumehood{folder}")
        archive.folder(f"{_CODE_HOME}/fumehood{folder}/__pycache__")
    for name in INSIDE:
        path = f"{_CODE_HOME}/fumehood/{name}"
        source = (package / name).read_bytes()
        archive.content(path, source)
        if ours:
            compiled = os.path.relpath(importlib.util.cache_from_source(f"/{path}", optimization=""), "/")
            archive.content(compiled, _compiled(source, f"/{path}"))
    archive.content("init", _INIT.encode(), executable=True)
    archive.close()
    return file.getvalue()


def _compiled(source: bytes, path: str) -> bytes:
    """A compiled file that is never compared with its source (PEP 552)."""
    code = compile(source, path, "exec", dont_inherit=True, optimize=0)
    flags = (0b01).to_bytes(4, "little")
    return importlib.util.MAGIC_NUMBER + flags + importlib.util.source_hash(source) + marshal.dumps(code)


# --- building --------------------------------------------------------------------------------------------------------


def _download_kernel(place: Path, progress: Progress) -> Path:
    """The archive of the newest kernel alone: its dependencies serve its installation, and nothing is installed."""
    done = subprocess.run(
        ["apt-cache", "depends", "--important", KERNEL_PACKAGE],
        capture_output=True,
        text=True,
        env={**os.environ, "LC_ALL": "C.UTF-8"},
    )
    found = re.search(r"Depends: (linux-image-[a-z0-9.+-]+)", done.stdout)
    if found is None:
        raise StartError(
            f"apt knows no {KERNEL_PACKAGE}",
            tier="microvm",
            remedy="run `apt-get update` as root, or give --kernel a Debian kernel package",
        )
    progress(f"downloading {found[1]}")
    place.mkdir()
    done = subprocess.run(
        ["apt-get", "-q", "-oAPT::Sandbox::User=", "download", found[1]],
        cwd=place,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    archives = list(place.glob("*.deb"))
    if done.returncode or len(archives) != 1:
        raise StartError(
            f"apt could not download {found[1]}: {done.stderr.strip()[-500:]}",
            tier="microvm",
            remedy="run `apt-get update` as root",
        )
    return archives[0]


def _make(made: Path, archives: list[Path], kernel_archive: Path, shop: Path, progress: Progress) -> dict[str, Any]:
    """Fill ``made`` with a kernel and an archive of the root; the manifest's facts."""
    root, kernel_root = shop / "root", shop / "kernel-root"
    debian.unpack(archives, root, progress)
    python = debian.python_of(root)
    _trim(root, python)
    debian.compile_library(root, progress)
    boot = [kernel_archive]
    if not _is_kernel(kernel_archive):
        debian.unpack([kernel_archive], kernel_root, progress)
        boot = sorted((kernel_root / "boot").glob("vmlinuz-*"))
    if not boot:
        raise StartError(f"{kernel_archive.name} holds no kernel", tier="microvm")
    shutil.copyfile(boot[-1], made / "kernel")
    progress("writing the first root file system")
    with (made / "initramfs.cpio").open("wb") as file:
        _write_root(Archive(file), root, kernel_root, python)
    return {
        "kernel_release": _kernel_release(boot[-1]),
        "python": python,
        "initramfs_bytes": (made / "initramfs.cpio").stat().st_size,
        "built_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _is_kernel(path: Path) -> bool:
    """Whether a file is a bzImage, by the mark of the x86 boot protocol."""
    with path.open("rb") as file:
        return file.read(0x206)[0x202:] == b"HdrS"


def _kernel_release(path: Path) -> str:
    """The release that a bzImage says it has: the first word of the text that its header points at (boot protocol)."""
    with path.open("rb") as file:
        head = file.read(0x10000)
    start = 0x200 + int.from_bytes(head[0x20E:0x210], "little")
    words = head[start : start + 256].partition(b"\0")[0].split()
    return words[0].decode("ascii", "replace") if words else path.name


def _trim(root: Path, python: str) -> None:
    library = f"usr/lib/python{python}"
    unused = [*_LEFT_OUT, *(f"{library}/{name}" for name in _LIBRARY_LEFT_OUT)]
    unused += [str(p.relative_to(root)) for p in (root / library).glob("config-*")]
    for name in unused:
        path = root / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _write_root(archive: Archive, root: Path, kernel_root: Path, python: str) -> None:
    for name in _FOLDERS:
        parts = name.split("/")
        for depth in range(len(parts)):
            archive.folder("/".join(parts[: depth + 1]))
    archive.device("dev/console", 0o600, 5, 1)
    archive.device("dev/null", 0o666, 1, 3)
    archive.tree(root)
    for name in ("python3", "python", f"python{python}"):
        archive.link(f"opt/env/bin/{name}", f"/usr/bin/python{python}")
    archive.content("opt/env/pyvenv.cfg", b"home = /usr/bin\ninclude-system-site-packages = false\n")
    archive.folder(_MODULES_HOME)
    order = []
    for name in MODULES:
        found = [*kernel_root.glob(f"usr/lib/modules/*/kernel/**/{name}.ko*")]
        if found:  # otherwise it is built in, or the guest does not find its ports and says so
            archive.content(f"{_MODULES_HOME}/{name}.ko", _module(found[0]))
            order.append(f"{name}.ko")
    archive.content(f"{_MODULES_HOME}/order", "\n".join(order).encode())
    archive.close()


def _module(path: Path) -> bytes:
    data = path.read_bytes()
    if path.suffix == ".xz":
        return lzma.decompress(data)
    if path.suffix != ".ko":
        raise StartError(f"{path.name} is compressed in a way that is not read here", tier="microvm")
    return data


def _load(place: Path, name: str) -> Image | None:
    try:
        digest = shelf.meant_by(place, name)
        if digest is None:
            return None
        path = place / "images" / digest
        raw = json.loads((path / "manifest.json").read_bytes())
        return Image(
            name=name,
            path=path,
            digest=digest,
            kernel_release=raw["kernel_release"],
            python=raw["python"],
            packages=tuple(raw["packages"]),
            initramfs_bytes=raw["initramfs_bytes"],
            built_at=raw["built_at"],
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
