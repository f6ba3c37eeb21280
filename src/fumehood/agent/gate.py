"""The gate: approval, then quota, then the audit record, then the run. Every front end runs code through one.

A :class:`Gate` wraps a runner and is one: ``run`` and ``open`` mean what :class:`~fumehood.runner.AsyncRunner`'s do,
and a live sandbox that it opens asks at each exec. In this order:

1. The question is recorded and asked (:mod:`fumehood.agent.approval`). A no is a Result with Outcome.DENIED.
2. The most that the run can use is reserved (:mod:`fumehood.agent.quotas`), or QuotaError is raised.
3. The start is recorded (:mod:`fumehood.agent.audit`) and on the disk before anything starts, or AuditError is raised.
4. It runs. Then, whatever came of it (an error and a cancellation too), the reservation becomes what was used, and the
   end is recorded. A result whose end cannot be recorded is withheld.

Here is the order; what each step does is in :mod:`fumehood.agent.books`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol

from fumehood.agent.approval import Approval, Decision, new_ident
from fumehood.agent.audit import AuditLog
from fumehood.agent.books import Books, Caller, to_the_end
from fumehood.agent.quotas import Amounts, Quotas
from fumehood.errors import ClosedError, FileError, UnsupportedError
from fumehood.model import Artifact, Policy, Program, Receipt, Result
from fumehood.runner import as_inputs, as_program
from fumehood.tier import FileInfo, FullSandbox, RunningProgram, Sink, Tier

#: How many input files a record names; the rest are counted.
FILES_RECORDED_MAX = 64

#: How much of a path a record holds; what is longer is none, and refused by the sandbox.
_PATH_CHARS_MAX = 4096


class AnyRunner(Protocol):
    """What the agent's side needs of a runner: :class:`~fumehood.runner.AsyncRunner` and :class:`Gate` are ones."""

    @property
    def policy(self) -> Policy: ...

    @property
    def tier(self) -> Tier: ...

    async def run(
        self,
        program: Program | str | bytes,
        *,
        files: Mapping[str, bytes] | None = None,
        stdin: bytes = b"",
        out: Path | None = None,
        sink: Sink | None = None,
        displays: bool = False,
    ) -> Result: ...

    def open(
        self, *, idle_s: float | None = None, lifetime_s: float | None = None
    ) -> AbstractAsyncContextManager[FullSandbox]: ...


class Gate:
    """A runner behind approval, quotas and an audit log, each of which may be None. See the module.

    ``caller`` defaults to a new session. The gate does not close what it was given.
    """

    def __init__(
        self,
        runner: AnyRunner,
        *,
        caller: Caller | None = None,
        approval: Approval | None = None,
        quotas: Quotas | None = None,
        audit: AuditLog | None = None,
    ) -> None:
        self._runner = runner
        self.caller = caller if caller is not None else Caller(new_ident())
        self._books = Books(runner.policy, runner.tier, self.caller, approval=approval, quotas=quotas, audit=audit)

    @property
    def policy(self) -> Policy:
        """The runner's policy."""
        return self._runner.policy

    @property
    def tier(self) -> Tier:
        """The runner's tier."""
        return self._runner.tier

    def for_caller(self, caller: Caller) -> Gate:
        """The same gate for somebody else."""
        gate = Gate(self._runner, caller=caller)
        gate._books = self._books.for_caller(caller)
        return gate

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
        """As :meth:`fumehood.runner.AsyncRunner.run`; also raises QuotaError and AuditError. See the module."""
        wanted = as_program(program, displays=displays)
        inputs = as_inputs(files)
        details = {"files": _named(inputs), **_stdin_facts(stdin), "saves_files": out is not None}
        ticket = await self._books.admit(wanted, details, sandboxes=1, saves_files=out is not None)
        if isinstance(ticket, Decision):
            return self._books.denied(ticket)
        run = self._runner.run(wanted, files=inputs, stdin=stdin, out=out, sink=sink)
        return await self._books.accompany(ticket, run)

    @contextlib.asynccontextmanager
    async def open(
        self, *, idle_s: float | None = None, lifetime_s: float | None = None
    ) -> AsyncIterator[GatedSandbox]:
        """A live sandbox whose execs pass the gate one by one. Raises as the runner's, and QuotaError."""
        books = self._books
        reservation = await books.reserve(Amounts(sandboxes=1))
        gated: GatedSandbox | None = None
        try:
            async with self._runner.open(idle_s=idle_s, lifetime_s=lifetime_s) as sandbox, books.renewing(reservation):
                gated = GatedSandbox(sandbox, books)
                yield gated
        finally:
            if gated is not None:
                await to_the_end(gated._settled())
            await to_the_end(books.settle(reservation, Amounts()))


