"""The service that tier e2b is tested against: our own endpoint, started when the first test needs it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

KEY = "e2b_a-key-of-the-suite"
_process: subprocess.Popen[str] | None = None


def ensure() -> None:
    """Start it once for this process, and point the SDK at it; an endpoint that the environment names is used."""
    global _process  # noqa: PLW0603 - one for the whole session
    if _process is not None or "E2B_API_KEY" in os.environ:
        return
    _process = subprocess.Popen(
        [sys.executable, "-P", "-m", "fumehood.e2b_server", "--tier", "jail"],
        env={**os.environ, "FUMEHOOD_E2B_KEY": KEY},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert _process.stdout is not None
    url = _process.stdout.readline().strip()
    os.environ.update(E2B_API_KEY=KEY, E2B_API_URL=url, E2B_SANDBOX_URL=url, E2B_HTTP_VERSION="1.1")
    asyncio.run(_meet())


async def _meet() -> None:
    """One question, so that what the SDK keeps for the whole process is there before any test looks."""
    from e2b_code_interpreter import AsyncSandbox

    await AsyncSandbox.list().next_items()


def pid() -> int | None:
    """Of the endpoint that this process started."""
    return _process.pid if _process is not None else None


def sandboxes() -> list[str]:
    """What lives at the endpoint, by its control API."""
    url = os.environ.get("E2B_API_URL", "")
    if os.environ.get("E2B_API_KEY") != KEY:
        return []
    request = urllib.request.Request(f"{url}/v2/sandboxes", headers={"X-API-Key": KEY})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return [str(box["sandboxID"]) for box in json.load(answer)]


def connections() -> set[str]:
    """Inodes of the sockets that are connected to the endpoint, by the kernel's table."""
    port = urlsplit(os.environ.get("E2B_API_URL", "")).port
    if os.environ.get("E2B_API_KEY") != KEY or port is None:
        return set()
    rows = (line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:])
    return {row[9] for row in rows if row[2].endswith(f":{port:04X}")}


def stop() -> None:
    """End what ``ensure`` started."""
    global _process  # noqa: PLW0603
    if _process is not None:
        _process.terminate()
        _process.wait(20)
        _process = None
