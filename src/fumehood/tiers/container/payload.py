"""What the host sends into a container before it serves: the plan and the agent (see :mod:`.bootstrap`)."""

from __future__ import annotations

import ast
import asyncio
import base64
import importlib.util
import json
import marshal
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import CodeType
from typing import Any

import fumehood
from fumehood.errors import StartError
from fumehood.tiers.container.excerpt import excerpt

_LENGTHS = struct.Struct(">IIIII")
_MARSHAL = 2  # a format that every Python 3 reads, of plain values
_LENGTH = struct.Struct(">I")
_REPORT_MAX = 1 << 16
_RECEIVED = b"R"
#: How long a started container may take to run its Python and take what was sent: gVisor on a busy host, amply.
_LISTEN_TIMEOUT_S = 15.0

_PACKAGE = Path(fumehood.__file__).parent
_BECOME_PROGRAM = "become_program"  # of the bootstrap
#: What that wants of the agent.
_OF_AGENT = ("prepare", "fresh_interpreter", "set_environment", "run_code", "finalize")


@lru_cache(maxsize=1)
def bootstrap() -> str:
    """The constant text of a container's command line, without what only readers need."""
    return (_PACKAGE / "tiers/container/bootstrap.py").read_text().split('"""', 2)[2].lstrip()


@lru_cache(maxsize=1)
def compiled_bootstrap() -> str:
    """The same for a Python that reads the code objects of this one, and need not compile it."""
    return _compiled(compile(bootstrap(), "<string>", "exec", dont_inherit=True, optimize=2))


@lru_cache(maxsize=1)
def program_bootstrap() -> str:
    """The part of the bootstrap that becomes a single program and not the agent."""
    return f"{ast.unparse(excerpt(bootstrap(), (_BECOME_PROGRAM,)))}\n{_BECOME_PROGRAM}()"


@lru_cache(maxsize=1)
def compiled_program_bootstrap() -> str:
    """The same as :func:`compiled_bootstrap` is."""
    return _compiled(compile(program_bootstrap(), "<string>", "exec", dont_inherit=True, optimize=2))


def _compiled(code: CodeType) -> str:
    text = base64.b64encode(marshal.dumps(code)).decode()
    return f"import binascii, marshal; exec(marshal.loads(binascii.a2b_base64('{text}')))"


@lru_cache(maxsize=2)
def _agent(single: bool) -> tuple[bytes, bytes]:
    """The agent compiled and its source; for a ``single`` program what it needs of both."""
    source = (_PACKAGE / "guest/agent.py").read_text()
    if single:
        source = ast.unparse(excerpt(source, _OF_AGENT))
    return marshal.dumps(compile(source, "agent.py", "exec", dont_inherit=True)), source.encode()


@dataclass(frozen=True, slots=True)
class Library:
    """Modules of the image's standard library to send along, see :mod:`.bootstrap`."""

    magic: bytes = b""  # of the Python whose .pyc files they are
    index: bytes = marshal.dumps({}, _MARSHAL)
    code: bytes = b""


def pack(magic: bytes, modules: dict[str, tuple[str, bool, bytes | None]]) -> Library:
    """Name -> the file inside, whether it is a package, and code without a .pyc's head, None for a shared object."""
    index: dict[str, tuple[str, bool, int, int]] = {}
    code = bytearray()
    for name, (file, package, own) in modules.items():
        start = len(code)
        code += own or b""
        index[name] = file, package, start, len(code)
    return Library(magic, marshal.dumps(index, _MARSHAL), bytes(code))


_NO_LIBRARY = Library()


def message(
    *,
    python: str | None,
    rlimits: dict[str, int],
    preload: tuple[str, ...],
    library: Library = _NO_LIBRARY,
    paths: Sequence[str] | None = None,
    same_python: bool = False,
    single: bool = False,
) -> bytes:
    """The bytes to send. ``python`` is the version that the environment's packages are for, if there is one.

    ``paths``: see :mod:`.bootstrap`. ``same_python``: the Python inside is known to read the code objects of this one.
    ``single``: to a bootstrap that becomes a single program.
    """
    code, source = _agent(single)
    if same_python:
        source = b""
    plan = {
        "magic": importlib.util.MAGIC_NUMBER,
        "library_magic": library.magic,
        "python": python,
        "rlimits": rlimits,
        "preload": list(preload),
        "paths": None if paths is None else list(paths),
    }
    packed = marshal.dumps(plan, _MARSHAL)
    parts = packed, library.index, library.code, code, source
    return b"".join((_LENGTHS.pack(*map(len, parts)), *parts))


async def report(stream: socket.socket, *, tier: str, timeout_s: float) -> dict[str, Any]:
    """The bootstrap's report. Raises StartError: none came, it is malformed, or it names what went wrong inside.

    SilentError if nothing came at all.
    """
    try:
        async with asyncio.timeout(_LISTEN_TIMEOUT_S):
            if await _exactly(stream, 1) != _RECEIVED:
                raise ValueError("it spoke out of turn")
    except TimeoutError:
        raise SilentError(f"no Python answered inside within {_LISTEN_TIMEOUT_S:g} s", tier=tier) from None
    except (OSError, ValueError) as error:
        raise StartError(f"what answered inside is not our agent: {error}"[:500], tier=tier) from None
    try:
        async with asyncio.timeout(timeout_s):
            (length,) = _LENGTH.unpack(await _exactly(stream, _LENGTH.size))
            if length > _REPORT_MAX:
                raise ValueError("too long")
            answer = json.loads(await _exactly(stream, length))
        if not isinstance(answer, dict):
            raise ValueError("not an object")
    except TimeoutError:
        raise StartError(f"the sandbox was not prepared within {timeout_s:g} s", tier=tier) from None
    except (OSError, ValueError) as error:
        raise StartError(f"what answered inside is not our agent: {error}"[:500], tier=tier) from None
    if answer.get("error"):
        raise StartError(f"the sandbox could not be prepared: {answer['error']}"[:1000], tier=tier)
    return answer


async def _exactly(stream: socket.socket, size: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < size:
        piece = await loop.sock_recv(stream, size - len(data))
        if not piece:
            raise StreamEndedError("the stream ended")
        data += piece
    return data


class SilentError(StartError):
    """The container runs and said nothing, in time or at all."""


class StreamEndedError(OSError):
    """The container ended, or never ran a Python."""
