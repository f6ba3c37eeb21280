"""A container engine over its HTTP API on a Unix socket: Docker's, which Podman serves as well.

Requests are HTTP/1.0 on a connection each, so that an answer ends where the stream ends and is never chunked; a
connection to a local socket costs some 20 µs. What the engine answers is bounded and checked like any other input.

API: https://docs.docker.com/reference/api/engine/ and https://docs.podman.io/en/latest/_static/api.html.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal
from urllib.parse import urlencode

Word = Literal["docker", "podman"]

ANSWER_MAX = 16 << 20
CALL_TIMEOUT_S = 30.0
_CONNECT_TIMEOUT_S = 5.0
_PIECE = 256 << 10

#: The variable that names another socket, as each engine's own client reads it.
_VARIABLE: Mapping[Word, str] = {"docker": "DOCKER_HOST", "podman": "CONTAINER_HOST"}


class EngineError(Exception):
    """The engine refused: ``status`` is HTTP's, ``message`` its own words."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"the engine said {status}: {message}")
        self.status = status
        self.message = message


class EngineGoneError(Exception):
    """The engine cannot be reached, or ended the connection in the middle of an answer."""


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine: which kind, and the path of its socket."""

    word: Word
    path: str

    async def call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, object] | None = None,
        body: object = None,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> Any:
        """One request; the JSON that came back, or None if it is empty. Raises EngineError, EngineGoneError."""
        data = json.dumps(body).encode() if body is not None else b""
        try:
            async with asyncio.timeout(timeout_s):
                async with self._connection() as connection:
                    await _send(connection, _request(method, path, query, "application/json", len(data)) + data)
                    head, rest = await _head(connection)
                    answer = await _rest(connection, rest)
        except TimeoutError:
            raise EngineGoneError(f"no answer to {method} {path} within {timeout_s:g} s") from None
        return _answer(_status(head), answer)

    async def attach(self, path: str, query: Mapping[str, object]) -> tuple[socket.socket, bytes]:
        """A connection that became a raw stream, and what of the stream came already. The caller closes it.

        Raises EngineError, EngineGoneError.
        """
        connection = await self._connect()
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                upgrade = "Connection: Upgrade\r\nUpgrade: tcp\r\n"
                await _send(connection, _request("POST", path, query, None, 0, version="1.1", more=upgrade))
                head, rest = await _head(connection)
                status = _status(head)
                if status not in (101, 200):
                    _answer(status, await _rest(connection, rest))
                    raise EngineError(status, "it did not attach")
        except TimeoutError:
            connection.close()
            raise EngineGoneError("no answer to attach") from None
        except BaseException:
            connection.close()
            raise
        return connection, rest

    async def stream(
        self, method: str, path: str, *, query: Mapping[str, object] | None = None, source: BinaryIO | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        """The JSON lines of a long request as they come; ``source`` is a file to send. No deadline.

        Raises EngineError (a line with an error included), EngineGoneError.
        """
        size = os.fstat(source.fileno()).st_size if source is not None else 0
        async with self._connection() as connection:
            await _send(connection, _request(method, path, query, "application/x-tar", size))
            while source is not None and (piece := source.read(_PIECE)):
                await _send(connection, piece)
            head, rest = await _head(connection)
            status = _status(head)
            if status >= 300:
                _answer(status, await _rest(connection, rest))
            loop = asyncio.get_running_loop()
            while True:
                line, newline, left = rest.partition(b"\n")
                if newline:
                    rest = left
                    if line.strip():
                        yield _progress(line)
                    continue
                if len(rest) > ANSWER_MAX:
                    raise EngineGoneError("an endless line")
                piece = await loop.sock_recv(connection, _PIECE)
                if not piece:
                    if rest.strip():
                        yield _progress(rest)
                    return
                rest += piece

    @contextlib.asynccontextmanager
    async def _connection(self) -> AsyncIterator[socket.socket]:
        connection = await self._connect()
        with connection:
            try:
                yield connection
            except OSError as error:
                raise EngineGoneError(f"{self.word} at {self.path} broke off: {error}") from None

    async def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.setblocking(False)
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                await asyncio.get_running_loop().sock_connect(connection, self.path)
        except (OSError, TimeoutError) as error:
            connection.close()
            raise EngineGoneError(f"{self.word} does not answer at {self.path}: {error or 'time is over'}") from error
        except BaseException:
            connection.close()
            raise
        return connection


def socket_paths(word: Word) -> tuple[list[str], str]:
    """Where the engine's socket may be, likeliest first; and why nowhere, if the environment names no Unix socket."""
    named = os.environ.get(_VARIABLE[word], "")
    if named:
        if not named.startswith("unix://"):
            return [], f"{_VARIABLE[word]} names {named.partition('://')[0]}://, and only a Unix socket can be used"
        return [named.removeprefix("unix://")], ""
    own = os.environ.get("XDG_RUNTIME_DIR", "")
    name = "docker.sock" if word == "docker" else "podman/podman.sock"
    system = f"/run/{name}"
    rootless = f"{own}/{name}" if own else ""
    order = (system, rootless) if word == "docker" or os.geteuid() == 0 else (rootless,)
    return [path for path in order if path and Path(path).exists()], ""


