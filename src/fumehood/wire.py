"""The host's side of the frames between a supervisor and a guest agent.

The format is the agent's (see :mod:`fumehood.guest.agent`): two 4-byte lengths, a JSON object of at most 16 KiB, a
raw body of at most 1 MiB. Every byte that arrives is hostile: lengths are checked before anything is allocated, and
a header is a flat enough object without floats, NaN or long numbers, or the channel is lost.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import struct
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

FRAME = struct.Struct("!II")
HEADER_MAX = 16 << 10
BODY_MAX = 1 << 20
READ_BYTES = 256 << 10

#: A read asks for this until there is more: room for READ_BYTES comes fresh from the kernel each time, page by page.
READ_BYTES_MIN = 8 << 10

#: Received bytes that wait for receive() beyond which the channel stops reading.
INBOX_MAX = 4 << 20

Header = dict[str, Any]
OnFrame = Callable[[Header, bytes], None]
OnLost = Callable[[Exception], None]


class ChannelClosed(Exception):
    """The stream has ended, by either side."""


class WireError(ChannelClosed):
    """The guest broke the format. The channel is closed, since what follows cannot be told apart."""


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text:.20} is not allowed")


#: A header as the text of its JSON object.
header_text = json.JSONEncoder(separators=(",", ":")).encode
_decode = json.JSONDecoder(parse_float=_refuse, parse_constant=_refuse).raw_decode


def encode(header: Header, body_bytes: int) -> bytes:
    """The two lengths and the header of a frame. Raises ValueError if it is over the bounds."""
    return _encode(header_text(header), body_bytes)


def _encode(text: str, body_bytes: int) -> bytes:
    head = text.encode()
    if len(head) > HEADER_MAX or body_bytes > BODY_MAX:
        raise ValueError(f"a frame of {len(head)} + {body_bytes} bytes is over the bounds")
    return FRAME.pack(len(head), body_bytes) + head


def decode(head: bytes) -> Header:
    """A frame's header. Raises WireError."""
    try:
        text = head.decode()
        header, end = _decode(text)
        if end != len(text):
            raise ValueError("something after the object")
    except (ValueError, RecursionError) as error:
        raise WireError(f"a header that is not JSON: {error}"[:200]) from None
    if not isinstance(header, dict) or not isinstance(header.get("op"), str):
        raise WireError("a header without an operation")
    return header


