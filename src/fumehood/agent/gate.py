"""The gate: approval, then quota, then the audit record, then the run. Every front end runs code through one.

A :class:`Gate` wraps a runner and is one: ``run`` and ``open`` mean what :class:`~fumehood.runner.AsyncRunner`'s do,
and a live sandbox that it opens asks at each exec. In this order:

1. The question is recorded and asked (:mod:`fumehood.agent.approval`). A no is a Result with Outcome.DENIED.
2. The most that the run can use is reserved (:mod:`fumehood.agent.quotas`), or QuotaError is raised.
3. The start is recorded (:mod:`fumehood.agent.audit`) and on the disk before anything starts, or AuditError is raised.
4. It runs. Then, whatever came of it (an error and a cancellation too), the reservation becomes what was used, and the
   end is recorded. A result whose end cannot be recorded is withheld.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from fumehood.agent.approval import Action, Approval, Ask, Decision, new_ident
from fumehood.agent.audit import AuditLog
from fumehood.agent.quotas import LEASE_S, Amounts, Per, Quotas
from fumehood.errors import AuditError, ClosedError, FileError, PolicyError, QuotaError, StartError, UnavailableError
from fumehood.model import Artifact, Code, Outcome, Policy, Program, Receipt, Result, Usage, check_path
from fumehood.threads import in_thread
from fumehood.tier import FileInfo, Sandbox, Sink, Tier

T = TypeVar("T")

#: Errors of a runner's ``run`` and a sandbox's ``exec`` that come before the program starts.
_NOTHING_RAN = (StartError, PolicyError, UnavailableError, FileError, ClosedError)

#: How many input files a record names; the rest are counted.
FILES_RECORDED_MAX = 64


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
    ) -> Result: ...

    def open(self) -> AbstractAsyncContextManager[Sandbox]: ...


@dataclass(frozen=True, slots=True)
class Caller:
    """On whose behalf: ``session`` is one conversation, ``key`` names (never holds) the credential that was used."""

    session: str
    key: str = ""

    @property
    def subjects(self) -> dict[Per, str]:
        """Whose quotas count."""
        return {"session": self.session, "key": self.key} if self.key else {"session": self.session}


@dataclass(slots=True)
class _Ticket:
    """A run that was let through."""

    run: str
    reservation: str | None
    began: float  # the event loop's time


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
        self._approval = approval
        self._quotas = quotas
        self._audit = audit

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
        return Gate(self._runner, caller=caller, approval=self._approval, quotas=self._quotas, audit=self._audit)

    async def run(
        self,
        program: Program | str | bytes,
        *,
        files: Mapping[str, bytes] | None = None,
        stdin: bytes = b"",
        out: Path | None = None,
        sink: Sink | None = None,
    ) -> Result:
        """As :meth:`fumehood.runner.AsyncRunner.run`; also raises QuotaError and AuditError. See the module."""
        wanted = Code(program) if isinstance(program, (str, bytes)) else program
        inputs = {check_path(path): data for path, data in (files or {}).items()}
        details = {"files": _named(inputs), "saves_files": out is not None}
        ticket = await self._admit(wanted, details, sandboxes=1, saves_files=out is not None)
        if isinstance(ticket, Decision):
            return self._denied(ticket)
        return await self._accompany(ticket, self._runner.run(wanted, files=inputs, stdin=stdin, out=out, sink=sink))

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[GatedSandbox]:
        """A live sandbox whose execs pass the gate one by one. Raises as the runner's, and QuotaError."""
        reservation = await self._reserve(Amounts(sandboxes=1))
        try:
            async with self._runner.open() as sandbox, self._renewing(reservation):
                yield GatedSandbox(sandbox, self, new_ident())
        finally:
            await _to_the_end(self._settle(reservation, Amounts()))

    # --- admitting

    async def _admit(
        self, program: Program, details: Mapping[str, Any], *, sandboxes: int, saves_files: bool
    ) -> _Ticket | Decision:
        run = new_ident()
        facts = {**_program_facts(program), **details}
        action: Action = "run_python" if isinstance(program, Code) else "run_command"
        ask = self._ask(run, action, program, saves_files=saves_files)
        if refused := await self._ask_if_needed(ask, facts):
            return refused
        limits = self.policy.limits
        most = Amounts(1, limits.cpu_s, limits.wall_s, limits.output_bytes, sandboxes)
        try:
            reservation = await self._reserve(most, lease_s=limits.wall_s)
        except QuotaError as error:
            await self._record("over_quota", run, {**facts, "quota": str(error.quota)})
            raise
        try:
            await _to_the_end(self._record("started", run, {**facts, **self._code(program)}))
        except BaseException as error:
            await _to_the_end(self._settle(reservation, Amounts()))
            if not isinstance(error, AuditError):  # cancelled when the record was there already
                await _to_the_end(self._record_failure("failed", run, error, nothing_ran=True))
            raise
        return _Ticket(run, reservation, asyncio.get_running_loop().time())

    def _ask(self, run: str, action: Action, program: Program | None, *, saves_files: bool) -> Ask:
        caller = self.caller
        return Ask(run, action, program, caller.session, caller.key, self.tier.name, self.policy, saves_files)

    async def _ask_if_needed(self, ask: Ask, facts: Mapping[str, Any]) -> Decision | None:
        """None if it may go on, else the refusal. Question and answer are recorded."""
        if self._approval is None:
            return None
        reasons = self._approval.reasons(ask)
        if not reasons:
            return None
        code = self._code(ask.program) if ask.program is not None else {}
        await self._record("asked", ask.ident, {**facts, **code, "action": ask.action, "reasons": list(reasons)})
        try:
            decision = await self._approval.decide(replace(ask, reasons=reasons))
        except BaseException as error:
            await _to_the_end(self._record_failure("unanswered", ask.ident, error, nothing_ran=True))
            raise
        event = "approved" if decision.approved else "timed_out" if decision.timed_out else "denied"
        await self._record(event, ask.ident, {"by": decision.by, "reason": decision.reason})
        return None if decision.approved else decision

    def _denied(self, decision: Decision) -> Result:
        why = decision.reason if decision.timed_out else f"approval was refused by {decision.by}"
        if decision.reason and not decision.timed_out:
            why += f": {decision.reason}"
        receipt = Receipt(self.tier.name, self.tier.features.boundary, (), notes=(why, "nothing was started"))
        return Result(Outcome.DENIED, None, b"", b"", 0.0, Usage(), receipt)

    # --- the run and its end

    async def _accompany(self, ticket: _Ticket, run: Coroutine[Any, Any, Result]) -> Result:
        """Await ``run`` and close its books, whatever comes of it."""
        try:
            result = await run
        except BaseException as error:
            await _to_the_end(self._failed(ticket, error))
            raise
        await _to_the_end(self._ended(ticket, result))
        return result

    async def _failed(self, ticket: _Ticket, error: BaseException) -> None:
        limits = self.policy.limits
        seconds = asyncio.get_running_loop().time() - ticket.began
        # What was lost or cancelled may have used all that it was allowed; what never started used nothing.
        used = Amounts(1, limits.cpu_s, min(seconds, limits.wall_s), limits.output_bytes)
        nothing_ran = isinstance(error, _NOTHING_RAN)
        with contextlib.suppress(UnavailableError):  # the first error says more; the reservation's lease ends it
            await self._settle(ticket.reservation, Amounts() if nothing_ran else used)
        await self._record_failure("failed", ticket.run, error, nothing_ran=nothing_ran, seconds=round(seconds, 6))

    async def _record_failure(self, event: str, run: str, error: BaseException, **fields: Any) -> None:
        with contextlib.suppress(AuditError):  # the first error says more; the log shows a start without an end
            await self._record(event, run, {"error": type(error).__name__, **fields})

    async def _ended(self, ticket: _Ticket, result: Result) -> None:
        limits = self.policy.limits
        output_bytes = len(result.stdout_data) + len(result.stderr_data)
        cpu_s = result.usage.cpu_s
        if cpu_s is None:  # nobody counted
            cpu_s = min(result.seconds * max(limits.cpus, 1.0), limits.cpu_s)
        try:
            await self._record("ended", ticket.run, self._ending(result))
        except AuditError as error:
            message = f"{error.message}; the run took place, and its result is withheld"
            raise AuditError(message, remedy=error.remedy) from error
        finally:
            await self._settle(ticket.reservation, Amounts(1, cpu_s, result.seconds, output_bytes))

    def _ending(self, result: Result) -> dict[str, Any]:
        usage = result.usage
        fields = {
            "outcome": result.outcome.value,
            "exit_code": result.exit_code,
            "seconds": round(result.seconds, 6),
            "cpu_s": usage.cpu_s,
            "memory_peak_bytes": usage.memory_peak_bytes,
            "stdout_bytes": usage.stdout_bytes,
            "stderr_bytes": usage.stderr_bytes,
            "stdout_sha256": hashlib.sha256(result.stdout_data).hexdigest(),
            "stderr_sha256": hashlib.sha256(result.stderr_data).hexdigest(),
            "artifacts": [{"path": a.path, "size_bytes": a.size_bytes, "skipped": a.skipped} for a in result.artifacts],
            "receipt": result.receipt.to_dict(),
        }
        if self._audit is not None and self._audit.keep.output:
            fields["stdout"] = result.stdout_data.decode("utf-8", "surrogateescape")
            fields["stderr"] = result.stderr_data.decode("utf-8", "surrogateescape")
        return fields

    # --- quotas and the log, off the event loop: both wait for locks and the disk

    async def _reserve(self, most: Amounts, *, lease_s: float = 0.0) -> str | None:
        if self._quotas is None:
            return None
        quotas = self._quotas
        waiting = asyncio.ensure_future(in_thread(quotas.reserve, self.caller.subjects, most, lease_s=lease_s))
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            waiting.add_done_callback(self._give_back)
            raise

    def _give_back(self, done: asyncio.Future[str]) -> None:
        """A reservation that came after its caller was cancelled."""
        if not done.cancelled() and done.exception() is None and self._quotas is not None:
            self._quotas.settle(done.result(), Amounts())

    async def _settle(self, reservation: str | None, used: Amounts) -> None:
        if self._quotas is not None and reservation is not None:
            await in_thread(self._quotas.settle, reservation, used)

    @contextlib.asynccontextmanager
    async def _renewing(self, reservation: str | None) -> AsyncIterator[None]:
        """Keep a live sandbox's reservation alive as long as it is."""
        quotas = self._quotas
        if quotas is None or reservation is None:
            yield
            return

        async def renew() -> None:
            while True:
                await asyncio.sleep(LEASE_S / 3)
                await in_thread(quotas.renew, reservation)

        task = asyncio.create_task(renew())
        try:
            yield
        finally:
            task.cancel()

    async def _record(self, event: str, run: str, fields: Mapping[str, Any]) -> None:
        if self._audit is None:
            return
        who = {"run": run, "session": self.caller.session, "key": self.caller.key}
        where = {"tier": self.tier.name, "policy_sha256": self.policy.digest()}
        await in_thread(self._audit.append, event, {**who, **where, **fields})

    def _code(self, program: Program) -> dict[str, str]:
        """The program's text, if the log keeps it."""
        if self._audit is None or not self._audit.keep.code:
            return {}
        if isinstance(program, Code):
            return {"code": program.data.decode("utf-8", "surrogateescape")}
        return {"code": "\0".join(program.argv)}


