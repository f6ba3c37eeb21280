"""Environments: folders of packages that the operator builds beforehand and a sandbox sees read-only.

The cache folder (:func:`cache_folder`) holds::

    envs/<digest>/manifest.json                     what it holds, :class:`Environment`
    envs/<digest>/lib/pythonX.Y/site-packages/…     laid out as a virtual environment, seen at /opt/env in a sandbox
    names/<name>                                    which digest a name means, replaced atomically
    building/                                       where a build works; renamed into envs/ only when complete
    lock                                            held by the one builder at a time

A digest is the SHA-256 of the Python, its ABI and platform, and every file that pip chose, by hash: two builds with
the same digest hold the same packages, so a folder in envs/ is never changed, only made and removed. An interrupted
build leaves at most a folder in building/, which the next build sweeps away.

Only wheels are installed, since a source distribution runs its own code on the host while it is built. ``bin/python3``
and ``pyvenv.cfg`` are left to the tier, which knows the interpreter inside; scripts of packages are not kept, for they
name the host's interpreter.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from fumehood.errors import PolicyError, StartError
from fumehood.model import Policy

#: Told each line of what a build does.
Progress = Callable[[str], None]

#: Where a sandbox sees its environment; compiled files name their sources below it.
INSIDE = "/opt/env"

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}\Z")
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
# A name with extras, versions and markers (PEP 508). A path, a URL or "name @ URL" is none: pip would build source
# found there even under --only-binary.
_PACKAGE = re.compile(
    r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?\s*(\[[A-Za-z0-9._,\s-]*\])?\s*([<>=!~(;][^@\n\r\0]*)?\Z"
)
_ERROR_LINES = 15
_PACKAGES_MAX = 256

_PYTHON_FACTS = """
import json, sys, sysconfig
print(json.dumps({
    "version": "%d.%d" % sys.version_info[:2],
    "abi": sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag,
    "platform": sysconfig.get_platform(),
}))
"""


@dataclass(frozen=True, slots=True)
class Environment:
    """A built environment. ``path`` is the folder to bind; it is never changed once built."""

    name: str
    path: Path
    digest: str  # SHA-256 of python, abi, platform and the hashes of all files installed
    python: str  # "3.11": the version whose packages these are
    abi: str  # "cpython-311-x86_64-linux-gnu"
    platform: str  # "linux-x86_64"
    requested: tuple[str, ...]  # the packages as the operator asked for them
    resolved: tuple[str, ...]  # every package installed, "name==version", sorted
    built_at: str  # UTC, ISO 8601
    size_bytes: int

    @property
    def site_packages(self) -> Path:
        """The folder of modules, on the host."""
        return self.path / _site_packages(self.python)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {"path": str(self.path)}


def packages_of(policy: Policy) -> str | None:
    """The host folder of the packages that ``policy`` names, for sandboxes of this process's Python, or None.

    Raises PolicyError if there is no such environment, or it was built for another Python.
    """
    if policy.environment is None:
        return None
    found = find(policy.environment)
    abi = sysconfig.get_config_var("SOABI")
    if found.abi != abi:
        raise PolicyError(
            f"environment {policy.environment!r} was built for {found.abi}, and sandboxes run {abi}",
            remedy=f"run `fumehood env build {policy.environment} …` with this Python",
        )
    return str(found.site_packages)


def cache_folder() -> Path:
    """``$FUMEHOOD_CACHE``, else ``$XDG_CACHE_HOME/fumehood``, else ``~/.cache/fumehood``; it need not exist.

    Raises PolicyError if FUMEHOOD_CACHE is relative or there is no home. A relative XDG_CACHE_HOME is ignored, as
    https://specifications.freedesktop.org/basedir-spec/latest/ rules.
    """
    own = os.environ.get("FUMEHOOD_CACHE", "")
    if own:
        if not os.path.isabs(own):
            raise PolicyError(f"FUMEHOOD_CACHE must be an absolute path, not {own!r}")
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(shared):
        return Path(shared) / "fumehood"
    try:
        return Path.home() / ".cache" / "fumehood"
    except RuntimeError:
        raise PolicyError(
            "there is no home folder for the cache", remedy="set FUMEHOOD_CACHE to an absolute path"
        ) from None


def find(name: str) -> Environment:
    """The environment called ``name``.

    Raises PolicyError if the name is malformed, nothing of that name is built (with the remedy), or the cache folder
    is not safe to read from: not this user's, or writable by others.
    """
    cache = _checked(cache_folder(), name=_check_name(name))
    environment = _load(cache, name)
    if environment is None:
        raise _missing(name)
    return environment


def list_all() -> tuple[Environment, ...]:
    """Every environment that is built, sorted by name. Raises PolicyError as :func:`find` does for the cache."""
    try:
        cache = _checked(cache_folder())
        names = sorted(n for n in os.listdir(cache / "names") if _NAME.match(n))
    except FileNotFoundError:
        return ()
    return tuple(found for n in names if (found := _load(cache, n)) is not None)


def build(
    name: str, packages: Sequence[str], *, python: str | None = None, progress: Progress = lambda line: None
) -> Environment:
    """Install ``packages`` with all they need, for ``python`` (default: this interpreter), under ``name``.

    pip reads its usual configuration for indexes. What is installed is what was resolved, held by hash. If the same
    set is there already, only the name is set. An environment that had the name before stays on disk, for a running
    sandbox may use it, until :func:`remove` is next called.

    Raises PolicyError (malformed name or package, unsafe cache folder) and StartError (pip is missing or failed, with
    its last lines; no space): StartError, because nothing came of it, no program ran, and a retry is safe.
    """
    _check_name(name)
    wanted = _check_packages(packages)
    interpreter = python or sys.executable
    facts = _python_facts(interpreter)
    cache = _made(cache_folder())
    with _locked(cache, progress), _workshop(cache) as shop:
        try:
            files = _resolve(interpreter, wanted, shop, progress)
            digest = _digest(facts, files)
            if not (cache / "envs" / digest / "manifest.json").exists():
                _install(interpreter, facts, files, shop, progress)
                _publish(shop, cache / "envs" / digest, _manifest(digest, facts, files, shop))
            else:
                progress("these packages are built already")
            _point(cache, name, digest, wanted)
        except OSError as error:
            raise StartError(f"the environment could not be built: {error}") from error
        built = _load(cache, name)
    if built is None:
        raise StartError(f"the environment {name!r} was removed while it was being built")
    return built


def remove(name: str) -> None:
    """Forget ``name``, and delete every environment that no name means. A sandbox using one loses its packages.

    Raises PolicyError if nothing of that name is built.
    """
    cache = _checked(cache_folder(), name=_check_name(name))
    with _locked(cache, lambda line: None):
        try:
            (cache / "names" / name).unlink()
        except FileNotFoundError:
            raise _missing(name) from None
        named = {environment.digest for environment in list_all()}
        for folder in (cache / "envs").iterdir():
            if folder.name not in named:
                shutil.rmtree(folder)


@contextlib.contextmanager
def building(progress: Progress) -> Iterator[tuple[Path, Path]]:
    """The cache folder, and a folder in it to build in, for one builder at a time. Raises PolicyError, StartError."""
    cache = _made(cache_folder())
    with _locked(cache, progress), _workshop(cache) as shop:
        try:
            yield cache, shop
        except OSError as error:
            raise StartError(f"the build failed: {error}") from error


def cache_is_safe() -> bool:
    """Whether the cache folder exists. Raises PolicyError if others could have planted something in it."""
    try:
        _checked(cache_folder())
    except FileNotFoundError:
        return False
    return True


# -- names and requests -------------------------------------------------------------------------------------------


def _check_name(name: str) -> str:
    if not _NAME.match(name):
        raise PolicyError(
            f"{name!r} is not a name of an environment: lower-case letters, digits, '.', '_' and '-', "
            "beginning with a letter or digit, at most 64"
        )
    return name


def _check_packages(packages: Sequence[str]) -> tuple[str, ...]:
    if isinstance(packages, str) or not packages:
        raise PolicyError("packages must be a list of at least one package")
    if len(packages) > _PACKAGES_MAX:
        raise PolicyError(f"more than {_PACKAGES_MAX} packages")
    for package in packages:
        if not _PACKAGE.match(package):
            raise PolicyError(
                f"{package!r} is not a package: write a name, with extras and versions if need be (pandas>=2), "
                "not an option, path or address"
            )
    return tuple(packages)


def _missing(name: str) -> PolicyError:
    return PolicyError(f"no environment is called {name!r}", remedy=f"build it: fumehood env build {name} PACKAGE…")


# -- the cache folder ---------------------------------------------------------------------------------------------


def _made(cache: Path) -> Path:
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        _checked(cache)
        for part in ("envs", "names", "building"):
            (cache / part).mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise PolicyError(
            f"the cache folder cannot be made: {error}", remedy="set FUMEHOOD_CACHE to a folder of your own"
        ) from None
    return cache


def _checked(cache: Path, *, name: str | None = None) -> Path:
    """``cache``, if nobody else can plant packages in it; ``name`` is what is missing if the folder is."""
    try:
        state = cache.stat()
    except FileNotFoundError:
        if name is not None:
            raise _missing(name) from None
        raise
    except OSError as error:
        raise PolicyError(f"the cache folder cannot be read: {error}") from None
    if not stat.S_ISDIR(state.st_mode):
        raise PolicyError(f"the cache folder {cache} is not a folder")
    if state.st_uid != os.geteuid():
        raise PolicyError(
            f"the cache folder {cache} belongs to uid {state.st_uid}, and this is uid {os.geteuid()}",
            remedy="set FUMEHOOD_CACHE to a folder of your own",
        )
    if state.st_mode & 0o022:
        raise PolicyError(f"the cache folder {cache} is writable by others", remedy=f"chmod go-w {cache}")
    return cache


@contextlib.contextmanager
def _locked(cache: Path, progress: Progress) -> Iterator[None]:
    """One builder at a time. The lock goes with its holder, however that dies."""
    fd = os.open(cache / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another build to end")
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def _workshop(cache: Path) -> Iterator[Path]:
    """A folder to build in, inside the cache so that it can be renamed. Needs the lock: others' leftovers go."""
    building = cache / "building"
    for left in building.iterdir():
        shutil.rmtree(left)
    shop = Path(tempfile.mkdtemp(dir=building))
    try:
        yield shop
    finally:
        shutil.rmtree(shop, ignore_errors=True)


