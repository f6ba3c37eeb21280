"""The interpreter tier's worker: frames from the supervisor, programs to Monty, nothing else.

Runs as the first process of a sandbox, in the jail where there is one, and starts one ``monty`` process, in which
alone programs run. Two threads: this file's loop, which serves one exec after another, and a reader, which takes frames
while an exec runs, because an interrupt, the host function's answer or the end of the stream must not wait.
"""

from __future__ import annotations

import errno
import json
import os
import queue
import select
import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import pydantic_monty
from fumehood.guest.agent import BODY_MAX, EXIT_INTERRUPTED, EXIT_LOST, FRAME, HEADER_MAX, VERSION, make_undumpable
from fumehood.tiers.interpreter.unsupported import unsupported

#: A program's last word on stderr is cut to this; a traceback of a deep recursion is long.
_TRACEBACK_MAX = 64 << 10
_PIECE = 256 << 10
_CRASHED = -signal.SIGKILL

Header = dict[str, Any]


class Stream:
    """The frames. ``receive`` belongs to the reader, ``send`` to the loop."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._read_fd = read_fd
        self._write_fd = write_fd
        self._inbox = bytearray()
        for fd in {read_fd, write_fd}:
            os.set_blocking(fd, True)

    def _take(self, size: int) -> bytes:
        while len(self._inbox) < size:
            data = os.read(self._read_fd, 256 << 10)
            if not data:
                raise EOFError
            self._inbox += data
        taken = bytes(self._inbox[:size])
        del self._inbox[:size]
        return taken

    def receive(self) -> tuple[Header, bytes]:
        """The next frame. Raises EOFError, OSError, ValueError."""
        header_bytes, body_bytes = FRAME.unpack(self._take(FRAME.size))
        if header_bytes > HEADER_MAX or body_bytes > BODY_MAX:
            raise ValueError("a frame that is too large")
        header = json.loads(self._take(header_bytes))
        return header, self._take(body_bytes)

    def send(self, header: Header, body: bytes = b"") -> None:
        """One frame, waiting until the supervisor takes it."""
        head = json.dumps(header, separators=(",", ":")).encode()
        data = memoryview(FRAME.pack(len(head), len(body)) + head + body)
        while data:
            try:
                data = data[os.write(self._write_fd, data) :]
            except BlockingIOError:  # the other end made the shared socket non-blocking
                poll = select.poll()
                poll.register(self._write_fd, select.POLLOUT)
                poll.poll()


class Output:
    """What a program prints: passed on up to the budget, counted beyond it."""

    def __init__(self, stream: Stream, ident: int, budget: int, stop: bool) -> None:
        self._stream = stream
        self._ident = ident
        self._budget = budget
        self._stop = stop
        self.counts = {"stdout": 0, "stderr": 0}
        self.overflowed = False

    def take(self, name: str, text: str) -> None:
        """One piece of output, from Monty's print."""
        for start in range(0, len(text), _PIECE):
            data = text[start : start + _PIECE].encode("utf-8", "replace")
            self.counts[name] += len(data)
            passed = data[: self._budget]
            self._budget -= len(passed)
            if passed:
                self._stream.send({"op": "out" if name == "stdout" else "err", "id": self._ident}, passed)
            if len(passed) < len(data) and not self.overflowed:
                self.overflowed = True
                if self._stop:
                    kill_children()


