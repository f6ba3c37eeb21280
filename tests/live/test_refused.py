"""What a tier does not promise of live sandboxes is refused by name, and nothing of it runs."""

from __future__ import annotations

import pytest
from support.needs import RunnerFactory

from fumehood.errors import UnsupportedError
from fumehood.model import Code, Command, Policy
from fumehood.runner import Runner
from fumehood.tier import Features

PROGRAMS = {
    "displays": Code("print('ran')", displays=True),
    "contexts": Code("print('ran')", context="b"),
    "pty": Command(("echo", "ran"), pty=(24, 80)),
}


@pytest.mark.parametrize("feature", PROGRAMS)
def test_refused_by_name(runner_factory: RunnerFactory, features: Features, feature: str) -> None:
    runner = runner_factory(Policy(terminals=True))
    if getattr(features, feature):
        assert runner.run(PROGRAMS[feature]).stdout.split() == ["ran"]
        return
    with pytest.raises(UnsupportedError) as refused:
        runner.run(PROGRAMS[feature])
    assert feature in refused.value.unmet
    if features.live and feature != "pty":
        with runner.open() as sandbox, pytest.raises(UnsupportedError):
            sandbox.exec(PROGRAMS[feature])


def test_handles_are_refused(runner: Runner, features: Features) -> None:
    if features.background or not features.live:
        pytest.skip("the tier promises them, or has no live sandbox")
    with runner.open() as sandbox, pytest.raises(UnsupportedError):
        sandbox.start("print('ran')")
