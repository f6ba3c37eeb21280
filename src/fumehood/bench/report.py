"""A report as text, as a table for the documentation, and as one page with a plot."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fumehood.bench.figures import Report, Spread, TierFigures
from fumehood.bench.targets import judge

_MIB = 1 << 20


def text(report: Report) -> str:
    """For a terminal: a block for each tier, with what the tier promises beside it."""
    lines = [f"{name}: {value}" for name, value in report.machine.items()]
    lines.append(
        "times are ratios to `python3 -I -c pass` as a process, measured in turn with it; 1.00 is that process"
    )
    for figures in report.tiers:
        lines += ["", figures.tier + (f" ({figures.note})" if figures.note else "")]
        rows = [("", "p50", "p90", "p99", "p50 ms"), *_spreads(figures)]
        lines += _columns(rows)
        lines += [f"  {name}: {value}" for name, value in _facts(figures)]
        lines += [f"  {name}: not measured, {why}" for name, why in figures.skipped.items()]
        for verdict in judge(figures):
            if verdict.value is not None:
                word = "kept" if verdict.met else "MISSED"
                bound = f"{'at most' if verdict.target.at_most else 'at least'} {verdict.target.bound:g}"
                lines.append(f"  {word}: {verdict.target.title}: {verdict.value:.3g} {verdict.target.unit} ({bound})")
    lines += ["", *(f"{tier}: {why}" for tier, why in report.absent.items())]
    return "\n".join(lines).rstrip()


def _spreads(figures: TierFigures) -> list[tuple[str, str, str, str, str]]:
    named = [("plain process", figures.plain), (figures.command_title, figures.command)]
    named += [(f"the jail beside it, {name}", spread) for name, spread in figures.jail.items()]
    named += [("cold", figures.cold), ("on demand", figures.on_demand), ("warm", figures.warm)]
    named += [(f"warm, {rate} a second", spread) for rate, spread in figures.open_loop.items()]
    named.append((f"first byte after {figures.first_byte_from}", figures.first_byte))
    named.append(("deadline to all dead", figures.kill))
    if figures.preload:
        named.append((f"warm, {' and '.join(figures.preload['modules'])}", figures.preload["warm"]))
    return [
        (name, f"{s.p50:.3f}", f"{s.p90:.3f}", f"{s.p99:.3f}", f"{s.p50_ms:.2f}") for name, s in named if s is not None
    ]


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  " + "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]


def _facts(figures: TierFigures) -> list[tuple[str, str]]:
    facts = [
        (
            f"throughput, {callers} caller{'s' if callers != '1' else ''}",
            f"{ratio:.2f} x plain, {figures.throughput[callers]:g} a second",
        )
        for callers, ratio in figures.throughput_ratio.items()
    ]
    for name, spread in (
        ("cold", figures.cold_to_command),
        ("on demand", figures.on_demand_to_command),
        ("warm", figures.warm_to_command),
    ):
        if spread is not None:
            told = f"p50 {spread.p50:.3f}, p90 {spread.p90:.3f}, p99 {spread.p99:.3f}"
            facts.append((f"{name} as ratio to `{figures.command_title}`", told))
    facts += [(f"processor time, {name}", f"{ratio:.2f} x plain") for name, ratio in figures.cpu.items()]
    facts += [(f"no warm one left at {rate} a second", f"{share:.1%}") for rate, share in figures.cold_starts.items()]
    if figures.warm_bytes is not None:
        facts.append(("memory of a warm sandbox", f"{figures.warm_bytes / _MIB:.2f} MiB ({figures.warm_bytes_by})"))
    if figures.preload.get("warm_bytes"):
        facts.append(("the same, preloaded", f"{figures.preload['warm_bytes'] / _MIB:.2f} MiB"))
    return facts


def markdown(report: Mapping[str, Any]) -> str:
    """The README's table, from the JSON of a report."""
    head = (
        "tier",
        "cold",
        "on demand",
        "warm",
        "warm, 50 a second",
        "runs a second, 1 / 8 callers",
        "memory of a warm one",
        "first byte",
        "deadline to dead",
    )
    lines = [_row(head), _row(["---"] * len(head))]
    for tier in report["tiers"]:
        ratios = tier["throughput_ratio"]
        lines.append(
            _row(
                (
                    f"`{tier['tier']}`",
                    _pair(tier["cold"]),
                    _pair(tier["on_demand"]),
                    _pair(tier["warm"]),
                    _pair(tier["open_loop"].get("50")),
                    f"{ratios['1']:.1f} / {ratios['8']:.1f}" if {"1", "8"} <= ratios.keys() else "–",
                    f"{tier['warm_bytes'] / _MIB:.1f} MiB" if tier["warm_bytes"] else "–",
                    f"{tier['first_byte']['p50_ms']:.1f} ms" if tier["first_byte"] else "–",
                    _single(tier["kill"]),
                )
            )
        )
    machine = report["machine"]
    told = f"{machine['processor']}; {machine['memory']}; {machine['system']}; Python {machine['python'].split()[0]}"
    return (
        "\n".join(lines)
        + "\n\nMedian / p99 as ratios to `python3 -I -c pass` as a process, measured in turn with it by "
        + f"`fumehood bench` on {report['taken']} ({told}). "
        + "On demand is a cold run under another policy than the one before, for which nothing was made ahead "
        + "(the jail has processes that wait for any policy); a dash: nothing ever is, or it was not measured. "
        + "Throughput is a ratio to plain processes by as many callers.\n"
    )


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _pair(spread: Mapping[str, float] | None) -> str:
    return f"{_short(spread['p50'])} / {_short(spread['p99'])}" if spread else "–"


