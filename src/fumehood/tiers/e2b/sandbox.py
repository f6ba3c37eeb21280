"""One microVM at the service, as a :class:`fumehood.tier.Sandbox`."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import math
import os
import posixpath
import shlex
import signal
import tempfile
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import e2b
from e2b_code_interpreter import AsyncSandbox, Execution, ExecutionError

from fumehood.artifacts import collect
from fumehood.displays import COUNT_MAX, check
from fumehood.errors import ClosedError, FileError, FumehoodError, OutcomeUnknownError, PolicyError, UnsupportedError
from fumehood.folders import remove_tree
from fumehood.model import (
    BINARY_MIME_TYPES,
    Artifact,
    Code,
    Command,
    Display,
    Outcome,
    Policy,
    Program,
    Receipt,
    Result,
    Usage,
    check_path,
)
from fumehood.threads import in_thread
from fumehood.tier import RunningProgram, Sink, Stream
from fumehood.tiers.e2b.errors import Phase, translate
from fumehood.tiers.e2b.files import HOME, WORK, E2BFiles

T = TypeVar("T")

_SCRATCH = f"{HOME}/.fumehood"

#: The SDK keeps all output of a cell; one that prints more than this past the limit is ended, whatever the policy's
#: ``overflow`` says, so that this process stays small.
CELL_SLACK_BYTES = 16 << 20

#: How long a run that is over waits for the service to confirm the kill; the rest happens in close().
_KILL_WAIT_S = 0.3
_CLOSE_WAIT_S = 30.0
_MARGIN_S = 60

#: What the SDK calls the forms of a result.
_FORMS = {
    "text": "text/plain",
    "html": "text/html",
    "markdown": "text/markdown",
    "latex": "text/latex",
    "svg": "image/svg+xml",
    "png": "image/png",
    "jpeg": "image/jpeg",
    "pdf": "application/pdf",
    "json": "application/json",
}


async def _heeding(call: Coroutine[Any, Any, T]) -> T:
    """What the call returns or raises, unless this task was cancelled meanwhile.

    The SDK waits with asyncio.wait_for(), which before Python 3.12 can lose a cancellation (bpo-42130); the run would
    then go on, and its caller wait for nothing.
    """
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    try:
        return await call
    finally:
        if task.cancelling() > before:
            raise asyncio.CancelledError


class _Ended(Exception):
    """We end the exec for this outcome."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.value)
        self.outcome = outcome


class _Output:
    """The output of one exec: kept up to the budget, counted beyond."""

    def __init__(self, policy: Policy, sink: Sink | None, slack: int | None) -> None:
        self._budget = policy.limits.output_bytes
        self._stop = policy.overflow == "stop"
        self._sink = sink
        self._slack = slack
        self._display_budget = policy.limits.display_bytes
        self.displays: list[Display] = []
        self.displays_truncated = False
        self.kept: dict[Stream, list[bytes]] = {"stdout": [], "stderr": []}
        self.counts: dict[Stream, int] = {"stdout": 0, "stderr": 0}

    def take(self, stream: Stream, text: str) -> None:
        """One piece, as the SDK decoded it. Raises _Ended, and what the sink raises."""
        data = text.encode("utf-8", "replace")
        self.counts[stream] += len(data)
        passed, self._budget = data[: self._budget], max(self._budget - len(data), 0)
        if passed:
            self.kept[stream].append(passed)
            if self._sink is not None:
                self._sink(stream, passed)
        over = len(data) - len(passed)
        if self._slack is not None:
            self._slack -= over
        if over and (self._stop or (self._slack is not None and self._slack < 0)):
            raise _Ended(Outcome.OUTPUT)

    def show(self, result: Any) -> None:
        """One of the SDK's results as a display. Raises what the sink raises."""
        data: dict[str, bytes] = {}
        dropped: list[str] = []
        for name, mime in _FORMS.items():
            value = getattr(result, name, None)
            if not value:
                continue
            try:
                text = json.dumps(value) if name == "json" else str(value)
                form = base64.b64decode(text) if mime in BINARY_MIME_TYPES else text.encode("utf-8", "replace")
            except (ValueError, RecursionError):
                dropped.append(f"{mime}: malformed")
                continue
            problem = check(mime, form)
            if problem:
                dropped.append(f"{mime}: {problem}")
            else:
                data[mime] = form
        self._display_budget -= sum(map(len, data.values()))
        if self._display_budget < 0 or len(self.displays) >= COUNT_MAX:
            self.displays_truncated = True
            return
        self.displays.append(Display(data, {}, tuple(dropped)))
        shown = getattr(self._sink, "display", None)
        if shown is not None:
            shown(self.displays[-1])


