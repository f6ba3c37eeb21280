"""``fumehood mcp``: the tools over the Model Context Protocol."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
import signal
import socket
from dataclasses import fields
from pathlib import Path

from fumehood import policy_file
from fumehood.agent.gate import Gate
from fumehood.cli import guards
from fumehood.cli.exits import ExitCode
from fumehood.cli.output import say
from fumehood.errors import PolicyError, UnavailableError
from fumehood.runner import AsyncRunner

TOKEN_BYTES = 32

_EPILOG = """\
Without --http the client is whoever started this command, over stdin and stdout. Tier, policy and all
else are fixed by these options: nothing that a client sends can loosen them."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``fumehood mcp``."""
    parser.epilog = _EPILOG
    serving = parser.add_argument_group("serving")
    serving.add_argument("--http", metavar="HOST:PORT", help="serve streamable HTTP at /mcp instead of stdio")
    serving.add_argument(
        "--token-file",
        metavar="FILE",
        help="clients must send the token in this file; it is made, with a new token, if it is missing",
    )
    serving.add_argument("--no-token", action="store_true", help="let every program of this host in (loopback only)")
    serving.add_argument("--sessions", type=int, metavar="N", help="live sandboxes at most (default: 16)")
    serving.add_argument("--session-idle", metavar="TIME", help="end a session idle for so long (default: 10m)")
    serving.add_argument("--runs-at-once", type=int, metavar="N", help="further runs wait (default: 8)")
    guards.configure(parser, terminal=False)


def main(args: argparse.Namespace) -> int:
    """Serve until the client goes away or a signal comes. Raises FumehoodError."""
    try:
        import fumehood.mcp  # noqa: F401
    except ImportError as error:
        if error.name is None or error.name.startswith("fumehood"):
            raise
        raise UnavailableError("the MCP SDK is not installed", remedy="pip install 'fumehood[mcp]'") from error
    token = _token(args)
    listener = _listener(args.http) if args.http is not None else None
    runner = guards.make_runner(args)
    with guards.guarded(args, runner) as gate, contextlib.closing(listener) if listener else contextlib.nullcontext():
        return asyncio.run(_serve(args, runner, gate, listener, token))


async def _serve(
    args: argparse.Namespace, runner: AsyncRunner, gate: Gate, listener: socket.socket | None, token: str | None
) -> int:
    from fumehood.mcp import Bounds, serve_http, serve_stdio

    wanted = {
        "sessions": args.sessions,
        "session_idle_s": None if args.session_idle is None else policy_file.parse_duration(args.session_idle),
        "runs_at_once": args.runs_at_once,
    }
    if any(value is not None and value <= 0 for value in wanted.values()):
        raise PolicyError("--sessions, --session-idle and --runs-at-once must be over 0")
    assert set(wanted) <= {f.name for f in fields(Bounds)}
    bounds = Bounds(**{name: value for name, value in wanted.items() if value is not None})
    async with runner:
        if listener is not None:
            host, port = listener.getsockname()[:2]
            say(f"listening on http://{f'[{host}]' if ':' in host else host}:{port}/mcp")
            await serve_http(gate, listener, token=token, bounds=bounds)
            return 0
        serving = asyncio.ensure_future(serve_stdio(gate, bounds=bounds))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, serving.cancel)
        try:
            await serving
        except asyncio.CancelledError:
            return ExitCode.TERMINATED
        return 0


def _token(args: argparse.Namespace) -> str | None:
    if args.http is None:
        if args.token_file is not None or args.no_token:
            raise PolicyError("--token-file and --no-token are for --http")
        return None
    if (args.token_file is None) == (not args.no_token):
        raise PolicyError("--http needs either --token-file or --no-token")
    if args.token_file is None:
        return None
    path = Path(args.token_file)
    with contextlib.suppress(FileExistsError):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(fd, "w", encoding="ascii") as file:
            file.write(secrets.token_urlsafe(TOKEN_BYTES) + "\n")
    token = path.read_text("utf-8", "replace").strip()
    if len(token) < 16 or not token.isascii() or not token.isprintable():
        raise PolicyError(f"{args.token_file!r} holds no token of 16 printable ASCII characters or more")
    return token


def _listener(address: str) -> socket.socket:
    host, colon, port = address.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit() and len(port) < 6):
        raise PolicyError(f"--http {address!r} is not HOST:PORT")
    host = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
    try:
        family = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, int(port)), family=family)
    except (OSError, OverflowError) as error:
        raise PolicyError(f"--http: cannot listen on {address!r}: {error}") from None
