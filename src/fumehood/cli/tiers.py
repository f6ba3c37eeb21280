"""``fumehood tiers``: how each tier stands on this host."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from fumehood import registry
from fumehood.cli.output import print_json
from fumehood.cli.terminal import escape, escape_line
from fumehood.registry import Standing


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``fumehood tiers``."""
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def main(args: argparse.Namespace) -> int:
    """Print every tier, lightest first."""
    standings = registry.survey()
    if args.json:
        print_json({"tiers": [standing_to_dict(s) for s in standings]})
    else:
        print(escape(tiers_in_words(standings)))
    return 0


def standing_to_dict(standing: Standing) -> dict[str, Any]:
    """Plain values for JSON: what the tier promises and how it stands here."""
    features = asdict(standing.tier.features) | {"boundary": standing.tier.features.boundary.value}
    probe = standing.probe
    return {
        "name": standing.tier.name,
        "available": probe.available,
        "boundary": features.pop("boundary"),
        "note": features.pop("note"),
        "summary": features.pop("summary"),
        "reason": probe.reason,
        "remedy": probe.remedy,
        "hard_limits": list(probe.hard),
        "features": features,
        "details": dict(probe.details),
    }


def tiers_in_words(standings: tuple[Standing, ...]) -> str:
    """One line for each tier, and below it what it is, why it is not there and what to do."""
    rows = []
    for standing in standings:
        features = standing.tier.features
        there = "available" if standing.probe.available else "not here"
        rows.append(
            (standing.tier.name, there, features.boundary.value + (f" ({features.note})" if features.note else ""))
        )
    rows = [("tier", "", "boundary"), *rows]
    name_width, there_width = (max(len(row[column]) for row in rows) for column in (0, 1))
    lines = [f"{name:<{name_width}}  {there:<{there_width}}  {boundary}".rstrip() for name, there, boundary in rows]
    below: list[str] = [lines[0]]
    for line, standing in zip(lines[1:], standings, strict=True):
        indent = " " * (name_width + 2)
        below += [line, indent + standing.tier.features.summary]
        if not standing.probe.available:
            below.append(f"{indent}why not: {escape_line(standing.probe.reason)}")
            if standing.probe.remedy:
                below.append(f"{indent}what to do: {escape_line(standing.probe.remedy)}")
    return "\n".join(below)
