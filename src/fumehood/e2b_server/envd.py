"""envd: commands and the file tree by Connect RPC, file contents by HTTP.

The two services derive from the SDK's generated classes; what is not defined here answers "unimplemented".
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import posixpath
import signal
from collections.abc import AsyncIterator, Awaitable
from typing import Any, Literal, TypeVar
from urllib.parse import parse_qs

from connectrpc.code import Code
from connectrpc.errors import ConnectError
from e2b.envd.filesystem import filesystem_pb as fs
from e2b.envd.filesystem.filesystem_connect import Filesystem, FilesystemASGIApplication
from e2b.envd.process import process_pb as ps
from e2b.envd.process.process_connect import Process, ProcessASGIApplication
from protobuf import Oneof
from protobuf.wkt import Timestamp

from fumehood.e2b_server.http import Receive, Scope, Send, answer, answer_json, body_of
from fumehood.e2b_server.sandboxes import HOME, Box, inside
from fumehood.errors import ClosedError, FileError, FumehoodError, PolicyError
from fumehood.model import Command, Outcome
from fumehood.tier import FileInfo, Stream

#: Changes to the command's folder and puts what it was given into its environment, then becomes it.
_STARTER = 'cd -- "$1" && shift && exec env -- "$@"'
_KILL_WAIT_S = 1.0
T = TypeVar("T")
_FILES_MAX = 64 << 20


async def serve(box: Box, scope: Scope, receive: Receive, send: Send) -> None:
    """One request."""
    path = scope["path"]
    if path.startswith("/process.Process/"):
        await ProcessASGIApplication(Processes(box))(scope, receive, send)
    elif path.startswith("/filesystem.Filesystem/"):
        await FilesystemASGIApplication(Files(box))(scope, receive, send)
    elif path == "/files":
        await _contents(box, scope, receive, send)
    elif path == "/health":
        await answer(send, 204)
    else:
        await answer(send, 404, b'{"code":404,"message":"not served here"}')


# --- processes


class _Started:
    """A command under way and what it said."""

    def __init__(self, pid: int, config: ps.ProcessConfig) -> None:
        self.pid = pid
        self.config = config
        self.events: asyncio.Queue[ps.ProcessEvent | None] = asyncio.Queue()

    def say(self, stream: Stream, data: bytes) -> None:
        """A piece of output."""
        said: Any  # which of the two, a type checker does not infer here
        said = Oneof("stdout", data) if stream == "stdout" else Oneof("stderr", data)
        piece: Oneof[Literal["data"], ps.ProcessEvent.DataEvent] = Oneof("data", ps.ProcessEvent.DataEvent(output=said))
        self.events.put_nowait(ps.ProcessEvent(event=piece))


class Processes(Process):
    """Commands in one sandbox, one after another."""

    def __init__(self, box: Box) -> None:
        self._box = box

    async def start(self, request: ps.StartRequest, ctx: Any) -> AsyncIterator[ps.StartResponse]:
        """Run a command and stream what it says."""
        config = request.process or ps.ProcessConfig()
        command = Command(_argv(config, self._box))
        async with self._box.turn:
            self._box.pids += 1
            started = _Started(self._box.pids, config)
            yield _response(Oneof("start", ps.ProcessEvent.StartEvent(pid=started.pid)))
            _running[self._box] = started
            task = asyncio.create_task(self._run(command, started))
            try:
                while (event := await started.events.get()) is not None:
                    yield ps.StartResponse(event=event)
                yield _response(Oneof("end", await task))
            finally:
                _running.pop(self._box, None)
                if not task.done():
                    task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def _run(self, command: Command, started: _Started) -> ps.ProcessEvent.EndEvent:
        try:
            result = await self._box.sandbox.exec(command, sink=started.say)
        except ClosedError as error:
            raise ConnectError(Code.UNAVAILABLE, f"The sandbox was not found: {error.message}") from None
        except FumehoodError as error:
            raise ConnectError(Code.INTERNAL, error.message) from None
        finally:
            started.events.put_nowait(None)
        if result.outcome is Outcome.EXITED:
            return ps.ProcessEvent.EndEvent(exit_code=result.exit_code or 0, exited=True, status="exited")
        text = f"ended by {result.outcome.value}"
        if result.outcome is Outcome.SIGNALED and result.exit_code is not None:
            text = f"signal: {(signal.strsignal(-result.exit_code) or 'unknown').lower()}"  # the service's own words
        return ps.ProcessEvent.EndEvent(exit_code=-1, exited=False, status=text, error=text)

    async def list(self, request: ps.ListRequest, ctx: Any) -> ps.ListResponse:
        """The command that runs, if one does."""
        started = _running.get(self._box)
        found = [] if started is None else [ps.ProcessInfo(pid=started.pid, config=started.config)]
        return ps.ListResponse(processes=found)

    async def send_signal(self, request: ps.SendSignalRequest, ctx: Any) -> ps.SendSignalResponse:
        """Interrupt the command that runs; if it does not heed that, the sandbox ends with it."""
        started = _running.get(self._box)
        selector = request.process.selector if request.process is not None else None
        if started is None or selector != Oneof("pid", started.pid):
            raise ConnectError(Code.NOT_FOUND, "no such process")
        for _ in range(10):
            await self._box.sandbox.interrupt()  # again, since one that comes before the command does is lost
            await asyncio.sleep(_KILL_WAIT_S / 10)
            if _running.get(self._box) is not started:
                return ps.SendSignalResponse()
        self._box.dead.set()
        return ps.SendSignalResponse()


_running: dict[Box, _Started] = {}


def _argv(config: ps.ProcessConfig, box: Box) -> tuple[str, ...]:
    """The command behind a shell that changes to its folder. Raises ConnectError."""
    try:
        folder = inside(config.cwd or HOME)
    except PolicyError as error:
        raise ConnectError(Code.INVALID_ARGUMENT, error.message) from None
    env = {**box.envs, **dict(config.envs)}
    starter = ("/bin/sh", "-c", _STARTER, "sh", folder or ".")
    return (*starter, *(f"{name}={value}" for name, value in env.items()), config.cmd, *config.args)


def _response(event: Any) -> ps.StartResponse:
    return ps.StartResponse(event=ps.ProcessEvent(event=event))


# --- the file tree


class Files(Filesystem):
    """The work folder of one sandbox, as /home/user."""

    def __init__(self, box: Box) -> None:
        self._box = box

    async def list_dir(self, request: fs.ListDirRequest, ctx: Any) -> fs.ListDirResponse:
        """What lies in a folder, ``depth`` levels deep."""
        folder = _inside(request.path)
        prefix = f"{folder}/" if folder else ""
        depth = request.depth or 1
        entries = await self._entries()
        if folder and not any(e.path == folder and e.kind == "folder" for e in entries):
            raise ConnectError(Code.NOT_FOUND, f"{request.path} is not a folder")
        below = [e for e in entries if e.path.startswith(prefix) and e.path.removeprefix(prefix).count("/") < depth]
        return fs.ListDirResponse(entries=[_entry(e) for e in below])

    async def stat(self, request: fs.StatRequest, ctx: Any) -> fs.StatResponse:
        """One entry, a link itself."""
        return fs.StatResponse(entry=await self._find(request.path))

    async def move(self, request: fs.MoveRequest, ctx: Any) -> fs.MoveResponse:
        """Another name for a file or folder."""
        await _told(self._box.sandbox.rename(_inside(request.source), _inside(request.destination)))
        return fs.MoveResponse(entry=await self._find(request.destination))

    async def make_dir(self, request: fs.MakeDirRequest, ctx: Any) -> fs.MakeDirResponse:
        """A folder with those above it."""
        folder = _inside(request.path)
        there = not folder
        with contextlib.suppress(ConnectError):
            there = there or bool(await self._find(request.path))
        if there:
            raise ConnectError(Code.ALREADY_EXISTS, f"{request.path} is there already")
        await _told(self._box.sandbox.make_folder(folder))
        return fs.MakeDirResponse(entry=await self._find(request.path))

    async def remove(self, request: fs.RemoveRequest, ctx: Any) -> fs.RemoveResponse:
        """A file, or a folder with all in it."""
        await _told(self._box.sandbox.remove(_inside(request.path) or "."))
        return fs.RemoveResponse()

    async def _entries(self) -> tuple[FileInfo, ...]:
        return await _told(self._box.sandbox.list_files())

    async def _find(self, path: str) -> fs.EntryInfo:
        return _entry(await _told(self._box.sandbox.stat(_inside(path))))


def _inside(path: str) -> str:
    try:
        return inside(path)
    except PolicyError as error:
        raise ConnectError(Code.INVALID_ARGUMENT, error.message) from None


async def _told(operation: Awaitable[T]) -> T:
    """The result of a file operation, its errors as the protocol names them."""
    try:
        return await operation
    except FileError as error:
        code = Code.NOT_FOUND if error.errno == errno.ENOENT else Code.INVALID_ARGUMENT
        raise ConnectError(code, error.message) from None
    except ClosedError as error:
        raise ConnectError(Code.UNAVAILABLE, f"The sandbox was not found: {error.message}") from None
    except FumehoodError as error:
        raise ConnectError(Code.INVALID_ARGUMENT, error.message) from None


def _entry(info: FileInfo) -> fs.EntryInfo:
    kinds = {"file": fs.FileType.FILE, "folder": fs.FileType.DIRECTORY}
    return fs.EntryInfo(
        name=posixpath.basename(info.path),
        path=f"{HOME}/{info.path}",
        type=kinds.get(info.kind, fs.FileType.SYMLINK),  # or a device or pipe, for which there is no word
        size=info.size_bytes,
        mode=info.mode or 0,
        modified_time=Timestamp(seconds=info.modified_s or 0),
        owner="user",
        group="user",
    )


# --- file contents


async def _contents(box: Box, scope: Scope, receive: Receive, send: Send) -> None:
    """``GET`` and ``POST /files``."""
    query = parse_qs(scope["query_string"].decode("latin-1"))
    try:
        path = inside(query["path"][0])
        if scope["method"] == "GET":
            await answer(
                send, 200, await box.sandbox.read_file(path, max_bytes=_FILES_MAX), b"application/octet-stream"
            )
            return
        for name, data in _uploads(scope, await body_of(receive), path):
            await box.sandbox.write_file(name, data)
    except FileError as error:
        status = {errno.ENOENT: 404, errno.ENOSPC: 507}.get(error.errno or 0, 400)
        await answer_json(send, status, {"code": status, "message": error.message})
    except (PolicyError, KeyError, ValueError) as error:
        await answer_json(send, 400, {"code": 400, "message": str(error)[:500]})
    except ClosedError:
        await answer(send, 502, b'{"code":502,"message":"The sandbox was not found"}')
    else:
        written = [{"name": posixpath.basename(path), "path": f"{HOME}/{path}", "type": "file"}]
        await answer_json(send, 200, written)


def _uploads(scope: Scope, body: bytes, path: str) -> list[tuple[str, bytes]]:
    """The files of an upload: the body itself, or the one part of a form."""
    kind = dict(scope["headers"]).get(b"content-type", b"")
    if not kind.startswith(b"multipart/form-data"):
        return [(path, body)]
    boundary = b"--" + kind.partition(b"boundary=")[2].strip(b'"')
    parts = body.split(boundary)[1:-1]
    if len(parts) != 1:
        raise ValueError("one file at a time, please")
    _, _, data = parts[0].partition(b"\r\n\r\n")
    return [(path, data.removesuffix(b"\r\n"))]
