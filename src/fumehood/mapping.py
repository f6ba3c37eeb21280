"""Many programs at once, each in a sandbox of its own, with bounded memory whatever their number.

A :class:`Batch` has at most ``concurrency`` programs running and a few results that nobody has taken yet; it takes the
next program only when there is room. So neither a long input nor a slow reader makes it grow.

What never started is tried again. What may have run is not: its item carries the OutcomeUnknownError.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fumehood.errors import FileError, FumehoodError, OutcomeUnknownError, PolicyError, StartError
from fumehood.model import Code, Program, Result

#: Pauses before a program that never started is tried again, in seconds; after the last one it is given up.
RETRY_PAUSES_S = (0.05, 0.5, 2.0)

#: In order, one slow program holds back this many times ``concurrency`` others, finished or begun.
WINDOW = 4

CONCURRENCY_MAX = 1024

#: What concerns one program only. Anything else (the runner is closed, the tier is gone) ends the whole batch.
OF_ONE = (PolicyError, StartError, OutcomeUnknownError, FileError)


@dataclass(frozen=True, slots=True)
class Job:
    """A program with what it gets. ``ident`` is handed back with its result."""

    program: Program
    ident: Any = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    stdin: bytes = b""


@dataclass(frozen=True, slots=True)
class Refused:
    """In the place of a job that cannot be: its item carries ``error``."""

    error: FumehoodError
    ident: Any = None


@dataclass(frozen=True, slots=True)
class Mapped:
    """What became of one program: either ``result`` or ``error`` is set."""

    index: int  # its place in the input, from 0
    ident: Any
    result: Result | None = None
    error: FumehoodError | None = None

    @property
    def may_have_run(self) -> bool:
        """Whether something of the program may have run."""
        return self.result is not None or isinstance(self.error, OutcomeUnknownError)


Item = Program | str | bytes | Job | Refused
Run = Callable[[Job], Awaitable[Result]]


class Batch:
    """The programs under way. Used inside one event loop; :meth:`stop` must be called, whatever happens.

    ``run`` runs one job. ``concurrency`` is how many run at a time (default: the processors of this process).
    Raises PolicyError.
    """

    def __init__(self, run: Run, *, concurrency: int | None = None, ordered: bool = True) -> None:
        if concurrency is None:
            concurrency = len(os.sched_getaffinity(0))
        if type(concurrency) is not int or not 1 <= concurrency <= CONCURRENCY_MAX:
            raise PolicyError(f"concurrency must be a whole number from 1 to {CONCURRENCY_MAX}, not {concurrency!r}")
        self._run = run
        self._ordered = ordered
        self._slots = asyncio.Semaphore(concurrency)
        self._window = concurrency * (WINDOW if ordered else 1)
        self._begun = 0
        self._taken = 0
        self._tasks: dict[int, asyncio.Task[Mapped]] = {}
        self._finished: dict[int, asyncio.Task[Mapped]] = {}
        self._changed: asyncio.Future[None] | None = None

    @property
    def has_room(self) -> bool:
        """Whether one more may start."""
        return self._begun - self._taken < self._window

    @property
    def pending(self) -> bool:
        """Whether there is something that was not taken yet."""
        return self._begun > self._taken

    def start(self, item: Item) -> None:
        """Begin with the next program; look at :attr:`has_room` before."""
        index = self._begun
        self._begun += 1
        task = asyncio.get_running_loop().create_task(self._one(index, item))
        self._tasks[index] = task
        task.add_done_callback(lambda done: self._finish(index, done))

    def take(self) -> list[Mapped]:
        """What is finished and next in order. Raises what ended the batch."""
        out = []
        while self._finished:
            index = self._taken if self._ordered else next(iter(self._finished))
            task = self._finished.pop(index, None)
            if task is None:
                break
            self._taken += 1
            out.append(task.result())
        return out

    async def wait(self, other: asyncio.Future[Any] | None = None) -> None:
        """Until :meth:`take` has something to give, nothing is pending, or ``other`` is done."""
        while not self._ready() and self.pending and not (other is not None and other.done()):
            self._changed = asyncio.get_running_loop().create_future()
            if other is None:
                await self._changed
            else:
                await asyncio.wait((self._changed, other), return_when=asyncio.FIRST_COMPLETED)
        if not self.pending and other is not None:
            await asyncio.wait((other,))

    async def admit(self, item: Item) -> list[Mapped]:
        """Begin with ``item`` as soon as there is room; what can be taken by then."""
        out = self.take()
        while not self.has_room:
            await self.wait()
            out += self.take()
        self.start(item)
        return out

    async def drain(self) -> list[Mapped]:
        """Wait for what is next; empty when nothing is pending."""
        await self.wait()
        return self.take()

    async def stop(self) -> None:
        """Cancel what runs and wait until its sandboxes are gone. Idempotent."""
        tasks = tuple(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for task in self._finished.values():
            if not task.cancelled():
                task.exception()  # it was seen
        self._finished.clear()
        self._taken = self._begun

    def _ready(self) -> bool:
        return bool(self._finished) and (not self._ordered or self._taken in self._finished)

    def _finish(self, index: int, task: asyncio.Task[Mapped]) -> None:
        del self._tasks[index]
        self._finished[index] = task
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    async def _one(self, index: int, item: Item) -> Mapped:
        if isinstance(item, Refused):
            return Mapped(index, item.ident, error=item.error)
        ident = None
        try:
            if not isinstance(item, Job):
                item = Job(Code(item) if isinstance(item, (str, bytes)) else item)
            ident = item.ident
            async with self._slots:
                return Mapped(index, ident, await self._with_retries(item))
        except OF_ONE as error:
            return Mapped(index, ident, error=error)

    async def _with_retries(self, job: Job) -> Result:
        for pause_s in RETRY_PAUSES_S:
            try:
                return await self._run(job)
            except StartError:
                await asyncio.sleep(pause_s)
        return await self._run(job)


async def drive(batch: Batch, items: Iterable[Item] | AsyncIterable[Item]) -> AsyncIterator[Mapped]:
    """Put ``items`` through ``batch``. A plain iterable is asked in the event loop and must not block."""
    more = True
    fetch: asyncio.Future[Item | None] | None = None
    if isinstance(items, AsyncIterable):
        slow, quick = aiter(items), None
    else:
        slow, quick = None, iter(items)
    try:
        while True:
            while quick is not None and batch.has_room and (item := next(quick, None)) is not None:
                batch.start(item)
            if slow is not None and fetch is None and more and batch.has_room:
                fetch = asyncio.ensure_future(anext(slow, None))
            if fetch is None and not batch.pending:
                return
            await batch.wait(fetch)
            if fetch is not None and fetch.done():
                fetched, fetch = fetch.result(), None
                more = fetched is not None
                if fetched is not None:
                    batch.start(fetched)
            for mapped in batch.take():
                yield mapped
    finally:
        if fetch is not None:
            fetch.cancel()
            await asyncio.wait((fetch,))
        await batch.stop()


def drive_from_thread(batch: Batch, items: Iterable[Item], call: Callable[[Any], Any]) -> Iterator[Mapped]:
    """The same from another thread than the event loop's: ``call`` runs a coroutine there to its end.

    ``items`` is asked in this thread.
    """
    try:
        for item in items:
            yield from call(batch.admit(item))
        while batch.pending:
            yield from call(batch.drain())
    finally:
        call(batch.stop())
