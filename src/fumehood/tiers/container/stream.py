"""The attached stream of a container without a terminal, as one plain stream.

Towards the container bytes go as they are. From it they come in pieces of stdout and stderr, each behind eight bytes:
the stream's number, three zeros, a length (big-endian). The pump takes stdout out of that and writes it to a socket
pair, whose other end a :class:`~fumehood.wire.Channel` reads; the first bytes of stderr, where a runtime or a Python
that does not start says why, are kept. It never blocks, and stops reading while the other side does not read.

Format: https://docs.docker.com/reference/api/engine/version/v1.43/#tag/Container/operation/ContainerAttach
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct

_HEADER = struct.Struct(">B3xI")
_STDOUT, _STDERR = 1, 2
_READ = 256 << 10
STDERR_KEPT = 4096


class Pump:
    """Owns ``attached`` and its end of the pair. Belongs to the running loop. ``stream`` is the plain end.

    :meth:`take` hands over the descriptors for a channel, after which only :meth:`close` is left to call.
    """

    def __init__(self, attached: socket.socket, begun: bytes) -> None:
        self._loop = asyncio.get_running_loop()
        self._attached = attached
        self._ours, self.stream = socket.socketpair()
        for end in (self._ours, self.stream):
            end.setblocking(False)
        self._left = 0  # bytes that are still to come of the current piece
        self._number = 0
        self._head = b""
        self._waiting = memoryview(b"")  # taken from the container, not yet taken from us
        self._closed = False
        self.stderr = b""
        self._loop.add_reader(attached, self._on_readable)
        if begun:
            self._pass_on(begun)

    async def send(self, data: bytes) -> None:
        """Send to the container's stdin. Raises OSError."""
        await self._loop.sock_sendall(self._attached, data)

    def take(self) -> tuple[int, int]:
        """Descriptors to read from and to write to, owned by the caller from now on."""
        return self.stream.detach(), os.dup(self._attached.fileno())

    def close(self) -> None:
        """End both directions. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._attached)
        self._loop.remove_writer(self._ours)
        with contextlib.suppress(OSError):  # the channel's duplicate would keep the stream open otherwise
            self._attached.shutdown(socket.SHUT_RDWR)
        self._attached.close()
        self._ours.close()
        self.stream.close()

    def _on_readable(self) -> None:
        try:
            data = self._attached.recv(_READ)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._attached)
            with contextlib.suppress(OSError):
                self._ours.shutdown(socket.SHUT_WR)
            return
        self._pass_on(data)

    def _pass_on(self, data: bytes) -> None:
        """Divide what came into its pieces. A header that is none ends the stream."""
        out = []
        view = memoryview(data)
        while view:
            if self._left == 0:
                need = _HEADER.size - len(self._head)
                self._head += bytes(view[:need])
                view = view[need:]
                if len(self._head) < _HEADER.size:
                    break
                self._number, self._left = _HEADER.unpack(self._head)
                self._head = b""
                if self._number not in (_STDOUT, _STDERR):
                    self.close()
                    return
                continue
            piece, view = view[: self._left], view[self._left :]
            self._left -= len(piece)
            if self._number == _STDOUT:
                out.append(piece)
            elif len(self.stderr) < STDERR_KEPT:
                self.stderr += bytes(piece[: STDERR_KEPT - len(self.stderr)])
        if out:
            self._waiting = memoryview(b"".join(out)) if len(out) > 1 else out[0]
            self._flush()

    def _flush(self) -> None:
        while self._waiting:
            try:
                self._waiting = self._waiting[self._ours.send(self._waiting) :]
            except BlockingIOError:
                self._loop.remove_reader(self._attached)
                self._loop.add_writer(self._ours, self._on_writable)
                return
            except OSError:  # the channel is closed
                self.close()
                return

    def _on_writable(self) -> None:
        self._loop.remove_writer(self._ours)
        self._flush()
        if not self._closed and not self._waiting:
            self._loop.add_reader(self._attached, self._on_readable)
