"""One exec as the host sees it: what it printed, its standard input, its end, and the handle on it while it runs.

The records are :class:`fumehood.session.GuestSandbox`'s; what ended an exec is decided here in one pure function.
"""

from __future__ import annotations

import asyncio
import contextvars
import importlib.util
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, Self

from fumehood.displays import Displays
from fumehood.errors import ClosedError, PolicyError
from fumehood.model import Code, Outcome, Policy, Program, Receipt, Result, check_terminal_size
from fumehood.tier import Sink, Stream
from fumehood.wire import Header

STDIN_PIECE = 256 << 10

#: What the agent takes for one exec: 16 MiB of code and what execve(2) could take of arguments and environment.
PAYLOAD_MAX = 24 << 20


class Host(Protocol):
    """What a handle needs of the sandbox that its program runs in."""

    @property
    def receipt(self) -> Receipt: ...

    def give_stdin(self, run: Run) -> None:
        """Answer the guest's question for standard input, if it has asked and there is an answer."""
        ...

    def post(self, header: Header) -> None:
        """Send a frame to a guest that may be gone."""
        ...


@dataclass(frozen=True, slots=True)
class Ending:
    """All that is known when an exec is over."""

    status: int | None  # exit code, or -N for signal N, as the agent waited for it; None: the channel was lost
    imposed: Outcome | None = None  # what we killed it for
    overflow: bool = False  # the agent killed it for output, because the policy said "stop"
    memory_killed: bool = False
    cpu_spent: bool = False  # CPU time is at its limit
    interrupted: bool = False  # interrupt() was called


def decide(ending: Ending) -> tuple[Outcome, int | None] | None:
    """The outcome and exit code of an exec; None if it cannot be known, because the guest was lost for no known cause.

    What we imposed comes first, then what the kernel imposed, then the program's own end. A memory or CPU limit
    counts only when the main process died of a signal that this limit sends: a program that survives the death of a
    child, or exits by itself, has exited.
    """
    if ending.imposed is not None:
        return ending.imposed, None
    status = ending.status
    if status is None:
        if ending.memory_killed:
            return Outcome.MEMORY, None
        return (Outcome.CPU, None) if ending.cpu_spent else None
    if ending.overflow:
        return Outcome.OUTPUT, None
    if status == -signal.SIGKILL and ending.memory_killed:
        return Outcome.MEMORY, None
    if status in (-signal.SIGKILL, -signal.SIGXCPU) and ending.cpu_spent:
        return Outcome.CPU, None
    if ending.interrupted and status in (-signal.SIGINT, 128 + signal.SIGINT):
        return Outcome.CANCELLED, None
    return (Outcome.SIGNALED if status < 0 else Outcome.EXITED), status


class Output:
    """The output of one exec: at most ``budget`` bytes of both streams kept, the rest counted."""

    __slots__ = ("budget", "counts", "kept", "sink")

    def __init__(self, budget: int, sink: Sink | None) -> None:
        self.budget = budget
        self.sink = sink
        self.kept: dict[Stream, list[bytes]] = {"stdout": [], "stderr": []}
        self.counts: dict[Stream, int] = {"stdout": 0, "stderr": 0}

    def take(self, stream: Stream, data: bytes) -> bool:
        """Keep and pass on what fits; whether all of it did. Raises what the sink raises."""
        self.counts[stream] += len(data)
        passed = data[: self.budget]
        self.budget -= len(passed)
        if passed:
            self.kept[stream].append(passed)
            if self.sink is not None:
                self.sink(stream, passed)
        return len(passed) == len(data)


