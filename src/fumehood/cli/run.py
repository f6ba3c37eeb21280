"""``fumehood run``: one program in a sandbox of its own, its output passed on as it comes."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fumehood import policy_file
from fumehood.cli import exits
from fumehood.cli.exits import ExitCode
from fumehood.cli.output import LiveOutput, forget_stdout, print_json, say
from fumehood.cli.output import bytes_in_words as _size
from fumehood.cli.terminal import escape_line
from fumehood.errors import PolicyError
from fumehood.model import CODE_BYTES_MAX, Artifact, Code, Limits, MiB, Outcome, Policy, Result, check_path
from fumehood.runner import AsyncRunner
from fumehood.tier import Sink

#: The longest standard input that is handed over; it is held in memory here.
STDIN_BYTES_MAX = 64 * MiB

_EPILOG = f"""\
Nothing of the host is inherited: no variable, no file, no network. An option counts more than the
policy file, and that more than the defaults; the floor of the policy holds all the same.

SIZE is bytes, or a number with k, M, G, KiB, MiB, GiB (1024s) or kB, MB, GB (1000s).
TIME is seconds, or a number with ms, s, m or h.

exit codes:
{exits.table()}"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``fumehood run``."""
    default = Limits()
    parser.epilog = _EPILOG
    parser.add_argument("program", nargs="?", metavar="FILE", help="the program; - reads it from stdin")
    parser.add_argument("-c", dest="code", metavar="CODE", help="the program as text")

    boundary = parser.add_argument_group("boundary")
    boundary.add_argument("--tier", help="the tier to use, see `fumehood tiers`")
    boundary.add_argument("--floor", metavar="BOUNDARY", help="the weakest boundary accepted (default: kernel)")
    boundary.add_argument("--policy", metavar="FILE", help="policy file (TOML)")
    boundary.add_argument("--image", metavar="NAME", help="the root file system, see `fumehood image`")
    boundary.add_argument("--runtime", metavar="NAME", help="the OCI runtime of docker or podman")

    limits = parser.add_argument_group("limits")
    limits.add_argument("--wall", metavar="TIME", help=f"time from start to end (default: {default.wall_s:g})")
    limits.add_argument("--cpu", metavar="TIME", help=f"CPU time of all processes (default: {default.cpu_s:g})")
    limits.add_argument("--cpus", metavar="N", help=f"CPU seconds per second (default: {default.cpus:g})")
    limits.add_argument(
        "--memory", metavar="SIZE", help=f"memory, files included (default: {_size(default.memory_bytes)})"
    )
    limits.add_argument("--pids", metavar="N", help=f"processes and threads (default: {default.pids})")
    limits.add_argument("--disk", metavar="SIZE", help=f"writable files (default: {_size(default.disk_bytes)})")
    limits.add_argument("--output", metavar="SIZE", help=f"stdout and stderr (default: {_size(default.output_bytes)})")

    inputs = parser.add_argument_group("what the program gets")
    inputs.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="an environment variable")
    inputs.add_argument(
        "--file",
        action="append",
        default=[],
        metavar="SRC[:DEST]",
        help="a copy of a file, in the work folder under DEST (default: its own name)",
    )
    inputs.add_argument("--stdin", metavar="FILE", help="its standard input (default: empty); - passes ours on")
    inputs.add_argument("--environment", metavar="NAME", help="packages, see `fumehood env`")
    inputs.add_argument(
        "--preload", action="append", default=[], metavar="MODULE", help="a module of it, imported beforehand"
    )

    results = parser.add_argument_group("what comes of it")
    results.add_argument("--out", metavar="DIR", help="save the files that the program leaves in its work folder")
    results.add_argument("--json", action="store_true", help="one JSON object on stdout instead of the output")
    results.add_argument("--receipt", action="store_true", help="say on stderr what was enforced, and how")


def main(args: argparse.Namespace) -> int:
    """Run the program and return the exit code; see :mod:`fumehood.cli.exits`. Raises FumehoodError."""
    policy = _policy(args)
    request = _request(args, policy)
    runner = AsyncRunner(tier=args.tier, floor=args.floor, policy=policy)
    ended = asyncio.run(_execute(runner, request, live=not args.json))
    if isinstance(ended, int):
        return ended
    if args.json:
        print_json(ended.to_dict())
    else:
        _explain(ended, policy)
    if args.receipt:
        print(receipt_table(ended, note=runner.tier.features.note), file=sys.stderr)
    return exits.of_result(ended)


