"""``fumehood approve``: answer the questions that wait in an approval store."""

from __future__ import annotations

import argparse
import getpass
import os
import time

from fumehood.agent.approval import StoreApprover
from fumehood.cli.exits import ExitCode
from fumehood.cli.output import print_json, say
from fumehood.cli.terminal import escape, escape_line
from fumehood.errors import PolicyError


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``fumehood approve``."""
    parser.description = "Without --yes or --no: show the questions that wait in a store (see --approve-in)."
    parser.add_argument("store", metavar="FILE", help="the store")
    parser.add_argument("ident", metavar="ID", nargs="?", help="the question to show or answer")
    answer = parser.add_mutually_exclusive_group()
    answer.add_argument("--yes", action="store_true", help="let it run")
    answer.add_argument("--no", action="store_true", help="do not")
    parser.add_argument("--reason", default="", help="for the audit log and, with --no, for the model")
    parser.add_argument("--by", help="who answers (default: the name of this user)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def main(args: argparse.Namespace) -> int:
    """Show or answer. Raises FumehoodError."""
    if not os.path.exists(args.store):
        raise PolicyError(f"there is no store {args.store!r}")
    store = StoreApprover(args.store)
    if args.yes or args.no:
        if args.ident is None:
            raise PolicyError("name the question to answer")
        answered = store.answer(args.ident, approved=args.yes, by=args.by or _user(), reason=args.reason)
        if not answered:
            say("no such question waits: it was answered, or its deadline is over")
        if args.json:
            print_json({"answered": answered})
        return 0 if answered else ExitCode.REQUEST
    pending = [p for p in store.pending() if args.ident in (None, p.ident)]
    if args.json:
        print_json({"pending": [{name: getattr(p, name) for name in p.__slots__} for p in pending]})
        return 0
    for p in pending:
        left_s = max(p.deadline_s - time.time(), 0)
        who = f"session {escape_line(p.session)}" + (f", key {escape_line(p.key)}" if p.key else "")
        print(f"{p.ident}  {p.action}, tier {p.tier}, {who}; {left_s:.0f} s left; {escape_line('; '.join(p.reasons))}")
        print("\n".join(f"  | {line}" for line in escape(p.code).split("\n")))
    return 0


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"
