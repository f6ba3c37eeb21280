"""A live sandbox behind the gate has every method of a live sandbox, and none of them goes round the gate."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import inspect
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from stand_in import StandInRunner, StandInSandbox, result

from fumehood.agent.approval import Approval, CallbackApprover, file_out
from fumehood.agent.audit import AuditLog, read, verify
from fumehood.agent.gate import DeniedProgram, Gate, GatedProgram, GatedSandbox
from fumehood.agent.quotas import Quota, Quotas
from fumehood.errors import AuditError, ClosedError, FileError, QuotaError, UnsupportedError
from fumehood.model import Code, Command, Limits, Outcome, Program, Result
from fumehood.runner import AsyncRunner, Runner
from fumehood.tier import FullSandbox, RunningProgram

LIMITS = Limits(wall_s=10, cpu_s=10, output_bytes=1000)
SLEEP = Command(("sleep", "60"))


@pytest.fixture
def log(tmp_path: Path) -> AuditLog:
    return AuditLog(tmp_path / "audit.jsonl")


def records(log: AuditLog, event: str) -> list[dict[str, Any]]:
    assert verify(log.path).ok
    return [r for r in read(log.path) if r["event"] == event]


def live(gate: Gate, use: Callable[[GatedSandbox], Awaitable[None]]) -> None:
    async def inside() -> None:
        async with gate.open() as sandbox:
            await use(sandbox)

    asyncio.run(inside())


@pytest.mark.parametrize(
    ("protocol", "kinds"), [(FullSandbox, [GatedSandbox]), (RunningProgram, [GatedProgram, DeniedProgram])]
)
def test_nothing_of_the_contract_is_missing(protocol: type, kinds: list[type]) -> None:
    names = [n for n in dir(protocol) if not n.startswith("_")]
    assert len(names) > 5
    for kind in kinds:
        for name in names:
            wanted, found = getattr(protocol, name), getattr(kind, name)
            if callable(wanted):
                assert list(inspect.signature(found).parameters) == list(inspect.signature(wanted).parameters), name


FILE_OPERATIONS: list[tuple[str, Callable[[GatedSandbox], Any], dict[str, Any]]] = [
    ("write_file", lambda s: s.write_file("b", b"12"), {"size_bytes": 2, "sha256": hashlib.sha256(b"12").hexdigest()}),
    ("write_stream", lambda s: s.write_stream("b", [b"1", b"2"]), {"path": "b"}),
    ("read_file", lambda s: s.read_file("a"), {"path": "a"}),
    ("read_stream", lambda s: _all(s.read_stream("a")), {"path": "a"}),
    ("remove", lambda s: s.remove("a"), {"path": "a"}),
    ("rename", lambda s: s.rename("a", "c"), {"path": "a", "new_path": "c"}),
    ("make_folder", lambda s: s.make_folder("d"), {"path": "d"}),
    ("export_tar", lambda s: _all(s.export_tar("")), {"path": ""}),
    ("import_tar", lambda s: s.import_tar([b"tar"], "d"), {"path": "d"}),
]


async def _all(source: Any) -> list[bytes]:
    return [piece async for piece in source]


@pytest.mark.parametrize(("operation", "call", "fields"), FILE_OPERATIONS, ids=[o for o, _, _ in FILE_OPERATIONS])
def test_what_is_done_with_files_is_recorded(
    log: AuditLog, operation: str, call: Callable[[GatedSandbox], Any], fields: dict[str, Any]
) -> None:
    runner = StandInRunner()

    async def use(sandbox: GatedSandbox) -> None:
        runner.sandboxes[0].files["a"] = b"content"
        await call(sandbox)
        await sandbox.list_files()
        await sandbox.exec(Code("x"))

    live(Gate(runner, audit=log), use)
    [record] = records(log, "file")
    assert record["operation"] == operation and record.items() >= fields.items()
    assert record["sandbox"] == records(log, "started")[0]["sandbox"]


@pytest.mark.parametrize(("operation", "call", "fields"), FILE_OPERATIONS, ids=[o for o, _, _ in FILE_OPERATIONS])
def test_what_cannot_be_recorded_is_not_done(
    tmp_path: Path, operation: str, call: Callable[[GatedSandbox], Any], fields: dict[str, Any]
) -> None:
    runner = StandInRunner()

    async def use(sandbox: GatedSandbox) -> None:
        inner = runner.sandboxes[0]
        inner.files["a"] = b"content"
        with pytest.raises(AuditError):
            await call(sandbox)
        assert inner.files == {"a": b"content"} and inner.calls == []

    live(Gate(runner, audit=AuditLog(tmp_path / "none" / "audit.jsonl")), use)


def test_what_is_no_matter_of_the_gate_is_passed_on() -> None:
    runner = StandInRunner()

    async def use(sandbox: GatedSandbox) -> None:
        sandbox.expire_after(idle_s=1, lifetime_s=2)
        await sandbox.interrupt()
        await sandbox.write_file("a", b"12")
        assert (await sandbox.stat("a")).size_bytes == 2

    live(Gate(runner), use)
    assert runner.sandboxes[0].calls == [("expire_after", 1, 2), ("interrupt",)]


@pytest.mark.parametrize("approved", [True, False])
def test_an_archive_of_a_folder_needs_the_approval_of_saved_files(log: AuditLog, approved: bool) -> None:
    async def use(sandbox: GatedSandbox) -> None:
        await sandbox.write_file("a", b"12")
        if approved:
            assert await _all(sandbox.export_tar()) == [b"12"]
        else:
            with pytest.raises(FileError, match="not exported: approval was refused by callback"):
                await _all(sandbox.export_tar())

    live(Gate(StandInRunner(), approval=Approval(CallbackApprover(lambda _: approved), (file_out(),)), audit=log), use)
    assert [r["operation"] for r in records(log, "file")] == ["write_file", *(["export_tar"] if approved else [])]


def test_a_started_program_closes_its_books_when_it_ends(log: AuditLog, tmp_path: Path) -> None:
    quotas = Quotas([Quota("session", "runs", 2, 3600)], tmp_path / "q.db")
    gate = Gate(StandInRunner(limits=LIMITS), audit=log, quotas=quotas)

    async def use(sandbox: GatedSandbox) -> None:
        program = await sandbox.start(Code("x"))
        assert program.stdout_data == b"so far"
        assert (await program.wait()).stdout_data == b"ran" and program.done
        await sandbox.start(Code("y"))  # nobody waits for it
        with pytest.raises(QuotaError):
            await sandbox.start(Code("z"))

    live(gate, use)
    assert len(records(log, "started")) == len(records(log, "ended")) == 2
    assert quotas.used(quotas.quotas[0], gate.caller.session) == 2
    quotas.close()


def test_a_started_program_that_is_refused_never_ran(log: AuditLog) -> None:
    runner = StandInRunner()

    async def use(sandbox: GatedSandbox) -> None:
        program = await sandbox.start(SLEEP, background=True)
        assert program.done and (await program.wait()).outcome is Outcome.DENIED
        await program.kill()
        with pytest.raises(ClosedError):
            await program.write(b"x")

    live(Gate(runner, approval=Approval(CallbackApprover(lambda _: False)), audit=log), use)
    assert runner.programs == [] and records(log, "started") == []


def test_a_start_that_fails_is_recorded_and_raises(log: AuditLog, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuses(self: object, program: Program, **_: Any) -> Any:
        raise UnsupportedError("cannot hold: pty", unmet=("pty",))

    monkeypatch.setattr(StandInSandbox, "start", refuses)

    async def use(sandbox: GatedSandbox) -> None:
        with pytest.raises(UnsupportedError, match="pty"):
            await sandbox.start(Command(("ls",), pty=(24, 80)))

    live(Gate(StandInRunner(), audit=log), use)
    [failed] = records(log, "failed")
    assert failed["error"] == "UnsupportedError" and failed["nothing_ran"] is True


def test_a_start_that_is_cancelled_closes_its_books(log: AuditLog, monkeypatch: pytest.MonkeyPatch) -> None:
    reached = asyncio.Event()

    async def hangs(self: object, program: Program, **_: Any) -> Any:
        reached.set()
        await asyncio.sleep(600)

    monkeypatch.setattr(StandInSandbox, "start", hangs)

    async def use(sandbox: GatedSandbox) -> None:
        starting = asyncio.ensure_future(sandbox.start(Code("x")))
        await reached.wait()
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await starting

    live(Gate(StandInRunner(), audit=log), use)
    assert [r["error"] for r in records(log, "failed")] == ["CancelledError"]


@pytest.mark.parametrize(("per", "refused"), [("session", True), ("key", False)])
def test_the_background_is_refused_where_running_time_is_a_quota(tmp_path: Path, per: Any, refused: bool) -> None:
    """A caller without a key has no quota of a key."""
    quotas = Quotas([Quota(per, "wall_s", 1000, 3600)], tmp_path / "q.db")
    runner = StandInRunner(limits=LIMITS)

    async def use(sandbox: GatedSandbox) -> None:
        with pytest.raises(UnsupportedError, match="quota on wall_s") if refused else contextlib.nullcontext():
            await sandbox.start(SLEEP, background=True)
        await (await sandbox.start(SLEEP)).wait()

    live(Gate(runner, quotas=quotas), use)
    assert len(runner.programs) == (1 if refused else 2)
    quotas.close()


def test_standard_input_is_recorded_by_its_hash(log: AuditLog) -> None:
    gate = Gate(StandInRunner(), audit=log)

    async def use(sandbox: GatedSandbox) -> None:
        await sandbox.exec(Code("x"), stdin=b"in")

    live(gate, use)
    asyncio.run(gate.run("x", stdin=b"in"))
    assert {r["stdin_sha256"] for r in records(log, "started")} == {hashlib.sha256(b"in").hexdigest()}


def test_over_a_real_sandbox(jail: Runner, log: AuditLog) -> None:
    """What is in the background when a sandbox is closed has its end recorded, too."""

    async def all_of_it() -> Result:
        async with AsyncRunner(tier="jail", policy=jail.policy) as runner, Gate(runner, audit=log).open() as sandbox:
            program = await sandbox.start(Code("print(input())"), stdin=True)
            await program.write(b"to and fro\n")
            ended = await program.wait()
            await sandbox.make_folder("d")
            await sandbox.write_stream("d/a", [b"1", b"2"])
            await sandbox.rename("d/a", "d/b")
            archive = b"".join(await _all(sandbox.export_tar()))
            await sandbox.import_tar([archive], "copy")
            assert b"".join(await _all(sandbox.read_stream("copy/d/b"))) == b"12"
            await sandbox.start(SLEEP, background=True)
            return ended

    ended = asyncio.run(all_of_it())
    assert ended.stdout == "to and fro\n"
    assert [r["operation"] for r in records(log, "file")] == [
        "make_folder", "write_stream", "rename", "export_tar", "import_tar", "read_stream",
    ]  # fmt: skip
    assert len(records(log, "started")) == 2
    assert verify(log.path).open_runs == ()


def test_a_result_is_there_only_when_its_end_is_recorded(log: AuditLog) -> None:
    async def play(_: Program) -> Result:
        log.path.write_bytes(b"")
        return result()

    async def use(sandbox: GatedSandbox) -> None:
        program = await sandbox.start(Code("x"))
        with pytest.raises(AuditError, match="result is withheld"):
            await program.wait()

    live(Gate(StandInRunner(play), audit=log), use)