# -- what was asked -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Request:
    program: Code
    files: dict[str, bytes]
    stdin: bytes
    out: Path | None


def _policy(args: argparse.Namespace) -> Policy:
    """The policy file (or the defaults) with the options over it."""
    policy = policy_file.load(args.policy) if args.policy is not None else Policy()
    parsers: dict[str, tuple[str, Callable[[str], Any]]] = {
        "wall": ("wall_s", policy_file.parse_duration),
        "cpu": ("cpu_s", policy_file.parse_duration),
        "cpus": ("cpus", _float),
        "memory": ("memory_bytes", policy_file.parse_bytes_size),
        "pids": ("pids", _int),
        "disk": ("disk_bytes", policy_file.parse_bytes_size),
        "output": ("output_bytes", policy_file.parse_bytes_size),
    }
    for option, (field, parse) in parsers.items():
        text = getattr(args, option)
        if text is not None:
            with _naming(f"--{option}"):
                policy = replace(policy, limits=replace(policy.limits, **{field: parse(text)}))
    with _naming("--env"):
        policy = replace(policy, env={**policy.env, **dict(map(_variable, args.env))})
    for field in ("environment", "image", "runtime"):
        value = getattr(args, field)
        if value is not None:
            with _naming(f"--{field}"):
                policy = replace(policy, **{field: value})
    with _naming("--preload"):
        policy = replace(policy, preload=(*policy.preload, *args.preload))
    return policy


def _request(args: argparse.Namespace, policy: Policy) -> _Request:
    if args.program == "-" and args.stdin == "-":
        raise PolicyError("stdin cannot be both the program and its input")
    return _Request(
        program=_program(args),
        files=_files(args.file, policy.limits.disk_bytes),
        stdin=b"" if args.stdin is None else _read("--stdin", args.stdin, STDIN_BYTES_MAX),
        out=None if args.out is None else _out_folder(args.out),
    )


def _program(args: argparse.Namespace) -> Code:
    if (args.code is None) == (args.program is None):
        raise PolicyError("give one program: FILE, -c CODE, or - for stdin", remedy="see fumehood run --help")
    if args.code is not None:
        return Code(os.fsencode(args.code), name="<string>")
    name = "<stdin>" if args.program == "-" else escape_line(os.path.basename(args.program))
    return Code(_read("the program", args.program, CODE_BYTES_MAX), name=name)


def _files(specs: list[str], total_max: int) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    left = total_max
    for spec in specs:
        source, colon, target = spec.rpartition(":")
        if not colon:
            source, target = spec, os.path.basename(spec)
        elif target.endswith("/"):
            target += os.path.basename(source)
        with _naming(f"--file {spec}"):
            path = check_path(target)
        if path in files:
            raise PolicyError(f"--file {spec}: {path} is given twice")
        files[path] = _read(f"--file {spec}", source, left)
        left -= len(files[path])
    return files


