"""One sandbox with a guest agent inside: the host's side of execs, files and the end.

Theory of operation. A tier builds a boundary, starts the agent in it, and hands over two things: a
:class:`~fumehood.wire.Channel` to the agent, and an :class:`Enclosure`, which is what the tier holds from outside
(the cgroup, the PID namespace, the container). Here they become a :class:`~fumehood.tier.Sandbox`.

The agent is believed in one thing, the exit status of a program that it waited for, and only while nothing known
outside contradicts it. The wall clock, CPU time, memory and the amount of output are judged from outside, and every
way to end a program that does not end itself is the same: kill the enclosure, wait until its last process is gone,
read what it used. So an exec takes at most its deadline, the kill and the wait; no pipe is waited for. What ended it
is decided in one pure function, :func:`decide`.

In a live sandbox the deadline of an exec costs less than the sandbox, if the program lets it: first it is interrupted,
then, :data:`GRACE_S` later, its process group is killed (the interpreter with its variables, if it is code), and only
if the guest does not report that end either, the enclosure. Commands in the background have no deadline but the
sandbox's own lifetime, and count towards its CPU time.

Frames arrive in callbacks of the event loop and wake a waiting call once, when its exec or file operation is over.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fumehood.displays import Displays
from fumehood.errors import (
    ClosedError,
    FileError,
    OutcomeUnknownError,
    PolicyError,
    StartError,
    UnsupportedError,
)
from fumehood.execs import Ended, Ending, Output, Run, Running, Stdin, decide, raw, request
from fumehood.guest_files import LISTING_MAX, GuestFiles, is_count, save_left
from fumehood.model import (
    DEFAULT_NAME,
    Artifact,
    Code,
    Command,
    Held,
    Outcome,
    Policy,
    Program,
    Receipt,
    Result,
    Usage,
)
from fumehood.threads import in_thread
from fumehood.tier import PTY_UNMET, Enclosure, Sink, Stream
from fumehood.wire import BODY_MAX, ChannelClosed, Header, Link

#: What a program's environment holds where the tier does not say otherwise; the policy's ``env`` comes on top.
DEFAULT_ENV: Mapping[str, str] = MappingProxyType({"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"})

#: The CPU watcher looks no more often than this: one look costs a read of a cgroup file, some 10 µs.
CPU_LOOK_MIN_S = 0.005

#: RLIMIT_CPU and a cgroup's counter tick differently: a process killed by the one is near the limit by the other.
CPU_SPENT_SHARE = 0.95

#: Frames that a guest may make us queue for it before it counts as hostile. An honest one asks for one piece of
#: standard input at a time.
PENDING_MAX = 4 << 20

#: How long a program that was interrupted may take to end before its process group is killed, and the guest to report
#: that end before the sandbox is. A choice: long enough for ``finally`` blocks, short beside the default deadline.
GRACE_S = 2.0

READY_MAX_S = 10.0  # from a sealed sandbox to an agent that serves; milliseconds on a quiet machine


class GuestSandbox(GuestFiles):
    """A :class:`~fumehood.tier.FullSandbox` over a channel to the guest agent and an enclosure. See the module.

    Made inside a running event loop, and owns both from then on: :meth:`close` must be called, whatever happens.
    ``env`` is what the tier gives every program (:data:`DEFAULT_ENV` if None), below the policy's own.
    """

    #: Whether the guest is the agent, with all of its frames, and not another that speaks the first few of them.
    guest_is_agent = True

    def __init__(
        self,
        channel: Link,
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
        self._env = b"".join(raw(f"{k}={v}") + b"\0" for k, v in environment.items())
        # Without a hard cap on CPUs, a program may use as many as there are.
        cpus = receipt.control("cpu")
        hard = cpus is not None and cpus.held is Held.HARD
        self._cpu_rate = policy.limits.cpus if hard else max(policy.limits.cpus, float(os.cpu_count() or 1))
        self._cpu_used = 0.0
        self._cpu_timer: asyncio.TimerHandle | None = None
        self._run: Run | None = None
        self._background: dict[int, Run] = {}
        self._tasks: set[asyncio.Task[Result]] = set()  # of the programs that were started and not awaited
        self._codes = 0  # execs of code so far
        self._idle_s: float | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._lifetime_timer: asyncio.TimerHandle | None = None
        self._asking = 0  # file operations under way
        self._replies: dict[int, tuple[asyncio.Future[Header], bytearray]] = {}
        self._next_id = 0
        self._ready = self._loop.create_future()
        self._ready.add_done_callback(lambda f: f.cancelled() or f.exception())  # not awaited by everybody
        self._killed: str | None = None  # why nothing can run here any more
        self._fatal = ""
        self._written: dict[str, tuple[int, str]] = {}
        self._closing: asyncio.Future[tuple[Artifact, ...]] | None = None
        #: Whether the last exec cost the interpreter, and with it the state of earlier execs.
        self.interpreter_lost = False
        channel.subscribe(self._on_frame, self._on_lost)

    @property
    def receipt(self) -> Receipt:
        """What was enforced."""
        return self._receipt

    @property
    def alive(self) -> bool:
        """Whether something can run here still: the channel is open and the first process inside lives."""
        return self._killed is None and self._enclosure.alive()

    async def ready(self, timeout_s: float) -> None:
        """Wait until the agent serves. Raises StartError; the caller closes the sandbox then."""
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(self._ready)
        except TimeoutError:
            raise StartError(f"the guest was not ready within {timeout_s:g} s", tier=self._receipt.tier) from None

    def expire_after(self, *, idle_s: float | None = None, lifetime_s: float | None = None) -> None:
        """See :class:`fumehood.tier.FullSandbox`."""
        self._idle_s = idle_s
        if lifetime_s is not None:
            self._lifetime_timer = self._loop.call_later(lifetime_s, self._expire, f"lifetime of {lifetime_s:g} s")
        self._rest()

    def _expire(self, what: str) -> None:
        for run in self._runs():
            run.imposed = run.imposed or Outcome.WALL
        self._kill(f"its {what} is over")

    def _rest(self) -> None:
        """Something has ended: if nothing is left under way, the idle time begins."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        busy = self._run is not None or self._background or self._asking
        if self._idle_s is not None and not busy and self._killed is None:
            self._idle_timer = self._loop.call_later(self._idle_s, self._expire, f"idle time of {self._idle_s:g} s")

    # --- exec

    async def exec(
        self, program: Program, *, stdin: bytes = b"", sink: Sink | None = None, last: bool = False
    ) -> Result:
        """See :class:`fumehood.tier.Sandbox`. A sink's exception kills the sandbox and is passed on."""
        return await self._follow(self._begin(program, Stdin(stdin), sink, last))

    async def start(
        self, program: Program, *, stdin: bool = False, sink: Sink | None = None, background: bool = False
    ) -> Running:
        """See :class:`fumehood.tier.FullSandbox`."""
        if background and not isinstance(program, Command):
            raise PolicyError("only a command runs in the background: code has the one interpreter")
        if not self.guest_is_agent:
            raise self._unsupported("handles on running programs")
        run = self._begin(program, Stdin(b"", stays_open=stdin), sink, last=False, background=background)
        run.sent = asyncio.Event()
        task = asyncio.ensure_future(self._follow_background(run) if background else self._follow(run))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda t: t.cancelled() or t.exception())  # not awaited by everybody
        sending = asyncio.ensure_future(run.sent.wait())
        try:
            either: set[asyncio.Future[Any]] = {sending, task}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            sending.cancel()
        if task.done() and (isinstance(task.exception(), PolicyError)):
            task.result()
        return Running(self, run, task)

    def _begin(self, program: Program, stdin: Stdin, sink: Sink | None, last: bool, background: bool = False) -> Run:
        """The record of an exec, which occupies the sandbox from here on. Raises what exec() does."""
        self._check_usable()
        if self._run is not None and not background:
            raise RuntimeError("an exec is running in this sandbox")
        limits = self._policy.limits
        if isinstance(program, Command) and program.pty is not None and not self._policy.terminals:
            raise self._unsupported(PTY_UNMET)
        self._next_id += 1
        output = Output(limits.output_bytes, sink)
        run = Run(self._next_id, program, output, stdin, last, Ended(loop=self._loop))
        if isinstance(program, Code):
            wanted = program.displays if program.displays is not None else not last and self.guest_is_agent
            if not self.guest_is_agent and (wanted or program.context):
                raise self._unsupported("displays" if wanted else "contexts")
            if wanted:
                run.displays = Displays(limits.display_bytes, getattr(sink, "display", None))
        elif not self.guest_is_agent and (program.env or program.cwd or program.pty):
            raise self._unsupported("commands with env, cwd or pty")
        if background:
            self._background[run.ident] = run
        else:
            self._run = run
        if self._idle_timer is not None:
            self._rest()
        return run

    def _unsupported(self, what: str) -> UnsupportedError:
        return UnsupportedError(f"cannot hold: {what}", unmet=(what,), tier=self._receipt.tier)

    async def _follow(self, run: Run) -> Result:
        """Hand the program over and see it to its end."""
        limits = self._policy.limits
        started = self._loop.time()
        handed_over = False
        try:
            try:
                rest = self._hand_over(run)
                # Not before: the guest has begun meanwhile, and nothing of this turn of the loop can come too late.
                self._start_clock(run)
                if (limits.cpu_s - self._cpu_used) < limits.wall_s * self._cpu_rate:
                    self._watch_cpu()
                if rest:
                    await self._hand_over_more(run, rest)
                handed_over = True
                if run.sent is not None:
                    run.sent.set()
            except ChannelClosed:
                pass  # run.done is set by now, with what is known
            await run.done
            finished = self._loop.time()
            if run.last or self._killed is not None:
                await self._end(run)
        except PolicyError:
            raise  # it was not handed over
        except BaseException:
            self._kill("an exec was cancelled or its sink failed")
            raise
        finally:
            self._loop.call_soon(self._tidy, run)  # after the caller has the result
            self._run = None
            if self._cpu_timer is not None and not self._background:
                self._cpu_timer.cancel()
                self._cpu_timer = None
            if self._idle_s is not None:
                self._rest()
        return self._result(run, handed_over, (finished if run.status is not None else self._loop.time()) - started)

    def _tidy(self, run: Run) -> None:
        """What is left to do after an exec."""
        for timer in run.timers:
            timer.cancel()

    async def _end(self, run: Run) -> None:
        """Kill all that is left, and wait until the last process is dead: none of the program runs when it is told."""
        self._kill("it was for one program only" if run.last else None)
        await self._enclosure.wait_dead()

    async def _follow_background(self, run: Run) -> Result:
        """The same for a command in the background, which has no deadline of its own."""
        started = self._loop.time()
        self._watch_cpu()
        handed_over = False
        try:
            try:
                rest = self._hand_over(run, background=True)
                if rest:
                    await self._hand_over_more(run, rest)
                handed_over = True
                if run.sent is not None:
                    run.sent.set()
            except ChannelClosed:
                pass
            await run.done
            seconds = self._loop.time() - started
            if self._killed is not None:
                await self._enclosure.wait_dead()
        finally:
            del self._background[run.ident]
            if self._idle_s is not None:
                self._rest()
        return self._result(run, handed_over, seconds, background=True)

    def _hand_over(self, run: Run, background: bool = False) -> memoryview:
        """Send the program's first piece, usually all of it; what is left. Raises PolicyError, ChannelClosed."""
        header, payload = request(run, self._env, self._policy, name=self._name(run), background=background)
        rest = payload[BODY_MAX:]
        header["more"] = bool(rest)
        self._channel.post(header, payload[:BODY_MAX])
        return rest

    async def _hand_over_more(self, run: Run, payload: memoryview) -> None:
        """Send the rest, each piece once the one before is on its way. Raises ChannelClosed."""
        while payload:
            await self._channel.flush()
            piece, payload = payload[:BODY_MAX], payload[BODY_MAX:]
            self._channel.post({"op": "more", "id": run.ident, "more": bool(payload)}, piece)

    def _name(self, run: Run) -> str:
        """What tracebacks call the program: the default name is made different for each exec of a live sandbox."""
        self._codes += 1
        name = run.program.name if isinstance(run.program, Code) else ""
        return f"<agent-{self._codes}>" if name == DEFAULT_NAME and not run.last else name[:255]

    def _result(self, run: Run, handed_over: bool, seconds: float, background: bool = False) -> Result:
        """What became of the exec. Raises StartError, OutcomeUnknownError, UnsupportedError."""
        if run.failed is not None:
            if isinstance(run.program, Command) and run.program.pty is not None:
                raise self._unsupported("pty") from StartError(run.failed)
            raise StartError(run.failed, tier=self._receipt.tier)
        if self._closing is not None and run.imposed is not Outcome.CANCELLED:  # the enclosure may be released already
            raise OutcomeUnknownError("close() was called during an exec", tier=self._receipt.tier)
        if background:  # what it used is part of what the sandbox used, and counted there
            return self._outcome(run, handed_over, seconds, None, None)
        cpu_s, peak = run.used or self._enclosure.usage()
        result = self._outcome(run, handed_over, seconds, cpu_s, peak)
        self._cpu_used = max(cpu_s or 0.0, self._cpu_used)
        return result

    def _outcome(self, run: Run, handed_over: bool, seconds: float, cpu_s: float | None, peak: int | None) -> Result:
        """The same when it is known what was used. Nothing is changed."""
        enough = CPU_SPENT_SHARE * self._policy.limits.cpu_s
        spent = run.status == -signal.SIGXCPU if cpu_s is None else cpu_s >= enough
        died = run.status is None or run.status < 0
        ended = Ending(
            status=run.status,
            imposed=run.imposed,
            overflow=run.overflow,
            memory_killed=died and self._closing is None and self._enclosure.memory_killed(),
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
        output = run.output
        return Result(
            outcome=outcome,
            exit_code=exit_code,
            stdout_data=b"".join(output.kept["stdout"]),
            stderr_data=b"".join(output.kept["stderr"]),
            seconds=seconds,
            usage=Usage(used, peak, output.counts["stdout"], output.counts["stderr"]),
            receipt=self._receipt,
            displays=run.displays.finish() if run.displays is not None else (),
            displays_truncated=run.displays is not None and run.displays.truncated,
            interpreter_lost=run.lost and not run.last,
        )

    def _lost_message(self, when: str) -> str:
        reason = self._enclosure.lost_reason() or self._fatal or self._killed or "no reason known"
        return f"the guest was lost {when}: {reason}"

    def _runs(self) -> tuple[Run, ...]:
        return (*((self._run,) if self._run is not None else ()), *self._background.values())

    def _find(self, ident: object) -> Run | None:
        """The exec that the guest speaks of, if there is such a one."""
        run = self._run
        if run is not None and run.ident == ident:
            return run
        return self._background.get(ident) if type(ident) is int else None

    def _impose(self, run: Run, outcome: Outcome) -> None:
        """End the exec from outside, and the sandbox with it: nothing that the guest still says counts."""
        if not run.done.done():
            run.imposed = outcome
            self._kill(f"the limit was reached: {outcome.value}")

    def _start_clock(self, run: Run) -> None:
        """The program's time begins when the guest can run it; a guest that is never ready has its own limit."""
        wall_s = self._policy.limits.wall_s
        if self._ready.done():
            run.timers.append(self._loop.call_later(wall_s, self._deadline, run))
            return
        run.timers.append(self._loop.call_later(wall_s + READY_MAX_S, self._deadline, run))
        self._ready.add_done_callback(lambda _: None if run.done.done() else self._start_clock(run))

    def _deadline(self, run: Run) -> None:
        """The wall clock has reached its limit."""
        if run.last or not self.guest_is_agent:
            self._impose(run, Outcome.WALL)
        elif not run.done.done():
            run.imposed = Outcome.WALL
            self.post({"op": "interrupt"})
            run.timers.append(self._loop.call_later(GRACE_S, self._force, run, Outcome.WALL))

    def _force(self, run: Run, outcome: Outcome) -> None:
        """It was interrupted and has not ended: kill its process group, and if that is not reported, everything."""
        if not run.done.done():
            run.imposed = outcome
            self.post({"op": "signal", "id": run.ident, "number": int(signal.SIGKILL)})
            run.timers.append(self._loop.call_later(GRACE_S, self._impose, run, outcome))

    def _watch_cpu(self) -> None:
        """Look at the CPU time when it can have reached the limit at the earliest."""
        if self._cpu_timer is None:
            left = self._policy.limits.cpu_s - self._cpu_used
            self._cpu_timer = self._loop.call_later(max(left / self._cpu_rate, CPU_LOOK_MIN_S), self._look)

    def _look(self) -> None:
        self._cpu_timer = None
        runs = self._runs()
        if not runs or self._killed is not None:
            return
        used, _ = self._enclosure.usage()
        if used is None:
            return
        left = self._policy.limits.cpu_s - used
        if left <= 0:
            for run in runs:
                self._impose(run, Outcome.CPU)
        else:
            wait = max(left / self._cpu_rate, CPU_LOOK_MIN_S)
            self._cpu_timer = self._loop.call_later(wait, self._look)

    # --- what the guest says

    def _on_frame(self, header: Header, body: bytes) -> None:
        operation = header["op"]
        run = self._find(header.get("id"))
        if operation in ("out", "err"):
            if run is not None:
                self._take_output(run, "stdout" if operation == "out" else "stderr", body)
        elif operation == "display":
            if run is not None:
                self._take_display(run, body)
        elif operation == "done":
            if run is not None:
                self._take_done(run, header)
        elif operation == "reply":
            self._take_reply(header, body)
        elif operation == "stdin":
            if run is not None:
                run.stdin.asked = True
                self.give_stdin(run)
        elif operation == "ready":
            if not self._ready.done():
                self._ready.set_result(None)
        elif operation == "failed":
            if run is not None and not run.done.done():
                run.failed = f"the guest could not start the program: {str(header.get('message'))[:200]}"
                run.done.set_result(None)
        elif operation == "fatal":
            self._fatal = f"the agent ended: {str(header.get('message'))[:200]}"
        else:
            self._kill(f"the guest said {operation[:20]!r}")

    def _take_output(self, run: Run, stream: Stream, body: bytes) -> None:
        if run.done.done():
            return
        try:
            if not run.output.take(stream, body) and self._policy.overflow == "stop":
                self._impose(run, Outcome.OUTPUT)
        except Exception as error:
            run.done.set_exception(error)
            self._kill("the sink failed")

    def _take_display(self, run: Run, body: bytes) -> None:
        if run.done.done() or run.displays is None:
            return
        try:
            run.displays.feed(body)
        except Exception as error:
            run.done.set_exception(error)
            self._kill("the sink failed")

    def _take_done(self, run: Run, header: Header) -> None:
        status = header.get("status")
        counts = [header.get("out_bytes"), header.get("err_bytes")]
        if not is_count(counts[0]) or not is_count(counts[1]) or type(status) is not int or not -64 <= status <= 255:
            self._kill("the guest sent a malformed result")
            return
        if run.done.done():
            return
        run.status = status
        run.overflow = header.get("overflow") is True and self._policy.overflow == "stop"
        run.lost = header.get("lost") is True
        if isinstance(run.program, Code):
            self.interpreter_lost = run.lost
        kept = run.output.counts
        kept["stdout"] = max(kept["stdout"], header["out_bytes"])
        kept["stderr"] = max(kept["stderr"], header["err_bytes"])
        run.done.tell()

    def give_stdin(self, run: Run) -> None:
        """Answer the guest's question for standard input, if it has asked and there is an answer."""
        if self._channel.pending_bytes > PENDING_MAX:
            self._kill("the guest asks without listening")
            return
        taken = run.stdin.take()
        if taken is not None:
            self.post({"op": "stdin", "id": run.ident, "more": taken[1]}, taken[0])

    def post(self, header: Header, body: bytes | memoryview = b"") -> None:
        """Send a frame to a guest that may be gone: then that is known elsewhere."""
        try:
            self._channel.post(header, body)
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
        for timer in (self._cpu_timer, self._idle_timer, self._lifetime_timer):
            if timer is not None:
                timer.cancel()
        for run in self._runs():
            if not run.done.done():
                run.done.set_result(None)
        if not self._ready.done():
            self._ready.set_exception(StartError(self._lost_message("before it was ready"), tier=self._receipt.tier))
        replies, self._replies = self._replies, {}
        for future, _ in replies.values():
            if not future.done():
                future.set_exception(ClosedError(f"the sandbox is gone: {self._killed}", tier=self._receipt.tier))

    def _check_usable(self) -> None:
        if self._closing is not None or self._killed is not None:
            raise ClosedError(f"the sandbox is closed: {self._killed or 'close() was called'}", tier=self._receipt.tier)

    # --- questions

    async def _ask(self, operation: str, *, body: bytes = b"", limit: int = 0, **fields: int) -> tuple[Header, bytes]:
        """One file operation; at most ``limit`` bytes come back. Raises FileError, ClosedError."""
        self._check_usable()
        self._next_id += 1
        ident = self._next_id
        future: asyncio.Future[Header] = self._loop.create_future()
        data = bytearray()
        self._replies[ident] = future, data
        self._asking += 1
        if self._idle_timer is not None:
            self._rest()
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
            self._asking -= 1
            if self._idle_s is not None:
                self._rest()
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

    # --- the end

    async def interrupt(self, *, grace_s: float | None = GRACE_S) -> None:
        """See :class:`fumehood.tier.Sandbox`; ``grace_s`` is how long the program may take to end before it is killed.

        None: it may go on.
        """
        run = self._run
        if run is not None and self._killed is None and not run.done.done():
            run.interrupted = True
            self.post({"op": "interrupt"})
            if grace_s is not None and self.guest_is_agent:
                run.timers.append(self._loop.call_later(grace_s, self._force, run, Outcome.CANCELLED))

    async def close(self, *, out: Path | None = None) -> tuple[Artifact, ...]:
        """See :class:`fumehood.tier.Sandbox`. Cancelling it does not stop the cleaning up.

        Raises FumehoodError if the artifacts could not be saved below ``out``; the sandbox is released even so.
        """
        if self._closing is None:
            for run in self._background.values():
                run.imposed = run.imposed or Outcome.CANCELLED
            self._kill("close() was called")
            self._closing = asyncio.ensure_future(self._clean_up(out))
        return await asyncio.shield(self._closing)

    async def _clean_up(self, out: Path | None) -> tuple[Artifact, ...]:
        try:
            await self._enclosure.wait_dead()
            if self._tasks:
                await asyncio.wait(self._tasks)
            workdir = self._enclosure.workdir_fd()
            if out is None or workdir is None:
                return ()
            # The thread owns its descriptor, because a cancelled wait does not stop it.
            return await in_thread(save_left, os.dup(workdir), out, self._policy, dict(self._written))
        finally:
            await self._enclosure.release()