def _point(cache: Path, name: str, digest: str, requested: tuple[str, ...]) -> None:
    target = cache / "names" / name
    draft = target.with_name(f".{name}.new")  # a name never begins with a dot; the lock keeps it ours
    draft.write_text(json.dumps({"digest": digest, "requested": requested}))
    draft.replace(target)


def _load(cache: Path, name: str) -> Environment | None:
    """The environment that ``name`` means, or None if it or its folder is not there (or is half removed)."""
    try:
        pointer = json.loads((cache / "names" / name).read_text())
        digest = pointer["digest"]
        if not _DIGEST.match(digest):
            raise ValueError(f"{digest!r} is not a digest")
        path = cache / "envs" / digest
        manifest = json.loads((path / "manifest.json").read_text())
        manifest |= {"name": name, "path": path, "digest": digest}
        manifest |= {"requested": tuple(pointer["requested"]), "resolved": tuple(manifest["resolved"])}
        return Environment(**{f.name: manifest[f.name] for f in fields(Environment)})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PolicyError(
            f"the environment {name!r} cannot be read: {error}", remedy=f"fumehood env remove {name}, and build it anew"
        ) from None


# -- building -----------------------------------------------------------------------------------------------------


def _site_packages(python: str) -> str:
    return f"lib/python{python}/site-packages"