class GatedSandbox:
    """A live :class:`~fumehood.tier.Sandbox` whose execs, and files saved at its end, pass the gate."""

    def __init__(self, sandbox: Sandbox, gate: Gate, ident: str) -> None:
        self._sandbox = sandbox
        self._gate = gate
        self._ident = ident

    @property
    def receipt(self) -> Receipt:
        """What is enforced on it."""
        return self._sandbox.receipt

    async def exec(
        self, program: Program, *, stdin: bytes = b"", sink: Sink | None = None, last: bool = False
    ) -> Result:
        """As the sandbox's; also raises QuotaError and AuditError, and may return Outcome.DENIED."""
        gate = self._gate
        ticket = await gate._admit(program, {"sandbox": self._ident}, sandboxes=0, saves_files=False)
        if isinstance(ticket, Decision):
            return gate._denied(ticket)
        return await gate._accompany(ticket, self._sandbox.exec(program, stdin=stdin, sink=sink, last=last))

    async def write_file(self, path: str, data: bytes) -> None:
        """As the sandbox's."""
        await self._sandbox.write_file(path, data)

    async def read_file(self, path: str, *, max_bytes: int = 64 << 20) -> bytes:
        """As the sandbox's."""
        return await self._sandbox.read_file(path, max_bytes=max_bytes)

    async def list_files(self) -> tuple[FileInfo, ...]:
        """As the sandbox's."""
        return await self._sandbox.list_files()

    async def remove(self, path: str) -> None:
        """As the sandbox's."""
        await self._sandbox.remove(path)

    async def interrupt(self) -> None:
        """As the sandbox's."""
        await self._sandbox.interrupt()

    async def close(self, *, out: Path | None = None) -> tuple[Artifact, ...]:
        """As the sandbox's; where saving files needs approval and is refused, nothing is saved."""
        if out is not None:
            gate = self._gate
            ask = gate._ask(new_ident(), "save_files", None, saves_files=True)
            if await gate._ask_if_needed(ask, {"sandbox": self._ident}):
                out = None
        return await self._sandbox.close(out=out)


async def _to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Await ``work``; a cancellation is passed on only when it is done."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({task})
        task.exception()
        raise


def _program_facts(program: Program) -> dict[str, Any]:
    if isinstance(program, Code):
        return {
            "kind": "code",
            "code_sha256": hashlib.sha256(program.data).hexdigest(),
            "code_bytes": len(program.data),
        }
    raw = b"\0".join(a.encode("utf-8", "surrogateescape") for a in program.argv)
    return {"kind": "command", "code_sha256": hashlib.sha256(raw).hexdigest(), "code_bytes": len(raw)}


def _named(files: Mapping[str, bytes]) -> list[dict[str, Any]]:
    named: list[dict[str, Any]] = [
        {"path": path, "size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for path, data in list(files.items())[:FILES_RECORDED_MAX]
    ]
    if len(files) > FILES_RECORDED_MAX:
        named.append({"more": len(files) - FILES_RECORDED_MAX})
    return named
