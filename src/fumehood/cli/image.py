"""``fumehood image``: the root file systems that containers and gVisor start from."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

from fumehood.cli.output import bytes_in_words, print_json
from fumehood.cli.terminal import escape
from fumehood.errors import FumehoodError, PolicyError
from fumehood.images import engines, store
from fumehood.images.engine import Word

_BUNDLE = "bundle"
_MICROVM = "microvm"
_ENGINES: tuple[Word, ...] = ("docker", "podman")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands and options of ``fumehood image``."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    build = actions.add_parser("build", help="make a small Python image from Debian packages", description=_BUILD)
    build.add_argument("name", metavar="NAME", help="lower-case letters, digits, '.', '_', '-'; at most 64")
    build.add_argument("--engine", choices=(*_ENGINES, _MICROVM, _BUNDLE), default=_BUNDLE, help=_ENGINE_HELP)
    build.add_argument("--packages", metavar="PACKAGE", nargs="+", default=[], help="Debian packages on top")
    build.add_argument("--environment", metavar="NAME", help="put this environment's packages in")
    build.add_argument("--kernel", metavar="FILE", help="for microvm: a kernel of yours, a .deb or a bzImage")
    build.add_argument("--json", action="store_true", help="one JSON object on stdout; progress stays on stderr")

    pull = actions.add_parser("pull", help="have an engine pull an image", description=_PULL)
    pull.add_argument("reference", metavar="REFERENCE", nargs="?", default=engines.PULLED, help=engines.PULLED)
    pull.add_argument("--engine", choices=_ENGINES, required=True)

    show = actions.add_parser("list", help="list the images", description="List the images that were built.")
    show.add_argument("--json", action="store_true", help="one JSON object on stdout")

    remove = actions.add_parser("remove", help="remove an image", description=_REMOVE)
    remove.add_argument("name", metavar="NAME")


_BUILD = """\
Make an image out of Debian packages, as the host's own apt sources offer them: python3, dash, coreutils and what they
need. No root is needed, and nothing of the packages runs. It is kept in the cache folder, where tier gvisor takes it
from; with --engine it is imported there as well. The tiers take the image called "python" unless told otherwise."""
_ENGINE_HELP = "where to put it besides the cache folder (default: nowhere, for tier gvisor); or microvm: a kernel and "
_ENGINE_HELP += "a root file system for tier microvm"
_PULL = "Have an engine pull an image from its registry, ahead of any run: a run never pulls."
_REMOVE = "Remove an image from the cache folder and from every engine that has it and answers."


def main(args: argparse.Namespace) -> int:
    """Do the action. Raises FumehoodError."""
    action = {"build": _build, "pull": _pull, "list": _list, "remove": _remove}[args.action]
    action(args)
    return 0


def _build(args: argparse.Namespace) -> None:
    if args.engine == _MICROVM:
        _build_microvm(args)
        return
    if args.kernel is not None:
        raise PolicyError("--kernel is for --engine microvm: containers run under the host's kernel")
    image = store.build(args.name, packages=args.packages, environment=args.environment, progress=_progress)
    told: dict[str, Any] = image.to_dict()
    if args.engine != _BUNDLE:
        told["reference"] = asyncio.run(engines.put(args.engine, image, _progress))
    if args.json:
        print_json({"image": told})
    else:
        where = told.get("reference", told["rootfs"])
        print(escape(f"{image.name}  Python {image.python}  {bytes_in_words(image.size_bytes)}  {where}"))


def _build_microvm(args: argparse.Namespace) -> None:
    from fumehood.tiers.microvm import images

    if args.environment is not None:
        raise PolicyError("a microVM gets the environment that the policy names; leave --environment out")
    kernel = Path(args.kernel) if args.kernel is not None else None
    image = images.build(args.name, packages=args.packages, kernel=kernel, progress=_progress)
    if args.json:
        print_json({"image": image.to_dict() | {"engine": _MICROVM}})
    else:
        size = bytes_in_words(image.initramfs_bytes)
        print(escape(f"{image.name}  Python {image.python}  Linux {image.kernel_release}  {size}  {image.path}"))


def _pull(args: argparse.Namespace) -> None:
    asyncio.run(engines.pull(args.engine, args.reference, _progress))


def _list(args: argparse.Namespace) -> None:
    from fumehood.tiers.microvm import images as microvm

    images = [image.to_dict() | {"engine": _BUNDLE} for image in store.list_all()]
    images += [
        image.to_dict() | {"engine": _MICROVM, "size_bytes": image.initramfs_bytes} for image in microvm.list_all()
    ]
    for word in _ENGINES:
        try:
            found = asyncio.run(engines.list_built(word))
        except FumehoodError:
            continue  # an engine that is not there has none
        images += [{"name": name, "digest": digest, "size_bytes": size, "engine": word} for name, digest, size in found]
    if args.json:
        print_json({"images": images})
        return
    for image in images:
        size = bytes_in_words(image["size_bytes"])
        print(escape(f"{image['engine']:<7} {image['name']}  {size}  {str(image['digest'])[:12]}"))


def _remove(args: argparse.Namespace) -> None:
    from fumehood.tiers.microvm import images as microvm

    gone = store.remove(args.name) | microvm.remove(args.name)
    for word in _ENGINES:
        try:
            gone = asyncio.run(engines.delete(word, args.name)) or gone
        except FumehoodError as error:
            _progress(f"{word}: {error.message}")
    if not gone:
        raise PolicyError(f"there is no image {args.name!r}", remedy="`fumehood image list` shows what there is")


def _progress(line: str) -> None:
    if line:
        print(escape(line), file=sys.stderr, flush=True)
