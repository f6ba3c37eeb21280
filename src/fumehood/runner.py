"""The interface: ``run()``, :class:`Runner` and, for asyncio, :class:`AsyncRunner`.

All the work is in the asynchronous core. The synchronous face hands each call to one event loop in a thread of its
own (:class:`_Portal`) and adds nothing.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

from fumehood import registry
from fumehood.errors import ClosedError, FumehoodError, PolicyError
from fumehood.mapping import Batch, Item, Job, Mapped, drive, drive_from_thread
from fumehood.model import Artifact, Boundary, Code, Policy, Program, Receipt, Result, check_path
from fumehood.pool import Pool
from fumehood.threads import in_thread
from fumehood.tier import (
    FileInfo,
    FullSandbox,
    RunningProgram,
    Sandbox,
    Single,
    Sink,
    Tier,
    is_simple,
    require,
    require_program,
)

T = TypeVar("T")


def as_program(program: Program | str | bytes, *, displays: bool = False, context: str | None = None) -> Program:
    """The program, with what was said beside it. Raises PolicyError for a command with what only code has."""
    wanted = Code(program) if isinstance(program, (str, bytes)) else program
    if displays or context is not None:
        if not isinstance(wanted, Code):
            raise PolicyError("displays and contexts are of code, not of commands")
        wanted = replace(wanted, displays=displays or wanted.displays, context=context or wanted.context)
    return wanted


def as_inputs(files: Mapping[str, bytes] | None) -> dict[str, bytes]:
    """Input files by their clean paths. Raises PolicyError."""
    return {check_path(path): data for path, data in files.items()} if files else {}


def _check_folder(out: Path) -> None:
    """Make ``out`` and see that it can be written to, before anything runs. Raises PolicyError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PolicyError(f"out: cannot make the folder {out}: {error.strerror}") from None
    if not os.access(out, os.W_OK | os.X_OK):
        raise PolicyError(f"out: the folder {out} cannot be written to")