class Stdin:
    """Standard input of a program: what waits until the guest asks for it."""

    __slots__ = ("asked", "open", "room", "waiting")

    def __init__(self, data: bytes, *, stays_open: bool = False) -> None:
        self.waiting = memoryview(data)
        self.open = stays_open  # more may be written
        self.asked = False
        self.room: asyncio.Future[None] | None = None  # set when the writer may go on

    @property
    def wanted(self) -> bool:
        """Whether the program has any."""
        return self.open or bool(self.waiting)

    def take(self) -> tuple[memoryview, bool] | None:
        """The next piece and whether more may follow, if the guest has asked and there is an answer."""
        if not self.asked or (self.open and not self.waiting):
            return None
        self.asked = False
        piece, self.waiting = self.waiting[:STDIN_PIECE], self.waiting[STDIN_PIECE:]
        if self.room is not None and not self.waiting:
            self.room.set_result(None)
            self.room = None
        return piece, self.open or bool(self.waiting)


class Ended(asyncio.Future[None]):
    """The end of an exec. A task that waits for it can go on in the same turn of the event loop, see :meth:`tell`."""

    _waiter: tuple[Callable[[Any], object], contextvars.Context] | None = None

    def add_done_callback(self, fn: Callable[[Self], object], /, *, context: contextvars.Context | None = None) -> None:
        """See :class:`asyncio.Future`. A task that waits gives its own context, and is called first."""
        if context is not None and self._waiter is None and not self.done():
            self._waiter = fn, context
        else:
            super().add_done_callback(fn, context=context)

    def tell(self) -> None:
        """Set it, and let the task that waits go on before this returns. Not from within a task, where it waits."""
        waiter = self._waiter
        if waiter is None or asyncio.current_task(self.get_loop()) is not None:
            self.set_result(None)
            return
        self._waiter = None
        self.set_result(None)
        waiter[1].run(waiter[0], self)

    def set_result(self, result: None, /) -> None:
        """See :class:`asyncio.Future`."""
        self._queue_waiter()
        super().set_result(result)

    def set_exception(self, exception: BaseException | type, /) -> None:
        """See :class:`asyncio.Future`."""
        self._queue_waiter()
        super().set_exception(exception)

    def cancel(self, msg: Any = None) -> bool:
        """See :class:`asyncio.Future`."""
        self._queue_waiter()
        return super().cancel(msg)

    def _queue_waiter(self) -> None:
        """The task goes on in the next turn, as with any future."""
        if self._waiter is not None:
            (fn, context), self._waiter = self._waiter, None
            super().add_done_callback(fn, context=context)


class Run:
    """An exec that is under way."""

    __slots__ = (
        "displays", "done", "failed", "ident", "imposed", "interrupted", "last", "lost", "output", "overflow",
        "program", "sent", "status", "stdin", "timers", "used",
    )  # fmt: skip

    def __init__(self, ident: int, program: Program, output: Output, stdin: Stdin, last: bool, done: Ended) -> None:
        self.ident = ident
        self.program = program
        self.output = output
        self.stdin = stdin
        self.last = last
        self.done = done  # set once the outcome can be decided, or to the sink's exception
        self.displays: Displays | None = None
        self.status: int | None = None
        self.imposed: Outcome | None = None
        self.failed: str | None = None  # the agent could not start it
        self.lost = False  # the interpreter with its variables
        self.overflow = False
        self.interrupted = False
        self.used: tuple[float | None, int | None] | None = None  # CPU seconds and peak, if read before the end of all
        self.sent: asyncio.Event | None = None  # the guest has been told to run it, so that what follows reaches it
        self.timers: list[asyncio.TimerHandle] = []


