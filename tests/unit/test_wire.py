"""The host's side of the frames: bounds, hostile bytes, and two ends that both write."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fumehood.wire import BODY_MAX, HEADER_MAX, INBOX_MAX, Channel, ChannelClosed, WireError, decode, encode

FRAME = struct.Struct("!II")


def frame(head: bytes, body: bytes = b"") -> bytes:
    return FRAME.pack(len(head), len(body)) + head + body


def with_channel(body: Callable[[Channel, socket.socket], Awaitable[None]]) -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        fd = ours.detach()
        channel = Channel(fd, fd)
        with theirs:
            theirs.setblocking(False)
            await asyncio.wait_for(body(channel, theirs), 60)
        channel.close()

    before = set(os.listdir("/proc/self/fd"))
    asyncio.run(main())
    assert set(os.listdir("/proc/self/fd")) == before


def test_frames_arrive_whole_however_they_are_cut() -> None:
    async def body(channel: Channel, guest: socket.socket) -> None:
        stream = frame(b'{"op":"a","n":1}', b"body") + frame(b'{"op":"b"}') + frame(b'{"op":"c"}', b"x" * BODY_MAX)
        loop = asyncio.get_running_loop()
        for byte in stream[:60]:
            await loop.sock_sendall(guest, bytes([byte]))
            await asyncio.sleep(0)
        sending = asyncio.ensure_future(loop.sock_sendall(guest, stream[60:]))
        assert await channel.receive() == ({"op": "a", "n": 1}, b"body")
        assert await channel.receive() == ({"op": "b"}, b"")
        assert await channel.receive() == ({"op": "c"}, b"x" * BODY_MAX)
        await sending

    with_channel(body)


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"{",
        b"[]",
        b"1",
        b"{}",
        b'{"op":1}',
        b'{"op":"a","x":NaN}',
        b'{"op":"a","x":Infinity}',
        b'{"op":"a","x":1.5}',
        b'{"op":"a","x":1e999}',
        b'{"op":"a","x":' + b"9" * 10_000 + b"}",
        b'{"op":"a","x":' + b"[" * 8000 + b"]" * 8000 + b"}",
        b'{"op":"\xff"}',
        b'{"op":"a"} x',
    ],
)
def test_headers_that_are_refused(head: bytes) -> None:
    async def body(channel: Channel, guest: socket.socket) -> None:
        guest.sendall(frame(b'{"op":"before"}') + frame(head))
        assert (await channel.receive())[0] == {"op": "before"}
        with pytest.raises(WireError):
            await channel.receive()
        with pytest.raises(WireError):
            await channel.send({"op": "x"})

    with_channel(body)


@pytest.mark.parametrize("lengths", [(HEADER_MAX + 1, 0), (2, BODY_MAX + 1), (0xFFFFFFFF, 0xFFFFFFFF)])
def test_lengths_are_refused_before_the_bytes_come(lengths: tuple[int, int]) -> None:
    async def body(channel: Channel, guest: socket.socket) -> None:
        guest.sendall(FRAME.pack(*lengths))
        with pytest.raises(WireError):
            await channel.receive()

    with_channel(body)


@settings(max_examples=200, deadline=None, database=None)
@given(st.binary(max_size=200))
def test_any_header_is_an_object_or_a_wire_error(head: bytes) -> None:
    try:
        header = decode(head)
    except WireError:
        return
    assert isinstance(header["op"], str)


@given(
    st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=9) | st.booleans() | st.none(), max_size=4)
)
def test_what_is_encoded_is_decoded(fields: dict[str, object]) -> None:
    header = {**fields, "op": "x"}
    raw = encode(header, 7)
    length, body = FRAME.unpack_from(raw)
    assert (len(raw), body) == (8 + length, 7)
    assert decode(raw[8:]) == json.loads(json.dumps(header))


def test_frames_over_the_bounds_are_not_sent() -> None:
    with pytest.raises(ValueError, match="bounds"):
        encode({"op": "x" * HEADER_MAX}, 0)
    with pytest.raises(ValueError, match="bounds"):
        encode({"op": "x"}, BODY_MAX + 1)


def test_end_of_stream() -> None:
    async def body(channel: Channel, guest: socket.socket) -> None:
        waiting = asyncio.ensure_future(channel.receive())
        await asyncio.sleep(0)
        guest.close()
        with pytest.raises(ChannelClosed):
            await waiting
        with pytest.raises(ChannelClosed):
            await channel.send({"op": "x"})

    with_channel(body)


def test_frames_before_the_end_are_still_received() -> None:
    async def body(channel: Channel, guest: socket.socket) -> None:
        guest.sendall(frame(b'{"op":"last"}', b"words"))
        guest.close()
        await asyncio.sleep(0.05)
        assert await channel.receive() == ({"op": "last"}, b"words")
        with pytest.raises(ChannelClosed):
            await channel.receive()

    with_channel(body)


def test_two_ends_that_both_write_do_not_lock_each_other() -> None:
    async def body(channel: Channel, guest: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        count = 8
        piece = b"z" * BODY_MAX
        received = 0

        async def drain() -> None:
            nonlocal received
            while received < count * (BODY_MAX + len(encode({"op": "p"}, BODY_MAX))):
                received += len(await loop.sock_recv(guest, 1 << 20))

        # The guest writes all that it has before it reads anything.
        sending = [asyncio.ensure_future(channel.send({"op": "p"}, piece)) for _ in range(count)]
        writing = asyncio.ensure_future(loop.sock_sendall(guest, frame(b'{"op":"q"}', piece) * count))
        for _ in range(count):
            assert len((await channel.receive())[1]) == BODY_MAX
        await writing
        assert not all(s.done() for s in sending)
        await drain()
        await asyncio.gather(*sending)
        assert channel.pending_bytes == 0

    with_channel(body)


def test_a_flood_that_nobody_receives_is_not_kept() -> None:
    async def body(channel: Channel, guest: socket.socket) -> None:
        flood = frame(b'{"op":"q"}', b"x" * 1000) * 1000
        loop = asyncio.get_running_loop()
        writing = asyncio.ensure_future(loop.sock_sendall(guest, flood * 20))
        for _ in range(200):
            await asyncio.sleep(0.001)
        assert not writing.done()
        kept = sum(len(body) for _, body in channel._frames)
        assert kept <= INBOX_MAX
        for _ in range(20_000):
            await channel.receive()
        await writing

    with_channel(body)


def test_subscriber_gets_what_came_before_and_the_end_once() -> None:
    async def body(channel: Channel, guest: socket.socket) -> None:
        guest.sendall(frame(b'{"op":"a"}') + frame(b'{"op":"b"}', b"x"))
        await asyncio.sleep(0.02)
        seen: list[object] = []
        ended = asyncio.Event()

        def lost(why: Exception) -> None:
            seen.append(type(why))
            ended.set()

        channel.subscribe(lambda header, body: seen.append((header["op"], body)), lost)
        guest.sendall(frame(b'{"op":"c"}'))
        guest.close()
        await ended.wait()
        channel.close()
        assert seen == [("a", b""), ("b", b"x"), ("c", b""), ChannelClosed]

    with_channel(body)


def test_a_cancelled_send_leaves_the_others_alone() -> None:
    async def body(channel: Channel, guest: socket.socket) -> None:
        piece = b"z" * BODY_MAX
        first = asyncio.ensure_future(channel.send({"op": "p"}, piece))
        second = asyncio.ensure_future(channel.send({"op": "p"}, piece))
        await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.sleep(0)
        while not second.done():
            await asyncio.get_running_loop().sock_recv(guest, 1 << 20)
        await second

    with_channel(body)