def _read(what: str, path: str, most: int) -> bytes:
    try:
        with open(0 if path == "-" else path, "rb", closefd=path != "-") as file:
            data = file.read(most + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise PolicyError(f"{what}: cannot read {path!r}: {reason}") from None
    if len(data) > most:
        raise PolicyError(f"{what}: {path!r} is over the {_size(most)} that there is room for")
    return data


def _out_folder(text: str) -> Path:
    folder = Path(text)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise PolicyError(f"--out: cannot make the folder {text!r}: {reason}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PolicyError(f"--out: the folder {text!r} is not writable")
    return folder


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise PolicyError(f"{text!r} has no value; write NAME=VALUE, for nothing is inherited")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise PolicyError(f"the value of {name} is not UTF-8") from None
    return name, value


def _int(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise PolicyError(f"{text!r} is not a whole number")
    return int(text)


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise PolicyError(f"{text!r} is not a number") from None


@contextlib.contextmanager
def _naming(option: str) -> Iterator[None]:
    """Put the option's name before the message of a PolicyError."""
    try:
        yield
    except PolicyError as error:
        raise PolicyError(f"{option}: {error.message}") from None


# -- running it ---------------------------------------------------------------------------------------------------


async def _execute(runner: AsyncRunner, request: _Request, *, live: bool) -> Result | int:
    """The result, or an exit code if a signal or a broken pipe ended it. The sandbox is gone in either case."""
    loop = asyncio.get_running_loop()
    running: asyncio.Task[Result]
    stopped_by: list[int] = []

    def stop(number: int) -> None:
        if stopped_by:  # asked twice: do not wait for the clean-up; the sandbox dies with us
            os._exit(128 + number)
        stopped_by.append(number)
        running.cancel()

    def unread() -> None:
        loop.call_soon_threadsafe(running.cancel)

    output = LiveOutput(unread) if live else None
    running = asyncio.create_task(_run(runner, request, output.sink if output else None))
    heeded = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    for number in heeded:
        loop.add_signal_handler(number, stop, number)
    try:
        result = await running
    except asyncio.CancelledError:
        if stopped_by:
            return 128 + stopped_by[0]
        if output and output.failure:
            return _unwritable(output.failure)
        raise
    finally:
        for number in heeded:
            loop.remove_signal_handler(number)
    if output:
        output.finish()
        if output.failure:
            return _unwritable(output.failure)
    return result


async def _run(runner: AsyncRunner, request: _Request, sink: Sink | None) -> Result:
    async with runner:
        return await runner.run(request.program, files=request.files, stdin=request.stdin, out=request.out, sink=sink)


def _unwritable(error: OSError) -> int:
    if isinstance(error, BrokenPipeError):
        forget_stdout()
        return ExitCode.BROKEN_PIPE
    say(f"the output could not be written: {error.strerror}")
    return ExitCode.FAULT


# -- what came of it ----------------------------------------------------------------------------------------------


def _explain(result: Result, policy: Policy) -> None:
    """On stderr, in words: what ended it or was lacking, output that was dropped, files saved and skipped."""
    limits = policy.limits
    reasons = {
        Outcome.WALL: f"ran longer than the {limits.wall_s:g} s allowed",
        Outcome.CPU: f"used more than the {limits.cpu_s:g} s of CPU time allowed",
        Outcome.MEMORY: f"used more than the {_size(limits.memory_bytes)} of memory allowed",
        Outcome.OUTPUT: f"printed more than the {_size(limits.output_bytes)} allowed",
        Outcome.DENIED: "was not approved",
        Outcome.CANCELLED: "was cancelled",
    }
    if result.outcome in reasons:
        say(reasons[result.outcome])
    elif result.exit_code is not None and result.exit_code < 0:
        say(f"died of signal {-result.exit_code} ({_signal_name(-result.exit_code)})")
    if result.unsupported is not None:
        say(f"the Python of tier {result.receipt.tier} lacks what it needs: {result.unsupported}")
    if result.truncated and result.outcome is not Outcome.OUTPUT:
        printed = result.usage.stdout_bytes + result.usage.stderr_bytes
        dropped = printed - len(result.stdout_data) - len(result.stderr_data)
        say(f"{_size(dropped)} of output beyond the {_size(limits.output_bytes)} allowed were dropped")
    for artifact in result.artifacts:
        say(_artifact_in_words(artifact))


def _artifact_in_words(artifact: Artifact) -> str:
    name = escape_line(artifact.path)
    if artifact.saved is not None:
        return f"saved {name} ({_size(artifact.size_bytes)}) as {escape_line(str(artifact.saved))}"
    return f"skipped {name}: {escape_line(artifact.skipped or 'no reason given')}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "real-time"


def receipt_table(result: Result, *, note: str = "") -> str:
    """The receipt for people; ``note`` is what must be known wherever the tier is named."""
    receipt = result.receipt
    boundary = f"{receipt.boundary.value}{', as claimed by the provider' if receipt.claimed else ''}"
    head = f"receipt: tier {receipt.tier}{f' ({note})' if note else ''}, boundary {boundary}"
    if receipt.host:
        head += f", enforced by {receipt.host}"
    rows = [("control", "held", "by", "value")]
    rows += [(c.name, c.held.value, c.mechanism, c.value) for c in receipt.controls]
    rows = [tuple(map(escape_line, row)) for row in rows]  # type: ignore[misc]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ["  " + "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]) for row in rows]
    return "\n".join([escape_line(head), *lines, *(f"  note: {escape_line(text)}" for text in receipt.notes)])