class GatedSandbox:
    """A live :class:`~fumehood.tier.FullSandbox` behind the gate; its methods mean what the sandbox's do.

    Programs pass the gate one by one. What changes a file, takes one in or hands one out is recorded before it is done
    (AuditError, and it is not done, if that fails); looking at the list of files is not. Files saved on the host, and
    a folder exported as an archive, need the approval that the rules ask for.
    """

    def __init__(self, sandbox: FullSandbox, books: Books) -> None:
        self._sandbox = sandbox
        self._books = books
        self._ident = new_ident()
        self._ends: set[asyncio.Task[Result]] = set()  # of programs that were started

    @property
    def receipt(self) -> Receipt:
        """What is enforced on it."""
        return self._sandbox.receipt

    # --- programs

    async def exec(
        self, program: Program, *, stdin: bytes = b"", sink: Sink | None = None, last: bool = False
    ) -> Result:
        """As the sandbox's; also raises QuotaError and AuditError, and may return Outcome.DENIED."""
        details = {"sandbox": self._ident, **_stdin_facts(stdin)}
        ticket = await self._books.admit(program, details, sandboxes=0, saves_files=False)
        if isinstance(ticket, Decision):
            return self._books.denied(ticket)
        return await self._books.accompany(ticket, self._sandbox.exec(program, stdin=stdin, sink=sink, last=last))

    async def start(
        self, program: Program, *, stdin: bool = False, sink: Sink | None = None, background: bool = False
    ) -> RunningProgram:
        """As the sandbox's; also raises QuotaError and AuditError. A refusal is a program that is over at once.

        Its books are closed when it ends, whoever waits for it. What it is given to read is not recorded. A command in
        the background has no deadline, so it is refused (UnsupportedError) where a quota on wall_s holds.
        """
        if background and self._books.has_quota_on_wall_s():
            what = "a command in the background under a quota on wall_s"
            raise UnsupportedError(f"cannot hold: {what}", unmet=(what,), tier=self.receipt.tier)
        details = {"sandbox": self._ident, "background": background}
        ticket = await self._books.admit(program, details, sandboxes=0, saves_files=False)
        if isinstance(ticket, Decision):
            return DeniedProgram(self._books.denied(ticket))
        started: asyncio.Future[RunningProgram] = asyncio.get_running_loop().create_future()

        async def run() -> Result:
            running = await self._sandbox.start(program, stdin=stdin, sink=sink, background=background)
            started.set_result(running)
            async with self._books.renewing(ticket.reservation):
                return await running.wait()

        end = asyncio.ensure_future(self._books.accompany(ticket, run()))
        self._ends.add(end)
        end.add_done_callback(self._ends.discard)
        end.add_done_callback(lambda task: task.cancelled() or task.exception())  # not awaited by everybody
        try:
            either: set[asyncio.Future[Any]] = {started, end}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            if not started.done():
                end.cancel()
            raise
        if not started.done():
            await end  # which raises why
        return GatedProgram(started.result(), end)

    async def interrupt(self) -> None:
        """As the sandbox's."""
        await self._sandbox.interrupt()

    def expire_after(self, *, idle_s: float | None = None, lifetime_s: float | None = None) -> None:
        """As the sandbox's."""
        self._sandbox.expire_after(idle_s=idle_s, lifetime_s=lifetime_s)

    # --- files

    async def write_file(self, path: str, data: bytes) -> None:
        """As the sandbox's; recorded with the content's hash."""
        await self._note("write_file", path, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        await self._sandbox.write_file(path, data)

    async def write_stream(self, path: str, source: AsyncIterable[bytes] | Iterable[bytes]) -> None:
        """As the sandbox's; recorded by name, since the content is not there yet."""
        await self._note("write_stream", path)
        await self._sandbox.write_stream(path, source)

    async def read_file(self, path: str, *, max_bytes: int = 64 << 20) -> bytes:
        """As the sandbox's; recorded."""
        await self._note("read_file", path)
        return await self._sandbox.read_file(path, max_bytes=max_bytes)

    async def read_stream(self, path: str) -> AsyncIterator[bytes]:
        """As the sandbox's; recorded."""
        await self._note("read_stream", path)
        async for piece in self._sandbox.read_stream(path):
            yield piece

    async def list_files(self) -> tuple[FileInfo, ...]:
        """As the sandbox's."""
        return await self._sandbox.list_files()

    async def stat(self, path: str) -> FileInfo:
        """As the sandbox's."""
        return await self._sandbox.stat(path)

    async def remove(self, path: str) -> None:
        """As the sandbox's; recorded."""
        await self._note("remove", path)
        await self._sandbox.remove(path)

    async def rename(self, path: str, new_path: str) -> None:
        """As the sandbox's; recorded."""
        await self._note("rename", path, new_path=str(new_path)[:_PATH_CHARS_MAX])
        await self._sandbox.rename(path, new_path)

    async def make_folder(self, path: str) -> None:
        """As the sandbox's; recorded."""
        await self._note("make_folder", path)
        await self._sandbox.make_folder(path)

    async def export_tar(
        self, path: str = "", *, skipped: Callable[[str, str], None] | None = None
    ) -> AsyncIterator[bytes]:
        """As the sandbox's; recorded. Raises FileError where saving files needs approval and is refused."""
        if refusal := await self._books.refusal_of_saving({"sandbox": self._ident, "path": path}):
            raise FileError(f"not exported: {self._books.denied(refusal).receipt.notes[0]}", tier=self.receipt.tier)
        await self._note("export_tar", path)
        async for piece in self._sandbox.export_tar(path, skipped=skipped):
            yield piece

    async def import_tar(self, source: AsyncIterable[bytes] | Iterable[bytes], path: str = "") -> None:
        """As the sandbox's; recorded by the folder's name."""
        await self._note("import_tar", path)
        await self._sandbox.import_tar(source, path)

    async def _note(self, operation: str, path: str, **fields: Any) -> None:
        await self._books.note_file(self._ident, operation, str(path)[:_PATH_CHARS_MAX], **fields)

    # --- the end

    async def close(self, *, out: Path | None = None) -> tuple[Artifact, ...]:
        """As the sandbox's; where saving files needs approval and is refused, nothing is saved."""
        if out is not None and await self._books.refusal_of_saving({"sandbox": self._ident}):
            out = None
        try:
            return await self._sandbox.close(out=out)
        finally:
            await self._settled()

    async def _settled(self) -> None:
        """Wait until the books of all programs are closed; called when the sandbox is gone, and they with it."""
        if self._ends:
            await asyncio.wait(self._ends)


class GatedProgram:
    """A program under way in a gated sandbox. Its end is there when it is recorded."""

    def __init__(self, running: RunningProgram, end: asyncio.Task[Result]) -> None:
        self._running = running
        self._end = end

    @property
    def done(self) -> bool:
        """Whether it is over, and its books closed."""
        return self._end.done()

    @property
    def stdout_data(self) -> bytes:
        """What it has printed so far."""
        return self._running.stdout_data

    @property
    def stderr_data(self) -> bytes:
        """The same of stderr."""
        return self._running.stderr_data

    async def wait(self) -> Result:
        """Its end, as the sandbox has it; raises AuditError if that could not be recorded."""
        return await asyncio.shield(self._end)

    async def write(self, data: bytes) -> None:
        """As the program's."""
        await self._running.write(data)

    async def close_stdin(self) -> None:
        """As the program's."""
        await self._running.close_stdin()

    async def signal(self, number: int) -> None:
        """As the program's."""
        await self._running.signal(number)

    async def kill(self) -> None:
        """As the program's."""
        await self._running.kill()

    async def resize(self, rows: int, columns: int) -> None:
        """As the program's."""
        await self._running.resize(rows, columns)


class DeniedProgram:
    """A program that was not approved: over before it began."""

    done = True
    stdout_data = b""
    stderr_data = b""

    def __init__(self, result: Result) -> None:
        self._result = result

    async def wait(self) -> Result:
        """The refusal, Outcome.DENIED."""
        return self._result

    async def write(self, data: bytes) -> None:
        """There is nobody to read it. Raises ClosedError."""
        raise ClosedError("the program was not approved and never ran", tier=self._result.receipt.tier)

    async def close_stdin(self) -> None:
        """Nothing."""

    async def signal(self, number: int) -> None:
        """Nothing."""

    async def kill(self) -> None:
        """Nothing."""

    async def resize(self, rows: int, columns: int) -> None:
        """Nothing."""


def _stdin_facts(stdin: bytes) -> dict[str, Any]:
    return {"stdin_bytes": len(stdin), "stdin_sha256": hashlib.sha256(stdin).hexdigest()} if stdin else {}


def _named(files: Mapping[str, bytes]) -> list[dict[str, Any]]:
    named: list[dict[str, Any]] = [
        {"path": path, "size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for path, data in list(files.items())[:FILES_RECORDED_MAX]
    ]
    if len(files) > FILES_RECORDED_MAX:
        named.append({"more": len(files) - FILES_RECORDED_MAX})
    return named
