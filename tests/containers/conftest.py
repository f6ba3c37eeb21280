"""The tiers of these tests, in turn."""

from __future__ import annotations

import pytest
from asked import ALL, need

from fumehood.images.engine import Word


@pytest.fixture(params=ALL)
def container_tier(request: pytest.FixtureRequest) -> str:
    """docker, podman and gvisor in turn."""
    return need(request.param)


@pytest.fixture(params=("docker", "podman"))
def engine_tier(request: pytest.FixtureRequest) -> Word:
    """The two engines in turn."""
    need(request.param)
    word: Word = request.param
    return word
