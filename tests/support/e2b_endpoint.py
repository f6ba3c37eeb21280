"""The service that tier e2b is tested against: our own endpoint, started when the first test needs it."""

from __future__ import annotations

import os
import subprocess
import sys

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


def stop() -> None:
    """End what ``ensure`` started."""
    global _process  # noqa: PLW0603
    if _process is not None:
        _process.terminate()
        _process.wait(20)
        _process = None
