"""Images inside an engine: put in from the store, pulled from a registry, looked up."""

from __future__ import annotations

import contextlib
import json
import os
import tarfile
import tempfile
from typing import Any

from fumehood.errors import StartError, UnavailableError
from fumehood.images.engine import Engine, EngineError, EngineGoneError, Word
from fumehood.images.packages import Progress
from fumehood.images.service import reach
from fumehood.images.shelf import check_name
from fumehood.images.store import DEFAULT_NAME, Image

#: What is used where nothing was built and a registry can be reached; a tag that its publisher keeps patched.
PULLED = "docker.io/library/python:3.12-slim"

LABEL = "fumehood.image"


def local_reference(name: str) -> str:
    """The name inside an engine of the image that was built as ``name``."""
    return f"localhost/fumehood/{check_name(name)}:latest"


def candidates(image: str | None) -> tuple[str, ...]:
    """The references to look for, in this order: ``image`` alone if given, else the built one and the pulled one."""
    if image is None:
        return local_reference(DEFAULT_NAME), PULLED
    return (image,) if "/" in image or ":" in image else (local_reference(image),)


async def inspect(engine: Engine, image: str | None) -> dict[str, Any] | None:
    """What the engine knows of the first of :func:`candidates` that it has, or None.

    Raises EngineError, EngineGoneError.
    """
    for reference in candidates(image):
        with contextlib.suppress(_Missing):
            return await _inspect(engine, reference)
    return None


class _Missing(Exception):
    pass


async def _inspect(engine: Engine, reference: str) -> dict[str, Any]:
    try:
        found = await engine.call("GET", f"/images/{reference}/json")
    except EngineError as error:
        if error.status == 404:
            raise _Missing from None
        raise
    return {**found, "reference": reference}


async def put(word: Word, image: Image, progress: Progress) -> str:
    """Import ``image`` into the engine as one layer; its reference there. Raises UnavailableError, StartError."""
    reference = local_reference(image.name)
    name, _, tag = reference.rpartition(":")
    with tempfile.TemporaryFile() as file:
        progress("packing")
        with tarfile.open(fileobj=file, mode="w|") as tar:
            tar.add(image.rootfs, arcname=".", filter=_as_root)
        file.seek(0)
        progress(f"importing {os.fstat(file.fileno()).st_size >> 20} MiB into {word}")
        query = {
            "fromSrc": "-",
            "repo": name,
            "tag": tag,
            "changes": f"LABEL {LABEL}={image.digest}",
        }
        async with _reached(word) as engine:
            async for line in engine.stream("POST", "/images/create", query=query, source=file):
                progress(str(line.get("status", "")))
            if await inspect(engine, reference) is None:
                raise StartError(f"{word} took the image and does not have it", tier=word)
    return reference


async def pull(word: Word, reference: str, progress: Progress) -> None:
    """Have the engine pull ``reference``. Raises UnavailableError, StartError (not found, registry out of reach)."""
    name, _, tag = reference.rpartition(":") if ":" in reference.rpartition("/")[2] else (reference, "", "latest")
    shown = ""
    async with _reached(word) as engine:
        async for line in engine.stream("POST", "/images/create", query={"fromImage": name, "tag": tag}):
            text = " ".join(str(line[key]) for key in ("id", "status", "progress") if line.get(key))
            if text and text != shown:
                shown = text
                progress(text)


async def delete(word: Word, name: str) -> bool:
    """Remove the image built as ``name`` from the engine; whether there was one. Raises as :func:`put`."""
    async with _reached(word) as engine:
        if await inspect(engine, local_reference(name)) is None:
            return False
        await engine.call("DELETE", f"/images/{local_reference(name)}")
    return True


async def list_built(word: Word) -> tuple[tuple[str, str, int], ...]:
    """The built images in the engine: reference, digest, size in bytes. Raises as :func:`put`."""
    async with _reached(word) as engine:
        found = await engine.call("GET", "/images/json", query={"filters": json.dumps({"label": [LABEL]})})
    return tuple(
        (reference, str(item.get("Labels", {}).get(LABEL, "")), int(item.get("Size", 0)))
        for item in found
        for reference in item.get("RepoTags") or ()
    )


@contextlib.asynccontextmanager
async def _reached(word: Word) -> Any:
    """The engine, with its errors as ours."""
    service = reach(word)
    try:
        yield service.engine
    except EngineGoneError as error:
        raise UnavailableError(str(error), tier=word) from None
    except EngineError as error:
        raise StartError(f"the engine refused: {error.message}", tier=word) from None
    finally:
        service.close()


def _as_root(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = "root"
    return info
