"""Images on this host: root file systems in the cache folder, found by name.

The cache folder (:func:`fumehood.environments.cache_folder`) holds::

    images/<digest>/rootfs/…          the root, never changed once built
    images/<digest>/manifest.json     what it holds, :class:`Image`
    images/names/<name>               which digest a name means, replaced atomically
    images/building/                  where a build works; renamed only when complete
    images/lock                       held by the one builder at a time

A digest is the SHA-256 of every package archive and of the environment put in, so two builds with the same digest
hold the same files. A name that is moved to another digest leaves the old one on disk until :func:`remove` is called,
for a sandbox may be using it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fumehood import environments
from fumehood.errors import PolicyError, StartError
from fumehood.images import packages as debian
from fumehood.images.packages import Progress

#: The image that a tier takes if none is named.
DEFAULT_NAME = "python"

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}\Z")
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")


@dataclass(frozen=True, slots=True)
class Image:
    """A built root file system."""

    name: str
    rootfs: Path
    digest: str  # SHA-256 over the package archives and the environment
    python: str  # "3.11"
    packages: tuple[str, ...]  # as they were asked for
    environment: str | None  # digest of the environment inside
    built_at: str  # UTC, ISO 8601
    size_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {"rootfs": str(self.rootfs)}


def find(name: str) -> Image | None:
    """The image called ``name``, or None. Raises PolicyError for a malformed name or an unsafe cache folder."""
    return _load(_folder(), check_name(name))


def list_all() -> tuple[Image, ...]:
    """Every image on this host, sorted by name. Raises PolicyError for an unsafe cache folder."""
    folder = _folder()
    try:
        names = sorted(n for n in os.listdir(folder / "names") if _NAME.match(n))
    except FileNotFoundError:
        return ()
    return tuple(image for name in names if (image := _load(folder, name)) is not None)


def build(
    name: str,
    *,
    packages: Sequence[str] = (),
    environment: str | None = None,
    progress: Progress = lambda line: None,
) -> Image:
    """Build an image out of the default packages, ``packages`` and the environment of that name, and call it ``name``.

    Raises PolicyError (malformed name or package, no such environment, an environment for another Python) and
    StartError (apt is missing or failed, with its last lines; no space).
    """
    check_name(name)
    wanted = debian.check(tuple(dict.fromkeys((*debian.DEFAULT, *packages))))
    inside = environments.find(environment) if environment is not None else None
    folder = _folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o755)
    with _locked(folder, progress), _workshop(folder) as shop:
        try:
            archives = debian.download(wanted, shop / "archives", progress)
            digest = _digest(archives, inside.digest if inside else None)
            if not (folder / digest / "manifest.json").exists():
                root = shop / "image" / "rootfs"
                root.parent.mkdir()
                debian.unpack(archives, root, progress)
                debian.compile_library(root, progress)
                if inside is not None:
                    _put_in(root, inside)
                manifest = {
                    "digest": digest,
                    "python": debian.python_of(root),
                    "packages": list(wanted),
                    "environment": inside.digest if inside else None,
                    "built_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                    "size_bytes": _size(root),
                }
                (shop / "image" / "manifest.json").write_text(json.dumps(manifest, indent=1))
                shutil.rmtree(folder / digest, ignore_errors=True)  # without a manifest: half removed
                (shop / "image").rename(folder / digest)
            else:
                progress("these packages are built already")
            _point(folder, name, digest)
        except OSError as error:
            raise StartError(f"the image could not be built: {error}") from error
        image = _load(folder, name)
    if image is None:
        raise StartError(f"the image {name!r} was removed while it was being built")
    return image


def remove(name: str) -> bool:
    """Forget ``name``, and delete every image that no name means; whether there was one. Raises PolicyError."""
    folder = _folder()
    if _load(folder, check_name(name)) is None:
        return False
    with _locked(folder, lambda line: None):
        (folder / "names" / name).unlink(missing_ok=True)
        named = {image.digest for image in list_all()}
        for path in folder.iterdir():
            if _DIGEST.match(path.name) and path.name not in named:
                shutil.rmtree(path)
    return True


def check_name(name: str) -> str:
    """``name`` if it can be one of an image. Raises PolicyError."""
    if not _NAME.match(name):
        raise PolicyError(
            f"{name!r} is not a name of an image: lower-case letters, digits, '.', '_' and '-', beginning with a "
            "letter or digit, at most 64"
        )
    return name


def _folder() -> Path:
    """The folder of images. Raises PolicyError if somebody else could change what is in it."""
    folder = environments.cache_folder() / "images"
    for path in (folder.parent, folder):
        try:
            info = path.stat()
        except FileNotFoundError:
            continue
        if info.st_uid != os.geteuid() or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PolicyError(
                f"the cache folder {path} is not this user's alone",
                remedy="own it and take write permission from others, or set FUMEHOOD_CACHE to another folder",
            )
    return folder


def _load(folder: Path, name: str) -> Image | None:
    try:
        digest = (folder / "names" / name).read_text().strip()
        if not _DIGEST.match(digest):
            return None
        raw = json.loads((folder / digest / "manifest.json").read_bytes())
        return Image(
            name=name,
            rootfs=folder / digest / "rootfs",
            digest=digest,
            python=raw["python"],
            packages=tuple(raw["packages"]),
            environment=raw["environment"],
            built_at=raw["built_at"],
            size_bytes=raw["size_bytes"],
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _put_in(root: Path, environment: environments.Environment) -> None:
    version = debian.python_of(root)
    if environment.python != version:
        raise PolicyError(
            f"the environment {environment.name!r} is for Python {environment.python} and the image has {version}",
            remedy=f"build it for Python {version}: fumehood env build NAME --python PATH",
        )
    target = root / f"opt/env/lib/python{version}/site-packages"
    shutil.copytree(environment.site_packages, target, symlinks=True)


def _digest(archives: list[Path], environment: str | None) -> str:
    total = hashlib.sha256()
    for archive in archives:
        with archive.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    total.update((environment or "").encode())
    return total.hexdigest()


def _size(root: Path) -> int:
    return sum(os.lstat(os.path.join(folder, name)).st_size for folder, _, names in os.walk(root) for name in names)


def _point(folder: Path, name: str, digest: str) -> None:
    (folder / "names").mkdir(exist_ok=True)
    fresh = folder / "names" / f".{name}-{os.getpid()}"
    fresh.write_text(digest)
    fresh.replace(folder / "names" / name)


@contextlib.contextmanager
def _locked(folder: Path, progress: Progress) -> Iterator[None]:
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another build to end")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _workshop(folder: Path) -> Iterator[Path]:
    """A fresh folder to build in; what an interrupted build left there goes first."""
    building = folder / "building"
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir()
    try:
        yield Path(tempfile.mkdtemp(dir=building))
    finally:
        shutil.rmtree(building, ignore_errors=True)