class Tools:
    """Host functions, called by frames: the program waits for the answer."""

    def __init__(self, stream: Stream, names: list[str]) -> None:
        self._stream = stream
        self._answers: queue.Queue[tuple[Header, bytes]] = queue.Queue()
        self._calls = 0
        self.ident = 0  # of the exec under way
        self.lookup: dict[str, Callable[..., Any]] = {name: self._caller(name) for name in names}

    def answer(self, header: Header, body: bytes) -> None:
        """From the reader: the host's answer to the call under way."""
        self._answers.put((header, body))

    def _caller(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._calls += 1
            body = json.dumps({"name": name, "args": args, "kwargs": kwargs}, allow_nan=False).encode()
            if len(body) > BODY_MAX:
                raise ValueError(f"the arguments of {name}() are longer than {BODY_MAX} bytes")
            self._stream.send({"op": "call", "id": self.ident, "call": self._calls}, body)
            while True:
                header, answer = self._answers.get()
                if header.get("call") == self._calls:
                    break
            value = json.loads(answer)
            if header.get("ok") is not True:
                raise RuntimeError(f"{name}() failed: {value}")
            return value

        return call


class Worker:
    """The loop."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self.stream = Stream(read_fd, write_fd)
        self.inbox: queue.Queue[tuple[Header, bytes]] = queue.Queue()
        self.running = False
        self.interrupted = False

    def run(self) -> NoReturn:
        """Serve until the stream ends, which ends this process."""
        make_undumpable()
        configuration, _ = self.stream.receive()
        self.tools = Tools(self.stream, configuration["tools"])
        self.limits = pydantic_monty.ResourceLimits(
            max_memory=configuration["memory_bytes"], max_suspensions=configuration["suspensions"]
        )
        self.pool = pydantic_monty.Monty(binary_path=configuration["files"]["monty"], max_processes=1)
        self.pool.__enter__()
        self.open_session()
        threading.Thread(target=self.read, daemon=True).start()
        self.stream.send({"op": "ready", "version": VERSION, "pid": os.getpid()})
        while True:
            header, body = self.inbox.get()
            if header.get("op") == "exec":
                self.exec(header, body)
            else:
                self.refuse(header)

    def open_session(self) -> None:
        """A fresh Monty session, touched so that the first program does not pay for page faults."""
        self.session = self.pool.checkout(script_name="agent.py", limits=self.limits, assert_message_annotations=False)
        self.session.__enter__()
        self.session.feed_run("sum([i * i for i in range(10)])")

    def read(self) -> None:
        """The reader thread."""
        try:
            while True:
                header, body = self.stream.receive()
                operation = header.get("op")
                if operation == "answer":
                    self.tools.answer(header, body)
                elif operation == "interrupt":
                    if self.running:
                        self.interrupted = True
                        kill_children()
                else:
                    self.inbox.put((header, body))
        finally:
            os._exit(0)  # the host is gone, or broke the format

    def refuse(self, header: Header) -> None:
        """There are no files here."""
        message = "this tier has no files"
        self.stream.send({"op": "reply", "id": header.get("id"), "error": errno.ENOSYS, "message": message})

    def payload(self, header: Header, body: bytes) -> bytes:
        """All of an exec's payload, from its continuations as well."""
        pieces = [body]
        while header.get("more") is True:
            header, body = self.inbox.get()
            pieces.append(body)
        return b"".join(pieces)

    def exec(self, header: Header, body: bytes) -> None:
        """Run one program to its end and report it."""
        ident = header["id"]
        payload = self.payload(header, body)
        env = environment(payload[: header["env_bytes"]])
        code = payload[header["env_bytes"] :]
        output = Output(self.stream, ident, header["output_bytes"], header["overflow"] == "stop")
        self.tools.ident = ident
        self.interrupted = False
        done: Header = {"op": "done", "id": ident, "status": 0, "overflow": False, "lost": False}
        self.running = True
        try:
            source = code.decode("utf-8")
            self.session.feed_run(
                source,
                print_callback=output.take,
                external_lookup=self.tools.lookup or None,
                os=lambda name, args, kwargs, **_: answer_os(env, name, args),
            )
        except UnicodeDecodeError as error:
            done["status"] = 1
            output.take("stderr", f"SyntaxError: {error}\n")
        except pydantic_monty.MontyCrashedError as error:
            self.crashed(done, output, error)
        except pydantic_monty.MontyError as error:
            self.failed(done, output, error)
        finally:
            self.running = False
        done["overflow"] = output.overflowed
        done["out_bytes"], done["err_bytes"] = output.counts["stdout"], output.counts["stderr"]
        if done["lost"]:
            self.session.__exit__(None, None, None)
            if header.get("last") is not True:
                self.open_session()
        self.stream.send(done)

    def failed(self, done: Header, output: Output, error: pydantic_monty.MontyError) -> None:
        """The program raised, or Monty cannot run it."""
        message = describe(error, "type-msg")
        done["status"] = 1
        lacking = unsupported(message)
        if lacking is not None:
            done["unsupported"] = lacking[:200]
            output.take("stderr", f"unsupported: {lacking[:200]}\n")
        if message.startswith("MemoryError: memory limit exceeded"):
            done["limit"] = "memory"
        output.take("stderr", describe(error, "traceback")[-_TRACEBACK_MAX:].rstrip("\n") + "\n")

    def crashed(self, done: Header, output: Output, error: pydantic_monty.MontyCrashedError) -> None:
        """The monty process is gone: we killed it, a limit of the jail did, or it broke."""
        done["lost"] = True
        if self.interrupted:
            done["status"] = EXIT_INTERRUPTED
            output.take("stderr", "KeyboardInterrupt\n")
            return
        code = error.exit_status
        done["status"] = code & 0xFF if code else _CRASHED
        if not output.overflowed:
            output.take("stderr", f"the interpreter process ended: {error}"[:1000] + "\n")


def describe(error: pydantic_monty.MontyError, form: str) -> str:
    """The error's text, in Monty's words. A typing or conversion error knows no form."""
    display = getattr(error, "display", None)
    try:
        return str(display(format=form)) if display is not None else f"{type(error).__name__}: {error}"
    except TypeError:
        return f"{type(error).__name__}: {error}"


def environment(block: bytes) -> dict[str, str]:
    """The environment that the policy gives."""
    items = (item.partition(b"=") for item in block.split(b"\0") if item)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in items}


def answer_os(env: Mapping[str, str], name: str, args: tuple[Any, ...]) -> Any:
    """What a program asks of the operating system: its environment, and nothing else."""
    if name == "os.getenv":
        return env.get(args[0], args[1] if len(args) > 1 else None)
    if name == "os.environ":
        return dict(env)
    return pydantic_monty.NOT_HANDLED


def kill_children() -> None:
    """Kill the monty process: nothing else stops it in the middle of one long operation."""
    ours = os.getpid()
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    parent = int(file.read().rpartition(b")")[2].split()[1])
                if parent == ours:
                    os.kill(int(name), signal.SIGKILL)
            except (OSError, ValueError, IndexError):
                pass  # it ended meanwhile


def serve(read_fd: int, write_fd: int, workdir: str) -> NoReturn:
    """Be the worker on this stream until it ends. ``workdir`` is not used: there are no files."""
    try:
        Worker(read_fd, write_fd).run()
    except BaseException as error:
        try:
            message = f"{type(error).__name__}: {error}"[:200]
            Stream(read_fd, write_fd).send({"op": "fatal", "message": message})
        finally:
            os._exit(EXIT_LOST)
