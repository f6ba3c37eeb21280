"""``fumehood prune``: remove what supervisors that were killed left behind."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from fumehood.cli.output import print_json
from fumehood.cli.terminal import escape_line
from fumehood.errors import UnavailableError
from fumehood.images.engine import EngineError, EngineGoneError, Word
from fumehood.images.service import reach
from fumehood.linux import cgroup
from fumehood.tiers.container import owners
from fumehood.tiers.gvisor import leftovers


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``fumehood prune``."""
    parser.description = (
        "Remove containers, gVisor bundles and control groups whose supervisor has ended. What belongs to a living "
        "one is never touched. The next start of a tier does the same."
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def main(args: argparse.Namespace) -> int:
    """Remove, and tell what went."""
    removed: dict[str, Any] = {word: _containers(word) for word in ("docker", "podman")}
    removed["bundles"] = leftovers.sweep()
    removed["cgroups"] = _cgroups()
    if args.json:
        print_json({"removed": removed})
        return 0
    for what, found in removed.items():
        text = f"not asked: {found}" if isinstance(found, str) else f"{found if isinstance(found, int) else len(found)}"
        print(f"{what}: {escape_line(text)}")
    return 0


def _containers(word: Word) -> list[str] | str:
    """The ids removed, or why the engine could not be asked."""
    try:
        service = reach(word)
    except UnavailableError as error:
        return error.message
    try:
        return asyncio.run(owners.prune(service.engine))
    except (EngineError, EngineGoneError) as error:
        return str(error)
    finally:
        service.close()


def _cgroups() -> int:
    found = cgroup.find()
    if not found.version:
        return 0
    with found.open(sweep=False) as tree:
        return tree.sweep()