class Link(ABC):
    """A session's way to a guest: it takes frames, and what cannot be sent at once waits. Usually a :class:`Channel`.

    Made inside a running event loop.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._outbox: deque[memoryview] = deque()
        self._drained: asyncio.Future[None] | None = None
        self.lost: Exception | None = None
        self.pending_bytes = 0  # what a guest has made us queue

    @abstractmethod
    def subscribe(self, on_frame: OnFrame, on_lost: OnLost) -> None:
        """Hand every frame to ``on_frame`` as it is parsed, and the end of the stream, once, to ``on_lost``."""

    @abstractmethod
    def post(self, header: Header, body: bytes | memoryview = b"") -> None:
        """Send a frame without waiting: what the stream does not take now goes out later. Raises ChannelClosed."""

    @abstractmethod
    def close(self) -> None:
        """Close the descriptors. Idempotent."""

    async def send(self, header: Header, body: bytes | memoryview = b"") -> None:
        """Send a frame and wait until the stream has taken it. Raises ChannelClosed."""
        self.post(header, body)
        await self.flush()

    async def flush(self) -> None:
        """Wait until the stream has taken all frames. Raises ChannelClosed."""
        while self._outbox:
            if self._drained is None:
                self._drained = self._loop.create_future()
            await asyncio.shield(self._drained)
            if self.lost is not None:
                raise self.lost

    def _wake_sender(self) -> None:
        """All is sent, or never will be."""
        if self._drained is not None:
            self._drained.set_result(None)
            self._drained = None


class Channel(Link):
    """A stream of frames over raw descriptors (one socket may be both), which it owns.

    Made inside a running event loop. Frames go to the callbacks of :meth:`subscribe`, or else wait for
    :meth:`receive`. Reading never waits for a pending send, so two ends that both write cannot lock each other.
    """

    def __init__(self, read_fd: int, write_fd: int) -> None:
        super().__init__()
        self._read_fd = read_fd
        self._write_fd = write_fd
        self._read_bytes = READ_BYTES_MIN
        self._inbuf = bytearray()
        self._frames: deque[tuple[Header, bytes]] = deque()
        self._queued_bytes = 0
        self._reading = False
        self._writing = False
        self._waiter: asyncio.Future[None] | None = None
        self._on_frame: OnFrame | None = None
        self._on_lost: OnLost | None = None
        for fd in {read_fd, write_fd}:
            os.set_blocking(fd, False)
        self._resume()

    def subscribe(self, on_frame: OnFrame, on_lost: OnLost) -> None:
        """See :class:`Link`."""
        self._on_frame = on_frame
        self._on_lost = on_lost
        while self._frames and self._on_frame is not None:
            on_frame(*self._frames.popleft())
        self._queued_bytes = 0
        if self.lost is not None:
            on_lost(self.lost)
        else:
            self._resume()

    async def receive(self) -> tuple[Header, bytes]:
        """The next frame. Raises ChannelClosed at the end of the stream, WireError if the guest broke the format."""
        while not self._frames:
            if self.lost is not None:
                raise self.lost
            self._waiter = self._loop.create_future()
            await self._waiter
        header, body = self._frames.popleft()
        self._queued_bytes -= len(body) + HEADER_MAX
        if self.lost is None and self._queued_bytes < INBOX_MAX:
            self._resume()
        return header, body

    def post(self, header: Header, body: bytes | memoryview = b"") -> None:
        """See :class:`Link`."""
        self.post_text(header_text(header), body)

    def post_text(self, header: str, body: bytes | memoryview = b"") -> None:
        """The same of a header that is its JSON already."""
        if self.lost is not None:
            raise self.lost
        head = _encode(header, len(body))
        frame = memoryview(head + body) if len(body) < 4096 else None
        idle = not self._outbox
        if idle and frame is not None:
            try:
                frame = frame[os.write(self._write_fd, frame) :]
            except BlockingIOError:
                pass
            except OSError as error:
                why = ChannelClosed(f"the stream broke: {error}")
                self._lose(why)
                raise why from None
            if not frame:
                return
        pieces = (memoryview(head), memoryview(body)) if frame is None else (frame,)
        self._outbox.extend(pieces)
        self.pending_bytes += sum(map(len, pieces))
        if idle:
            self._on_writable()
            if self.lost is not None:
                raise self.lost

    def close(self) -> None:
        """Close the descriptors; frames already received can still be taken. Idempotent."""
        self._lose(ChannelClosed("closed"))

    def _resume(self) -> None:
        if not self._reading:
            self._reading = True
            self._loop.add_reader(self._read_fd, self._on_readable)

    def _on_readable(self) -> None:
        try:
            data = os.read(self._read_fd, self._read_bytes)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(ChannelClosed(f"the stream broke: {error}"))
            return
        if not data:
            self._lose(ChannelClosed("the guest ended the stream"))
            return
        self._read_bytes = READ_BYTES if len(data) == self._read_bytes else READ_BYTES_MIN
        self._inbuf += data
        try:
            self._parse()
        except WireError as error:
            self._lose(error)
            return
        if self._queued_bytes >= INBOX_MAX and self._reading:
            self._reading = False
            self._loop.remove_reader(self._read_fd)

    def _parse(self) -> None:
        buffer = self._inbuf
        start = 0
        while len(buffer) - start >= FRAME.size:
            header_bytes, body_bytes = FRAME.unpack_from(buffer, start)
            if header_bytes > HEADER_MAX or body_bytes > BODY_MAX:
                raise WireError(f"a frame of {header_bytes} + {body_bytes} bytes")
            middle = start + FRAME.size + header_bytes
            end = middle + body_bytes
            if len(buffer) < end:
                break
            header = decode(bytes(buffer[start + FRAME.size : middle]))
            body = bytes(memoryview(buffer)[middle:end])
            start = end
            if self._on_frame is not None:
                self._on_frame(header, body)
                if self.lost is not None:
                    return
            else:
                self._frames.append((header, body))
                self._queued_bytes += len(body) + HEADER_MAX
                if self._waiter is not None and not self._waiter.done():
                    self._waiter.set_result(None)
        del buffer[:start]

    def _on_writable(self) -> None:
        outbox = self._outbox
        while outbox:
            try:
                written = os.writev(self._write_fd, list(itertools.islice(outbox, 8)))
            except BlockingIOError:
                if not self._writing:
                    self._writing = True
                    self._loop.add_writer(self._write_fd, self._on_writable)
                return
            except OSError as error:
                self._lose(ChannelClosed(f"the stream broke: {error}"))
                return
            self.pending_bytes -= written
            while written:
                piece = outbox[0]
                if len(piece) <= written:
                    written -= len(piece)
                    outbox.popleft()
                else:
                    outbox[0] = piece[written:]
                    written = 0
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self._write_fd)
        self._wake_sender()

    def _lose(self, why: Exception) -> None:
        if self.lost is not None:
            return
        self.lost = why
        if self._reading:
            self._loop.remove_reader(self._read_fd)
        if self._writing:
            self._loop.remove_writer(self._write_fd)
        self._outbox.clear()
        self.pending_bytes = 0
        for fd in {self._read_fd, self._write_fd}:
            os.close(fd)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        self._wake_sender()
        if self._on_lost is not None:
            self._on_lost(why)
