"""``fumehood verify``: attacks every tier on this host and prints what held."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from fumehood import registry
from fumehood.attacks import mutation, report
from fumehood.attacks.catalogue import ATTACKS, GROUPS, by_id
from fumehood.attacks.model import Attack, Finding
from fumehood.attacks.suite import Suite, verify
from fumehood.cli.output import check_reports, print_json, say
from fumehood.cli.terminal import escape
from fumehood.errors import PolicyError

#: A boundary did not hold what it must, or something is not proven.
NOT_PROVEN = 1


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``fumehood verify``."""
    parser.add_argument("--tier", action="append", metavar="TIER", help="a tier to attack (default: every one here)")
    parser.add_argument("--group", action="append", metavar="GROUP", help=f"only a group: {', '.join(GROUPS)}")
    parser.add_argument("--attack", action="append", metavar="ID", help="only one attack, such as A1")
    parser.add_argument("--list", action="store_true", help="list the attacks and do nothing")
    parser.add_argument("--show", metavar="ID", help="print one attack with its program and do nothing")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="the report as JSON (default: on stdout)")
    parser.add_argument("--html", type=Path, metavar="FILE", help="the report as one self-contained page")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="the report as JUnit XML")
    parser.add_argument(
        "--mutate", action="store_true", help="switch off each control of the jail in turn; an attack must succeed then"
    )
    parser.add_argument("--docs", type=Path, metavar="DIR", help="write the tables of the documentation into DIR")


def main(args: argparse.Namespace) -> int:
    """Run the suite; 0 if everything that must hold held, 1 if not. Raises PolicyError for unknown names."""
    chosen = _chosen(args)
    if args.list:
        print(escape("\n".join(f"{a.id:<6}{a.group:<11}{a.title}" for a in chosen)))
        return 0
    if args.show:
        print(escape(_shown(_known(args.show))))
        return 0
    check_reports(args.json, args.html, args.junit, args.docs and args.docs / "verify.json")
    if args.mutate:
        return _mutate(args)
    tiers = args.tier or list(registry.names())
    for tier in tiers:
        registry.make(tier)
    found = verify(chosen, tiers, _progress)
    _clear()
    if args.json == "-":
        print_json(report.to_dict(found))
    else:
        print(escape(report.text_matrix(found)))
    for path, text in ((args.json, report.to_json), (args.html, report.to_html), (args.junit, report.junit)):
        if path and path != "-":
            Path(path).write_text(text(found))
    if args.docs is not None:
        (args.docs / "verify.json").write_text(json.dumps(report.small_dict(found), indent=1) + "\n")
        (args.docs / "attacks.md").write_text(catalogue_page())
    return NOT_PROVEN if found.failed() else 0


def _chosen(args: argparse.Namespace) -> tuple[Attack, ...]:
    for group in args.group or ():
        if group not in GROUPS:
            raise PolicyError(f"unknown group {group!r}; groups are {', '.join(GROUPS)}")
    wanted = {_known(ident).id for ident in args.attack or ()}
    return tuple(
        a
        for a in ATTACKS
        if (not args.group or a.group in args.group) and (not wanted or a.id in wanted)
    )  # fmt: skip


def _known(ident: str) -> Attack:
    attack = by_id(ident)
    if attack is None:
        raise PolicyError(f"unknown attack {ident!r}; `fumehood verify --list` names them")
    return attack


def _shown(attack: Attack) -> str:
    facts = report.attack_dict(attack)
    lines = [f"{attack.id}  {attack.title}", f"source: {facts['source']}", f"the host watches: {facts['sees']}"]
    lines += [f"must be held from: {facts['holds_from']}", "", attack.program.strip()]
    if attack.second:
        lines += ["", f"# second program, {attack.second_when} the first:", attack.second.strip()]
    return "\n".join(lines)


def _mutate(args: argparse.Namespace) -> int:
    hard = registry.make(mutation.TIER).probe().hard
    lacks = tuple(name for name in ("memory", "pids", "cpu") if name not in hard)
    with Suite(_progress) as suite:
        mutants = mutation.mutate(suite, lacks=lacks)
    _clear()
    print(escape(mutation.text_table(mutants)))
    for finding in mutation.worst(mutants):
        say(f"inconclusive: {finding.attack}: {finding.seen}")
    if args.docs is not None:
        (args.docs / "mutation.md").write_text(mutation.markdown(mutants))
    missing = mutation.unproven(mutants)
    if missing:
        say(f"unproven controls: {', '.join(missing)}")
    return NOT_PROVEN if missing else 0


def _progress(finding: Finding, number: int, total: int) -> None:
    if sys.stderr.isatty():
        text = f"{finding.tier}: {number} of {total}: {finding.attack} {finding.verdict.value}"
        print(f"\r\x1b[K{escape(text)}", end="", file=sys.stderr, flush=True)
    elif number == total:
        print(f"{finding.tier}: {total} attacks done", file=sys.stderr, flush=True)


def _clear() -> None:
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def catalogue_page() -> str:
    """docs/attacks.md."""
    return _PAGE + report.markdown_catalogue(ATTACKS) + "\n"


_PAGE = """\
# The attacks

Written by `fumehood verify --docs docs`; `fumehood verify --show ID` prints one with its program.

An attack is a short program and a witness on the host: a canary that only the host knows, the log of a service, a scan
of /proc, a file's hash. It counts only if it succeeds on the control, the same program with nothing around it. "Must be
held from" is the weakest boundary that is required to hold it; what a weaker one does with it is reported as it is.
"Only" names the one tier that is required to, because the attack states that tier's own way to hold something.

## On your own machine

    fumehood verify                           # the control, then every tier that this host has
    fumehood verify --tier jail --group network --html report.html
    fumehood verify --attack B16              # one alone
    fumehood verify --mutate                  # each control of the jail switched off: an attack must succeed then

The exit code is 0 if every boundary held what it must, 1 if not, or if anything is inconclusive.

## In your own tests

`pytest --pyargs fumehood.attacks` attacks the default jail. To attack your own tier and policy, put this into a test
file:

```python
from fumehood.attacks.testing import *      # the tests and their fixtures
from fumehood import Limits, Policy, Runner

@pytest.fixture(scope="session")
def fumehood_runner():                      # or fumehood_tier, fumehood_policy
    return Runner(tier="jail", policy=Policy(limits=Limits(pids=16)))
```

An attack's own limits apply where they are stricter than the policy's, and never loosen it.

## Catalogue

"""