class E2BSandbox(E2BFiles):
    """A microVM that is destroyed by :meth:`close`, or by the service when its life is over."""

    def __init__(self, remote: AsyncSandbox, policy: Policy, receipt: Receipt, *, secret: str, life_s: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._remote = remote
        self._policy = policy
        self._receipt = receipt
        self._secret = secret
        self._ends_at = self._loop.time() + life_s
        self._context: Any = None
        self._running: asyncio.Future[Any] | None = None
        self._began: asyncio.Future[float] = self._loop.create_future()  # when the exec's program was handed over
        self._interrupted = False
        self._killing: asyncio.Task[None] | None = None
        self._why = ""
        self._written: dict[str, tuple[int, str]] = {}
        self._serial = 0
        self._artifacts: tuple[Artifact, ...] = ()
        self._working = 0  # execs and file operations under way
        self._idle_s: float | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._lifetime: asyncio.TimerHandle | None = None
        self._expired = False

    @property
    def receipt(self) -> Receipt:
        """What is held, and what is the provider's claim."""
        return self._receipt

    async def prepare(self) -> None:
        """The work folder. Raises StartError, UnavailableError."""
        await self._call("create", self._remote.files.make_dir(WORK))

    async def _call(self, phase: Phase, call: Coroutine[Any, Any, Any]) -> Any:
        """What the SDK answers, its errors as ours."""
        try:
            return await _heeding(call)
        except FumehoodError:
            raise
        except Exception as error:
            raise translate(error, phase, secret=self._secret) from None

    def expire_after(self, *, idle_s: float | None = None, lifetime_s: float | None = None) -> None:
        """See :class:`fumehood.tier.FullSandbox`; after it nothing can be saved, since the service keeps no files."""
        self._idle_s = idle_s
        if lifetime_s is not None:
            self._lifetime = self._loop.call_later(lifetime_s, self._expire, f"lifetime of {lifetime_s:g} s")
        with self._at_work():
            pass  # the idle time begins

    def _expire(self, what: str) -> None:
        self._expired = True
        self._kill(f"its {what} is over")
        if self._running is not None:
            self._running.cancel()

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        """Something is under way, so that the idle time begins at its end."""
        self._working += 1
        if self._idle is not None:
            self._idle.cancel()
        try:
            yield
        finally:
            self._working -= 1
            if self._idle_s is not None and not self._working and self._killing is None:
                self._idle = self._loop.call_later(self._idle_s, self._expire, f"idle time of {self._idle_s:g} s")

    # --- exec

    async def start(
        self, program: Program, *, stdin: bool = False, sink: Sink | None = None, background: bool = False
    ) -> RunningProgram:
        """Raises UnsupportedError: no handles on running programs here."""
        what = "handles on running programs"
        raise UnsupportedError(f"cannot hold: {what}", unmet=(what,), tier="e2b")

    async def exec(
        self, program: Program, *, stdin: bytes = b"", sink: Sink | None = None, last: bool = False
    ) -> Result:
        """See :class:`fumehood.tier.Sandbox`. A live cell takes no standard input: PolicyError."""
        self._check_usable()
        if self._running is not None:
            raise RuntimeError("an exec is running in this sandbox")
        cell = isinstance(program, Code) and not last
        if isinstance(program, Code) and (program.context or (last and program.displays)):
            what = "contexts" if program.context else "displays of a single run"
            raise UnsupportedError(f"cannot hold: {what}", unmet=(what,), tier="e2b")
        if isinstance(program, Command) and program.pty is not None:
            raise UnsupportedError("cannot hold: pty", unmet=("pty",), tier="e2b")
        if cell and stdin:
            raise PolicyError("a cell of a live sandbox takes no standard input here", tier="e2b")
        output = _Output(self._policy, sink, CELL_SLACK_BYTES if cell else None)
        self._began = self._loop.create_future()
        self._interrupted = False
        work = self._cell(program, output) if cell else self._process(program, stdin, output)
        self._running = asyncio.ensure_future(work)
        self._running.add_done_callback(lambda done: done.cancelled() or done.exception())  # not always awaited
        try:
            with self._at_work():
                outcome, code = await self._judge(self._running, last)
        except BaseException:
            self._kill("an exec was cancelled, or failed")
            raise
        finally:
            self._running = None
        seconds = self._loop.time() - (self._began.result() if self._began.done() else self._loop.time())
        if self._killing is not None:
            await asyncio.wait((self._killing,), timeout=_KILL_WAIT_S)
        return Result(
            outcome=outcome,
            exit_code=code,
            stdout_data=b"".join(output.kept["stdout"]),
            stderr_data=b"".join(output.kept["stderr"]),
            seconds=seconds,
            usage=Usage(None, None, output.counts["stdout"], output.counts["stderr"]),
            receipt=self._receipt,
            displays=tuple(output.displays),
            displays_truncated=output.displays_truncated,
        )

    async def _judge(self, running: asyncio.Future[int], last: bool) -> tuple[Outcome, int | None]:
        """How the exec ended. Raises ours for the service's errors, and what the sink raised.

        Its time begins when the service is asked to run it; what is made ready before has the SDK's own timeouts.
        """
        try:
            either: set[asyncio.Future[Any]] = {running, self._began}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            done, _ = await asyncio.wait((running,), timeout=self._policy.limits.wall_s)
        except asyncio.CancelledError:
            running.cancel()
            raise
        if not done:
            await self._stop(last, "the limit was reached: wall")
            running.cancel()
            return Outcome.WALL, None
        try:
            code = running.result()
        except _Ended as end:
            await self._stop(last, f"the limit was reached: {end.outcome.value}")
            return end.outcome, None
        except asyncio.CancelledError:
            if self._expired:
                return Outcome.WALL, None
            if not self._interrupted:
                raise OutcomeUnknownError("close() was called during an exec", tier="e2b") from None
            return Outcome.CANCELLED, None
        if self._interrupted and code != 0:
            return Outcome.CANCELLED, None
        return (Outcome.SIGNALED if code < 0 else Outcome.EXITED), code

    async def _stop(self, last: bool, why: str) -> None:
        """End what runs: the process, if close() comes next and may still fetch its files, or else the microVM."""
        if last and self._handle is not None:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(_KILL_WAIT_S):
                    await self._handle.kill()
                return
        self._kill(why)

    async def _process(self, program: Program, stdin: bytes, output: _Output) -> int:
        """A whole process; its exit code, or -N for signal N."""
        self._serial += 1
        place = f"{_SCRATCH}/{self._serial}"
        if isinstance(program, Code):
            await self._call("create", self._remote.files.write(f"{place}/main.py", program.data))
            command = f"python3 {posixpath.relpath(place, WORK)}/main.py"
        else:
            command = shlex.join(program.argv)
            if program.cwd:
                command = f"env --chdir={shlex.quote(program.cwd)} -- {command}"
        await self._call("create", self._remote.files.write(f"{place}/stdin", stdin))
        await self._prolong()
        # The words of the shell's own exec: signals and exit code are then the program's.
        line = f"exec {command} < {posixpath.relpath(place, WORK)}/stdin"
        failed: list[BaseException] = []

        def told(stream: Stream, text: str) -> None:
            try:
                output.take(stream, text)
            except BaseException as error:  # the SDK would take it for an error of the service
                if not failed:
                    failed.append(error)
                    stopped.set()

        stopped = asyncio.Event()
        self._began.set_result(self._loop.time())
        handle = await self._call(
            "exec",
            self._remote.commands.run(
                line,
                background=True,
                envs={**self._policy.env, **(program.env if isinstance(program, Command) else {})},
                cwd=WORK,
                timeout=0,
                on_stdout=lambda text: told("stdout", text),
                on_stderr=lambda text: told("stderr", text),
                retain_output=False,
            ),
        )
        self._handle = handle
        ending = asyncio.ensure_future(handle.wait())
        noticing = asyncio.ensure_future(stopped.wait())
        try:
            await asyncio.wait((ending, noticing), return_when=asyncio.FIRST_COMPLETED)
            if failed:
                raise failed[0]
            await ending
        except e2b.CommandExitException as end:
            return _status(end.exit_code, end.error or "")
        except (_Ended, FumehoodError):
            raise
        except Exception as error:
            if failed:
                raise
            raise translate(error, "exec", secret=self._secret) from None
        finally:
            self._handle = None
            for task in (ending, noticing):
                task.cancel()
            await asyncio.gather(ending, noticing, return_exceptions=True)
            await handle.disconnect()
        return 0

    _handle: Any = None

    async def _cell(self, program: Program, output: _Output) -> int:
        """A cell of the interpreter; 0, the code of ``sys.exit``, or 1 for an error, told on stderr."""
        assert isinstance(program, Code)
        await self._prolong()
        if self._context is None:
            self._context = await self._call("create", self._remote.create_code_context(cwd=WORK))
        sink_errors: list[BaseException] = []

        def told(stream: Stream, text: str) -> None:
            try:
                output.take(stream, text)
            except BaseException as error:
                sink_errors.append(error)
                raise

        def shown(result: Any) -> None:
            if program.displays is False:
                return
            try:
                output.show(result)
            except BaseException as error:
                sink_errors.append(error)
                raise

        try:
            source = program.data.decode()
        except UnicodeDecodeError as error:
            output.take("stderr", f"SyntaxError: (unicode error) {error}\n")
            return 1
        self._began.set_result(self._loop.time())
        try:
            running = self._remote.run_code(
                source,
                context=self._context,
                envs=dict(self._policy.env),
                timeout=0,
                on_stdout=lambda message: told("stdout", message.line),
                on_stderr=lambda message: told("stderr", message.line),
                on_result=shown,
            )
            execution: Execution = await _heeding(running)
        except Exception as error:
            if sink_errors:
                raise sink_errors[0] from None
            raise translate(error, "exec", secret=self._secret) from None
        return _cell_code(execution.error, output)

    async def _prolong(self) -> None:
        """Let the sandbox live past this exec's deadline."""
        needed = self._policy.limits.wall_s + _MARGIN_S
        if self._ends_at - self._loop.time() < needed:
            life_s = max(300, math.ceil(needed) + _MARGIN_S)
            await self._call("create", self._remote.set_timeout(life_s))
            self._ends_at = self._loop.time() + life_s

    async def interrupt(self) -> None:
        """End the running exec: a process is killed, a cell is abandoned, which the service takes as an interrupt."""
        running = self._running
        if running is None or running.done():
            return
        self._interrupted = True
        if self._handle is not None:
            await self._call("exec", self._handle.kill())
        else:
            running.cancel()

    # --- files

    async def _file(self, call: Coroutine[Any, Any, Any]) -> Any:
        try:
            self._check_usable()
        except BaseException:
            call.close()
            raise
        try:
            with self._at_work():
                async with asyncio.timeout(max(self._policy.limits.wall_s, 1.0)):
                    return await self._call("file", call)
        except TimeoutError:
            self._kill("a file operation passed the deadline")
            raise FileError("the service did not answer in time", tier="e2b") from None

    # --- the end

    def _check_usable(self) -> None:
        if self._killing is not None:
            raise ClosedError(f"the sandbox is closed: {self._why}", tier="e2b")

    def _kill(self, why: str) -> None:
        """Destroy the microVM, without waiting. Idempotent."""
        if self._killing is None:
            self._why = why
            for timer in (self._idle, self._lifetime):
                if timer is not None:
                    timer.cancel()
            self._killing = asyncio.ensure_future(self._destroy())

    async def _destroy(self) -> None:
        for pause in (0.0, 0.2, 1.0):
            await asyncio.sleep(pause)
            try:
                await self._remote.kill()
                return
            except e2b.NotFoundException:
                return
            except Exception:
                continue  # what we cannot destroy, the service does when its life is over

    async def close(self, *, out: Path | None = None) -> tuple[Artifact, ...]:
        """Save what is new in the work folder below ``out``, if given, and destroy the microVM. Idempotent.

        The microVM must live while its files are fetched, so a process left behind in it may still change them.
        """
        try:
            if out is not None and self._killing is None:
                self._artifacts = await self._fetch(out)
        finally:
            if self._running is not None:
                self._running.cancel()
            self._kill("close() was called")
            assert self._killing is not None
            await asyncio.wait((self._killing,), timeout=_CLOSE_WAIT_S)
        return self._artifacts

    async def _fetch(self, out: Path) -> tuple[Artifact, ...]:
        """The work folder through a folder of our own, so that one code judges artifacts of every tier."""
        limits = self._policy.artifacts
        folder = tempfile.mkdtemp(prefix="fumehood-")
        left = limits.total_bytes
        skipped: list[Artifact] = []
        try:
            for info in await self.list_files():
                try:
                    path = check_path(info.path)
                except PolicyError:
                    continue  # a name that no artifact can have
                if info.kind == "folder":
                    continue
                if info.kind == "other":
                    skipped.append(Artifact(path, info.size_bytes, skipped="not a regular file"))
                    continue
                if info.size_bytes > left:
                    skipped.append(Artifact(path, info.size_bytes, skipped=f"more than {limits.total_bytes} bytes"))
                    continue
                try:
                    data = await self.read_file(path, max_bytes=left)
                except FileError as error:
                    skipped.append(Artifact(path, info.size_bytes, skipped=error.message[:200]))
                    continue
                left -= len(data)
                target = Path(folder, path)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(data)
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                saved = await in_thread(collect, fd, out, limits, self._written)
            finally:
                os.close(fd)
        except OSError as error:
            raise FumehoodError(f"artifacts could not be saved: {error}", tier="e2b") from error
        finally:
            await in_thread(remove_tree, folder)
        return tuple(sorted((*saved, *skipped), key=lambda artifact: artifact.path))


_SIGNALS = {(signal.strsignal(number) or "").lower(): int(number) for number in signal.Signals}


def _status(code: int, error: str) -> int:
    """The exit code, or -N for signal N, which the service tells in words ("signal: segmentation fault") beside -1."""
    if code >= 0:
        return code & 0xFF
    return -_SIGNALS.get(error.removeprefix("signal: ").partition(" (")[0], int(signal.SIGKILL))


def _cell_code(error: ExecutionError | None, output: _Output) -> int:
    if error is None:
        return 0
    if error.name == "SystemExit":
        with contextlib.suppress(ValueError):
            return int(error.value) & 0xFF
        if error.value in ("", "None"):
            return 0
    output.take("stderr", error.traceback or f"{error.name}: {error.value}\n")
    return 1
