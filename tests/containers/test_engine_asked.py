"""How often an engine is asked what it is, which for Podman costs some tenths of a second of processor time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fumehood import Runner
from fumehood.images.engine import Word
from fumehood.images.service import reach
from fumehood.model import Policy
from fumehood.tiers.container import tier as under_test
from fumehood.tiers.container.tier import DockerTier, PodmanTier, learn


def test_the_version_is_as_the_engine_tells_it(engine_tier: Word) -> None:
    """Podman's is taken from its info."""
    service = reach(engine_tier)
    try:
        told: dict[str, Any] = asyncio.run(service.engine.call("GET", "/version"))
        host = asyncio.run(learn(service.engine, None, None))
    finally:
        service.close()
    assert host.version == told["Version"]
    assert host.components == {part["Name"]: part["Version"] for part in told["Components"]}


def test_a_probe_is_kept_for_a_while_whatever_runs_meanwhile(
    engine_tier: Word, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[Word] = []
    look = under_test._look

    def counted(word: Word, image: str | None, runtime: str | None) -> Any:
        looks.append(word)
        return look(word, image, runtime)

    monkeypatch.setattr(under_test, "_look", counted)
    monkeypatch.setattr(under_test, "_PROBE_KEPT_S", 600.0)
    made = DockerTier if engine_tier == "docker" else PodmanTier
    under_test._probes.forget(engine_tier)
    try:
        for _ in range(2):
            assert made().probe().available
            with Runner(tier=made(), policy=Policy()) as runner:
                assert runner.run("print(1)").stdout == "1\n"
        assert looks == [engine_tier]
        monkeypatch.setattr(under_test, "_PROBE_KEPT_S", 0.0)
        under_test._probes.forget(engine_tier)
        assert made().probe().available and made().probe().available
        assert looks == [engine_tier] * 3
    finally:
        under_test._probes.forget(engine_tier)
