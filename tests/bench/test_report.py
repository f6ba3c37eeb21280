"""The bench's figures and what is made of them, without measuring."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import pytest

from fumehood.bench.figures import Report, Spread, TierFigures, quantile
from fumehood.bench.report import markdown, plot, text, to_html
from fumehood.bench.targets import JAIL, judge

PLAIN = Spread.of([0.01] * 10, [0.01])


def spread(ratio: float) -> Spread:
    return Spread.of([ratio / 100] * 98 + [ratio / 50] * 2, [0.01])


def jail(**changes: object) -> TierFigures:
    figures = TierFigures(
        "jail",
        plain=PLAIN,
        cold=spread(0.25),
        on_demand=spread(0.3),
        warm=spread(0.04),
        open_loop={"20": spread(0.04), "50": spread(0.045), "200": spread(0.06)},
        cold_starts={"50": 0.0},
        throughput={"1": 400.0, "2": 500.0, "8": 600.0},
        throughput_ratio={"1": 4.0, "2": 4.1, "8": 3.9},
        cpu={"cold": 0.3},
        warm_bytes=2_000_000,
        warm_bytes_by="cgroup, kernel memory included",
        first_byte=spread(0.02),
        kill=spread(0.06),
    )
    for name, value in changes.items():
        setattr(figures, name, value)
    return figures


def report(*tiers: TierFigures) -> Report:
    machine = {"processor": "a <fast> one", "memory": "8 GiB", "system": "Linux 6", "python": "3.11 (/usr/bin/python3)"}
    return Report(machine, "2026-01-02", "0.1", False, list(tiers), {"gvisor": "runsc is missing"})


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([3, 1, 2], 0.5, 2),
        ([1], 0.99, 1),
        (list(range(1, 101)), 0.99, 99),
        (list(range(1, 101)), 0.5, 50),
        ([1, 2], 0.9, 2),
    ],
)
def test_quantiles_by_nearest_rank(values: list[float], share: float, expected: float) -> None:
    assert quantile(values, share) == expected


def test_a_spread_is_a_ratio_to_the_plain_median() -> None:
    found = Spread.of([0.001, 0.002, 0.003], [0.010, 0.001, 0.020])
    assert (found.count, found.p50_ms, found.p50, found.p99) == (3, 2.0, 0.2, 0.3)


def test_every_promise_is_judged_and_a_missed_one_is_told() -> None:
    assert all(verdict.met for verdict in judge(jail()) if verdict.value is not None)
    assert "MISSED" not in text(report(jail()))
    slow = jail(cold=spread(0.31), throughput_ratio={"1": 3.4, "8": 3.5}, warm_bytes=3 << 20)
    missed = [verdict.target.title for verdict in judge(slow) if verdict.met is False]
    assert missed == ["cold, median", "throughput, 1 caller", "memory of a warm sandbox"]
    assert text(report(slow)).count("MISSED") == 3
    assert [verdict.target.title for verdict in judge(jail()) if verdict.met is None] == [
        target.title for target in JAIL if "preloaded" in target.title
    ]


@pytest.mark.parametrize(("tier", "bound"), [("interpreter", 0.05), ("wasm", 4.0)])
def test_a_language_runtime_is_held_to_its_warm_run(tier: str, bound: float) -> None:
    for ratio, kept in ((bound * 0.99, True), (bound * 1.01, False)):
        verdict = judge(TierFigures(tier, warm=spread(ratio)))[0]
        assert (verdict.target.bound, verdict.met) == (bound, kept)


def test_a_microvm_is_held_to_what_an_emulated_one_costs() -> None:
    verdicts = judge(TierFigures("microvm", cold=spread(14.9), warm=spread(1.01)))
    assert [(v.target.bound, v.met) for v in verdicts[:2]] == [(15.0, True), (1.0, False)]


def test_the_table_has_a_row_per_tier_and_a_dash_for_what_is_absent() -> None:
    bare = TierFigures("docker", plain=PLAIN, cold=spread(20.0))
    table = markdown(json.loads(json.dumps(report(jail(), bare).to_dict())))
    rows = [line for line in table.splitlines() if line.startswith("|")]
    assert len(rows) == 4 and len({row.count("|") for row in rows}) == 1
    assert rows[2].startswith(
        "| `jail` | 0.25 / 0.50 | 0.30 / 0.60 | 0.040 / 0.080 | 0.045 / 0.090 | 4.0 / 3.9 | 1.9 MiB |"
    )
    assert rows[3] == "| `docker` | 20 / 40 | – | – | – | – | – | – | – |"


def test_the_plot_is_whole_and_within_its_frame() -> None:
    svg = ElementTree.fromstring(plot(report(jail(), TierFigures("docker", cold=spread(20.0)))))
    _, _, width, height = map(float, svg.attrib["viewBox"].split())
    points = [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in svg.iter("circle")]
    assert len(points) == 9
    assert all(0 <= x <= width and 0 <= y <= height for x, y in points)
    cold, warm = points[0], points[2]
    assert cold[0] > warm[0], "slower is further right"
    assert ElementTree.fromstring(plot(report())) is not None


def test_the_page_is_self_contained_and_escaped() -> None:
    page = to_html(report(jail(note="<script>alert(1)</script>")))
    assert "<script" not in page and "a &lt;fast&gt; one" in page
    assert not re.search(r"(src|href)=|url\(|@import", page)
