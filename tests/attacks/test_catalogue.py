"""The catalogue is well formed, and covers what it promises."""

import ast
import dataclasses

import pytest

from fumehood import registry
from fumehood.attacks import mutation
from fumehood.attacks.catalogue import ATTACKS, FIRST, GROUPS, by_id
from fumehood.attacks.model import Attack
from fumehood.attacks.needs import NEEDS
from fumehood.attacks.prelude import compose
from fumehood.model import HARD_LIMITS, ArtifactLimits, Boundary, Limits, Policy
from fumehood.tier import Features


def test_ids_are_unique_and_the_articles_six_come_first() -> None:
    ids = [attack.id for attack in ATTACKS]
    assert len(ids) == len({ident.lower() for ident in ids}) >= 80
    assert tuple(ids[:6]) == FIRST == ("A1", "A7", "A14", "A20", "B1", "D1")
    assert by_id("d1") is by_id("D1") is ATTACKS[5]


def test_every_group_that_the_catalogue_names_has_attacks() -> None:
    assert set(GROUPS) == {attack.group for attack in ATTACKS}


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda a: a.id)
def test_an_attack_is_sound(attack: Attack) -> None:
    for program in (attack.program, attack.second):
        ast.parse(compose(program, {"token": "quote' \" \\ {}"}))
        assert len(program.splitlines()) <= 30, "to be read in under a minute"
    assert set(attack.needs) <= set(NEEDS)
    assert set(attack.features) <= {f.name for f in dataclasses.fields(Features)}
    assert set(attack.limits) <= {f.name for f in dataclasses.fields(Limits)}
    assert set(attack.artifacts) <= {f.name for f in dataclasses.fields(ArtifactLimits)}
    assert attack.limit is None or attack.limit in HARD_LIMITS
    assert attack.holds_from is not Boundary.NONE
    assert attack.second_when in ("after", "beside")
    assert attack.watch.sees
    assert attack.title


def test_every_control_of_the_jail_has_an_attack_that_probes_it() -> None:
    assert [name for name, attacks in mutation.plan().items() if not attacks] == []


def test_every_control_that_an_attack_names_is_one() -> None:
    known = set(mutation.plan())
    assert {name for attack in ATTACKS for name in attack.proves} <= known
    assert set(mutation.TOGETHER) | {n for names in mutation.TOGETHER.values() for n in names} <= known


def test_limits_are_never_loosened() -> None:
    tight = Policy(limits=Limits(wall_s=0.5, pids=4, memory_bytes=32 << 20))
    for attack in ATTACKS:
        limits = attack.policy(tight).limits
        assert (limits.wall_s, limits.pids, limits.memory_bytes) == (0.5, 4, 32 << 20)
    attack = by_id("A14")
    assert attack is not None
    assert attack.policy(Policy()).limits.pids == 32


def test_the_control_is_no_tier_that_a_caller_can_name() -> None:
    assert "none" not in registry.names()
