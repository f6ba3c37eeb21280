"""The inside of a worker: frames from the supervisor, files, and programs for a runtime that a subclass holds.

Runs as the first process of a sandbox, in the jail where there is one (:mod:`fumehood.tiers.worker` is the other end).
Two threads that are alike: one takes frames until there is an exec, and runs it itself. If that takes longer than
:data:`RELIEF_S`, or cannot go on without a frame, the other one takes the frames from then on, until it has an exec in
its turn. So an interrupt, an answer, a file operation or the end of the stream does not wait for a program, and a short
program wakes no thread: the alarm that would is set off before its time.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import queue
import signal
import socket
import stat
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

from fumehood.guest import agent
from fumehood.guest.agent import BODY_MAX, EXIT_INTERRUPTED, EXIT_LOST, FRAME, HEADER_MAX, VERSION

#: A folder of the host's that the worker removes when the host is gone, see :mod:`fumehood.tiers.worker_child`.
folder_of_host: str | None = None

Header = dict[str, Any]
#: An exec: its first header, and the bodies of all its frames together.
Job = tuple[Header, bytes]

#: A program's standard input is held whole here, within the worker's own memory.
STDIN_MAX = 16 << 20
_PIECE = 256 << 10

#: How long a program has the only thread that is awake. What it prints meanwhile goes out with its end, in one piece,
#: if that comes as soon.
RELIEF_S = 0.005
_HOLD_BYTES = 4096

#: The header of a rehearsed exec: as long as that of most runs, for Python has pages of their own for each size.
_REHEARSED: Header = {
    "op": "exec", "id": 0, "size": 99, "last": True, "output_bytes": 1 << 20, "kind": "code", "overflow": "truncate",
    "stdin": False, "env_bytes": 0, "more": False,
}  # fmt: skip
_HEAP_BYTES = 32 << 10

#: Blocked in every thread; the one that does not take frames waits for it.
_ALARM = {signal.SIGALRM}

#: A read asks for little until there is much: room for much comes fresh from the kernel each time, page by page.
READ_BYTES_MIN = 8 << 10
READ_BYTES = 256 << 10


_encode = json.JSONEncoder(separators=(",", ":")).encode
_decode = json.JSONDecoder().raw_decode


def frame(header: Header, body: bytes | memoryview) -> bytes:
    """The bytes of a frame."""
    head = _encode(header).encode()
    return b"".join((FRAME.pack(len(head), len(body)), head, body))


class Stream:
    """The frames, over one or two descriptors. One thread receives, any may send."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._read_fd = read_fd
        self._write_fd = write_fd
        self._read_bytes = READ_BYTES_MIN
        self._inbox = bytearray()
        self._lock = threading.Lock()
        self._held: list[tuple[str, int, bytes]] = []  # output to go out before what is sent next: operation, id, data
        self._held_bytes = 0
        self.holding = False  # whether output may be held
        for fd in {read_fd, write_fd}:
            os.set_blocking(fd, True)

    def receive(self) -> tuple[Header, bytes]:
        """The next frame. Raises EOFError, OSError, ValueError."""
        inbox = self._inbox
        middle, end = 0, FRAME.size
        while True:
            if len(inbox) < end:
                data = os.read(self._read_fd, self._read_bytes)
                if not data:
                    raise EOFError
                self._read_bytes = READ_BYTES if len(data) == self._read_bytes else READ_BYTES_MIN
                inbox += data
            elif not middle:
                header_bytes, body_bytes = FRAME.unpack_from(inbox)
                if header_bytes > HEADER_MAX or body_bytes > BODY_MAX:
                    raise ValueError("a frame that is too large")
                middle = FRAME.size + header_bytes
                end = middle + body_bytes
            else:
                break
        header, _ = _decode(inbox[FRAME.size : middle].decode())
        body = bytes(inbox[middle:end])
        del inbox[:end]
        return header, body

    def send(self, header: Header, body: bytes | memoryview = b"") -> None:
        """One frame, waiting until the supervisor takes it."""
        with self._lock:
            self._write(self._frames_held(), header, body)

    def send_done(self, header: Header) -> None:
        """The last frame of an exec: output that is held goes with it, if all of it is of one stream."""
        with self._lock:
            if len(self._held) == 1:
                ((operation, _, data),) = self._held
                self._forget()
                self._write(b"", {**header, "tail": operation}, data)
            else:
                self._write(self._frames_held(), header, b"")

    def send_output(self, operation: str, ident: int, data: bytes | memoryview) -> None:
        """A frame of output, which may be held until something else is sent or :meth:`let_go` is called."""
        with self._lock:
            if not self.holding or self._held_bytes + len(data) > _HOLD_BYTES:
                self._write(self._frames_held(), {"op": operation, "id": ident}, data)
                return
            held = bytes(data)
            if self._held and self._held[-1][0] == operation:
                held = self._held.pop()[2] + held
            self._held.append((operation, ident, held))
            self._held_bytes += len(data)

    def let_go(self) -> None:
        """Send what is held, and hold no more."""
        with self._lock:
            self.holding = False
            self._write_all(self._frames_held())

    def _frames_held(self) -> bytes:
        if not self._held:
            return b""
        frames = b"".join(frame({"op": operation, "id": ident}, data) for operation, ident, data in self._held)
        self._forget()
        return frames

    def _forget(self) -> None:
        self._held.clear()
        self._held_bytes = 0

    def _write(self, before: bytes, header: Header, body: bytes | memoryview) -> None:
        self._write_all(before + frame(header, body))

    def _write_all(self, frames: bytes) -> None:
        data = memoryview(frames)
        while data:
            data = data[os.write(self._write_fd, data) :]

    @contextlib.contextmanager
    def diverted(self, fd: int) -> Iterator[None]:
        """Meanwhile the frames come from ``fd`` and go to it. No other thread uses the stream."""
        kept = self._read_fd, self._write_fd
        self._read_fd = self._write_fd = fd
        try:
            yield
        finally:
            self._read_fd, self._write_fd = kept


