"""Verdicts: each of the four, from tiers that deserve them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any, ClassVar

import pytest

from fumehood.attacks import control
from fumehood.attacks.catalogue import by_id
from fumehood.attacks.engine import face, make_control
from fumehood.attacks.model import Attack, Finding, Verdict, Watch
from fumehood.attacks.stage import Stage
from fumehood.errors import StartError
from fumehood.model import Boundary, Outcome, Policy, Receipt, Result, Usage
from fumehood.tier import Features, Probe


class Fake:
    """A tier that claims the boundary ``kernel`` and passes all to the control, but for what a subclass changes."""

    name = "fake"
    features = Features(boundary=Boundary.KERNEL, summary="", live=True, files=True)

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.real = control.ControlTier(home=stage.home)

    def probe(self) -> Probe:
        return Probe(True)

    async def create(self, policy: Policy) -> Any:
        return await self.real.create(policy)

    async def close(self) -> None:
        await self.real.close()


class Broken(Fake):
    async def create(self, policy: Policy) -> Any:
        raise StartError("no room")


class Deaf(Fake):
    """Its sandboxes run nothing but the ordinary program."""

    async def create(self, policy: Policy) -> Any:
        return DeafSandbox()


class DeafSandbox:
    receipt = Receipt("fake", Boundary.KERNEL, ())

    async def exec(self, program: Any, **_: Any) -> Result:
        out = b"42\n" if b"6 * 7" in program.data else b""
        return Result(Outcome.EXITED, 0, out, b"", 0.0, Usage(), self.receipt)

    async def close(self, **_: Any) -> tuple[()]:
        return ()


class Apart(Deaf):
    """Makes sandboxes for single programs, too, and remembers what it was asked for."""

    asked: ClassVar[list[str]] = []

    async def create(self, policy: Policy) -> Any:
        self.asked.append("any")
        return FilesSandbox()

    async def create_single(self, policy: Policy, *, warm: bool = False) -> Any:
        self.asked.append("single")
        return DeafSandbox()


class FilesSandbox(DeafSandbox):
    async def write_file(self, path: str, data: bytes) -> None: ...


class Untidy(Fake):
    """Holds the attack, and leaves a file, a descriptor and a process."""

    children: list[subprocess.Popen[bytes]]

    async def create(self, policy: Policy) -> Any:
        return UntidySandbox(self.stage)


class UntidySandbox(DeafSandbox):
    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    async def exec(self, program: Any, **_: Any) -> Result:
        result = await super().exec(program)
        if not result.stdout_data:
            (self.stage.work / "forgotten").touch()
            self.stage.forgotten = [  # type: ignore[attr-defined]
                open(self.stage.public),  # noqa: SIM115 - that it stays open is the point
                subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"]),
            ]
            from fumehood.attacks.prelude import ARMED

            return Result(Outcome.EXITED, 0, ARMED, b"", 0.0, Usage(), self.receipt)
        return result


def attack(ident: str) -> Attack:
    found = by_id(ident)
    assert found is not None
    return found


def carry_out(ident: str | Attack, make: Any) -> Finding:
    what = attack(ident) if isinstance(ident, str) else ident
    return asyncio.run(face(what, make, Policy()))


@pytest.mark.parametrize("ident", ["B1", "B7", "B9", "B10", "B16", "B22", "D1", "E1", "F1", "F5", "P4", "P13", "G7"])
def test_the_control_is_broken_by(ident: str) -> None:
    finding = carry_out(ident, make_control)
    assert finding.verdict is Verdict.BROKEN, finding.seen
    assert not finding.required


def test_a_boundary_that_does_not_hold_what_it_must_has_failed() -> None:
    finding = carry_out("B1", lambda _, stage: Fake(stage))
    assert (finding.verdict, finding.required, finding.failed) == (Verdict.BROKEN, True, True)


def test_a_set_up_that_fails_is_inconclusive_and_a_failure() -> None:
    finding = carry_out("B1", lambda _, stage: Broken(stage))
    assert (finding.verdict, finding.failed) == (Verdict.INCONCLUSIVE, True)
    assert "no room" in finding.seen


def test_a_program_that_never_started_proves_nothing() -> None:
    finding = carry_out("B1", lambda _, stage: Deaf(stage))
    assert finding.verdict is Verdict.INCONCLUSIVE


def test_a_program_that_fails_by_its_own_fault_proves_nothing() -> None:
    wrong = Attack("X1", "files", "wrong", "leek(T.secret)", Watch("nothing", lambda _: None))
    finding = carry_out(wrong, make_control)
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert "NameError" in finding.seen


def test_a_mark_that_was_never_seen_proves_nothing() -> None:
    wrong = Attack("X2", "files", "unmarked", "pass", Watch("nothing", lambda _: None, marked=True))
    assert carry_out(wrong, make_control).verdict is Verdict.INCONCLUSIVE


def test_what_the_host_cannot_read_proves_nothing() -> None:
    def judge(_: Any) -> None:
        raise PermissionError("not for you")

    wrong = Attack("X3", "files", "unreadable", "pass", Watch("nothing", judge))
    finding = carry_out(wrong, make_control)
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert "not for you" in finding.seen


def test_a_host_without_the_property_is_not_applicable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fumehood.attacks.needs.NEEDS", {"ia32": ("a rare thing", lambda: False)})
    from fumehood.attacks import needs

    needs.missing.cache_clear()
    try:
        finding = carry_out("C2", make_control)
    finally:
        needs.missing.cache_clear()
    assert (finding.verdict, finding.seen) == (Verdict.NOT_APPLICABLE, "needs a rare thing")


@pytest.mark.parametrize(("ident", "kind"), [("A1", "single"), ("B9", "any")])
def test_an_attack_runs_in_the_sandbox_that_a_runner_would_have_made(ident: str, kind: str) -> None:
    Apart.asked.clear()
    carry_out(ident, lambda _, stage: Apart(stage))
    assert set(Apart.asked) == {kind}  # the ordinary runs beside it, too, so that what a tier prepares is there before


def test_residue_is_found_and_is_a_failure() -> None:
    stages: list[Stage] = []

    def make(_: Attack, stage: Stage) -> Untidy:
        stages.append(stage)
        return Untidy(stage)

    finding = carry_out("B1", make)
    file, child = stages[0].forgotten  # type: ignore[attr-defined]
    file.close()
    child.kill()
    child.wait()
    assert finding.verdict is Verdict.HELD
    assert finding.failed
    text = "\n".join(finding.residue)
    assert "forgotten" in text
    assert "descriptor" in text
    assert "process" in text


def test_the_stage_leaves_nothing() -> None:
    stage = Stage()
    assert stage.secret.exists()
    stage.close()
    assert not stage.folder.exists()
    assert stage.bystander.poll() is not None