def _python_facts(interpreter: str) -> dict[str, str]:
    try:
        done = subprocess.run(
            [interpreter, "-I", "-S", "-c", _PYTHON_FACTS], capture_output=True, timeout=60, stdin=subprocess.DEVNULL
        )
        facts: dict[str, str] = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise StartError(f"{interpreter!r} does not run as a Python: {error}") from None
    return facts


def _resolve(interpreter: str, wanted: tuple[str, ...], shop: Path, progress: Progress) -> dict[str, str]:
    """What pip would install: "name==version" to the SHA-256 of the file, sorted."""
    progress(f"resolving {' '.join(wanted)}")
    report = shop / "report.json"
    options = ["--dry-run", "--ignore-installed", "--report", str(report)]
    _pip(interpreter, [*options, "--target", str(shop / "none"), "--", *wanted], shop, progress)
    files: dict[str, str] = {}
    for item in json.loads(report.read_bytes())["install"]:
        pin = f"{item['metadata']['name']}=={item['metadata']['version']}"
        archive = item["download_info"].get("archive_info", {})
        # `hash` is the older spelling of `hashes`: https://packaging.python.org/en/latest/specifications/direct-url/
        sha256 = archive.get("hashes", {}).get("sha256") or archive.get("hash", "").removeprefix("sha256=")
        if not _DIGEST.match(sha256):
            raise StartError(f"pip names no SHA-256 for {pin}, so it cannot be held to what was resolved")
        files[pin] = sha256
    return dict(sorted(files.items()))


