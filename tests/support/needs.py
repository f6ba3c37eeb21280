"""What a test needs of the host: a tier, or an end that says why not."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from fumehood import registry
from fumehood.runner import Runner
from fumehood.tier import Tier

from . import e2b_endpoint

RunnerFactory = Callable[..., Runner]


def required(name: str) -> bool:
    """Whether the environment demands that this tier be there."""
    wanted = os.environ.get("FUMEHOOD_REQUIRE_TIERS", "").replace(" ", "").split(",")
    return "all" in wanted or name in wanted


def need_tier(name: str) -> Tier:
    """The tier, or the end of the test: a skip that says why, or a failure where the tier is required."""
    if name == "e2b":
        e2b_endpoint.ensure()
    tier = registry.make(name)
    probe = tier.probe()
    if probe.available:
        return tier
    text = f"tier {name} is not on this host: {probe.reason} (remedy: {probe.remedy})"
    if required(name):
        pytest.fail(text, pytrace=False)
    pytest.skip(text)
