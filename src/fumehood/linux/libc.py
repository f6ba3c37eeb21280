"""System calls that Python's ``os`` lacks, each raising OSError with the call's name.

``PyDLL`` keeps the interpreter lock during a call: the processes that use this module have one thread, and a child
that comes out of a raw ``clone3`` must still hold the lock when it runs Python again.

Only ``ctypes`` and ``os`` are imported, since every module loaded here is memory in each sandbox.
"""

from __future__ import annotations

import ctypes
import os
import sys

if sys.platform == "linux":
    _libc = ctypes.PyDLL(None, use_errno=True)
    _syscall = _libc.syscall
    _syscall.restype = ctypes.c_long
    _prctl = _libc.prctl
    _prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
    _mount = _libc.mount
    _mount.argtypes = [ctypes.c_char_p] * 3 + [ctypes.c_ulong, ctypes.c_char_p]


def syscall(name: str, number: int, *args: object) -> int:
    """System call ``number``; ``name`` is for the error. Integers are passed as longs. Raises OSError."""
    wide = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    result: int = _syscall(ctypes.c_long(number), *wide)
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


def prctl(name: str, option: int, a: int = 0, b: int = 0, c: int = 0, d: int = 0) -> int:
    """prctl(2); ``name`` is for the error. Raises OSError."""
    result: int = _prctl(option, a, b, c, d)
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl {name}: {os.strerror(code)}")
    return result


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """mount(2). Raises OSError with the target."""

    def raw(text: str | None) -> bytes | None:
        return None if text is None else os.fsencode(text)

    if _mount(raw(source), raw(target), raw(kind), flags, raw(data)) == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"mount: {os.strerror(code)}", target)


def umount(target: str, flags: int) -> None:
    """umount2(2). Raises OSError with the target."""
    if _libc.umount2(os.fsencode(target), flags) == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"umount2: {os.strerror(code)}", target)


def unshare(flags: int) -> None:
    """unshare(2). Raises OSError."""
    if _libc.unshare(flags) == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"unshare: {os.strerror(code)}")


def setns(fd: int, kind: int) -> None:
    """setns(2). Raises OSError."""
    if _libc.setns(fd, kind) == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"setns: {os.strerror(code)}")
