"""A folder of the cache in which built things lie under their digests, and names that point at them.

The folder holds, beside what its owner keeps there::

    names/<name>    which digest a name means, replaced atomically
    building/       where a build works; what is complete is renamed out of it
    lock            held by the one builder at a time
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from fumehood import environments
from fumehood.errors import PolicyError
from fumehood.images.packages import Progress

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}\Z")
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")


def check_name(name: str) -> str:
    """``name`` if it can be one of an image. Raises PolicyError."""
    if not _NAME.match(name):
        raise PolicyError(
            f"{name!r} is not a name of an image: lower-case letters, digits, '.', '_' and '-', beginning with a "
            "letter or digit, at most 64"
        )
    return name


def own_folder(name: str) -> Path:
    """The folder ``name`` of the cache; it need not exist. Raises PolicyError if somebody else could change it."""
    folder = environments.cache_folder() / name
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


def names(folder: Path) -> list[str]:
    """Every name there is, sorted."""
    try:
        return sorted(name for name in os.listdir(folder / "names") if _NAME.match(name))
    except FileNotFoundError:
        return []


def meant_by(folder: Path, name: str) -> str | None:
    """The digest that ``name`` points at, or None."""
    try:
        digest = (folder / "names" / name).read_text().strip()
    except (OSError, ValueError):
        return None
    return digest if is_digest(digest) else None


def is_digest(name: str) -> bool:
    """Whether a file of this name is a built thing."""
    return _DIGEST.match(name) is not None


def point(folder: Path, name: str, digest: str) -> None:
    """Have ``name`` mean ``digest`` from now on. Raises OSError."""
    (folder / "names").mkdir(exist_ok=True)
    fresh = folder / "names" / f".{name}-{os.getpid()}"
    fresh.write_text(digest)
    fresh.replace(folder / "names" / name)


def sweep(shelf: Path, kept: Collection[str]) -> None:
    """Remove every built thing in ``shelf`` whose digest is not ``kept``. Raises OSError."""
    for path in shelf.iterdir():
        if is_digest(path.name) and path.name not in kept:
            shutil.rmtree(path)


def digest_of(archives: Sequence[Path], *, head: bytes = b"", tail: bytes = b"") -> str:
    """SHA-256 over ``head``, that of each archive, and ``tail``. Raises OSError."""
    total = hashlib.sha256(head)
    for archive in archives:
        with archive.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    total.update(tail)
    return total.hexdigest()


@contextlib.contextmanager
def locked(folder: Path, progress: Progress) -> Iterator[None]:
    """One builder at a time; ``progress`` hears of a wait. Raises OSError."""
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another build to end")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def workshop(folder: Path) -> Iterator[Path]:
    """A fresh folder to build in, under the lock; what an interrupted build left there goes first. Raises OSError."""
    building = folder / "building"
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir()
    try:
        yield Path(tempfile.mkdtemp(dir=building))
    finally:
        shutil.rmtree(building, ignore_errors=True)
