"""``fumehood env``: environments of packages, built by the operator and seen read-only by a sandbox."""

from __future__ import annotations

import argparse
import sys

from fumehood import environments
from fumehood.cli.output import bytes_in_words, print_json
from fumehood.cli.terminal import escape
from fumehood.environments import Environment
from fumehood.errors import PolicyError


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands and options of ``fumehood env``."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    build = actions.add_parser("build", help="install packages under a name", description=_BUILD)
    build.add_argument("name", metavar="NAME", nargs="?", help="lower-case letters, digits, '.', '_', '-'; at most 64")
    build.add_argument("packages", metavar="PACKAGE", nargs="*", help="as pip takes it: numpy, 'pandas>=2'")
    build.add_argument("--wasm", action="store_true", help="instead: compile the module of tier wasm, once")
    build.add_argument("--fuel", action="store_true", help="with --wasm: the module that counts instructions")
    build.add_argument("--python", metavar="PATH", help="the Python to install for, with pip (default: this one)")
    build.add_argument("--json", action="store_true", help="one JSON object on stdout; progress stays on stderr")

    show = actions.add_parser("list", help="list the environments", description="List the environments.")
    show.add_argument("--json", action="store_true", help="one JSON object on stdout")

    remove = actions.add_parser("remove", help="remove an environment", description=_REMOVE)
    remove.add_argument("name", metavar="NAME")


_BUILD = """\
Install packages, with all they need, under a name. Only wheels are installed; pip's own configuration names the
index. With --wasm, compile the WebAssembly module of tier wasm instead, which takes a minute or more. The cache is
$FUMEHOOD_CACHE, else $XDG_CACHE_HOME/fumehood, else ~/.cache/fumehood."""
_REMOVE = "Remove an environment, and the packages that no other one uses. A sandbox that is using it loses them."


def main(args: argparse.Namespace) -> int:
    """Do the action. Raises FumehoodError."""
    if args.action == "build" and (args.wasm or args.fuel):
        _compile_wasm(args)
    elif args.action == "build":
        if args.name is None or not args.packages:
            raise PolicyError("name the environment and at least one package, or --wasm")
        built = environments.build(args.name, args.packages, python=args.python, progress=_progress)
        _show((built,), {"environment": built.to_dict()} if args.json else None)
    elif args.action == "list":
        found = environments.list_all()
        _show(found, {"environments": [e.to_dict() for e in found]} if args.json else None)
    else:
        environments.remove(args.name)
    return 0


def _compile_wasm(args: argparse.Namespace) -> None:
    from fumehood.tiers.wasm import compiled

    if args.name is not None or args.packages or args.python or not args.wasm:
        raise PolicyError("--wasm takes no name, no packages and no --python; --fuel goes with --wasm")
    found = compiled.build(metered=args.fuel, progress=_progress)
    if args.json:
        print_json({"compiled": found.to_dict()})
    else:
        print(escape(f"{found.key}  {bytes_in_words(found.size_bytes)}  built {found.built_at}"))


def _progress(line: str) -> None:
    print(escape(line), file=sys.stderr, flush=True)


def _show(found: tuple[Environment, ...], as_json: dict[str, object] | None) -> None:
    if as_json is not None:
        print_json(as_json)
        return
    for environment in found:
        size = bytes_in_words(environment.size_bytes)
        asked = " ".join(environment.requested)
        print(escape(f"{environment.name}  Python {environment.python}  {size}  built {environment.built_at}  {asked}"))