class AsyncRunner:
    """Runs programs in one tier under one policy; for asyncio. Use as an asynchronous context manager.

    ``tier`` or ``floor`` chooses the boundary (see :mod:`fumehood.registry`); a ready :class:`~fumehood.tier.Tier` may
    be given instead of a name. ``warm`` is how many sandboxes are kept ready beforehand (see :mod:`fumehood.pool`; a
    pool of other bounds is given as ``tier``). Many runs may be under way at once.
    Raises PolicyError, UnsupportedError or UnavailableError when made: nothing is started then.
    """

    def __init__(
        self,
        *,
        tier: str | Tier | None = None,
        floor: Boundary | str | None = None,
        policy: Policy | None = None,
        warm: int = 0,
    ) -> None:
        self.policy = policy if policy is not None else Policy()
        if tier is None or isinstance(tier, str):
            self.tier = registry.choose(tier=tier, floor=floor, policy=self.policy)
        else:
            self.tier = tier
            require(tier, self.policy, floor=Boundary.parse(floor) if floor is not None else None)
        if warm:
            self.tier = Pool(self.tier, size=warm)
        self._singles = self.tier if isinstance(self.tier, Single) else None  # not asked again at each run
        self._closed = False
        self._sandboxes: set[Sandbox] = set()

    async def run(
        self,
        program: Program | str | bytes,
        *,
        files: Mapping[str, bytes] | None = None,
        stdin: bytes = b"",
        out: Path | None = None,
        sink: Sink | None = None,
        displays: bool = False,
    ) -> Result:
        """Create a sandbox, run one program to its end, and destroy the sandbox.

        ``files`` are put into the work folder first; what the program leaves there is saved below ``out`` once its
        last process is dead. ``displays`` is :attr:`fumehood.model.Code.displays`. A program's failure is a Result.
        Raises PolicyError (malformed request), StartError (nothing ran), FileError (a file could not be put in),
        OutcomeUnknownError, ClosedError.
        """
        wanted = as_program(program, displays=displays)
        inputs = as_inputs(files)
        require_program(self.tier, self.policy, wanted, files=bool(inputs) or out is not None)
        if out is not None:
            _check_folder(out)
        sandbox = await self._create(single=is_simple(wanted, files=bool(inputs), stdin=bool(stdin)))
        try:
            for path, data in inputs.items():
                await sandbox.write_file(path, data)
            result = await sandbox.exec(wanted, stdin=stdin, sink=sink, last=True)
        except BaseException:
            await self._destroy(sandbox)
            raise
        try:
            artifacts = await self._destroy(sandbox, out)
        except FumehoodError as error:  # the program has run: its result is not lost because the disk is full
            artifacts = (Artifact(".", 0, skipped=error.message),)
        return replace(result, artifacts=artifacts) if artifacts else result

    @contextlib.asynccontextmanager
    async def open(self, *, idle_s: float | None = None, lifetime_s: float | None = None) -> AsyncIterator[FullSandbox]:
        """A live sandbox, destroyed at the end of the block; see :meth:`FullSandbox.expire_after` for the two times.

        Raises as :meth:`run` does before anything ran.
        """
        sandbox = await self._open(idle_s, lifetime_s)
        try:
            yield sandbox
        finally:
            await self._destroy(sandbox)

    async def _open(self, idle_s: float | None, lifetime_s: float | None) -> FullSandbox:
        require(self.tier, self.policy, live=True)
        for name, value in (("idle_s", idle_s), ("lifetime_s", lifetime_s)):
            if value is not None and not 0 < value <= 30 * 86400:
                raise PolicyError(f"{name} must be more than 0 and at most 30 days, not {value!r}")
        # A tier whose features say "live" makes sandboxes of this kind; what it lacks of it, it refuses by name.
        sandbox = cast(FullSandbox, await self._create())
        if idle_s is not None or lifetime_s is not None:
            sandbox.expire_after(idle_s=idle_s, lifetime_s=lifetime_s)
        return sandbox

    def map(
        self, programs: Iterable[Item] | AsyncIterable[Item], *, concurrency: int | None = None, ordered: bool = True
    ) -> AsyncIterator[Mapped]:
        """Run many programs, ``concurrency`` at a time, each in a sandbox of its own; what became of each.

        In the order of the input, or as they finish. ``programs`` is read only as there is room, so it may be endless;
        a plain iterable must not block. A program that never started is tried again; one that may have run is not, and
        carries its OutcomeUnknownError. Whoever leaves the loop early closes the iterator (``contextlib.aclosing``).
        Raises PolicyError; the iterator raises what ends the whole, such as ClosedError and UnavailableError.
        """
        return drive(Batch(self._run_job, concurrency=concurrency, ordered=ordered), programs)

    async def _run_job(self, job: Job) -> Result:
        return await self.run(job.program, files=job.files, stdin=job.stdin)

    async def fill(self) -> None:
        """Wait until the warm sandboxes are ready; at once if none were asked for. Raises ClosedError."""
        if isinstance(self.tier, Pool):
            await self.tier.fill(self.policy)

    async def _create(self, *, single: bool = False) -> Sandbox:
        tier = self.tier
        if self._closed:
            raise ClosedError("the runner is closed", tier=tier.name)
        if single and self._singles is not None:
            sandbox = await self._singles.create_single(self.policy)
        else:
            sandbox = await tier.create(self.policy)
        self._sandboxes.add(sandbox)
        if self._closed:  # meanwhile
            await self._destroy(sandbox)
            raise ClosedError("the runner is closed", tier=self.tier.name)
        return sandbox

    async def _destroy(self, sandbox: Sandbox, out: Path | None = None) -> tuple[Artifact, ...]:
        self._sandboxes.discard(sandbox)
        return await sandbox.close(out=out)

    async def close(self) -> None:
        """Destroy the sandboxes, whose runs end in OutcomeUnknownError, and the tier's templates. Idempotent."""
        self._closed = True
        await asyncio.gather(*(self._destroy(sandbox) for sandbox in tuple(self._sandboxes)), return_exceptions=True)
        await self.tier.close()

    async def __aenter__(self) -> AsyncRunner:
        if isinstance(self.tier, Pool):
            self.tier.begin(self.policy)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


#: How long a portal waits for the tasks of its loop to end: what they wait for is killed already.
SETTLE_S = 10.0