def answers(path: str) -> str:
    """ "" if something listens on the Unix socket ``path``, else why not."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_CONNECT_TIMEOUT_S)
        try:
            connection.connect(path)
        except OSError as error:
            return error.strerror or str(error)
    return ""


def _request(
    method: str,
    path: str,
    query: Mapping[str, object] | None,
    kind: str | None,
    size: int,
    *,
    version: str = "1.0",
    more: str = "",
) -> bytes:
    target = f"{path}?{urlencode(query)}" if query else path
    content = f"Content-Type: {kind}\r\n" if kind else ""
    return f"{method} {target} HTTP/{version}\r\nHost: engine\r\n{content}Content-Length: {size}\r\n{more}\r\n".encode()


async def _send(connection: socket.socket, data: bytes) -> None:
    try:
        await asyncio.get_running_loop().sock_sendall(connection, data)
    except OSError as error:
        raise EngineGoneError(f"the engine takes no request: {error}") from None


async def _head(connection: socket.socket) -> tuple[bytes, bytes]:
    """An answer's status line and headers, and what came after them."""
    loop = asyncio.get_running_loop()
    data = b""
    while b"\r\n\r\n" not in data:
        if len(data) > 64 << 10:
            raise EngineGoneError("endless headers")
        try:
            piece = await loop.sock_recv(connection, _PIECE)
        except OSError as error:
            raise EngineGoneError(f"the engine broke off: {error}") from None
        if not piece:
            raise EngineGoneError("the engine ended the connection without an answer")
        data += piece
    head, _, rest = data.partition(b"\r\n\r\n")
    return head, rest


async def _rest(connection: socket.socket, begun: bytes) -> bytes:
    loop = asyncio.get_running_loop()
    pieces, size = [begun], len(begun)
    while piece := await loop.sock_recv(connection, _PIECE):
        pieces.append(piece)
        size += len(piece)
        if size > ANSWER_MAX:
            raise EngineGoneError("an endless answer")
    return b"".join(pieces)


def _status(head: bytes) -> int:
    words = head.split(b" ", 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
        raise EngineGoneError("what answers is no HTTP server")
    return int(words[1])


def _answer(status: int, body: bytes) -> Any:
    try:
        value = json.loads(body) if body.strip() else None
    except ValueError:
        value = body.decode("utf-8", "replace")[:500]
    if status >= 400:
        message = value.get("message") or value.get("cause") if isinstance(value, dict) else value
        raise EngineError(status, str(message)[:2000])
    return value


def _progress(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError:
        raise EngineGoneError("a line that is not JSON") from None
    if not isinstance(value, dict):
        raise EngineGoneError("a line that is not an object")
    if "error" in value:
        raise EngineError(500, str(value["error"])[:2000])
    return value
