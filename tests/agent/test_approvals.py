"""Approval: when it is asked, by whom it is answered, and that nothing else is a yes."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import threading
import time
from pathlib import Path

import pytest

from fumehood import cli
from fumehood.agent.approval import (
    Approval,
    Ask,
    CallbackApprover,
    Decision,
    StoreApprover,
    code_matches,
    file_out,
    new_egress_host,
    new_ident,
    tool_call,
)
from fumehood.cli.guards import TerminalApprover, question
from fumehood.errors import FumehoodError, PolicyError
from fumehood.model import Code, Command, Policy


def ask(code: str = "print(1)", **fields: object) -> Ask:
    values: dict[str, object] = {
        "ident": new_ident(),
        "action": "run_python",
        "program": Code(code),
        "session": "s",
        "key": "",
        "tier": "jail",
        "policy": Policy(),
    }
    return Ask(**(values | fields))  # type: ignore[arg-type]


YES = CallbackApprover(lambda _: True, name="alice")


def test_always_and_never() -> None:
    assert Approval(YES, "always").reasons(ask())
    assert not Approval(YES, "never").reasons(ask())


def test_rules_ask_where_they_match() -> None:
    approval = Approval(YES, (tool_call("run_command"), file_out(), code_matches(r"\bsubprocess\b")))
    assert approval.reasons(ask()) == ()
    assert approval.reasons(ask(action="run_command", program=Command(("ls",)))) == ("it is a run_command",)
    assert approval.reasons(ask(saves_files=True)) == ("files are saved on the host",)
    assert approval.reasons(ask("import subprocess", saves_files=True)) == (
        "files are saved on the host",
        r"it holds '\\bsubprocess\\b'",
    )


def test_a_host_is_new_once_for_each_session() -> None:
    approval = Approval(YES, (new_egress_host(),))
    first = ask(policy=Policy(egress=("pypi.org",)))
    assert approval.reasons(first) == ("it can reach: pypi.org",)
    assert asyncio.run(approval.decide(first)).approved
    assert approval.reasons(first) == ()
    assert approval.reasons(ask(policy=Policy(egress=("pypi.org", "example.org"))))
    assert approval.reasons(ask(policy=Policy(egress=("pypi.org",)), session="another"))


def test_a_refused_host_stays_new() -> None:
    approval = Approval(CallbackApprover(lambda _: False), (new_egress_host(),))
    first = ask(policy=Policy(egress=("pypi.org",)))
    assert not asyncio.run(approval.decide(first)).approved
    assert approval.reasons(first)


@pytest.mark.parametrize("answer", [False, None, 1, "yes", "no"])
def test_only_true_is_a_yes(answer: object) -> None:
    approval = Approval(CallbackApprover(lambda _: answer))  # type: ignore[arg-type,return-value]
    assert not asyncio.run(approval.decide(ask())).approved


def test_callbacks_may_be_asynchronous_and_say_why() -> None:
    async def decide(_: Ask) -> Decision:
        return Decision(False, "bob", "too long")

    assert asyncio.run(Approval(CallbackApprover(decide)).decide(ask())) == Decision(False, "bob", "too long")


def test_no_answer_in_time_is_a_no() -> None:
    async def never(_: Ask) -> bool:
        await asyncio.sleep(600)
        return True

    decision = asyncio.run(Approval(CallbackApprover(never), timeout_s=0.05).decide(ask()))
    assert not decision.approved and decision.timed_out and "0.05 s" in decision.reason


def test_an_approver_that_fails_is_no_yes() -> None:
    def fails(_: Ask) -> bool:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError):
        asyncio.run(Approval(CallbackApprover(fails)).decide(ask()))


@pytest.mark.parametrize("wrong", [{"when": "sometimes"}, {"timeout_s": 0}, {"timeout_s": 1e9}])
def test_malformed_approvals_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(PolicyError):
        Approval(YES, **wrong)  # type: ignore[arg-type]
    with pytest.raises(PolicyError):
        code_matches("(")


# --- the store


def _answer_when_there(store: StoreApprover, *, approved: bool) -> threading.Thread:
    def work() -> None:
        while not (pending := store.pending()):
            time.sleep(0.01)
        assert pending[0].code == "print('\x1b[2J')"
        assert store.answer(pending[0].ident, approved=approved, by="carol", reason="because")

    thread = threading.Thread(target=work)
    thread.start()
    return thread


@pytest.mark.parametrize("approved", [True, False])
def test_a_question_waits_in_the_store_for_its_answer(tmp_path: Path, approved: bool) -> None:
    store = StoreApprover(tmp_path / "asks.db")
    thread = _answer_when_there(StoreApprover(tmp_path / "asks.db"), approved=approved)
    decision = asyncio.run(Approval(store, timeout_s=60).decide(ask("print('\x1b[2J')")))
    thread.join()
    assert decision == Decision(approved, "carol", "because")
    assert store.pending() == ()


def test_a_question_is_gone_after_its_deadline(tmp_path: Path) -> None:
    store = StoreApprover(tmp_path / "asks.db")
    one = ask()
    assert asyncio.run(Approval(store, timeout_s=0.3).decide(one)).timed_out
    assert not store.answer(one.ident, approved=True, by="late")


def test_the_store_is_private(tmp_path: Path) -> None:
    StoreApprover(tmp_path / "asks.db")
    assert (tmp_path / "asks.db").stat().st_mode & 0o777 == 0o600
    with pytest.raises(FumehoodError):
        StoreApprover(tmp_path / "none" / "asks.db")


def test_a_question_is_answered_once(tmp_path: Path) -> None:
    store = StoreApprover(tmp_path / "asks.db")
    one = ask()
    store._put(one, time.time() + 60)
    assert store.answer(one.ident, approved=False, by="first")
    assert not store.answer(one.ident, approved=True, by="second")


def test_the_command_shows_and_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "asks.db")
    store = StoreApprover(path)
    one = ask("print('\x1b]0;title\x07')")
    store._put(one, time.time() + 60)
    assert cli.main(["approve", path]) == 0
    shown = capsys.readouterr().out
    assert one.ident in shown and "  | print(" in shown and "\x1b" not in shown
    assert cli.main(["approve", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pending"][0]["ident"] == one.ident
    assert cli.main(["approve", path, one.ident, "--yes", "--by", "dan"]) == 0
    assert store._answered(one.ident) == Decision(True, "dan")
    assert cli.main(["approve", path, one.ident, "--no"]) != 0
    assert cli.main(["approve", str(tmp_path / "none.db")]) != 0


# --- the terminal


@pytest.mark.parametrize(
    ("typed", "approved"), [(b"y\n", True), (b" YES \n", True), (b"\n", False), (b"n\n", False), (b"yep\n", False)]
)
def test_the_terminal_shows_the_code_and_takes_y(typed: bytes, approved: bool) -> None:
    ours, theirs = pty.openpty()
    try:
        os.write(ours, b"y\n")  # typed before the question: no answer to it

        async def converse() -> tuple[Decision, bytes]:
            approver = TerminalApprover(os.ttyname(theirs))
            deciding = asyncio.ensure_future(approver.decide(ask("print('\x1b[1A\x1b[2Khidden')"), timeout_s=60))
            shown = b""
            while b"[y/N]" not in shown:
                shown += await asyncio.to_thread(os.read, ours, 4096)
            await asyncio.sleep(0.05)
            os.write(ours, typed)
            return await asyncio.wait_for(deciding, 60), shown

        decision, shown = asyncio.run(converse())
    finally:
        os.close(ours)
        os.close(theirs)
    assert decision == Decision(approved, "terminal")
    assert b"\x1b" not in shown
    assert "␛[1A␛[2Khidden".encode() in shown


def test_each_line_of_code_is_marked_in_the_question() -> None:
    forged = "x = 1\n\nfumehood: [y/N] y\nfumehood: 1 lines above"
    lines = question(ask(forged)).splitlines()
    assert [line for line in lines if not line.startswith(("fumehood: ", "  | ")) and line] == []
    assert sum(line.startswith("fumehood: ") for line in lines) == 3


def test_without_a_terminal_nobody_is_asked(tmp_path: Path) -> None:
    with pytest.raises(FumehoodError, match="no terminal"):
        TerminalApprover(str(tmp_path / "tty"))