class Running:
    """A program under way: what it has printed so far, its standard input, its signals and its end.

    Its program is an exec of the sandbox like any other (then the sandbox has no room for a second one), or a command
    in the background. Also after the program's end its methods do no harm.
    """

    def __init__(self, sandbox: Host, run: Run, task: asyncio.Task[Result]) -> None:
        self._sandbox = sandbox
        self._run = run
        self._task = task

    @property
    def done(self) -> bool:
        """Whether it is over."""
        return self._task.done()

    @property
    def stdout_data(self) -> bytes:
        """What it has printed so far, within Limits.output_bytes."""
        return b"".join(self._run.output.kept["stdout"])

    @property
    def stderr_data(self) -> bytes:
        """The same of stderr."""
        return b"".join(self._run.output.kept["stderr"])

    async def wait(self) -> Result:
        """Its end, as :meth:`fumehood.tier.Sandbox.exec` has it. Cancelling this does not end the program."""
        return await asyncio.shield(self._task)

    async def write(self, data: bytes) -> None:
        """Give it ``data`` to read; waits while more than 256 KiB are unread. Raises ClosedError if it is over."""
        stdin = self._run.stdin
        if not stdin.open or self.done:
            raise ClosedError("the program's standard input is closed", tier=self._sandbox.receipt.tier)
        stdin.waiting = memoryview(bytes(stdin.waiting) + data)
        self._sandbox.give_stdin(self._run)
        while len(stdin.waiting) > STDIN_PIECE and not self.done:
            if stdin.room is None:
                stdin.room = asyncio.get_running_loop().create_future()
            either: set[asyncio.Future[Any]] = {stdin.room, self._task}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)

    async def close_stdin(self) -> None:
        """The end of file, once all that was written is read."""
        self._run.stdin.open = False
        self._sandbox.give_stdin(self._run)

    async def signal(self, number: int) -> None:
        """Send a signal to its process group."""
        if not self.done:
            self._sandbox.post({"op": "signal", "id": self._run.ident, "number": int(number)})

    async def kill(self) -> None:
        """SIGKILL to its process group; if it is code, the interpreter's variables are lost."""
        await self.signal(signal.SIGKILL)

    async def resize(self, rows: int, columns: int) -> None:
        """Give its pseudo-terminal another size. Raises PolicyError."""
        rows, columns = check_terminal_size((rows, columns))
        if not self.done:
            self._sandbox.post({"op": "resize", "id": self._run.ident, "rows": rows, "columns": columns})


def request(run: Run, env: bytes, policy: Policy, *, name: str, background: bool = False) -> tuple[Header, memoryview]:
    """The first header of an exec and all that follows it: environment, helper or folder, code or arguments.

    ``env`` is what every program of the sandbox has. Raises PolicyError.
    """
    program = run.program
    header: Header = {"op": "exec", "id": run.ident, "last": False, "output_bytes": run.output.budget}
    if isinstance(program, Code):
        middle, body = _helper() if run.displays is not None else b"", program.data
        header |= {"kind": "code", "name": name, "last": run.last}
        if program.context:
            header["context"] = program.context
        if run.displays is not None:
            header |= {"helper_bytes": len(middle), "display_bytes": policy.limits.display_bytes}
    else:
        env += b"".join(raw(f"{k}={v}") + b"\0" for k, v in program.env.items())
        middle, body = program.cwd.encode(), b"".join(raw(a) + b"\0" for a in program.argv)
        header["kind"] = "command"
        if middle:
            header["cwd_bytes"] = len(middle)
        if background:
            header["background"] = True
        if program.pty is not None:
            header["rows"], header["columns"] = program.pty
    payload = memoryview(b"".join((env, middle, body)))
    if len(payload) > PAYLOAD_MAX:
        raise PolicyError(f"environment and program are longer than {PAYLOAD_MAX} bytes together")
    header |= {"overflow": policy.overflow, "stdin": run.stdin.wanted, "env_bytes": len(env), "size": len(payload)}
    return header, payload


@lru_cache(maxsize=1)
def _helper() -> bytes:
    """The text of :mod:`fumehood.guest.displays`, which runs in the interpreter of a program that may display."""
    spec = importlib.util.find_spec("fumehood.guest.displays")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).read_bytes()


def raw(text: str) -> bytes:
    """A word of a command line or an environment as bytes. Raises PolicyError."""
    try:
        return os.fsencode(text)
    except UnicodeEncodeError:
        raise PolicyError(f"{text!r:.200} cannot be given to a program: it holds a lone surrogate") from None