def _digest(facts: dict[str, str], files: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps([facts, files], sort_keys=True).encode()).hexdigest()


def _install(interpreter: str, facts: dict[str, str], files: dict[str, str], shop: Path, progress: Progress) -> None:
    """Fill ``shop/env`` with exactly ``files``, compiled and readable by the sandbox's uid."""
    progress(f"installing {len(files)} packages")
    pins = shop / "pins.txt"
    pins.write_text("".join(f"{pin} --hash=sha256:{sha256}\n" for pin, sha256 in files.items()))
    site = shop / "env" / _site_packages(facts["version"])
    options = ["--no-deps", "--no-compile", "--require-hashes", "--requirement", str(pins), "--target", str(site)]
    _pip(interpreter, options, shop, progress)
    site.mkdir(parents=True, exist_ok=True)
    if not (site / "bin" / "__init__.py").exists():
        shutil.rmtree(site / "bin", ignore_errors=True)
    progress("compiling")
    _compile(interpreter, shop / "env")
    open_to_read(shop / "env")


def _compile(interpreter: str, env: Path) -> None:
    """Compile every module that compiles; packages ship some, as test data, that do not.

    Unchecked, since the folder never changes: an import then need not look at the source. Paths are those inside.
    """
    options = ["-q", "-q", "-j", "0", "--invalidation-mode", "unchecked-hash", "-s", str(env), "-p", INSIDE]
    subprocess.run(
        [interpreter, "-I", "-m", "compileall", *options, str(env / "lib")],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _pip(interpreter: str, arguments: list[str], shop: Path, progress: Progress) -> None:
    """One ``pip install``, its lines told as they come. StartError has its last lines."""
    last: collections.deque[str] = collections.deque(maxlen=_ERROR_LINES)
    command = [interpreter, "-m", "pip", "install", "--only-binary=:all:", "--progress-bar=off", *arguments]
    quiet = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PIP_ROOT_USER_ACTION": "ignore"}
    try:
        process = subprocess.Popen(
            command,
            cwd=shop,  # `-m` imports from the current folder first
            env=os.environ | quiet | {"PIP_USER": "0"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        )
    except OSError as error:
        raise StartError(f"pip could not be started: {error}") from None
    with process:
        try:
            assert process.stdout is not None
            for raw in process.stdout:
                line = raw.rstrip()
                last.append(line)
                progress(line)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        text = "\n".join(last)
        if "No module named pip" in text:
            raise StartError(f"{interpreter} has no pip", remedy="install pip (python3-pip), or name another --python")
        raise StartError(f"pip failed with code {process.returncode}:\n{text}")


def open_to_read(env: Path) -> None:
    """Readable by all: inside, the sandbox's uid is another. The 0700 of the cache's own folder still guards it."""
    for folder, _, names in os.walk(env):
        os.chmod(folder, 0o755)
        for name in names:
            path = os.path.join(folder, name)
            state = os.lstat(path)
            if stat.S_ISREG(state.st_mode):
                os.chmod(path, 0o755 if state.st_mode & 0o100 else 0o644)


def _manifest(digest: str, facts: dict[str, str], files: dict[str, str], shop: Path) -> dict[str, Any]:
    return {
        "digest": digest,
        "python": facts["version"],
        "abi": facts["abi"],
        "platform": facts["platform"],
        "resolved": list(files),
        "sha256": files,
        "built_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "size_bytes": sum(
            os.lstat(os.path.join(folder, name)).st_size for folder, _, names in os.walk(shop / "env") for name in names
        ),
    }


def _publish(shop: Path, target: Path, manifest: dict[str, Any]) -> None:
    env = shop / "env"
    (env / "manifest.json").write_text(json.dumps(manifest, indent=1))
    (env / "manifest.json").chmod(0o644)
    if target.exists():  # without a manifest: half removed
        shutil.rmtree(target)
    env.rename(target)
