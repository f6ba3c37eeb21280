"""Fixtures for the agent's side."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from fumehood import registry
from fumehood.model import Limits, Policy
from fumehood.runner import Runner


@pytest.fixture(scope="session")
def jail() -> Iterator[Runner]:
    """A runner of the default tier, with a deadline that a slow machine keeps."""
    probe = registry.make("jail").probe()
    if not probe.available:
        text = f"tier jail is not on this host: {probe.reason} (remedy: {probe.remedy})"
        if os.environ.get("FUMEHOOD_REQUIRE_TIERS"):
            pytest.fail(text, pytrace=False)
        pytest.skip(text)
    with Runner(tier="jail", policy=Policy(limits=Limits(wall_s=20, cpu_s=20))) as runner:
        yield runner
