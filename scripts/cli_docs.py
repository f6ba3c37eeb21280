"""Write docs/cli.md from the ``--help`` texts, or, with ``--check``, say whether it is what they are now."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from fumehood import cli

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"

HEAD = """\
# The command line

What each command says with `--help`. Written by `scripts/cli_docs.py` and compared by a test; do not edit by hand.
"""


def page() -> str:
    """The whole page."""
    texts = [("fumehood", cli.parser())]
    for name in cli.COMMANDS:
        texts += commands(f"fumehood {name}", sub_parsers(cli.parser(name))[name])
    return HEAD + "".join(f"\n## `{name}`\n\n```\n{parser.format_help()}```\n" for name, parser in texts)


def commands(name: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """A command, and the commands below it."""
    yield name, parser
    for below, its_parser in sub_parsers(parser).items():
        yield from commands(f"{name} {below}", its_parser)


def sub_parsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of a parser's commands, by name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def main() -> int:
    """Exit code 1 if ``--check`` finds a difference."""
    os.environ |= {"COLUMNS": "100", "NO_COLOR": "1"}
    text = page()
    if "--check" in sys.argv[1:]:
        if not PAGE.exists() or PAGE.read_text() != text:
            print("docs/cli.md is out of date: run python scripts/cli_docs.py", file=sys.stderr)
            return 1
        return 0
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
