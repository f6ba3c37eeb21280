"""As much of an HTTP/1.1 server as an ASGI application needs on loopback: bodies, streams, connections kept open.

A client that goes away in the middle of an answer cancels the application's call. Everything from the wire is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import unquote

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

BODY_MAX = 128 << 20
_LINE_MAX = 64 << 10
_HEADERS_MAX = 200
_REASONS = {200: "OK", 201: "Created", 204: "No Content"}


class BadRequest(Exception):
    """The client broke HTTP: the connection ends."""


async def listen(application: Application, *, host: str = "127.0.0.1", port: int = 0) -> asyncio.Server:
    """Serve ``application`` on a loopback port (0: any that is free). Raises OSError, and ValueError elsewhere."""
    if host not in ("127.0.0.1", "::1"):
        raise ValueError(f"this server has no TLS and serves loopback only, not {host}")

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            source = _Source(reader)
            while await _Exchange(source, writer, application).serve():
                pass
        except (BadRequest, ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    return await asyncio.start_server(connected, host, port, limit=_LINE_MAX)


async def body_of(receive: Receive) -> bytes:
    """The whole body of a request."""
    pieces = []
    while True:
        message = await receive()
        pieces.append(bytes(message.get("body", b"")))
        if not message.get("more_body", False):
            return b"".join(pieces)


async def answer(send: Send, status: int, body: bytes = b"", kind: bytes = b"application/json") -> None:
    """A whole answer at once."""
    headers = [(b"content-type", kind), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def answer_json(send: Send, status: int, value: Any = None) -> None:
    """The same with a JSON value, or with nothing if the status is 204."""
    await answer(send, status, b"" if status == 204 else json.dumps(value).encode())


class _Source:
    """The client's bytes, with a way to notice its going without losing the first byte of its next request."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._early = b""
        self.readexactly = reader.readexactly

    async def line(self) -> bytes:
        """One line, or nothing at the end."""
        early, self._early = self._early, b""
        return early + await self._reader.readline()

    async def gone(self) -> None:
        """Until the client closes."""
        self._early += await self._reader.read(1)
        if self._early:
            await asyncio.Event().wait()


class _Exchange:
    """One request and its answer."""

    def __init__(self, reader: _Source, writer: asyncio.StreamWriter, application: Application) -> None:
        self._reader = reader
        self._writer = writer
        self._application = application
        self._body = b""
        self._given = False
        self._gone = asyncio.Event()
        self._started = False
        self._chunked = False
        self._ended = False

    async def serve(self) -> bool:
        """Whether the connection can take another request."""
        line = await self._reader.line()
        if not line:
            return False
        method, target, version = _split_request(line)
        headers = await self._headers()
        fields = dict(headers)
        if fields.get(b"expect", b"").lower() == b"100-continue":
            self._writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._body = await self._read_body(fields)
        path, _, query = target.partition(b"?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": version,
            "method": method,
            "scheme": "http",
            "path": unquote(path.decode("latin-1")),
            "raw_path": path,
            "query_string": query,
            "root_path": "",
            "headers": headers,
            "client": self._writer.get_extra_info("peername"),
            "server": self._writer.get_extra_info("sockname"),
        }
        await self._answer(scope)
        return self._ended and fields.get(b"connection", b"").lower() != b"close" and version == "1.1"

    async def _answer(self, scope: Scope) -> None:
        """Run the application, and cancel it if the client goes away meanwhile."""
        call = asyncio.ensure_future(self._application(scope, self._receive, self._send))
        watch = asyncio.ensure_future(self._wait_gone())
        try:
            await asyncio.wait((call, watch), return_when=asyncio.FIRST_COMPLETED)
            if call.done():
                call.result()
        finally:
            for task in (call, watch):
                task.cancel()
            await asyncio.gather(call, watch, return_exceptions=True)

    async def _wait_gone(self) -> None:
        """Until the client closes, which the application may be told of."""
        await self._reader.gone()
        self._gone.set()

    async def _headers(self) -> list[tuple[bytes, bytes]]:
        headers: list[tuple[bytes, bytes]] = []
        while (line := await self._reader.line()) not in (b"\r\n", b"\n"):
            name, colon, value = line.partition(b":")
            if not colon or len(headers) >= _HEADERS_MAX:
                raise BadRequest("headers")
            headers.append((name.strip().lower(), value.strip()))
        return headers

    async def _read_body(self, fields: dict[bytes, bytes]) -> bytes:
        if fields.get(b"transfer-encoding", b"").lower() == b"chunked":
            pieces, total = [], 0
            while True:
                size = _number(await self._reader.line(), 16)
                total += size
                if total > BODY_MAX:
                    raise BadRequest("body")
                pieces.append(await self._reader.readexactly(size))
                await self._reader.line()
                if size == 0:
                    return b"".join(pieces)
        size = _number(fields.get(b"content-length", b"0"), 10)
        if size > BODY_MAX:
            raise BadRequest("body")
        return await self._reader.readexactly(size)

    async def _receive(self) -> MutableMapping[str, Any]:
        if not self._given:
            self._given = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self._start(message["status"], list(message.get("headers", [])))
        elif message["type"] == "http.response.body":
            body, more = bytes(message.get("body", b"")), message.get("more_body", False)
            if self._chunked:
                self._writer.write(b"%x\r\n%b\r\n" % (len(body), body) if body else b"")
                self._writer.write(b"" if more else b"0\r\n\r\n")
            else:
                self._writer.write(body)
            await self._writer.drain()
            self._ended = not more

    def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        names = {name.lower() for name, _ in headers}
        self._chunked = b"content-length" not in names and status not in (204, 304)
        if self._chunked:
            headers.append((b"transfer-encoding", b"chunked"))
        reason = _REASONS.get(status, "Status")
        lines = [b"HTTP/1.1 %d %b" % (status, reason.encode()), *(b"%b: %b" % pair for pair in headers)]
        self._writer.write(b"\r\n".join(lines) + b"\r\n\r\n")


def _split_request(line: bytes) -> tuple[str, bytes, str]:
    parts = line.split()
    if len(parts) != 3 or parts[2] not in (b"HTTP/1.1", b"HTTP/1.0"):
        raise BadRequest("request line")
    return parts[0].decode("latin-1"), parts[1], parts[2][5:].decode()


def _number(text: bytes, base: int) -> int:
    try:
        value = int(text.split(b";")[0].strip(), base)
    except ValueError:
        raise BadRequest("a length that is no number") from None
    if value < 0:
        raise BadRequest("a negative length")
    return value
