"""Options that ``fumehood agent`` and ``fumehood mcp`` share: tier and policy, approval, quotas and the audit log."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import termios
from collections.abc import Iterator

from fumehood import policy_file
from fumehood.agent.approval import (
    TIMEOUT_S,
    Approval,
    Approver,
    Ask,
    Decision,
    Rule,
    StoreApprover,
    code_matches,
    file_out,
    new_egress_host,
    tool_call,
)
from fumehood.agent.audit import AuditLog, Keep
from fumehood.agent.books import Caller
from fumehood.agent.gate import Gate
from fumehood.agent.quotas import Quota, Quotas
from fumehood.cli.terminal import escape, escape_line
from fumehood.errors import FumehoodError, PolicyError
from fumehood.model import Policy
from fumehood.runner import AsyncRunner

_RULES = {
    "commands": lambda: tool_call("run_command"),
    "files": file_out,
    "egress": new_egress_host,
}


def configure(parser: argparse.ArgumentParser, *, terminal: bool) -> None:
    """Add the options. ``terminal`` says whether a person at the terminal may be asked."""
    boundary = parser.add_argument_group("boundary")
    boundary.add_argument("--tier", help="the tier to use, see `fumehood tiers`")
    boundary.add_argument("--floor", metavar="BOUNDARY", help="the weakest boundary accepted (default: kernel)")
    boundary.add_argument("--policy", metavar="FILE", help="policy file (TOML)")

    guards = parser.add_argument_group("approval, quotas, audit")
    guards.add_argument(
        "--approve",
        action="append",
        default=[],
        metavar="WHEN",
        help="ask a person: always; or commands, files (saved on the host), egress (hosts new to the session), "
        "code:REGEX; may be repeated (default: never)",
    )
    guards.add_argument(
        "--approve-in",
        metavar="FILE",
        help="let the question wait in this store for `fumehood approve`"
        + (" (default: ask on the terminal)" if terminal else ""),
    )
    guards.add_argument(
        "--approve-timeout", metavar="TIME", default="5m", help="no answer by then is a no (default: %(default)s)"
    )
    guards.add_argument(
        "--quota",
        action="append",
        default=[],
        metavar="SPEC",
        help="session:runs=100/3600 (at most 100 in 3600 s); of runs, cpu_s, wall_s, output_bytes, and sandboxes=N "
        "without a window; for each session or key; may be repeated",
    )
    guards.add_argument("--quota-db", metavar="WHERE", help="file, or postgresql:// URL, that quotas are kept in")
    guards.add_argument("--session", metavar="NAME", help="whose session quota counts (default: a new one)")
    guards.add_argument("--key", metavar="NAME", default="", help="whose key quota counts")
    guards.add_argument("--audit", metavar="FILE", help="append a record of each step to this log")
    guards.add_argument(
        "--audit-keep",
        action="append",
        default=[],
        choices=("code", "output"),
        help="keep this in the log itself, beside its hash; may be repeated",
    )
    guards.add_argument(
        "--audit-rotate",
        metavar="SIZE",
        help="move the log aside before it grows beyond this; logrotate(8) may do it instead (default: never)",
    )
    parser.set_defaults(terminal=terminal)


def make_runner(args: argparse.Namespace) -> AsyncRunner:
    """The runner that the options ask for. Raises FumehoodError."""
    policy = policy_file.load(args.policy) if args.policy is not None else Policy()
    return AsyncRunner(tier=args.tier, floor=args.floor, policy=policy)


@contextlib.contextmanager
def guarded(args: argparse.Namespace, runner: AsyncRunner) -> Iterator[Gate]:
    """``runner`` behind what the options ask for. Raises FumehoodError."""
    caller = Caller(args.session, args.key) if args.session else None
    audit = _audit(args)
    approval = _approval(args)
    quotas = _quotas(args)
    try:
        gate = Gate(runner, approval=approval, quotas=quotas, audit=audit, caller=caller)
        yield gate if caller is not None or not args.key else gate.for_caller(Caller(gate.caller.session, args.key))
    finally:
        if quotas is not None:
            quotas.close()


def _audit(args: argparse.Namespace) -> AuditLog | None:
    if args.audit is None:
        return None
    rotate_bytes = policy_file.parse_bytes_size(args.audit_rotate) if args.audit_rotate else None
    return AuditLog(args.audit, keep=Keep(**dict.fromkeys(args.audit_keep, True)), rotate_bytes=rotate_bytes)


def _quotas(args: argparse.Namespace) -> Quotas | None:
    if not args.quota:
        return None
    if args.quota_db is None:
        raise PolicyError("--quota needs --quota-db")
    return Quotas([Quota.parse(text) for text in args.quota], args.quota_db)


def _approval(args: argparse.Namespace) -> Approval | None:
    if not args.approve:
        if args.approve_in is not None:
            raise PolicyError("--approve-in needs --approve")
        return None
    approver: Approver
    if args.approve_in is not None:
        approver = StoreApprover(args.approve_in)
    elif args.terminal:
        approver = TerminalApprover()
    else:
        raise PolicyError("--approve needs --approve-in here: nobody is at a terminal")
    timeout_s = policy_file.parse_duration(args.approve_timeout) if args.approve_timeout else TIMEOUT_S
    if "always" in args.approve:
        return Approval(approver, "always", timeout_s)
    return Approval(approver, tuple(map(_rule, args.approve)), timeout_s)


def _rule(text: str) -> Rule:
    if text.startswith("code:"):
        return code_matches(text.removeprefix("code:"))
    if text not in _RULES:
        raise PolicyError(f"--approve {text!r} is none of always, {', '.join(_RULES)}, code:REGEX")
    return _RULES[text]()


class TerminalApprover:
    """Asks whoever sits at the process's terminal, which is opened anew: stdin may be something else.

    Raises FumehoodError if there is none.
    """

    def __init__(self, terminal: str = "/dev/tty") -> None:
        self._terminal = terminal
        try:
            os.close(self._open())
        except OSError as error:
            raise FumehoodError(
                f"there is no terminal to ask on: {error.strerror}", remedy="use --approve-in and `fumehood approve`"
            ) from error

    def _open(self) -> int:
        return os.open(self._terminal, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)

    async def decide(self, ask: Ask, *, timeout_s: float) -> Decision:
        """See :class:`fumehood.agent.approval.Approver`. Only ``y`` or ``yes`` is a yes."""
        fd = self._open()
        try:
            os.write(fd, question(ask).encode("utf-8", "replace"))
            # What was typed, or what a terminal answered, before the question was shown is no answer to it.
            termios.tcflush(fd, termios.TCIFLUSH)
            line = await _read_line(fd)
        finally:
            os.close(fd)
        answer = line.decode("utf-8", "replace").strip()
        return Decision(answer.lower() in ("y", "yes"), "terminal")


def question(ask: Ask) -> str:
    """The question as it is shown, escapes harmless; each line of the program is marked as such."""
    code = ask.code()
    lines = [f"  | {line}" for line in escape(code).split("\n")]
    told = [
        "",
        f"fumehood: may this run? {ask.action}, tier {ask.tier}, because: {escape_line('; '.join(ask.reasons))}",
        *(lines if code else []),
        f"fumehood: {len(code.splitlines())} lines above" if code else "",
        "fumehood: [y/N] ",
    ]
    return "\n".join(line for line in told if line)


async def _read_line(fd: int) -> bytes:
    """A line from the terminal; what is there of it at its end."""
    loop = asyncio.get_running_loop()
    line = bytearray()
    done: asyncio.Future[None] = loop.create_future()

    def readable() -> None:
        data = os.read(fd, 4096)
        line.extend(data)
        if (not data or b"\n" in data or len(line) > 65536) and not done.done():
            done.set_result(None)

    loop.add_reader(fd, readable)
    try:
        await done
    finally:
        loop.remove_reader(fd)
    return bytes(line)
