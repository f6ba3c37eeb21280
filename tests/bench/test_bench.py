"""``fumehood bench`` measures what it says, on the jail, with few rounds; no figure's size is tested here."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest
from support.needs import need_tier

from fumehood import cli
from fumehood.bench import measure as measure_module
from fumehood.bench import memory, plain, processor
from fumehood.bench.measure import Effort
from fumehood.cli import bench as command
from fumehood.cli.exits import ExitCode
from fumehood.runner import AsyncRunner

TINY = Effort(
    rounds=3, budget_s=20, rounds_min=2, windows=1, window_s=0.2, open_s=0.3, rates=(20, 1_000_000), callers=(1, 8)
)


def test_a_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    need_tier("jail")
    monkeypatch.setattr(command, "QUICK", TINY)
    monkeypatch.setattr(measure_module, "_SATURATED", 1000.0)
    to_json, to_html = tmp_path / "b.json", tmp_path / "b.html"
    assert cli.main(["bench", "--tier", "jail", "--quick", "--json", str(to_json), "--html", str(to_html)]) == 0
    found = json.loads(to_json.read_text())
    (jail,) = found["tiers"]
    assert found["quick"] and found["machine"]["processor"] and found["absent"] == {}
    for name in ("plain", "cold", "on_demand", "warm", "first_byte", "kill"):
        assert 0 < jail[name]["p50_ms"] <= jail[name]["p90_ms"] <= jail[name]["p99_ms"], name
    assert jail["plain"]["p50"] == 1.0
    assert jail["first_byte_from"] == "printed"
    assert jail["open_loop"]["20"]["count"] >= 1
    assert "1000000" not in jail["open_loop"] and jail["skipped"].keys() == {"open loop 1000000"}
    assert jail["throughput"].keys() == {"1", "8"} == jail["throughput_ratio"].keys()
    assert jail["warm_bytes"] > 1 << 18 and jail["cpu"]["cold"] > 0
    assert "<svg" in to_html.read_text()
    out = capsys.readouterr().out
    assert "jail" in out and "deadline to all dead" in out


def test_a_wrong_tier_is_refused_before_anything_is_measured() -> None:
    assert cli.main(["bench", "--tier", "nonsense"]) == ExitCode.REQUEST
    assert cli.main(["bench", "--tier", "jail", "--preload", "numpy"]) == ExitCode.REQUEST


def test_processor_time_counts_dead_children_and_living_ones() -> None:
    before = processor.used_s()
    for _ in range(3):
        plain.once(("-I", "-c", "import time\nend = time.process_time() + 0.1\nwhile time.process_time() < end: pass"))
    assert processor.used_s() - before >= 0.28


def test_plain_processes_are_counted() -> None:
    began = time.perf_counter()
    rate = plain.per_second(2, 0.3)
    assert 1 / (time.perf_counter() - began) < rate < 10_000


def test_memory_is_that_of_the_sandboxes_that_wait() -> None:
    need_tier("jail")

    async def main() -> None:
        async with AsyncRunner(tier="jail", warm=3) as runner:
            await runner.fill()
            found = memory.of_sandboxes(3)
            assert found is not None and 1 << 18 < found[0] < 64 << 20
            assert memory.of_sandboxes(2) != found, "three groups are not two sandboxes"

    asyncio.run(main())