def _single(spread: Mapping[str, float] | None) -> str:
    return _short(spread["p50"]) if spread else "–"


def _short(ratio: float) -> str:
    return f"{ratio:.3f}" if ratio < 0.1 else f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"


# -- one page -----------------------------------------------------------------------------------------------------

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1b1f24 }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
pre { background: #f4f6f8; padding: 1rem; overflow: auto }
dt { float: left; clear: left; width: 8rem; color: #57606a } dd { margin-left: 8rem }
svg text { font: 12px system-ui, sans-serif; fill: #1b1f24 } .axis { fill: #57606a } .tier { font-weight: 600 }
"""
_COLOURS = {"cold": "#0969da", "warm": "#1a7f37", "open": "#8250df", "first": "#bf8700", "kill": "#cf222e"}
_LEFT, _RIGHT, _WIDTH, _LINE = 210, 20, 900, 20


def to_html(report: Report) -> str:
    """One self-contained page: the machine, the plot, the figures."""
    machine = "".join(f"<dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd>" for k, v in report.machine.items())
    return (
        "<!doctype html>\n<html lang=en><meta charset=utf-8><title>fumehood bench</title>"
        f"<style>{_STYLE}</style>\n<h1>fumehood {html.escape(report.version)}: what a sandbox costs</h1>\n"
        f"<p>Taken on {html.escape(report.taken)}{' with few rounds' if report.quick else ''}.</p>\n"
        f"<dl>{machine}</dl>\n<h2>Latency</h2>\n<p>From the median (dot) to p99 (end of the line), as ratios to "
        f"<code>python3 -I -c pass</code> as a process, on a logarithmic scale.</p>\n{plot(report)}\n"
        f"<h2>All figures</h2>\n<pre>{html.escape(text(report))}</pre>\n</html>\n"
    )


def plot(report: Report) -> str:
    """The latencies of all tiers as an SVG."""
    rows = _plot_rows(report.tiers)
    values = [value for _, _, spread in rows if spread for value in (spread.p50, spread.p99) if value > 0]
    low = math.floor(math.log10(min(values, default=0.1)))
    high = max(math.ceil(math.log10(max(values, default=1.0))), low + 1)
    height = 40 + _LINE * len(rows)

    def x(ratio: float) -> float:
        share = (math.log10(max(ratio, 10.0**low)) - low) / (high - low)
        return round(_LEFT + share * (_WIDTH - _LEFT - _RIGHT), 1)

    out = [f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="latency by tier" width="100%">']
    for power in range(low, high + 1):
        at = x(10.0**power)
        colour, width = ("#57606a", 1.5) if power == 0 else ("#d8dee4", 1)
        out.append(f'<line x1="{at}" x2="{at}" y1="20" y2="{height - 10}" stroke="{colour}" stroke-width="{width}"/>')
        out.append(f'<text class="axis" x="{at}" y="14" text-anchor="middle">{10.0**power:g}</text>')
    for number, (label, kind, spread) in enumerate(rows):
        y = 36 + _LINE * number
        if spread is None:
            out.append(f'<text class="tier" x="8" y="{y + 4}">{html.escape(label)}</text>')
            continue
        colour = _COLOURS[kind]
        out.append(f'<text x="24" y="{y + 4}">{html.escape(label)}</text>')
        out.append(
            f'<line x1="{x(spread.p50)}" x2="{x(spread.p99)}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="3"/>'
            f'<circle cx="{x(spread.p50)}" cy="{y}" r="4.5" fill="{colour}"><title>{spread.p50:.3f} / {spread.p99:.3f}'
            "</title></circle>"
        )
    return "\n".join([*out, "</svg>"])


def _plot_rows(tiers: Sequence[TierFigures]) -> list[tuple[str, str, Spread | None]]:
    rows: list[tuple[str, str, Spread | None]] = []
    for figures in tiers:
        rows.append((figures.tier, "", None))
        named = [("cold", "cold", figures.cold), ("on demand", "cold", figures.on_demand)]
        named.append(("warm", "warm", figures.warm))
        named += [(f"warm, {rate} a second", "open", spread) for rate, spread in figures.open_loop.items()]
        named += [("first byte", "first", figures.first_byte), ("deadline to dead", "kill", figures.kill)]
        rows += [row for row in named if row[2] is not None]
    return rows
