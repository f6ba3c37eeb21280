"""One sandbox with a guest agent inside: the host's side of execs, files and the end.

Theory of operation. A tier builds a boundary, starts the agent in it, and hands over two things: a
:class:`~fumehood.wire.Channel` to the agent, and an :class:`Enclosure`, which is what the tier holds from outside
(the cgroup, the PID namespace, the container). Here they become a :class:`~fumehood.tier.Sandbox`.

The agent is believed in one thing, the exit status of a program that it waited for, and only while nothing known
outside contradicts it. The wall clock, CPU time, memory and the amount of output are judged from outside, and every
way to end a program that does not end itself is the same: kill the enclosure, wait until its last process is gone,
read what it used. So an exec takes at most its deadline, the kill and the wait; no pipe is waited for. What ended it
is decided in one pure function, :func:`decide`.

Frames arrive in callbacks of the event loop and wake a waiting call once, when its exec or file operation is over.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from fumehood.artifacts import collect
from fumehood.errors import ClosedError, FileError, FumehoodError, OutcomeUnknownError, PolicyError, StartError
from fumehood.model import Artifact, Code, Held, Outcome, Policy, Program, Receipt, Result, Usage, check_path
from fumehood.tier import FileInfo, Sink, Stream
from fumehood.wire import BODY_MAX, Channel, ChannelClosed, Header

#: What a program's environment holds where the tier does not say otherwise; the policy's ``env`` comes on top.
DEFAULT_ENV: Mapping[str, str] = MappingProxyType({"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"})

#: What the agent takes for one exec: 16 MiB of code and what execve(2) could take of arguments and environment.
PAYLOAD_MAX = 24 << 20

STDIN_PIECE = 256 << 10
READ_FILE_MAX = 64 << 20

#: The CPU watcher looks no more often than this: one look costs a read of a cgroup file, some 10 µs.
CPU_LOOK_MIN_S = 0.005

#: RLIMIT_CPU and a cgroup's counter tick differently: a process killed by the one is near the limit by the other.
CPU_SPENT_SHARE = 0.95

#: Frames that a guest may make us queue for it before it counts as hostile. An honest one asks for one piece of
#: standard input at a time.
PENDING_MAX = 4 << 20

LISTING_MAX = 64 << 20
_COUNT_MAX = 1 << 62


class Enclosure(Protocol):
    """What a tier holds of a sandbox from outside, around the guest."""

    def kill(self) -> None:
        """Kill every process inside, at once, whatever they do. Idempotent; does not wait, does not raise."""
        ...

    async def wait_dead(self) -> None:
        """Return when the last process inside is gone, and at once if it is gone already. After :meth:`kill`."""
        ...

    def usage(self) -> tuple[float | None, int | None]:
        """CPU seconds used so far and peak memory in bytes, all processes together; None for what nobody counts.

        Works from creation to release, also when every process is dead. Must not block.
        """
        ...

    def memory_killed(self) -> bool:
        """Whether the memory limit has killed a process inside."""
        ...

    def lost_reason(self) -> str:
        """Why the guest is gone, as far as the tier can tell, for an error message; "" if it cannot."""
        ...

    def workdir_fd(self) -> int | None:
        """A descriptor of the work folder, owned by the enclosure, good after death; None if it has none."""
        ...

    async def release(self) -> None:
        """Remove cgroups, folders and descriptors. Called when all are dead. Idempotent."""
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


class _Output:
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


class _Run:
    """The exec that is under way."""

    __slots__ = ("done", "failed", "ident", "imposed", "interrupted", "output", "overflow", "status", "stdin")

    def __init__(self, ident: int, output: _Output, stdin: bytes, done: asyncio.Future[None]) -> None:
        self.ident = ident
        self.output = output
        self.stdin = memoryview(stdin)
        self.done = done  # set once the outcome can be decided, or to the sink's exception
        self.status: int | None = None
        self.imposed: Outcome | None = None
        self.failed: str | None = None  # the agent could not start it
        self.overflow = False
        self.interrupted = False


class GuestSandbox:
    """A :class:`~fumehood.tier.Sandbox` over a channel to the guest agent and an enclosure. See the module.

    Made inside a running event loop, and owns both from then on: :meth:`close` must be called, whatever happens.
    ``env`` is what the tier gives every program (:data:`DEFAULT_ENV` if None), below the policy's own.
    """

    def __init__(
        self,
        channel: Channel,
        enclosure: Enclosure,
        policy: Policy,
        receipt: Receipt,
        *,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._channel = channel
        self._enclosure = enclosure
        self._policy = policy
        self._receipt = receipt
        environment = {**(DEFAULT_ENV if env is None else env), **policy.env}
        self._env = b"".join(_raw(f"{k}={v}") + b"\0" for k, v in environment.items())
        # Without a hard cap on CPUs, a program may use as many as there are.
        cpus = receipt.control("cpu")
        hard = cpus is not None and cpus.held is Held.HARD
        self._cpu_rate = policy.limits.cpus if hard else max(policy.limits.cpus, float(os.cpu_count() or 1))
        self._cpu_used = 0.0
        self._run: _Run | None = None
        self._replies: dict[int, tuple[asyncio.Future[Header], bytearray]] = {}
        self._next_id = 0
        self._ready = self._loop.create_future()
        self._ready.add_done_callback(lambda f: f.cancelled() or f.exception())  # not awaited by everybody
        self._killed: str | None = None  # why nothing can run here any more
        self._fatal = ""
        self._written: dict[str, tuple[int, str]] = {}
        self._closing: asyncio.Task[tuple[Artifact, ...]] | None = None
        #: Whether the last exec cost the interpreter, and with it the state of earlier execs.
        self.interpreter_lost = False
        channel.subscribe(self._on_frame, self._on_lost)

    @property
    def receipt(self) -> Receipt:
        """What was enforced."""
        return self._receipt

    async def ready(self, timeout_s: float) -> None:
        """Wait until the agent serves. Raises StartError; the caller closes the sandbox then."""
        try:
            await asyncio.wait_for(asyncio.shield(self._ready), timeout_s)
        except TimeoutError:
            raise StartError(f"the guest was not ready within {timeout_s:g} s", tier=self._receipt.tier) from None

    # --- exec

    async def exec(
        self, program: Program, *, stdin: bytes = b"", sink: Sink | None = None, last: bool = False
    ) -> Result:
        """See :class:`fumehood.tier.Sandbox`. A sink's exception kills the sandbox and is passed on."""
        self._check_usable()
        if self._run is not None:
            raise RuntimeError("an exec is running in this sandbox")
        limits = self._policy.limits
        started = self._loop.time()
        self._next_id += 1
        run = _Run(self._next_id, _Output(limits.output_bytes, sink), stdin, self._loop.create_future())
        payload = self._payload(program)
        self._run = run
        timers = [self._loop.call_later(limits.wall_s, self._impose, run, Outcome.WALL)]
        self._watch_cpu(run, timers, limits.wall_s)
        handed_over = False
        try:
            try:
                await self._hand_over(run, program, payload, last)
                handed_over = True
            except ChannelClosed:
                pass  # run.done is set by now, with what is known
            await run.done
            finished = self._loop.time()
            if last or self._killed is not None:
                self._kill("it was for one program only" if last else None)
                await self._enclosure.wait_dead()
        except BaseException:
            self._kill("an exec was cancelled or its sink failed")
            raise
        finally:
            for timer in timers:
                timer.cancel()
            self._run = None
        return self._result(run, handed_over, (finished if run.status is not None else self._loop.time()) - started)

    def _payload(self, program: Program) -> memoryview:
        """Environment and code or arguments. Raises PolicyError."""
        body = program.data if isinstance(program, Code) else b"".join(_raw(a) + b"\0" for a in program.argv)
        payload = memoryview(self._env + body)
        if len(payload) > PAYLOAD_MAX:
            raise PolicyError(f"environment and program are longer than {PAYLOAD_MAX} bytes together")
        return payload

    async def _hand_over(self, run: _Run, program: Program, payload: memoryview, last: bool) -> None:
        """Send the program. Raises ChannelClosed if the agent cannot have all of it."""
        code = isinstance(program, Code)
        header: Header = {
            "op": "exec",
            "id": run.ident,
            "kind": "code" if code else "command",
            "last": last and code,
            "output_bytes": run.output.budget,
            "overflow": self._policy.overflow,
            "stdin": bool(run.stdin),
            "env_bytes": len(self._env),
            "size": len(payload),
        }
        if isinstance(program, Code):
            header["name"] = program.name[:255]
        while True:
            piece, payload = payload[:BODY_MAX], payload[BODY_MAX:]
            header["more"] = bool(payload)
            if not payload:
                self._channel.post(header, piece)
                return
            await self._channel.send(header, piece)
            header = {"op": "more", "id": run.ident}

    def _result(self, run: _Run, handed_over: bool, seconds: float) -> Result:
        """What became of the exec. Raises StartError, OutcomeUnknownError."""
        if run.failed is not None:
            raise StartError(run.failed, tier=self._receipt.tier)
        if self._closing is not None:  # the enclosure may be released already
            raise OutcomeUnknownError("close() was called during an exec", tier=self._receipt.tier)
        cpu_s, peak = self._enclosure.usage()
        enough = CPU_SPENT_SHARE * self._policy.limits.cpu_s
        spent = run.status == -signal.SIGXCPU if cpu_s is None else cpu_s >= enough
        ended = Ending(
            status=run.status,
            imposed=run.imposed,
            overflow=run.overflow,
            memory_killed=self._enclosure.memory_killed(),
            cpu_spent=spent,
            interrupted=run.interrupted,
        )
        verdict = decide(ended)
        was_ready = self._ready.done() and self._ready.exception() is None
        if not was_ready or (verdict is None and not handed_over):
            raise StartError(self._lost_message("before the program started"), tier=self._receipt.tier)
        if verdict is None:
            message = self._lost_message("while the program may have been running")
            raise OutcomeUnknownError(message, tier=self._receipt.tier)
        outcome, exit_code = verdict
        used = None if cpu_s is None else max(cpu_s - self._cpu_used, 0.0)
        self._cpu_used = cpu_s if cpu_s is not None else 0.0
        output = run.output
        return Result(
            outcome=outcome,
            exit_code=exit_code,
            stdout_data=b"".join(output.kept["stdout"]),
            stderr_data=b"".join(output.kept["stderr"]),
            seconds=seconds,
            usage=Usage(used, peak, output.counts["stdout"], output.counts["stderr"]),
            receipt=self._receipt,
        )

    def _lost_message(self, when: str) -> str:
        reason = self._enclosure.lost_reason() or self._fatal or self._killed or "no reason known"
        return f"the guest was lost {when}: {reason}"

    def _impose(self, run: _Run, outcome: Outcome) -> None:
        """End the exec from outside: nothing that the guest still says counts."""
        if run is self._run and not run.done.done():
            run.imposed = outcome
            self._kill(f"the limit was reached: {outcome.value}")

    def _watch_cpu(self, run: _Run, timers: list[asyncio.TimerHandle], wall_s: float) -> None:
        """Look at the CPU time when it can have reached the limit at the earliest, if that is before the deadline."""
        left = self._policy.limits.cpu_s - self._cpu_used
        if left < wall_s * self._cpu_rate:
            timers.append(self._loop.call_later(max(left / self._cpu_rate, CPU_LOOK_MIN_S), self._look, run, timers))

    def _look(self, run: _Run, timers: list[asyncio.TimerHandle]) -> None:
        used, _ = self._enclosure.usage()
        if used is None or run is not self._run or run.done.done():
            return
        left = self._policy.limits.cpu_s - used
        if left <= 0:
            self._impose(run, Outcome.CPU)
        else:
            wait = max(left / self._cpu_rate, CPU_LOOK_MIN_S)
            timers[1:] = [self._loop.call_later(wait, self._look, run, timers)]

    # --- what the guest says

    def _on_frame(self, header: Header, body: bytes) -> None:
        operation = header["op"]
        run = self._run
        if operation in ("out", "err"):
            if run is not None and header.get("id") == run.ident:
                self._take_output(run, "stdout" if operation == "out" else "stderr", body)
        elif operation == "done":
            if run is not None and header.get("id") == run.ident:
                self._take_done(run, header)
        elif operation == "reply":
            self._take_reply(header, body)
        elif operation == "stdin":
            if run is not None and header.get("id") == run.ident:
                self._give_stdin(run)
        elif operation == "ready":
            if not self._ready.done():
                self._ready.set_result(None)
        elif operation == "failed":
            if run is not None and header.get("id") == run.ident and not run.done.done():
                run.failed = f"the guest could not start the program: {str(header.get('message'))[:200]}"
                run.done.set_result(None)
        elif operation == "fatal":
            self._fatal = f"the agent ended: {str(header.get('message'))[:200]}"
        else:
            self._kill(f"the guest said {operation[:20]!r}")

    def _take_output(self, run: _Run, stream: Stream, body: bytes) -> None:
        if run.done.done():
            return
        try:
            fits = run.output.take(stream, body)
        except Exception as error:
            run.done.set_exception(error)
            self._kill("the sink failed")
            return
        if not fits and self._policy.overflow == "stop":
            self._impose(run, Outcome.OUTPUT)

    def _take_done(self, run: _Run, header: Header) -> None:
        status = header.get("status")
        counts = [header.get("out_bytes"), header.get("err_bytes")]
        if not _is_count(counts[0]) or not _is_count(counts[1]) or type(status) is not int or not -64 <= status <= 255:
            self._kill("the guest sent a malformed result")
            return
        if run.done.done():
            return
        run.status = status
        run.overflow = header.get("overflow") is True and self._policy.overflow == "stop"
        self.interpreter_lost = header.get("lost") is True
        kept = run.output.counts
        kept["stdout"] = max(kept["stdout"], header["out_bytes"])
        kept["stderr"] = max(kept["stderr"], header["err_bytes"])
        run.done.set_result(None)

    def _give_stdin(self, run: _Run) -> None:
        if self._channel.pending_bytes > PENDING_MAX:
            self._kill("the guest asks without listening")
            return
        piece, run.stdin = run.stdin[:STDIN_PIECE], run.stdin[STDIN_PIECE:]
        try:
            self._channel.post({"op": "stdin", "id": run.ident, "more": bool(run.stdin)}, piece)
        except ChannelClosed:
            pass

    def _on_lost(self, why: Exception) -> None:
        """The channel is gone: whoever waits for the guest is told, and what is left of it is killed."""
        self._kill(str(why))

    def _kill(self, why: str | None) -> None:
        """Kill everything inside and stop listening. Idempotent."""
        if self._killed is None:
            self._killed = why or "it was killed"
        self._enclosure.kill()
        self._channel.close()
        if self._run is not None and not self._run.done.done():
            self._run.done.set_result(None)
        if not self._ready.done():
            self._ready.set_exception(StartError(self._lost_message("before it was ready"), tier=self._receipt.tier))
        replies, self._replies = self._replies, {}
        for future, _ in replies.values():
            if not future.done():
                future.set_exception(ClosedError(f"the sandbox is gone: {self._killed}", tier=self._receipt.tier))

    def _check_usable(self) -> None:
        if self._closing is not None or self._killed is not None:
            raise ClosedError(f"the sandbox is closed: {self._killed or 'close() was called'}", tier=self._receipt.tier)

    # --- files

    async def _ask(self, operation: str, *, body: bytes = b"", limit: int = 0, **fields: int) -> tuple[Header, bytes]:
        """One file operation; at most ``limit`` bytes come back. Raises FileError, ClosedError."""
        self._check_usable()
        self._next_id += 1
        ident = self._next_id
        future: asyncio.Future[Header] = self._loop.create_future()
        data = bytearray()
        self._replies[ident] = future, data
        timer = self._loop.call_later(self._policy.limits.wall_s, self._kill, "a file operation passed the deadline")
        try:
            try:
                await self._channel.send({"op": operation, "id": ident, **fields}, body)
            except ChannelClosed:
                pass  # the future knows why
            header = await future
        except asyncio.CancelledError:
            self._kill("a file operation was cancelled")
            raise
        finally:
            timer.cancel()
            self._replies.pop(ident, None)
        error = header.get("error")
        if error is not None:
            failure = FileError(str(header.get("message"))[:200], tier=self._receipt.tier)
            failure.errno = error if type(error) is int and 0 < error < 4096 else None
            raise failure
        if len(data) > limit:
            raise FileError("the guest sent more than was asked for", tier=self._receipt.tier)
        return header, bytes(data)

    def _take_reply(self, header: Header, body: bytes) -> None:
        ident = header.get("id")
        if not isinstance(ident, int) or ident not in self._replies:
            return
        future, data = self._replies[ident]
        data += body
        if len(data) > LISTING_MAX:
            self._kill("the guest sent an endless reply")
        elif header.get("more") is not True and not future.done():
            future.set_result(header)

    async def write_file(self, path: str, data: bytes) -> None:
        """See :class:`fumehood.tier.Sandbox`."""
        path = check_path(path)
        raw = path.encode()
        room = BODY_MAX - len(raw)
        self._written.pop(path, None)
        for start in range(0, len(data), room) if data else (0,):
            piece = raw + data[start : start + room]
            await self._ask("write", body=piece, path_bytes=len(raw), offset=start)
        self._written[path] = len(data), sha256(data).hexdigest()

    async def read_file(self, path: str, *, max_bytes: int = READ_FILE_MAX) -> bytes:
        """See :class:`fumehood.tier.Sandbox`."""
        raw = check_path(path).encode()
        pieces: list[bytes] = []
        got = 0
        while True:
            header, data = await self._ask(
                "read", body=raw, limit=BODY_MAX, path_bytes=len(raw), offset=got, length=min(BODY_MAX, max_bytes + 1)
            )
            size = header.get("size")
            if not _is_count(size):
                raise FileError("the guest sent a malformed reply", tier=self._receipt.tier)
            got += len(data)
            if got > max_bytes or header["size"] > max_bytes:
                raise FileError(f"{path!r} is larger than {max_bytes} bytes", tier=self._receipt.tier)
            pieces.append(data)
            if not data or got >= header["size"]:
                return b"".join(pieces)

    async def list_files(self) -> tuple[FileInfo, ...]:
        """See :class:`fumehood.tier.Sandbox`. Names that are not UTF-8 show U+FFFD."""
        count = self._policy.limits.files
        _, data = await self._ask("list", limit=LISTING_MAX, count=count)
        found = []
        for line in data.split(b"\0", count)[:count]:
            size, _, name = line[1:].partition(b" ")
            if size.isdigit() and len(size) < 20 and name:
                kind = {b"f": "file", b"d": "folder"}.get(line[:1], "other")
                found.append(FileInfo(name.decode("utf-8", "replace"), kind, int(size)))  # type: ignore[arg-type]
        return tuple(sorted(found, key=lambda f: f.path))

    async def remove(self, path: str) -> None:
        """See :class:`fumehood.tier.Sandbox`."""
        raw = check_path(path).encode()
        await self._ask("remove", body=raw, path_bytes=len(raw))

    # --- the end

    async def interrupt(self) -> None:
        """See :class:`fumehood.tier.Sandbox`."""
        run = self._run
        if run is not None and self._killed is None and not run.done.done():
            run.interrupted = True
            try:
                self._channel.post({"op": "interrupt"})
            except ChannelClosed:
                pass

    async def close(self, *, out: Path | None = None) -> tuple[Artifact, ...]:
        """See :class:`fumehood.tier.Sandbox`. Cancelling it does not stop the cleaning up.

        Raises FumehoodError if the artifacts could not be saved below ``out``; the sandbox is released even so.
        """
        if self._closing is None:
            self._kill("close() was called")
            self._closing = asyncio.ensure_future(self._clean_up(out))
        return await asyncio.shield(self._closing)

    async def _clean_up(self, out: Path | None) -> tuple[Artifact, ...]:
        try:
            await self._enclosure.wait_dead()
            workdir = self._enclosure.workdir_fd()
            if out is None or workdir is None:
                return ()
            # The thread owns its descriptor, because a cancelled wait does not stop it.
            return await asyncio.to_thread(_collect, os.dup(workdir), out, self._policy, dict(self._written))
        finally:
            await self._enclosure.release()


def _collect(workdir: int, out: Path, policy: Policy, unchanged: Mapping[str, tuple[int, str]]) -> tuple[Artifact, ...]:
    try:
        return collect(workdir, out, policy.artifacts, unchanged)
    except OSError as error:
        raise FumehoodError(f"artifacts could not be saved: {error}", remedy="choose another output folder") from error
    finally:
        os.close(workdir)


def _raw(text: str) -> bytes:
    try:
        return os.fsencode(text)
    except UnicodeEncodeError:
        raise PolicyError(f"{text!r:.200} cannot be given to a program: it holds a lone surrogate") from None


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _COUNT_MAX
