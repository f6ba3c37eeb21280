"""The books of a caller: may a run start, what does it use, and what is written down of it.

This is what :mod:`fumehood.agent.gate` does around a run, without the run: approval, quotas and the audit log, each of
which may be missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from fumehood.agent.approval import Action, Approval, Ask, Decision, new_ident
from fumehood.agent.audit import AuditLog
from fumehood.agent.quotas import LEASE_S, Amounts, Per, Quotas
from fumehood.errors import AuditError, ClosedError, FileError, PolicyError, QuotaError, StartError, UnavailableError
from fumehood.model import Code, Outcome, Policy, Program, Receipt, Result, Usage
from fumehood.threads import in_thread
from fumehood.tier import Tier

T = TypeVar("T")

#: Errors of a runner's ``run`` and a sandbox's ``exec`` that come before the program starts.
_NOTHING_RAN = (StartError, PolicyError, UnavailableError, FileError, ClosedError)


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
class Ticket:
    """A run that was let through."""

    run: str
    reservation: str | None
    began: float  # the event loop's time


class Books:
    """Approval, quotas and an audit log, each of which may be None, for the runs of ``caller``."""

    def __init__(
        self,
        policy: Policy,
        tier: Tier,
        caller: Caller,
        *,
        approval: Approval | None,
        quotas: Quotas | None,
        audit: AuditLog | None,
    ) -> None:
        self.policy = policy
        self.tier = tier
        self.caller = caller
        self._approval = approval
        self._quotas = quotas
        self._audit = audit

    def for_caller(self, caller: Caller) -> Books:
        """The same for somebody else."""
        return Books(self.policy, self.tier, caller, approval=self._approval, quotas=self._quotas, audit=self._audit)

    # --- admitting

    async def admit(
        self, program: Program, details: Mapping[str, Any], *, sandboxes: int, saves_files: bool
    ) -> Ticket | Decision:
        """Ask, reserve and record: a ticket for :meth:`accompany`, or the refusal. ``details`` go into the records.

        ``sandboxes`` is how many the run makes. Raises QuotaError, AuditError, UnavailableError (the quotas' database)
        and what the approver raises; nothing is reserved then.
        """
        run = new_ident()
        facts = {**_program_facts(program), **details}
        action: Action = "run_python" if isinstance(program, Code) else "run_command"
        ask = self._ask(run, action, program, saves_files=saves_files)
        if refused := await self._ask_if_needed(ask, facts):
            return refused
        limits = self.policy.limits
        most = Amounts(1, limits.cpu_s, limits.wall_s, limits.output_bytes, sandboxes)
        try:
            reservation = await self.reserve(most, lease_s=limits.wall_s)
        except QuotaError as error:
            await self._record("over_quota", run, {**facts, "quota": str(error.quota)})
            raise
        try:
            await to_the_end(self._record("started", run, {**facts, **self._code(program)}))
        except BaseException as error:
            await to_the_end(self.settle(reservation, Amounts()))
            if not isinstance(error, AuditError):  # cancelled when the record was there already
                await to_the_end(self._record_failure("failed", run, error, nothing_ran=True))
            raise
        return Ticket(run, reservation, asyncio.get_running_loop().time())

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
            await to_the_end(self._record_failure("unanswered", ask.ident, error, nothing_ran=True))
            raise
        event = "approved" if decision.approved else "timed_out" if decision.timed_out else "denied"
        await self._record(event, ask.ident, {"by": decision.by, "reason": decision.reason})
        return None if decision.approved else decision

    def denied(self, decision: Decision) -> Result:
        """What a run that was refused gives instead of running; the receipt's first note says why."""
        why = decision.reason if decision.timed_out else f"approval was refused by {decision.by}"
        if decision.reason and not decision.timed_out:
            why += f": {decision.reason}"
        receipt = Receipt(self.tier.name, self.tier.features.boundary, (), notes=(why, "nothing was started"))
        return Result(Outcome.DENIED, None, b"", b"", 0.0, Usage(), receipt)

    async def refusal_of_saving(self, facts: Mapping[str, Any]) -> Decision | None:
        """None if files may be saved on the host, else the refusal. Raises AuditError and what the approver does."""
        return await self._ask_if_needed(self._ask(new_ident(), "save_files", None, saves_files=True), facts)

    async def note_file(self, sandbox: str, operation: str, path: str, **fields: Any) -> None:
        """Record what is about to be done with a file of a live sandbox. Raises AuditError: it must not be done."""
        await self._record("file", sandbox, {"sandbox": sandbox, "operation": operation, "path": path, **fields})

    def has_quota_on_wall_s(self) -> bool:
        """Whether one counts for this caller: then each run needs a deadline."""
        quotas = self._quotas.quotas if self._quotas is not None else ()
        return any(q.resource == "wall_s" and q.per in self.caller.subjects for q in quotas)

    # --- the run and its end

    async def accompany(self, ticket: Ticket, run: Coroutine[Any, Any, Result]) -> Result:
        """Await ``run`` and close its books, whatever comes of it."""
        try:
            result = await run
        except BaseException as error:
            await to_the_end(self._failed(ticket, error))
            raise
        await to_the_end(self._ended(ticket, result))
        return result

    async def _failed(self, ticket: Ticket, error: BaseException) -> None:
        limits = self.policy.limits
        seconds = asyncio.get_running_loop().time() - ticket.began
        # What was lost or cancelled may have used all that it was allowed; what never started used nothing.
        used = Amounts(1, limits.cpu_s, min(seconds, limits.wall_s), limits.output_bytes)
        nothing_ran = isinstance(error, _NOTHING_RAN)
        with contextlib.suppress(UnavailableError):  # the first error says more; the reservation's lease ends it
            await self.settle(ticket.reservation, Amounts() if nothing_ran else used)
        await self._record_failure("failed", ticket.run, error, nothing_ran=nothing_ran, seconds=round(seconds, 6))

    async def _record_failure(self, event: str, run: str, error: BaseException, **fields: Any) -> None:
        with contextlib.suppress(AuditError):  # the first error says more; the log shows a start without an end
            await self._record(event, run, {"error": type(error).__name__, **fields})

    async def _ended(self, ticket: Ticket, result: Result) -> None:
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
            await self.settle(ticket.reservation, Amounts(1, cpu_s, result.seconds, output_bytes))

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

    async def reserve(self, most: Amounts, *, lease_s: float = 0.0) -> str | None:
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

    async def settle(self, reservation: str | None, used: Amounts) -> None:
        if self._quotas is not None and reservation is not None:
            await in_thread(self._quotas.settle, reservation, used)

    @contextlib.asynccontextmanager
    async def renewing(self, reservation: str | None) -> AsyncIterator[None]:
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


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
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
