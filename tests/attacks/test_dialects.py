"""Attacks on language runtimes: who faces them, and that a runtime that lets them through is seen."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import pytest
from support.needs import need_tier

from fumehood import registry
from fumehood.attacks import control, dialects
from fumehood.attacks.catalogue import ATTACKS, FIRST, by_id
from fumehood.attacks.engine import face
from fumehood.attacks.model import Attack, Finding, Verdict
from fumehood.attacks.runtimes import ATTACKS as RUNTIMES
from fumehood.attacks.stage import Stage
from fumehood.model import Boundary, Policy
from fumehood.tier import Features, Probe

PROCESS = Features(boundary=Boundary.KERNEL, summary="")
WASI = Features(boundary=Boundary.RUNTIME, summary="", files=True)
SUBSET = Features(boundary=Boundary.INTERPRETER, summary="", full_python=False)


class Leaky:
    """A tier that says it is a runtime, and runs programs where nothing stops them."""

    name = "leaky"

    def __init__(self, stage: Stage, features: Features) -> None:
        self.features = features
        self._real = control.ControlTier(home=stage.home)

    def probe(self) -> Probe:
        return Probe(True)

    async def create(self, policy: Policy) -> Any:
        return await self._real.create(policy)

    async def close(self) -> None:
        await self._real.close()


def carry_out(ident: str, features: Features) -> Finding:
    attack = by_id(ident)
    assert attack is not None
    return asyncio.run(face(attack, lambda _, stage: Leaky(stage, features), Policy()))


@pytest.mark.parametrize("features", [WASI, SUBSET], ids=["wasi", "subset"])
@pytest.mark.parametrize("ident", ["A1", "B1b", "D1", "E1", "R1", "R2", "R3", "R7", "R8", "R9", "R11", "W1"])
def test_a_runtime_that_lets_it_through_is_broken(ident: str, features: Features) -> None:
    if ident == "D1" and features is SUBSET:
        pytest.skip("the subset has no module socket; R9 tries every other way")
    finding = carry_out(ident, features)
    assert finding.verdict is Verdict.BROKEN, finding.seen


@pytest.mark.parametrize("tier", ["interpreter", "wasm"])
@pytest.mark.parametrize("ident", [*FIRST, "F1", "R1", "R13", "W1b"])
def test_the_runtime_holds(tier: str, ident: str) -> None:
    need_tier(tier)
    attack = by_id(ident)
    assert attack is not None
    finding = asyncio.run(face(attack, lambda *_: registry.make(tier), Policy()))
    assert finding.verdict is Verdict.HELD, finding.seen
    assert not finding.residue


def test_a_process_faces_no_attack_on_a_runtime() -> None:
    assert all(dialects.unable(attack, PROCESS) for attack in RUNTIMES)
    assert not any(dialects.unable(attack, PROCESS) for attack in ATTACKS if not attack.runtimes_only)


def test_what_cannot_be_asked_of_a_runtime_is_told() -> None:
    for ident, part in (("P4", "marks itself"), ("C5", "marks itself"), ("E2c", "by number")):
        attack = by_id(ident)
        assert attack is not None
        assert part in (dialects.unable(attack, WASI) or "")
    assert not any(dialects.unable(attack, WASI) for attack in map(by_id, FIRST) if attack is not None)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda a: a.id)
@pytest.mark.parametrize("features", [WASI, SUBSET], ids=["wasi", "subset"])
def test_programs_are_python_in_every_dialect(attack: Attack, features: Features) -> None:
    targets = {"token": "quote' \" \\ {}", "ports": {"tcp4": 1}}
    compile(dialects.compose(attack.program, targets, features), "<attack>", "exec")


def test_the_preludes_run_and_tell_that_the_program_has_begun() -> None:
    for features in (WASI, SUBSET):
        text = dialects.compose("say(T.token)", {"token": "a 'word'"}, features)
        done = subprocess.run([sys.executable, "-I", "-c", text], capture_output=True, text=True, check=True)
        assert done.stdout == "fumehood: armed\na 'word'\n"
