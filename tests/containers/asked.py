"""What is on this host, and what is left in an engine: asked directly."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import pytest

from fumehood import registry
from fumehood.images.engine import Engine, Word
from fumehood.images.service import Service, reach
from fumehood.tiers.container import owners

ALL = ("docker", "podman", "gvisor")


def need(name: str) -> str:
    """The tier's name, or the end of the test: a skip that says why, or a failure where the tier is required."""
    probe = registry.make(name).probe()
    if not probe.available:
        wanted = os.environ.get("FUMEHOOD_REQUIRE_TIERS", "").replace(" ", "").split(",")
        text = f"tier {name} is not on this host: {probe.reason} (remedy: {probe.remedy})"
        if name in wanted or "all" in wanted:
            pytest.fail(text, pytrace=False)
        pytest.skip(text)
    return name


def labelled(word: Word, owner: str | None = None, *, path: str = "") -> list[dict[str, Any]]:
    """The containers that belong to ``owner``, by default this process, in the engine (at the socket ``path``)."""
    wanted = owners.ours() if owner is None else owner
    query = {"all": "true", "filters": json.dumps({"label": [f"{owners.LABEL}={wanted}"]})}
    service = Service(Engine(word, path)) if path else reach(word)
    try:
        found: list[dict[str, Any]] = asyncio.run(service.engine.call("GET", "/containers/json", query=query))
    finally:
        service.close()
    return found