class Output:
    """What one program prints: passed on up to its budget, counted beyond it."""

    def __init__(self, guest: WorkerGuest, header: Header) -> None:
        self._guest = guest
        self._ident = header["id"]
        self._budget: int = header["output_bytes"]
        self._stop = header["overflow"] == "stop"
        self.counts = {"stdout": 0, "stderr": 0}
        self.overflowed = False

    def text(self, name: str, text: str) -> None:
        """A piece of output as text, of whatever length."""
        for start in range(0, len(text), _PIECE):
            self.data(name, text[start : start + _PIECE].encode("utf-8", "replace"))

    def data(self, name: str, data: bytes) -> None:
        """A piece of output of stream ``name``, "stdout" or "stderr"."""
        self.counts[name] += len(data)
        passed = memoryview(data)[: self._budget]
        self._budget -= len(passed)
        operation = "out" if name == "stdout" else "err"
        for start in range(0, len(passed), _PIECE):
            self._guest.stream.send_output(operation, self._ident, passed[start : start + _PIECE])
        if len(passed) < len(data) and not self.overflowed:
            self.overflowed = True
            if self._stop:
                self._guest.halt()


class WorkerGuest:
    """The loop. A subclass prepares a runtime, runs programs in it, and stops one from another thread."""

    has_files = False

    #: A program of ours to go through beforehand, if the runtime's state is the same after it.
    rehearsal = b""

    def __init__(self, read_fd: int, write_fd: int, workdir: str) -> None:
        self.stream = Stream(read_fd, write_fd)
        self.workdir = os.open(workdir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.interrupted = False
        self.halted = threading.Event()  # the exec under way is to end
        self._halting = False  # that is set
        self._turn = threading.Lock()  # of what follows, between the two threads
        self._asked = False  # there is an exec, from its first frame to its end
        self._running = False  # the runtime has its program
        self._busy = False  # a thread has an exec, or makes a fresh state after one
        self._relieved = False  # the other one takes frames meanwhile
        self._waiting: Job | None = None  # for the thread that is busy
        self._stdin: queue.Queue[tuple[Header, bytes]] = queue.Queue()
        self._files = {
            "write": self._write, "read": self._read, "list": self._list, "remove": self._remove,
            "stat": self._stat, "mkdir": self._mkdir, "rename": self._rename,
        }  # fmt: skip

    # --- for the subclass

    def prepare(self, configuration: Header) -> None:
        """Start the runtime, so that the first program finds it warm."""
        raise NotImplementedError

    def program(self, source: bytes, header: Header, env: dict[str, str], stdin: bytes, output: Output) -> Header:
        """Run a program to its end: fields of ``done``, ``status`` and ``lost`` at least.

        The runtime may look at :attr:`halted`, which is set when the program is to end.
        """
        raise NotImplementedError

    def stop(self) -> None:
        """From any thread, with :attr:`halted` set: end the running program soon."""

    def restore(self) -> None:
        """After the end of a program whose state was lost has been told: a fresh state for the next one."""
        raise NotImplementedError

    def answer(self, header: Header, body: bytes) -> None:
        """From the reader: the host's answer to a call. Only a runtime that calls gets one."""

    def halt(self) -> None:
        """From any thread: end the program under way soon, or before it begins."""
        with self._turn:
            if self._asked:
                self._halting = True
                self.halted.set()
                if self._running:
                    self.stop()

    # --- the loop

    def run(self) -> NoReturn:
        """Serve until the stream ends, which ends this process."""
        agent.make_undumpable()
        signal.pthread_sigmask(signal.SIG_BLOCK, _ALARM)
        configuration, _ = self.stream.receive()
        self.prepare(configuration)
        gc.freeze()  # what is there by now stays, and is not looked at again
        if self.rehearsal:
            self._rehearse(configuration.get("rehearsals", 1))
        threading.Thread(target=self._work, daemon=True).start()
        self.stream.send({"op": "ready", "version": VERSION, "pid": os.getpid()})
        self._work(takes=True)

    def _rehearse(self, times: int) -> None:
        """Go through execs of ours: the first program shall not pay for the pages that one writes to.

        Once is enough for most of these. From the eighth time on Python's own code is in the form that is touched least
        (PEP 659), and what Monty keeps of one program for the next has found its place.
        """
        ours, theirs = socket.socketpair()
        with ours, theirs, self.stream.diverted(theirs.fileno()):
            host = Stream(ours.fileno(), ours.fileno())
            for _ in range(times):
                host.send(_REHEARSED, self.rehearsal)
                self._exec(*self._take())
                self._next()
                host.receive()
        _touch_heap()

    def _work(self, takes: bool = False) -> NoReturn:
        """One of the two threads. ``takes``: it is the one that takes frames first."""
        try:
            while True:
                if not takes:
                    self._wait_to_relieve()
                job: Job | None = self._take_or_end()
                while job is not None:
                    self._exec(*job)
                    job, takes = self._next()
        except BaseException as error:
            give_up(self.stream, error)

    def _wait_to_relieve(self) -> None:
        """Until the thread that takes frames has been with an exec for a while, or needs a frame for it."""
        while True:
            signal.sigwait(_ALARM)
            with self._turn:
                if self._busy and not self._relieved:  # or else the alarm was for an exec that has ended
                    self._relieved = True
                    break
        self.stream.let_go()

    def need_frames(self) -> None:
        """From a thread with an exec, which waits for a frame: the other one is to take them from now on."""
        signal.setitimer(signal.ITIMER_REAL, 1e-6)

    def _take_or_end(self) -> Job:
        try:
            return self._take()
        except (EOFError, OSError, ValueError):
            leave(0)  # the host is gone, or broke the format

    def _take(self) -> Job:
        """Serve frames until there is an exec for this thread: the other one is not running any."""
        while True:
            header, body = self.stream.receive()
            operation = header.get("op")
            if operation == "exec":
                job = self._begin(header, body)
                if job is not None:
                    return job
            elif operation in self._files:
                self._serve_file(header, body)
            elif operation == "answer":
                self.answer(header, body)
            elif operation == "stdin":
                self._stdin.put((header, body))
            elif operation == "interrupt":
                self.interrupted = self._asked
                self.halt()

    def _begin(self, header: Header, body: bytes) -> Job | None:
        """An exec is there, and what interrupts from now on is meant for it. None if it is not for this thread."""
        with self._turn:
            self.interrupted = False
            if self._halting:
                self._halting = False
                self.halted.clear()
            self._asked = True
        job = header, self._whole(body) if header.get("more") is True else body
        with self._turn:
            if not self._busy:
                self._busy = self.stream.holding = True
                signal.setitimer(signal.ITIMER_REAL, RELIEF_S)
                return job
            self._waiting = job  # the other thread makes a fresh state still, and takes it then
            return None

    def _whole(self, body: bytes) -> bytes:
        pieces = [body]
        more = True
        while more:
            header, body = self.stream.receive()
            pieces.append(body)
            more = header.get("more") is True
        return b"".join(pieces)

    def _next(self) -> tuple[Job | None, bool]:
        """After an exec: the one that has come meanwhile; or whether this thread takes frames again."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        with self._turn:
            job, self._waiting = self._waiting, None
            self._busy = job is not None
            takes = not self._relieved
            if not self._busy:
                self._relieved = False
            return job, takes

    def _exec(self, header: Header, payload: bytes) -> None:
        ident = header["id"]
        env_bytes = header["env_bytes"]
        env, source = (environment(payload[:env_bytes]), payload[env_bytes:]) if env_bytes else ({}, payload)
        try:
            stdin = self._whole_stdin(ident) if header["stdin"] else b""
        except OverflowError as error:
            self.stream.send({"op": "failed", "id": ident, "error": errno.EFBIG, "message": str(error)})
            return
        output = Output(self, header)
        done = self._run(source, header, env, stdin, output)
        counts = {"out_bytes": output.counts["stdout"], "err_bytes": output.counts["stderr"]}
        self.stream.send_done({"op": "done", "id": ident, "overflow": output.overflowed, **counts, **done})
        if done["lost"] and header.get("last") is not True:
            self.restore()

    def _run(self, source: bytes, header: Header, env: dict[str, str], stdin: bytes, output: Output) -> Header:
        with self._turn:
            self._running = not self._halting
        try:
            if not self._running:
                return {"status": EXIT_INTERRUPTED, "lost": False}
            return self.program(source, header, env, stdin, output)
        finally:
            with self._turn:
                self._asked = self._running = False

    def _whole_stdin(self, ident: int) -> bytes:
        data = bytearray()
        self.need_frames()
        while True:
            self.stream.send({"op": "stdin", "id": ident})
            header, body = self._stdin.get()
            data += body
            if len(data) > STDIN_MAX:
                raise OverflowError(f"standard input is longer than the {STDIN_MAX} bytes that this tier takes")
            if header.get("more") is not True:
                return bytes(data)

    # --- files, by the agent's own functions, which follow no link

    def _serve_file(self, header: Header, body: bytes) -> None:
        reply: Header = {"op": "reply", "id": header["id"]}
        try:
            if not self.has_files:
                raise OSError(errno.ENOSYS, "this tier has no files")
            self._files[header["op"]](header, body, reply)
        except OSError as error:
            code = error.errno or errno.EIO
            message = error.strerror or os.strerror(code)
            self.stream.send({"op": "reply", "id": header["id"], "error": code, "message": message})

    def _write(self, header: Header, body: bytes, reply: Header) -> None:
        path, data = agent._split_path(header, body)
        agent.write_file(self.workdir, path, header["offset"], data)
        self.stream.send(reply)

    def _read(self, header: Header, body: bytes, reply: Header) -> None:
        path, _ = agent._split_path(header, body)
        data, size = agent.read_file(self.workdir, path, header["offset"], min(header["length"], BODY_MAX))
        self.stream.send({**reply, "size": size}, data)

    def _list(self, header: Header, body: bytes, reply: Header) -> None:
        path = agent._split_path(header, body)[0] if "path_bytes" in header else []
        listing, truncated = agent.list_files(self.workdir, min(header["count"], agent.LIST_COUNT_MAX), path)
        for start in range(0, max(len(listing), 1), BODY_MAX):
            more = start + BODY_MAX < len(listing)
            self.stream.send({**reply, "more": more, "truncated": truncated}, listing[start : start + BODY_MAX])

    def _remove(self, header: Header, body: bytes, reply: Header) -> None:
        path, _ = agent._split_path(header, body)
        agent.remove(self.workdir, path)
        self.stream.send(reply)

    def _stat(self, header: Header, body: bytes, reply: Header) -> None:
        path, _ = agent._split_path(header, body)
        info = agent.stat_file(self.workdir, path)
        kind = "file" if stat.S_ISREG(info.st_mode) else "folder" if stat.S_ISDIR(info.st_mode) else "other"
        when = max(int(info.st_mtime), 0)
        self.stream.send(
            {**reply, "size": info.st_size, "kind": kind, "mtime": when, "mode": stat.S_IMODE(info.st_mode)}
        )

    def _mkdir(self, header: Header, body: bytes, reply: Header) -> None:
        path, _ = agent._split_path(header, body)
        os.close(agent.open_folder(self.workdir, path, create=True))
        self.stream.send(reply)

    def _rename(self, header: Header, body: bytes, reply: Header) -> None:
        path, rest = agent._split_path(header, body)
        target, _ = agent._split_path({"path_bytes": header["to_bytes"]}, rest)
        agent.rename(self.workdir, path, target)
        self.stream.send(reply)


def _touch_heap() -> None:
    """Have room in the C library's heap for what a run allocates, in pages that are there already."""
    b"\1" * _HEAP_BYTES


def environment(block: bytes) -> dict[str, str]:
    """The environment that the policy gives, from NUL-ended NAME=VALUE items."""
    items = (item.partition(b"=") for item in block.split(b"\0") if item)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in items}


def serve(kind: type[WorkerGuest], read_fd: int, write_fd: int, workdir: str) -> NoReturn:
    """Be a worker of this kind on this stream until it ends, then end the process."""
    try:
        kind(read_fd, write_fd, workdir).run()
    except BaseException as error:
        give_up(Stream(read_fd, write_fd), error)


def give_up(stream: Stream, error: BaseException) -> NoReturn:
    """Tell why, and end the process."""
    try:
        stream.send({"op": "fatal", "message": f"{type(error).__name__}: {error}"[:200]})
    except OSError:
        leave(EXIT_LOST)
    finally:
        os._exit(EXIT_LOST)


def leave(status: int) -> NoReturn:
    """End the process, whose host is gone."""
    try:
        if folder_of_host is not None:
            from fumehood.folders import remove_tree

            remove_tree(folder_of_host)
    finally:
        os._exit(status)
