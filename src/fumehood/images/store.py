"""Images on this host: root file systems in the cache folder, found by name.

The cache folder (:func:`fumehood.environments.cache_folder`) holds::

    images/<digest>/rootfs/…          the root, never changed once built
    images/<digest>/manifest.json     what it holds, :class:`Image`
    images/names/<name>               which digest a name means, replaced atomically
    images/building/                  where a build works; renamed only when complete
    images/lock                       held by the one builder at a time

A digest is the SHA-256 of LAYOUT, of every package archive and of the environment put in, so two builds with the same
digest hold the same files. A name that is moved to another digest leaves the old one on disk until :func:`remove` is
called, for a sandbox may be using it.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fumehood import environments
from fumehood.errors import PolicyError, StartError
from fumehood.images import packages as debian
from fumehood.images import shelf
from fumehood.images.packages import Progress

#: The image that a tier takes if none is named.
DEFAULT_NAME = "python"

#: Counts up when the same packages make another root.
LAYOUT = 1

_FOLDER = "images"


@dataclass(frozen=True, slots=True)
class Image:
    """A built root file system."""

    name: str
    rootfs: Path
    digest: str  # SHA-256 over the layout, the package archives and the environment
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
    return _load(shelf.own_folder(_FOLDER), shelf.check_name(name))


def list_all() -> tuple[Image, ...]:
    """Every image on this host, sorted by name. Raises PolicyError for an unsafe cache folder."""
    folder = shelf.own_folder(_FOLDER)
    return tuple(image for name in shelf.names(folder) if (image := _load(folder, name)) is not None)


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
    shelf.check_name(name)
    wanted = debian.check(tuple(dict.fromkeys((*debian.DEFAULT, *packages))))
    inside = environments.find(environment) if environment is not None else None
    folder = shelf.own_folder(_FOLDER)
    folder.mkdir(parents=True, exist_ok=True, mode=0o755)
    with shelf.locked(folder, progress), shelf.workshop(folder) as shop:
        try:
            archives = debian.download(wanted, shop / "archives", progress)
            digest = shelf.digest_of(archives, head=b"%d" % LAYOUT, tail=inside.digest.encode() if inside else b"")
            if not (folder / digest / "manifest.json").exists():
                root = shop / "image" / "rootfs"
                root.parent.mkdir()
                debian.unpack(archives, root, progress)
                debian.index_libraries(root, progress)
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
            shelf.point(folder, name, digest)
        except OSError as error:
            raise StartError(f"the image could not be built: {error}") from error
        image = _load(folder, name)
    if image is None:
        raise StartError(f"the image {name!r} was removed while it was being built")
    return image


def remove(name: str) -> bool:
    """Forget ``name``, and delete every image that no name means; whether there was one. Raises PolicyError."""
    folder = shelf.own_folder(_FOLDER)
    if _load(folder, shelf.check_name(name)) is None:
        return False
    with shelf.locked(folder, lambda line: None):
        (folder / "names" / name).unlink(missing_ok=True)
        named = {image.digest for image in list_all()}
        shelf.sweep(folder, named)
    return True


def _load(folder: Path, name: str) -> Image | None:
    try:
        digest = shelf.meant_by(folder, name)
        if digest is None:
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


def _size(root: Path) -> int:
    return sum(os.lstat(os.path.join(folder, name)).st_size for folder, _, names in os.walk(root) for name in names)
