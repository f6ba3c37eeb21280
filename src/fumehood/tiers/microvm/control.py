"""The host's end of the small port of the guest's init: lines of JSON, and raw bytes after some of them.

Every byte is hostile once a program has run: a line is at most 64 KiB, lines wait in a bounded queue, and whoever
breaks a rule is not listened to any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections import deque
from typing import Any

from fumehood.errors import StartError
from fumehood.wire import Header, WireError, decode

_LINE_MAX = 64 << 10
_PIECE = 256 << 10
_QUEUE_MAX = 64
_HEAR_PIECES_MAX = 8
_COUNT_MAX = 1 << 50


class Control:
    """Owns the socket. Belongs to the running event loop."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._loop = asyncio.get_running_loop()
        self._data = bytearray()
        self._lines: deque[Header] = deque()
        self._ended = False  # nothing more comes
        self._broken = False  # init broke a rule, and nothing that it says counts any more
        self._streaming = False  # raw bytes may stand between lines, so lines are not looked for ahead
        #: What init last said that the programs used at most, and how many were killed for memory.
        self.memory_peak_bytes: int | None = None
        self.oom_kills = 0
        end.setblocking(False)

    def send(self, message: bytes) -> None:
        """Send init a message as it is. Raises StartError."""
        try:
            self._end.sendall(message)
        except OSError as error:
            raise StartError(f"the guest takes no orders: {error}", tier="microvm") from None

    def post(self, operation: str, **fields: object) -> None:
        """Ask init for something. Raises StartError."""
        self.send(json.dumps({"op": operation, **fields}).encode() + b"\n")

    def hear(self) -> None:
        """Take in what has come, without waiting."""
        for _ in range(_HEAR_PIECES_MAX):
            if self._broken or self._ended or self._streaming:
                return
            try:
                piece = self._end.recv(_PIECE)
            except BlockingIOError:
                return
            except OSError:
                piece = b""
            self._take(piece)

    async def line(self) -> Header:
        """The next line that is not about memory. Raises StartError if none can come."""
        while not self._lines:
            self._check()
            await self._receive()
        return self._lines.popleft()

    async def entry(self) -> Header:
        """The next line, looking no further: raw bytes may follow it. Raises StartError."""
        self._streaming = True
        while not self._lines:
            line, found, rest = self._data.partition(b"\n")
            if found:
                self._data = rest
                self._parse(bytes(line))
                if self._broken:
                    self._check()
            else:
                self._broken = self._broken or len(self._data) > _LINE_MAX
                self._check()
                await self._receive()
        return self._lines.popleft()

    async def body(self, size: int) -> bytes:
        """The next ``size`` raw bytes. Raises StartError."""
        while len(self._data) < size:
            self._check()
            await self._receive()
        data = bytes(self._data[:size])
        del self._data[:size]
        return data

    def _check(self) -> None:
        if self._broken or self._ended:
            why = "broke its protocol" if self._broken else "is gone"
            raise StartError(f"the guest's init {why}", tier="microvm")

    async def _receive(self) -> None:
        try:
            piece = await self._loop.sock_recv(self._end, _PIECE)
        except OSError:
            piece = b""
        self._take(piece)

    def _take(self, piece: bytes) -> None:
        self._ended = self._ended or not piece
        self._data += piece
        if self._streaming:
            return
        while not self._broken:
            line, found, rest = self._data.partition(b"\n")
            if not found:
                self._broken = len(self._data) > _LINE_MAX
                return
            self._data = rest
            self._parse(bytes(line))

    def _parse(self, line: bytes) -> None:
        try:
            header = decode(line)
        except WireError:
            self._broken = True
            return
        if header["op"] == "spent":
            self.memory_peak_bytes = _count(header.get("memory_peak_bytes"))
            self.oom_kills = _count(header.get("oom_kills")) or 0
        elif len(self._lines) < _QUEUE_MAX:
            self._lines.append(header)
        else:
            self._broken = True

    def close(self) -> None:
        """Idempotent."""
        self._broken = True
        with contextlib.suppress(OSError):
            self._end.close()


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < _COUNT_MAX else None
