"""``python -m fumehood.e2b_server [--port N] [--tier NAME]``: serve on loopback until interrupted.

The API key is taken from the environment variable FUMEHOOD_E2B_KEY; without it there is no server.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys

from fumehood.e2b_server.application import Endpoint
from fumehood.e2b_server.http import listen
from fumehood.e2b_server.sandboxes import Sandboxes
from fumehood.model import Limits, MiB, Policy
from fumehood.runner import AsyncRunner

#: Limits of what lives for an hour: the SDK's own timeouts end a command or a cell before, and
#: the client bounds what it keeps.
_LIMITS = Limits(wall_s=3600, cpu_s=3600, output_bytes=64 * MiB)


async def serve(key: str, port: int, tier: str | None) -> None:
    """Serve until cancelled. Raises what making a runner does, and OSError for the port."""
    async with AsyncRunner(tier=tier, policy=Policy(limits=_LIMITS)) as runner:
        sandboxes = Sandboxes(runner)
        server = await listen(Endpoint(sandboxes, key), port=port)
        print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
        try:
            await server.serve_forever()
        finally:
            await sandboxes.close()


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m fumehood.e2b_server", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="on 127.0.0.1; 0, the default, takes a free one")
    parser.add_argument("--tier", help="of the sandboxes (default: the lightest that meets the floor kernel)")
    args = parser.parse_args()
    key = os.environ.get("FUMEHOOD_E2B_KEY", "")
    if not key:
        print("set FUMEHOOD_E2B_KEY to the API key that clients must present", file=sys.stderr)
        return 2
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(key, args.port, args.tier))
    return 0


if __name__ == "__main__":
    sys.exit(main())
