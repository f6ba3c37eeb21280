"""``fumehood bench``: what a sandbox of each tier costs on this machine, as ratios to a plain Python process."""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import sys
from pathlib import Path

import fumehood
from fumehood import registry
from fumehood.bench import machine, report
from fumehood.bench.figures import Report, TierFigures
from fumehood.bench.measure import FULL, QUICK, Bench, Effort
from fumehood.bench.targets import judge
from fumehood.cli.output import check_reports, print_json
from fumehood.cli.terminal import escape
from fumehood.errors import FumehoodError, PolicyError, UnavailableError

#: A promise was not kept on this machine.
MISSED = 1

_EPILOG = """\
Figures take turns with `python3 -I -c pass`, started as a process, so both meet the same noise. A tier
takes some two minutes, with --quick a few seconds, whose figures are no more than a look."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``fumehood bench``."""
    parser.epilog = _EPILOG
    parser.add_argument("--tier", action="append", metavar="TIER", help="a tier to measure (default: every one here)")
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--environment", metavar="NAME", help="measure preloading too, with this environment")
    parser.add_argument(
        "--preload", action="append", metavar="MODULE", help="a module of it (default: numpy and pandas)"
    )
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="the figures as JSON (default: on stdout)")
    parser.add_argument("--html", type=Path, metavar="FILE", help="one self-contained page with a plot")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a tier does not keep what it promises")


def main(args: argparse.Namespace) -> int:
    """Measure; 0, or 1 with ``--check`` if a promise was missed. Raises PolicyError, UnavailableError."""
    check_reports(args.json, args.html)
    for name in args.tier or ():
        registry.make(name)
    if args.preload and not args.environment:
        raise PolicyError("--preload needs --environment, where the modules are")
    preload = (args.environment, tuple(args.preload or ("numpy", "pandas"))) if args.environment else None
    found = Report(
        machine=machine.describe(),
        taken=datetime.datetime.now(datetime.UTC).date().isoformat(),
        version=fumehood.__version__,
        quick=args.quick,
        tiers=[],
        absent={},
    )
    for name in args.tier or registry.names():
        try:
            found.tiers.append(_measure(name, QUICK if args.quick else FULL, preload))
        except FumehoodError as error:
            if args.tier:
                raise
            found.absent[name] = error.message
    _clear()
    if args.json == "-":
        print_json(found.to_dict())
    else:
        print(escape(report.text(found)))
    if args.json and args.json != "-":
        Path(args.json).write_text(json.dumps(found.to_dict(), indent=1) + "\n")
    if args.html:
        args.html.write_text(report.to_html(found))
    missed = args.check and any(verdict.met is False for figures in found.tiers for verdict in judge(figures))
    return MISSED if missed else 0


def _measure(name: str, effort: Effort, preload: tuple[str, tuple[str, ...]] | None) -> TierFigures:
    probe = registry.make(name).probe()
    if not probe.available:
        raise UnavailableError(probe.reason, tier=name, remedy=probe.remedy or None)
    if preload is not None and not registry.make(name).features.environments:
        preload = None
    bench = Bench(lambda: registry.make(name), effort, _progress)
    return asyncio.run(bench.all(preload))


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
    else:
        print(text, file=sys.stderr, flush=True)


def _clear() -> None:
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