class _Portal:
    """One event loop in one daemon thread, and a way to wait for a coroutine there."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fumehood", daemon=True)
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run ``coroutine`` to its end. An interrupt of the waiting thread cancels it and waits for its clean-up."""
        if not self._thread.is_alive():
            coroutine.close()
            raise ClosedError("the runner is closed")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            if not future.done():
                future.cancel()
                with contextlib.suppress(BaseException):
                    asyncio.run_coroutine_threadsafe(_settle(), self._loop).result(5)
            raise

    def stop(self) -> None:
        if self._thread.is_alive():
            # Runs of other threads have lost their sandboxes; their threads wait for what they still have to say.
            asyncio.run_coroutine_threadsafe(_settle(everything=True), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


async def _settle(everything: bool = False) -> None:
    """Wait for the other tasks of this loop that are being cancelled, or for all, but not for ever."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    waiting = [task for task in others if everything or task.cancelling()]
    if waiting:
        await asyncio.wait(waiting, timeout=SETTLE_S)


class LiveProgram:
    """The synchronous face of a :class:`~fumehood.tier.RunningProgram`; its methods mean and raise the same."""

    def __init__(self, portal: _Portal, running: RunningProgram) -> None:
        self._portal = portal
        self._running = running

    @property
    def done(self) -> bool:
        """Whether it is over."""
        return self._running.done

    @property
    def stdout(self) -> str:
        """What it has printed so far; bytes that are not UTF-8 become U+FFFD."""
        return self._running.stdout_data.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        """The same of stderr."""
        return self._running.stderr_data.decode("utf-8", "replace")

    def wait(self) -> Result:
        """Its end."""
        return self._portal.call(self._running.wait())

    def write(self, data: bytes) -> None:
        """Give it something to read."""
        self._portal.call(self._running.write(data))

    def close_stdin(self) -> None:
        """End of file, once it has read what was written."""
        self._portal.call(self._running.close_stdin())

    def signal(self, number: int) -> None:
        """A signal to its process group."""
        self._portal.call(self._running.signal(number))

    def kill(self) -> None:
        """SIGKILL to its process group."""
        self._portal.call(self._running.kill())

    def resize(self, rows: int, columns: int) -> None:
        """Another size for its pseudo-terminal."""
        self._portal.call(self._running.resize(rows, columns))


class LiveSandbox:
    """The synchronous face of a live :class:`~fumehood.tier.FullSandbox`; its methods mean and raise the same."""

    def __init__(self, portal: _Portal, sandbox: FullSandbox) -> None:
        self._portal = portal
        self._sandbox = sandbox

    @property
    def receipt(self) -> Receipt:
        """What is enforced on this sandbox."""
        return self._sandbox.receipt

    def exec(
        self,
        program: Program | str | bytes,
        *,
        stdin: bytes = b"",
        sink: Sink | None = None,
        context: str | None = None,
    ) -> Result:
        """Run one program; state and files of earlier ones are there. A failure of the program is a Result.

        ``context`` names the namespace that code runs in, see :class:`fumehood.model.Code`.
        """
        return self._portal.call(self._sandbox.exec(as_program(program, context=context), stdin=stdin, sink=sink))

    def start(
        self,
        program: Program | str | bytes,
        *,
        stdin: bool = False,
        sink: Sink | None = None,
        background: bool = False,
        context: str | None = None,
    ) -> LiveProgram:
        """Begin to run a program, and return while it runs."""
        wanted = as_program(program, context=context)
        starting = self._sandbox.start(wanted, stdin=stdin, sink=sink, background=background)
        return LiveProgram(self._portal, self._portal.call(starting))

    def write_file(self, path: str, data: bytes) -> None:
        """Create or replace a file of the work folder."""
        self._portal.call(self._sandbox.write_file(path, data))

    def write_stream(self, path: str, source: Iterable[bytes]) -> None:
        """The same from pieces (a file opened with "rb" has lines, which do), holding one at a time."""
        self._portal.call(self._sandbox.write_stream(path, _in_threads(source)))

    def read_file(self, path: str, *, max_bytes: int = 64 << 20) -> bytes:
        """A regular file's content, refused above ``max_bytes``."""
        return self._portal.call(self._sandbox.read_file(path, max_bytes=max_bytes))

    def read_stream(self, path: str) -> Iterator[bytes]:
        """A regular file's content in pieces of at most 1 MiB."""
        return self._each(self._sandbox.read_stream(path))

    def list_files(self) -> tuple[FileInfo, ...]:
        """The work folder's entries, sorted by path."""
        return self._portal.call(self._sandbox.list_files())

    def stat(self, path: str) -> FileInfo:
        """One entry, a link itself and not what it points to."""
        return self._portal.call(self._sandbox.stat(path))

    def remove(self, path: str) -> None:
        """Remove a file, or a folder with all in it."""
        self._portal.call(self._sandbox.remove(path))

    def rename(self, path: str, new_path: str) -> None:
        """Move a file or a folder, replacing a file."""
        self._portal.call(self._sandbox.rename(path, new_path))

    def make_folder(self, path: str) -> None:
        """Make a folder with its parents; one that exists is fine."""
        self._portal.call(self._sandbox.make_folder(path))

    def export_tar(self, path: str = "", *, skipped: Callable[[str, str], None] | None = None) -> Iterator[bytes]:
        """A folder ("": the work folder) as a tar stream of its regular files and folders."""
        return self._each(self._sandbox.export_tar(path, skipped=skipped))

    def import_tar(self, source: Iterable[bytes], path: str = "") -> None:
        """Unpack an uncompressed tar stream into a folder."""
        self._portal.call(self._sandbox.import_tar(_in_threads(source), path))

    def interrupt(self) -> None:
        """Send the exec that another thread waits for what Ctrl-C would."""
        self._portal.call(self._sandbox.interrupt())

    def close(self, *, out: Path | None = None) -> tuple[Artifact, ...]:
        """Destroy the sandbox; save what is new in its work folder below ``out`` if given."""
        return self._portal.call(self._sandbox.close(out=out))

    def _each(self, source: AsyncIterator[bytes]) -> Iterator[bytes]:
        while (piece := self._portal.call(_next(source))) is not None:
            yield piece


async def _next(source: AsyncIterator[bytes]) -> bytes | None:
    return await anext(source, None)


async def _in_threads(source: Iterable[bytes]) -> AsyncIterator[bytes]:
    """The pieces of an iterator that may block, which the loop of every other run must not."""
    pieces = iter(source)
    while (piece := await in_thread(next, pieces, None)) is not None:
        yield piece


class Runner:
    """Runs programs in one tier under one policy. Use as a context manager; threads may share it.

    Takes and raises what :class:`AsyncRunner` does, of which it is the synchronous face.
    """

    def __init__(
        self,
        *,
        tier: str | Tier | None = None,
        floor: Boundary | str | None = None,
        policy: Policy | None = None,
        warm: int = 0,
    ) -> None:
        self._core = AsyncRunner(tier=tier, floor=floor, policy=policy, warm=warm)
        self._portal = _Portal()
        if warm:
            self._portal.call(self._core.__aenter__())

    @property
    def tier(self) -> Tier:
        """The tier that was chosen."""
        return self._core.tier

    @property
    def policy(self) -> Policy:
        """The policy that holds for every run."""
        return self._core.policy

    def run(
        self,
        program: Program | str | bytes,
        *,
        files: Mapping[str, bytes] | None = None,
        stdin: bytes = b"",
        out: Path | None = None,
        sink: Sink | None = None,
        displays: bool = False,
    ) -> Result:
        """One program in a sandbox of its own; see :meth:`AsyncRunner.run`."""
        return self._portal.call(
            self._core.run(program, files=files, stdin=stdin, out=out, sink=sink, displays=displays)
        )

    def map(
        self, programs: Iterable[Item], *, concurrency: int | None = None, ordered: bool = True
    ) -> Iterator[Mapped]:
        """Many programs at once; see :meth:`AsyncRunner.map`. ``programs`` is read in the caller's thread."""
        batch = Batch(self._core._run_job, concurrency=concurrency, ordered=ordered)
        return drive_from_thread(batch, programs, self._portal.call)

    def fill(self) -> None:
        """Wait until the warm sandboxes are ready; at once if none were asked for."""
        self._portal.call(self._core.fill())

    @contextlib.contextmanager
    def open(self, *, idle_s: float | None = None, lifetime_s: float | None = None) -> Iterator[LiveSandbox]:
        """A live sandbox, destroyed at the end of the block; see :meth:`AsyncRunner.open`."""
        sandbox = self._portal.call(self._core._open(idle_s, lifetime_s))
        try:
            yield LiveSandbox(self._portal, sandbox)
        finally:
            with contextlib.suppress(ClosedError):  # the runner was closed in the block, and the sandbox with it
                self._portal.call(self._core._destroy(sandbox))

    def close(self) -> None:
        """Release everything. Idempotent."""
        with contextlib.suppress(ClosedError):
            self._portal.call(self._core.close())
        self._portal.stop()

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_default: Runner | None = None
_default_lock = threading.Lock()


def _default_runner() -> Runner:
    global _default  # noqa: PLW0603 - one shared runner per process is what makes run() fast the second time
    with _default_lock:
        if _default is None:
            _default = Runner()
            atexit.register(_default.close)
        return _default


def run(
    program: Program | str | bytes,
    *,
    tier: str | None = None,
    floor: Boundary | str | None = None,
    policy: Policy | None = None,
    files: Mapping[str, bytes] | None = None,
    stdin: bytes = b"",
    out: Path | None = None,
    sink: Callable[[Any, bytes], None] | None = None,
    displays: bool = False,
) -> Result:
    """Run one program in a sandbox of its own, with safe defaults: tier ``jail``, no network, 10 s, 256 MiB.

    With neither tier, floor nor policy given, the process's shared Runner is used, so that only the first call pays
    for the template. Raises as :meth:`AsyncRunner.run`.
    """
    if tier is None and floor is None and policy is None:
        return _default_runner().run(program, files=files, stdin=stdin, out=out, sink=sink, displays=displays)
    with Runner(tier=tier, floor=floor, policy=policy) as runner:
        return runner.run(program, files=files, stdin=stdin, out=out, sink=sink, displays=displays)
