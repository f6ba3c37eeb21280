"""Fixtures of the tests of live sandboxes: every tier whose features promise the part under test."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fumehood.tier import Features


@pytest.fixture
def promised(tier_name: str, features: Features) -> Callable[[str], None]:
    """Skips a test whose tier does not promise the feature; test_refusals.py sees it refused by name."""

    def promised(name: str) -> None:
        if not (features.live and getattr(features, name)):
            pytest.skip(f"tier {tier_name} promises no {name}; test_refusals.py sees it refused")

    return promised
