"""Fixtures for containers and gVisor: the tiers that are on this host, and an engine that can be made to fail."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from containers_proxy import Proxy

from fumehood import registry
from fumehood.images.engine import Word, socket_paths
from fumehood.images.service import Service, reach

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


@pytest.fixture
def proxied(engine_tier: Word, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Word, Proxy]]:
    """An engine behind a proxy that the tier is pointed to."""
    service: Service = reach(engine_tier)
    folder = tempfile.mkdtemp(prefix="fumehood-test-")
    proxy = Proxy(service.engine.path, f"{folder}/engine.sock")
    variable = "DOCKER_HOST" if engine_tier == "docker" else "CONTAINER_HOST"
    monkeypatch.setenv(variable, f"unix://{proxy.path}")
    assert socket_paths(engine_tier)[0] == [proxy.path]
    try:
        yield engine_tier, proxy
    finally:
        proxy.close()
        service.close()
        Path(proxy.path).unlink()
        os.rmdir(folder)
