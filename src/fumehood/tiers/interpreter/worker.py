"""The interpreter tier's worker: programs to Monty, nothing else.

It starts one ``monty`` process, in which alone programs run.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import string
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import pydantic_monty

from fumehood.guest.agent import BODY_MAX, EXIT_INTERRUPTED
from fumehood.tiers import worker_guest
from fumehood.tiers.interpreter.unsupported import unsupported
from fumehood.tiers.worker_guest import Header, Output, Stream, WorkerGuest

#: A program's last word on stderr is cut to this; a traceback of a deep recursion is long.
_TRACEBACK_MAX = 64 << 10
_CRASHED = -signal.SIGKILL

#: Monty's client imports it three times in every run: here it is known to be absent, without a search for it.
sys.modules["opentelemetry"] = sys.modules["opentelemetry.context"] = None  # type: ignore[assignment]

#: Modules that Monty lacks and that are nothing but constants, so that no code runs outside of it for them.
MODULES = {
    "string": pydantic_monty.ExternalModule(
        {name: value for name, value in vars(string).items() if isinstance(value, str) and not name.startswith("_")}
    )
}


class Tools:
    """Host functions, called by frames: the program waits for the answer."""

    def __init__(self, stream: Stream, names: list[str], need_frames: Callable[[], None]) -> None:
        self._stream = stream
        self._need_frames = need_frames
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
            self._need_frames()
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


class InterpreterGuest(WorkerGuest):
    """Programs in a Monty session."""

    rehearsal = b"print(sum([i * i for i in range(10)]))"

    def prepare(self, configuration: Header) -> None:
        """See :class:`WorkerGuest`."""
        self.tools = Tools(self.stream, configuration["tools"], self.need_frames)
        self.answer = self.tools.answer  # type: ignore[method-assign]
        self.limits = pydantic_monty.ResourceLimits(
            max_memory=configuration["memory_bytes"], max_suspensions=configuration["suspensions"]
        )
        self.pool = pydantic_monty.Monty(binary_path=configuration["files"]["monty"], max_processes=1)
        self.pool.__enter__()
        self.open_session()

    def open_session(self) -> None:
        """A fresh Monty session, touched so that the first program does not pay for page faults."""
        self.session = self.pool.checkout(
            script_name="agent.py", limits=self.limits, assert_message_annotations=False, external_modules=MODULES
        )
        self.session.__enter__()
        self.session.feed_run("sum([i * i for i in range(10)])")
        self.monty = children()

    def program(self, source: bytes, header: Header, env: dict[str, str], stdin: bytes, output: Output) -> Header:
        """See :class:`WorkerGuest`."""
        self.tools.ident = header["id"]
        done: Header = {"status": 0, "lost": False}
        try:
            self.session.feed_run(
                source.decode(),
                print_callback=output.text,
                external_lookup=self.tools.lookup or None,
                os=lambda name, args, kwargs, **_: answer_os(env, name, args),
            )
        except UnicodeDecodeError as error:
            output.text("stderr", f"SyntaxError: {error}\n")
            return {"status": 1, "lost": False}
        except pydantic_monty.MontyCrashedError as error:
            done = self.crashed(output, error)
        except pydantic_monty.MontyError as error:
            done = failed(output, error)
        return done

    def restore(self) -> None:
        """See :class:`WorkerGuest`."""
        self.session.__exit__(None, None, None)
        self.open_session()

    def crashed(self, output: Output, error: pydantic_monty.MontyCrashedError) -> Header:
        """The monty process is gone: we killed it, a limit of the jail did, or it broke."""
        if self.interrupted:
            output.text("stderr", "KeyboardInterrupt\n")
            return {"status": EXIT_INTERRUPTED, "lost": True}
        if not output.overflowed:
            output.text("stderr", f"the interpreter process ended: {error}"[:1000] + "\n")
        code = error.exit_status
        return {"status": code & 0xFF if code else _CRASHED, "lost": True}

    def stop(self) -> None:
        """Kill the monty process: nothing else stops it in the middle of one long operation."""
        for pid in self.monty:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def children() -> list[int]:
    """The processes that this one has started."""
    ours, found = os.getpid(), []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat", "rb") as file:
            if int(file.read().rpartition(b")")[2].split()[1]) == ours:
                found.append(int(name))
    return found


def failed(output: Output, error: pydantic_monty.MontyError) -> Header:
    """The program raised, or Monty cannot run it."""
    message = describe(error, "type-msg")
    done: Header = {"status": 1, "lost": False}
    lacking = unsupported(message)
    if lacking is not None:
        done["unsupported"] = lacking[:200]
        output.text("stderr", f"unsupported: {lacking[:200]}\n")
    if message.startswith("MemoryError: memory limit exceeded"):
        done["limit"] = "memory"
    output.text("stderr", describe(error, "traceback")[-_TRACEBACK_MAX:].rstrip("\n") + "\n")
    return done


def describe(error: pydantic_monty.MontyError, form: str) -> str:
    """The error's text, in Monty's words. A typing or conversion error knows no form."""
    display = getattr(error, "display", None)
    try:
        return str(display(format=form)) if display is not None else f"{type(error).__name__}: {error}"
    except TypeError:
        return f"{type(error).__name__}: {error}"


def answer_os(env: Mapping[str, str], name: str, args: tuple[Any, ...]) -> Any:
    """What a program asks of the operating system: its environment, and nothing else."""
    if name == "os.getenv":
        return env.get(args[0], args[1] if len(args) > 1 else None)
    if name == "os.environ":
        return dict(env)
    return pydantic_monty.NOT_HANDLED


def serve(read_fd: int, write_fd: int, workdir: str) -> NoReturn:
    """Be the worker on this stream until it ends."""
    worker_guest.serve(InterpreterGuest, read_fd, write_fd, workdir)
