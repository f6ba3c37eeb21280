"""Receiving a guest's work folder into a private folder of the host's, from where artifacts are collected as ever.

What comes is hostile. Every path is taken apart and walked by descriptor, following no link; every entry is made under
a name that was free; sizes and counts are bounded by the policy's own. Links, FIFOs and sockets are made as what they
are, since the collector tells the user of them, and it follows and opens none.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress

from fumehood.errors import StartError
from fumehood.model import Limits
from fumehood.tiers.microvm.control import Control
from fumehood.wire import Header

_PIECE = 1 << 20
_RUNS_MAX = 1024
_PATH_MAX = 4096
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


async def receive_folder(control: Control, target: str, limits: Limits) -> str:
    """Fill the empty folder ``target`` with what init sends; why something of it is missing, or "".

    Raises StartError, OSError; what came whole until then stays.
    """
    missing = ""
    top = os.open(target, _FOLDER)
    try:
        bytes_left = limits.disk_bytes
        for _ in range(limits.files + 1):
            header = await control.entry()
            if header["op"] != "entry":
                return "a path is too long to be sent" if header.get("truncated") is True else missing
            if header.get("kind") == "x":
                missing = "a file is too large, or in too many pieces, to be sent"
                continue
            bytes_left = await _receive_entry(control, top, header, bytes_left, limits.disk_bytes)
        raise StartError("the guest sent more files than it can have", tier="microvm")
    finally:
        os.close(top)


async def _receive_entry(control: Control, top: int, header: Header, bytes_left: int, size_max: int) -> int:
    """Make one entry; how many bytes of content may still come."""
    parts = _parts(header.get("path"))
    runs = _runs(header.get("runs"))
    kind, mode = header.get("kind"), header.get("mode")
    bytes_left -= sum(length for _, length in runs)
    if bytes_left < 0:
        raise StartError("the guest sent more than it can have", tier="microvm")
    folder = _open_folder(top, parts[:-1])
    name = parts[-1]
    try:
        if kind == "f" and not header.get("same"):
            fd = os.open(name, _NEW, 0o600, dir_fd=folder)
            try:
                await _receive_content(control, fd, header.get("size"), runs, size_max)
                if type(mode) is int and mode & stat.S_IXUSR:
                    os.fchmod(fd, 0o700)
            except BaseException:
                os.unlink(name, dir_fd=folder)  # half a file is none
                raise
            finally:
                os.close(fd)
        elif kind == "f":
            _link(top, _parts(header["same"]), folder, name)
        elif kind == "d":
            os.mkdir(name, 0o700, dir_fd=folder)
        elif kind == "l":
            os.symlink(_hex(header.get("target")) or b"?", name, dir_fd=folder)
        elif kind in ("p", "s"):
            os.mknod(name, (stat.S_IFIFO if kind == "p" else stat.S_IFSOCK) | 0o600, dir_fd=folder)
    finally:
        os.close(folder)
    return bytes_left


async def _receive_content(control: Control, fd: int, size: object, runs: list[tuple[int, int]], size_max: int) -> None:
    if type(size) is not int or not 0 <= size <= max(size_max, 1):
        raise StartError("the guest sent a file of impossible size", tier="microvm")
    os.ftruncate(fd, size)
    for offset, length in runs:
        if offset + length > size:
            raise StartError("the guest sent content beyond a file's end", tier="microvm")
        for start in range(offset, offset + length, _PIECE):
            os.pwrite(fd, await control.body(min(_PIECE, offset + length - start)), start)


def _link(top: int, original: list[bytes], folder: int, name: bytes) -> None:
    """A second name for a file that came before."""
    parent = _open_folder(top, original[:-1])
    try:
        with suppress(FileNotFoundError):
            os.link(original[-1], name, src_dir_fd=parent, dst_dir_fd=folder, follow_symlinks=False)
    finally:
        os.close(parent)


def _open_folder(top: int, parts: list[bytes]) -> int:
    fd = os.dup(top)
    for part in parts:
        try:
            below = os.open(part, _FOLDER, dir_fd=fd)
        finally:
            os.close(fd)
        fd = below
    return fd


def _hex(value: object) -> bytes:
    if not isinstance(value, str) or len(value) > 2 * _PATH_MAX:
        raise StartError("the guest sent what is no name", tier="microvm")
    try:
        raw = bytes.fromhex(value)
    except ValueError:
        raise StartError("the guest sent what is no name", tier="microvm") from None
    if b"\0" in raw:
        raise StartError("the guest sent a name with NUL", tier="microvm")
    return raw


def _parts(value: object) -> list[bytes]:
    parts = _hex(value).split(b"/")
    if any(part in (b"", b".", b"..") for part in parts):
        raise StartError("the guest sent a path that leads elsewhere", tier="microvm")
    return parts


def _runs(value: object) -> list[tuple[int, int]]:
    if not isinstance(value, list) or len(value) > _RUNS_MAX:
        raise StartError("the guest sent what is no list of runs", tier="microvm")
    runs = []
    for run in value:
        if not isinstance(run, list) or len(run) != 2 or any(type(n) is not int or not 0 <= n < 1 << 50 for n in run):
            raise StartError("the guest sent what is no run", tier="microvm")
        runs.append((run[0], run[1]))
    return runs
