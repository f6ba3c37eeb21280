"""``fumehood audit``: check the audit log, and read it."""

from __future__ import annotations

import argparse
import collections
import csv
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fumehood.agent import audit
from fumehood.agent.audit import Head
from fumehood.cli.exits import ExitCode
from fumehood.cli.output import print_json
from fumehood.cli.terminal import escape_line
from fumehood.errors import PolicyError

_FOLLOW_EVERY_S = 0.5
_COLUMNS = (
    "seq",
    "time",
    "event",
    "run",
    "session",
    "key",
    "tier",
    "policy_sha256",
    "code_sha256",
    "code_bytes",
    "by",
    "reason",
    "outcome",
    "exit_code",
    "seconds",
    "cpu_s",
    "memory_peak_bytes",
    "stdout_bytes",
    "stderr_bytes",
    "hash",
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands of ``fumehood audit``."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    verify = actions.add_parser(
        "verify", help="check that no record was changed, removed or moved", description=_VERIFY
    )
    verify.add_argument("log", metavar="FILE")
    verify.add_argument("--expect", metavar="HEAD", help="a head that was kept elsewhere: the log must contain it")
    verify.add_argument("--pruned", action="store_true", help="accept a log whose oldest parts were removed")
    verify.add_argument("--json", action="store_true", help="one JSON object on stdout")

    show = actions.add_parser("show", help="the records, one line each", description="Show the records.")
    _selection(show)
    show.add_argument("--json", action="store_true", help="whole records, one JSON object a line")

    tail = actions.add_parser("tail", help="the last records", description="Show the last records.")
    _selection(tail)
    tail.add_argument("-n", type=int, default=10, metavar="N", help="how many (default: %(default)s)")
    tail.add_argument("-f", dest="follow", action="store_true", help="go on with new ones until interrupted")
    tail.add_argument("--json", action="store_true", help="whole records, one JSON object a line")

    export = actions.add_parser("export", help="the records for another program", description=_EXPORT)
    _selection(export)
    export.add_argument("--format", choices=("csv", "json"), default="json", help="(default: %(default)s)")


_VERIFY = f"""\
Check every record's hash, their order, and the end of the log against its head file. Exit code 0 if all is well, else
{ExitCode.AUDIT.value}. The head that is printed can be kept elsewhere and be given to --expect later: whoever can
write both the log and its head file can forge them together, but not into one that holds that head. Parts that were
moved aside (FILE.1, FILE-20270131.gz, ...) are taken together with FILE, as by all other actions."""
_EXPORT = """\
Write all selected records: as one JSON array, or as CSV with one row a record and the fields that are single values.
In CSV, a text that a spreadsheet would take for a formula has a ' before it."""


def _selection(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", metavar="FILE")
    parser.add_argument("--run", metavar="ID", help="only this run")
    parser.add_argument("--session", metavar="NAME", help="only this session")
    parser.add_argument("--event", metavar="NAME", help="only this event: asked, approved, started, ended, ...")


def main(args: argparse.Namespace) -> int:
    """Do the action. Raises AuditError, PolicyError."""
    if args.action == "verify":
        return _verify(args)
    records = _selected(audit.read(Path(args.log)), args)
    if args.action == "export":
        _export(records, args.format)
        return 0
    if args.action == "tail":
        last = collections.deque(records, maxlen=max(args.n, 0))
        _show(last, as_json=args.json)
        if args.follow:
            after = max((r.get("seq", 0) for r in last), default=0)  # a damaged record has no number
            more = audit.read(Path(args.log), follow_s=_FOLLOW_EVERY_S)
            _show((r for r in _selected(more, args) if r.get("seq", 0) > after), as_json=args.json)
        return 0
    _show(records, as_json=args.json)
    return 0


def _verify(args: argparse.Namespace) -> int:
    try:
        expected = Head.parse(args.expect) if args.expect is not None else None
    except ValueError:
        raise PolicyError(f"{args.expect!r} is not a head as `fumehood audit verify` prints it") from None
    verdict = audit.verify(Path(args.log), expected=expected, pruned=args.pruned)
    head = str(verdict.head) if verdict.head is not None else None
    if args.json:
        told = {"ok": verdict.ok, "records": verdict.records, "parts": verdict.parts, "head": head}
        print_json(told | {"problems": list(verdict.problems), "open_runs": list(verdict.open_runs)})
    else:
        for problem in verdict.problems:
            print(f"problem: {problem}")
        for run in verdict.open_runs:
            print(f"note: run {escape_line(run)} has a start and no end")
        parts = "" if verdict.parts == 1 else f" in {verdict.parts} parts"
        print(f"{'whole' if verdict.ok else 'NOT whole'}: {verdict.records} records{parts}, head {head}")
    return 0 if verdict.ok else ExitCode.AUDIT


def _selected(records: Iterable[dict[str, Any]], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    wanted = {name: getattr(args, name) for name in ("run", "session", "event") if getattr(args, name) is not None}
    return (r for r in records if all(r.get(name) == value for name, value in wanted.items()))


def _show(records: Iterable[dict[str, Any]], *, as_json: bool) -> None:
    for record in records:
        print(json.dumps(record) if as_json else escape_line(_in_words(record)), flush=True)


def _in_words(record: dict[str, Any]) -> str:
    if record.get("event") == "damaged":
        return f"damaged record at byte {record['at_byte']}"
    head = f"{record.get('seq'):>6} {record.get('time')} {record.get('event'):<10} {str(record.get('run'))[:12]}"
    names = ("session", "key", "tier", "by", "reason", "reasons", "quota", "outcome", "exit_code", "seconds", "error")
    rest = [f"{name}={record[name]}" for name in names if record.get(name) not in (None, "", [])]
    return (
        f"{head} {' '.join(rest)} code={str(record['code_sha256'])[:12]}"
        if "code_sha256" in record
        else (f"{head} {' '.join(rest)}")
    )


def _export(records: Iterable[dict[str, Any]], format_: str) -> None:
    if format_ == "json":
        print(json.dumps(list(records), indent=1))
        return
    writer = csv.writer(sys.stdout)
    writer.writerow(_COLUMNS)
    for record in records:
        writer.writerow([_cell(record.get(name)) for name in _COLUMNS])


def _cell(value: object) -> str:
    """Text for a spreadsheet: nothing that it takes for a formula (https://owasp.org/www-community/attacks/CSV_Injection)
    and no control characters."""
    if value is None:
        return ""
    text = escape_line(str(value))
    return f"'{text}" if isinstance(value, str) and text[:1] in "=+-@\t\r" and text else text
