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
from typing import Any, TypeVar

from fumehood import registry
from fumehood.errors import ClosedError, FumehoodError, PolicyError
from fumehood.mapping import Batch, Item, Job, Mapped, drive, drive_from_thread
from fumehood.model import Artifact, Boundary, Code, Policy, Program, Receipt, Result, check_path
from fumehood.pool import Pool
from fumehood.tier import FileInfo, Sandbox, Sink, Tier, require

T = TypeVar("T")


def _program(program: Program | str | bytes) -> Program:
    return Code(program) if isinstance(program, (str, bytes)) else program


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
        self._closed = False

    async def run(
        self,
        program: Program | str | bytes,
        *,
        files: Mapping[str, bytes] | None = None,
        stdin: bytes = b"",
        out: Path | None = None,
        sink: Sink | None = None,
    ) -> Result:
        """Create a sandbox, run one program to its end, and destroy the sandbox.

        ``files`` are put into the work folder first; what the program leaves there is saved below ``out`` once its
        last process is dead. A program's failure is a Result. Raises PolicyError (malformed request), StartError
        (nothing ran), FileError (a file could not be put in), OutcomeUnknownError, ClosedError.
        """
        wanted = _program(program)
        inputs = {check_path(path): data for path, data in (files or {}).items()}
        require(self.tier, self.policy, program=wanted, files=bool(inputs) or out is not None)
        sandbox = await self._create()
        try:
            for path, data in inputs.items():
                await sandbox.write_file(path, data)
            result = await sandbox.exec(wanted, stdin=stdin, sink=sink, last=True)
        except BaseException:
            await sandbox.close()
            raise
        try:
            artifacts = await sandbox.close(out=out)
        except FumehoodError as error:  # the program has run: its result is not lost because the disk is full
            artifacts = (Artifact(".", 0, skipped=error.message),)
        return replace(result, artifacts=artifacts) if artifacts else result

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Sandbox]:
        """A live sandbox, destroyed at the end of the block. Raises as :meth:`run` does before anything ran."""
        require(self.tier, self.policy, live=True)
        sandbox = await self._create()
        try:
            yield sandbox
        finally:
            await sandbox.close()

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

    async def _create(self) -> Sandbox:
        if self._closed:
            raise ClosedError("the runner is closed", tier=self.tier.name)
        return await self.tier.create(self.policy)

    async def close(self) -> None:
        """Release the tier's templates. Idempotent."""
        self._closed = True
        await self.tier.close()

    async def __aenter__(self) -> AsyncRunner:
        if isinstance(self.tier, Pool):
            self.tier.begin(self.policy)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


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
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


async def _settle() -> None:
    """Wait for the other tasks of this loop that are being cancelled."""
    waiting = [task for task in asyncio.all_tasks() if task is not asyncio.current_task() and task.cancelling()]
    if waiting:
        await asyncio.wait(waiting)


class LiveSandbox:
    """The synchronous face of a live :class:`~fumehood.tier.Sandbox`; its methods mean and raise the same."""

    def __init__(self, portal: _Portal, sandbox: Sandbox) -> None:
        self._portal = portal
        self._sandbox = sandbox

    @property
    def receipt(self) -> Receipt:
        """What is enforced on this sandbox."""
        return self._sandbox.receipt

    def exec(self, program: Program | str | bytes, *, stdin: bytes = b"", sink: Sink | None = None) -> Result:
        """Run one program; state and files of earlier ones are there. A failure of the program is a Result."""
        return self._portal.call(self._sandbox.exec(_program(program), stdin=stdin, sink=sink))

    def write_file(self, path: str, data: bytes) -> None:
        """Create or replace a file of the work folder."""
        self._portal.call(self._sandbox.write_file(path, data))

    def read_file(self, path: str, *, max_bytes: int = 64 << 20) -> bytes:
        """A regular file's content, refused above ``max_bytes``."""
        return self._portal.call(self._sandbox.read_file(path, max_bytes=max_bytes))

    def list_files(self) -> tuple[FileInfo, ...]:
        """The work folder's entries, sorted by path."""
        return self._portal.call(self._sandbox.list_files())

    def remove(self, path: str) -> None:
        """Remove a file, or a folder with all in it."""
        self._portal.call(self._sandbox.remove(path))

    def interrupt(self) -> None:
        """Send the exec that another thread waits for what Ctrl-C would."""
        self._portal.call(self._sandbox.interrupt())

    def close(self, *, out: Path | None = None) -> tuple[Artifact, ...]:
        """Destroy the sandbox; save what is new in its work folder below ``out`` if given."""
        return self._portal.call(self._sandbox.close(out=out))


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
    ) -> Result:
        """One program in a sandbox of its own; see :meth:`AsyncRunner.run`."""
        return self._portal.call(self._core.run(program, files=files, stdin=stdin, out=out, sink=sink))

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
    def open(self) -> Iterator[LiveSandbox]:
        """A live sandbox, destroyed at the end of the block."""
        require(self.tier, self.policy, live=True)
        sandbox = self._portal.call(self._core._create())
        try:
            yield LiveSandbox(self._portal, sandbox)
        finally:
            self._portal.call(sandbox.close())

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
) -> Result:
    """Run one program in a sandbox of its own, with safe defaults: tier ``jail``, no network, 10 s, 256 MiB.

    With neither tier, floor nor policy given, the process's shared Runner is used, so that only the first call pays
    for the template. Raises as :meth:`AsyncRunner.run`.
    """
    if tier is None and floor is None and policy is None:
        return _default_runner().run(program, files=files, stdin=stdin, out=out, sink=sink)
    with Runner(tier=tier, floor=floor, policy=policy) as runner:
        return runner.run(program, files=files, stdin=stdin, out=out, sink=sink)
