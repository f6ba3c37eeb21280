"""One path for every run: approval, quota, record, run, record; and what happens when a step fails."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from pathlib import Path
from typing import Any

import pytest
from stand_in import StandInRunner, result

from fumehood.agent.approval import Approval, CallbackApprover, Decision, file_out
from fumehood.agent.audit import AuditLog, Keep, read, verify
from fumehood.agent.books import Caller
from fumehood.agent.gate import Gate
from fumehood.agent.quotas import Quota, Quotas
from fumehood.errors import AuditError, OutcomeUnknownError, QuotaError, StartError
from fumehood.model import Code, Limits, Outcome, Program, Result

LIMITS = Limits(wall_s=10, cpu_s=10, output_bytes=1000)


@pytest.fixture
def log(tmp_path: Path) -> AuditLog:
    return AuditLog(tmp_path / "audit.jsonl")


@pytest.fixture
def quotas(tmp_path: Path) -> Any:
    quotas = Quotas([Quota("session", "runs", 3, 3600), Quota("session", "sandboxes", 1)], tmp_path / "q.db")
    yield quotas
    quotas.close()


def events(log: AuditLog) -> list[str]:
    assert verify(log.path).ok
    return [r["event"] for r in read(log.path)]


def test_a_run_leaves_a_start_and_an_end(log: AuditLog) -> None:
    gate = Gate(StandInRunner(limits=LIMITS), audit=log, caller=Caller("s1", "k1"))
    assert asyncio.run(gate.run("print(1)", files={"a.csv": b"12"})).ok
    started, ended = read(log.path)
    assert started["event"] == "started" and ended["event"] == "ended"
    assert started["run"] == ended["run"] and started["session"] == "s1" and started["key"] == "k1"
    assert started["code_sha256"] == hashlib.sha256(b"print(1)").hexdigest()
    assert started["policy_sha256"] == gate.policy.digest()
    assert started["files"] == [{"path": "a.csv", "size_bytes": 2, "sha256": hashlib.sha256(b"12").hexdigest()}]
    assert ended["outcome"] == "exited" and ended["receipt"]["tier"] == "stand_in"
    assert "code" not in started and "stdout" not in ended


def test_code_and_output_are_kept_where_the_operator_says_so(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "keep.jsonl", keep=Keep(code=True, output=True))

    async def play(_: Program) -> Result:
        return result(b"\xff\x1b[2J")

    asyncio.run(Gate(StandInRunner(play), audit=log).run("print(1)"))
    started, ended = read(log.path)
    assert started["code"] == "print(1)"
    assert ended["stdout"].encode("utf-8", "surrogateescape") == b"\xff\x1b[2J"


def test_the_start_is_on_the_disk_before_the_run(log: AuditLog) -> None:
    seen: list[list[str]] = []

    async def play(_: Program) -> Result:
        seen.append(events(log))
        return result()

    asyncio.run(Gate(StandInRunner(play), audit=log).run("x"))
    assert seen == [["started"]]


def test_a_run_that_cannot_be_recorded_does_not_start(tmp_path: Path, quotas: Quotas) -> None:
    runner = StandInRunner(limits=LIMITS)
    gate = Gate(runner, audit=AuditLog(tmp_path / "none" / "audit.jsonl"), quotas=quotas)
    with pytest.raises(AuditError):
        asyncio.run(gate.run("x"))
    assert runner.programs == []
    assert quotas.used(quotas.quotas[0], gate.caller.session) == 0


def test_a_result_whose_end_cannot_be_recorded_is_withheld(log: AuditLog, quotas: Quotas) -> None:
    async def play(_: Program) -> Result:
        log.path.write_bytes(b"")
        return result()

    gate = Gate(StandInRunner(play, limits=LIMITS), audit=log, quotas=quotas)
    with pytest.raises(AuditError, match="result is withheld"):
        asyncio.run(gate.run("x"))
    assert quotas.used(quotas.quotas[0], gate.caller.session) == 1
    assert quotas.used(quotas.quotas[1], gate.caller.session) == 0


def test_a_refusal_is_an_outcome_and_never_a_run(log: AuditLog) -> None:
    runner = StandInRunner()
    no = Approval(CallbackApprover(lambda _: Decision(False, "alice", "not today")))
    denied = asyncio.run(Gate(runner, approval=no, audit=log).run("x"))
    assert denied.outcome is Outcome.DENIED and runner.programs == []
    assert "refused by alice: not today" in denied.receipt.notes[0]
    asked, answer = read(log.path)
    assert (asked["event"], answer["event"], answer["by"]) == ("asked", "denied", "alice")
    assert asked["reasons"] == ["every run is asked"]


def test_no_answer_is_an_outcome_and_recorded_as_such(log: AuditLog) -> None:
    async def never(_: object) -> bool:
        await asyncio.sleep(600)
        return True

    runner = StandInRunner()
    gate = Gate(runner, approval=Approval(CallbackApprover(never), timeout_s=0.05), audit=log)
    assert asyncio.run(gate.run("x")).outcome is Outcome.DENIED
    assert runner.programs == [] and events(log) == ["asked", "timed_out"]


def test_a_yes_is_recorded_before_the_start(log: AuditLog) -> None:
    gate = Gate(StandInRunner(), approval=Approval(CallbackApprover(lambda _: True, name="bob")), audit=log)
    asyncio.run(gate.run("x"))
    assert events(log) == ["asked", "approved", "started", "ended"]
    assert len({r["run"] for r in read(log.path)}) == 1


def test_an_approver_that_fails_lets_nothing_run(log: AuditLog) -> None:
    def fails(_: object) -> bool:
        raise RuntimeError("the approver broke")

    runner = StandInRunner()
    with pytest.raises(RuntimeError):
        asyncio.run(Gate(runner, approval=Approval(CallbackApprover(fails)), audit=log).run("x"))
    assert runner.programs == [] and events(log) == ["asked", "unanswered"]


def test_over_quota_is_an_error_and_recorded(log: AuditLog, quotas: Quotas) -> None:
    runner = StandInRunner(limits=LIMITS)
    gate = Gate(runner, quotas=quotas, audit=log)

    async def runs() -> None:
        for _ in range(3):
            await gate.run("x")
        with pytest.raises(QuotaError):
            await gate.run("x")

    asyncio.run(runs())
    assert len(runner.programs) == 3 and events(log)[-1] == "over_quota"


@pytest.mark.parametrize(("error", "charged"), [(StartError("no"), 0), (OutcomeUnknownError("lost"), 1)])
def test_a_failure_is_recorded_and_charged_by_what_may_have_run(
    log: AuditLog, quotas: Quotas, error: Exception, charged: int
) -> None:
    async def play(_: Program) -> Result:
        raise error

    gate = Gate(StandInRunner(play, limits=LIMITS), quotas=quotas, audit=log)
    with pytest.raises(type(error)):
        asyncio.run(gate.run("x"))
    assert events(log) == ["started", "failed"]
    assert list(read(log.path))[1]["nothing_ran"] is (charged == 0)
    assert quotas.used(quotas.quotas[0], gate.caller.session) == charged
    assert quotas.used(quotas.quotas[1], gate.caller.session) == 0


def test_a_cancelled_run_closes_its_books(log: AuditLog, quotas: Quotas) -> None:
    async def play(_: Program) -> Result:
        await asyncio.sleep(600)
        raise AssertionError

    gate = Gate(StandInRunner(play, limits=LIMITS), quotas=quotas, audit=log)

    async def cancel() -> None:
        task = asyncio.ensure_future(gate.run("x"))
        while not log.path.exists() or events(log) != ["started"]:
            await asyncio.sleep(0.01)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert events(log) == ["started", "failed"]
    assert quotas.used(quotas.quotas[1], gate.caller.session) == 0


def test_a_live_sandbox_asks_at_each_exec_and_counts_once(log: AuditLog, quotas: Quotas) -> None:
    gate = Gate(StandInRunner(limits=LIMITS), quotas=quotas, audit=log)

    async def live() -> None:
        async with gate.open() as sandbox:
            for _ in range(3):
                await sandbox.exec(Code("x"))
            with pytest.raises(QuotaError):
                await sandbox.exec(Code("x"))
            with pytest.raises(QuotaError, match="sandboxes at once"):
                async with gate.open():
                    raise AssertionError
        assert quotas.used(quotas.quotas[1], gate.caller.session) == 0

    asyncio.run(live())
    assert len({r.get("sandbox") for r in read(log.path) if r["event"] == "started"}) == 1


@pytest.mark.parametrize("approved", [True, False])
def test_files_of_a_live_sandbox_are_saved_with_approval_only(log: AuditLog, tmp_path: Path, approved: bool) -> None:
    runner = StandInRunner()
    gate = Gate(runner, approval=Approval(CallbackApprover(lambda _: approved), (file_out(),)), audit=log)

    async def live() -> None:
        async with gate.open() as sandbox:
            await sandbox.exec(Code("x"))
            await sandbox.close(out=tmp_path)

    asyncio.run(live())
    assert runner.sandboxes[0].saved_to == [tmp_path if approved else None]
    assert events(log)[2:] == ["asked", "approved" if approved else "denied"]
