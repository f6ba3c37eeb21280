"""The ``fumehood`` command. Each subcommand is a module, imported only when it is named, so that help comes at once.

A subcommand's module has ``configure(parser)``, which adds its options, and ``main(args) -> int``, which returns the
exit code (see :mod:`fumehood.cli.exits`). Errors it raises are told here: as words on stderr or, with ``--json``, as
the one JSON object on stdout.
"""

from __future__ import annotations

import argparse
import importlib
import shutil
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from fumehood import __version__
from fumehood.cli import exits
from fumehood.cli.exits import ExitCode
from fumehood.cli.output import forget_stdout, open_standard_descriptors, print_json, say
from fumehood.errors import FumehoodError, PolicyError, UnsupportedError

#: Subcommand -> (module, one line of help).
COMMANDS = {
    "run": ("fumehood.cli.run", "run a Python program in a sandbox of its own"),
    "map": ("fumehood.cli.map", "run many programs, JSON lines in and JSON lines out"),
    "tiers": ("fumehood.cli.tiers", "which tiers this host has, at which boundary, and why not the others"),
    "doctor": ("fumehood.cli.doctor", "what this host has to build boundaries with, and what to do about the rest"),
    "env": ("fumehood.cli.env", "build, list and remove environments of packages"),
    "image": ("fumehood.cli.image", "build, pull, list and remove the images of containers and gVisor"),
    "prune": ("fumehood.cli.prune", "remove what supervisors that were killed left behind"),
    "verify": ("fumehood.cli.verify", "attack every tier of this host, and show what held"),
    "bench": ("fumehood.cli.bench", "what a sandbox of each tier costs here, against a plain Python process"),
    "agent": ("fumehood.cli.agent", "let a model work on a task with a sandbox for its code"),
    "approve": ("fumehood.cli.approve", "answer the questions that wait for approval"),
    "audit": ("fumehood.cli.audit", "check the audit log, and read it"),
    "mcp": ("fumehood.cli.mcp", "serve the tools over the Model Context Protocol"),
}

_HELP_COLUMNS_MAX = 100


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: the process's own); returns the exit code.

    Raises SystemExit(0) after ``--help`` and ``--version``, as argparse does, and nothing else.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in arguments
    open_standard_descriptors()
    try:
        return _dispatch(arguments)
    except FumehoodError as error:
        _tell(error, as_json=as_json)
        return exits.of_error(error)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        forget_stdout()
        return ExitCode.BROKEN_PIPE
    except OSError as error:
        _tell(error, as_json=as_json)
        return ExitCode.FAULT
    except Exception as error:
        traceback.print_exc()
        _tell(error, as_json=as_json)
        return ExitCode.FAULT


def parser(command: str | None = None) -> argparse.ArgumentParser:
    """The parser. Only ``command`` has its options in it; the modules of the others are not imported."""
    top = _Parser(
        prog="fumehood",
        description="Run code that an AI agent wrote, at the isolation that you chose.",
        epilog=f"exit codes:\n{exits.table()}",
    )
    top.add_argument("--version", action="version", version=f"fumehood {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, summary) in COMMANDS.items():
        sub = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if name == command:
            importlib.import_module(module).configure(sub)
    return top


def _dispatch(arguments: list[str]) -> int:
    try:
        command = next((a for a in arguments if not a.startswith("-")), None)
        args = parser(command).parse_args(arguments)
        code: int = importlib.import_module(COMMANDS[args.command][0]).main(args)
        return code
    finally:
        sys.stdout.flush()  # here, where a broken pipe is still caught


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=min(shutil.get_terminal_size().columns, _HELP_COLUMNS_MAX) - 2)


class _Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=_Formatter, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise PolicyError(message, remedy=f"see {self.prog} --help")


def _tell(error: Exception, *, as_json: bool) -> None:
    message = error.message if isinstance(error, FumehoodError) else str(error)
    tier = getattr(error, "tier", None)
    remedy = getattr(error, "remedy", None)
    if not as_json:
        say(f"{tier}: {message}" if tier else message)
        if remedy:
            say(f"what to do: {remedy}")
        return
    told: dict[str, Any] = {"type": type(error).__name__, "message": message, "tier": tier, "remedy": remedy}
    if isinstance(error, UnsupportedError):
        told["unmet"] = list(error.unmet)
    try:
        print_json({"error": told})
        sys.stdout.flush()
    except BrokenPipeError:
        forget_stdout()
