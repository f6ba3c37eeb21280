"""The suite as tests: against the default jail, or against a tier and a policy of one's own.

``pytest --pyargs fumehood.attacks`` attacks the default jail. To attack one's own configuration, a test file of three
lines is enough::

    from fumehood.attacks.testing import *          # the tests and their fixtures

    @pytest.fixture(scope="session")
    def fumehood_runner():                          # or fumehood_tier and fumehood_policy
        return Runner(tier="jail", policy=Policy(environment="data", mounts=(Mount("/srv/data", "/mnt/data"),)))

Each attack is run with its own limits where they are stricter than the policy's, never looser. The test process is the
supervisor here: it is given a canary in its environment, and adopts orphans while the tests run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from fumehood import registry
from fumehood.attacks import procfs
from fumehood.attacks.catalogue import ATTACKS
from fumehood.attacks.engine import face
from fumehood.attacks.model import Attack, Verdict
from fumehood.attacks.stage import Stage
from fumehood.model import Policy
from fumehood.runner import Runner
from fumehood.tier import Tier

__all__ = ["fumehood_policy", "fumehood_runner", "fumehood_supervisor", "fumehood_tier", "pytest", "test_held"]


@pytest.fixture(scope="session")
def fumehood_runner() -> Runner | None:
    """Override to attack a configured Runner: its tier and its policy are used."""
    return None


@pytest.fixture(scope="session")
def fumehood_tier(fumehood_runner: Runner | None) -> Tier | str:
    """Override to attack a tier: its name, or an instance."""
    return fumehood_runner.tier if fumehood_runner is not None else "jail"


@pytest.fixture(scope="session")
def fumehood_policy(fumehood_runner: Runner | None) -> Policy:
    """Override to attack a policy."""
    return fumehood_runner.policy if fumehood_runner is not None else Policy()


@pytest.fixture(scope="session")
def fumehood_supervisor() -> Iterator[None]:
    """Makes the test process a supervisor that no orphan escapes."""
    procfs.become_subreaper()
    yield
    procfs.stop_subreaper()


@pytest.mark.parametrize("attack", [a for a in ATTACKS if not a.orphan], ids=lambda a: a.id)
def test_held(attack: Attack, fumehood_tier: Tier | str, fumehood_policy: Policy, fumehood_supervisor: None) -> None:
    """The tier holds ``attack``, and nothing is left of it."""

    def make(_attack: Attack, _stage: Stage) -> Tier:
        return registry.make(fumehood_tier) if isinstance(fumehood_tier, str) else fumehood_tier

    finding = asyncio.run(face(attack, make, fumehood_policy))
    if finding.verdict is Verdict.NOT_APPLICABLE:
        pytest.skip(finding.seen)
    if finding.verdict is Verdict.BROKEN and not finding.failed:
        pytest.skip(f"not required of this boundary: {finding.seen}")
    assert finding.verdict is Verdict.HELD, finding.seen
    assert not finding.residue, finding.residue
