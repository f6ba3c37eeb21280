"""The part of an image's standard library that the agent imports, read once here instead of in each sandbox.

Every file that a program opens under gVisor goes through two processes and costs some 3 ms; the agent's imports open
thirty. What is read here is what the sandbox's Python would take: a .pyc that fits its source. What does not fit, or is
not there, the sandbox's Python finds by itself.
"""

from __future__ import annotations

import os
import zlib
from functools import lru_cache
from pathlib import Path

from fumehood.images.store import Image
from fumehood.tiers.container import payload

#: What bootstrap and agent import that is not built in, what they import for errors and displays only, and what of it
#: other releases have elsewhere. A name that is a package in one and a module in another (re, since 3.11) is looked for
#: as both.
_MODULES = """
    __future__ collections collections.abc contextlib copyreg ctypes ctypes._endian enum functools json json.decoder
    json.encoder json.scanner keyword linecache operator re re._casefix re._compiler re._constants re._parser reprlib
    struct textwrap token tokenize traceback types
"""
#: Those of them that a start runs; the others are sent compressed.
_FIRST = "__future__ struct types"
_SHARED_OBJECTS = "_ctypes _json _socket array math resource select"

_HEAD_BYTES = 16  # of a .pyc: magic, flags, and the source's mtime and size or hash (PEP 552)
_FLAGS_TIME, _FLAGS_UNCHECKED = 0, 1


@lru_cache(maxsize=8)
def of(image: Image) -> payload.Library:
    """Empty for an image with another layout than Debian's."""
    inside = f"/usr/lib/python{image.python}"
    folder = Path(f"{image.rootfs}{inside}")
    tag = f"cpython-{image.python.replace('.', '')}"
    modules: dict[str, tuple[str, bool, bytes | None]] = {}
    built_in = (folder / "lib-dynload").is_dir() and not any((folder / "lib-dynload").glob("zlib.*"))
    magic = b""
    for name in _MODULES.split():
        path = name.replace(".", "/")
        for file, package in ((f"{path}/__init__.py", True), (f"{path}.py", False)):
            found = _compiled(folder / file, tag)
            if found is not None and magic in (b"", found[0]):
                magic, code = found
                wait = built_in and name not in _FIRST.split()
                modules[name] = f"{inside}/{file}", package, zlib.compress(code, 9) if wait else code
                break
    for name in _SHARED_OBJECTS.split():
        for found_so in (folder / "lib-dynload").glob(f"{name}.{tag}-*.so"):
            modules[name] = f"{inside}/lib-dynload/{found_so.name}", False, None
    return payload.pack(magic, modules)


def _compiled(source: Path, tag: str) -> tuple[bytes, bytes] | None:
    """Magic and code of the .pyc beside ``source``, None if there is none that its Python would take unseen."""
    try:
        data = (source.parent / "__pycache__" / f"{source.stem}.{tag}.pyc").read_bytes()
        info = os.stat(source)
    except OSError:
        return None
    flags, mtime, size = (int.from_bytes(data[at : at + 4], "little") for at in (4, 8, 12))
    fits = (mtime, size) == (int(info.st_mtime) & 0xFFFFFFFF, info.st_size & 0xFFFFFFFF)
    if flags == _FLAGS_UNCHECKED or (flags == _FLAGS_TIME and fits):
        return data[:4], data[_HEAD_BYTES:]
    return None
