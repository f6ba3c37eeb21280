"""The container engines that the tests need: ``python -m tests.services start`` and ``stop``, both idempotent, as root.

``start`` installs Debian's packages where a command is missing, starts a Docker engine of its own if none answers at
the usual socket, and builds the image that the tiers take. The engine has its own data folder and touches no network
of the host's: no bridge, no firewall rules, no forwarding. An engine that was there already is used and left alone.
``stop`` ends what ``start`` started, by its pid, and keeps the images for the next time. Podman and runsc need no
service.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from fumehood.images import engines, store
from fumehood.images.engine import Word, answers
from fumehood.images.service import reach

#: Command -> Debian package. uidmap is what rootless Podman maps its users with.
PACKAGES = {
    "dockerd": "docker.io",
    "podman": "podman",
    "runsc": "runsc",
    "runc": "runc",
    "newuidmap": "uidmap",
}
SOCKET = "/run/docker.sock"
STATE = Path("/var/lib/fumehood-tests")
_PID_FILE = STATE / "dockerd.pid"
_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 30.0
_POLICY = Path("/usr/sbin/policy-rc.d")


def main() -> int:
    """Do what the one argument says."""
    action = sys.argv[1] if len(sys.argv) == 2 else ""
    if action not in ("start", "stop"):
        print(f"usage: python -m tests.services start|stop\n{__doc__}", file=sys.stderr)
        return 2
    if os.geteuid() != 0:
        print("engines are started by root only; their tests are skipped", file=sys.stderr)
        return 0
    {"start": start, "stop": stop}[action]()
    return 0


def start() -> None:
    """Install, start, build."""
    install()
    if answers(SOCKET):
        start_docker()
    image = store.find(store.DEFAULT_NAME) or store.build(store.DEFAULT_NAME, progress=_say)
    for word in ("docker", "podman"):
        asyncio.run(put_once(word, image))


def install() -> None:
    """Packages whose command is missing. Nothing that they bring is started."""
    missing = [package for command, package in PACKAGES.items() if shutil.which(command) is None]
    if not missing:
        return
    _say(f"installing {' '.join(missing)}")
    with _nothing_starts():
        env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        command = ["apt-get", "install", "-y", "-q", "--no-install-recommends", *missing]
        if subprocess.run(command, env=env, stdout=subprocess.DEVNULL).returncode:
            subprocess.run(["apt-get", "update", "-q"], env=env, stdout=subprocess.DEVNULL, check=True)
            subprocess.run(command, env=env, stdout=subprocess.DEVNULL, check=True)


def start_docker() -> None:
    """An engine at the usual socket, with runsc as a second runtime. Raises TimeoutError with its log's end."""
    STATE.mkdir(mode=0o711, exist_ok=True)
    runtimes = {"runsc": {"path": shutil.which("runsc"), "runtimeArgs": ["--platform=ptrace", "--network=none"]}}
    (STATE / "daemon.json").write_text(json.dumps({"runtimes": runtimes}))
    command = [
        "dockerd",
        f"--config-file={STATE}/daemon.json",
        f"--data-root={STATE}/data",
        f"--exec-root={STATE}/exec",
        f"--pidfile={_PID_FILE}",
        f"--host=unix://{SOCKET}",
        "--bridge=none",
        "--iptables=false",
        "--ip6tables=false",
        "--ip-forward=false",
        "--ip-masq=false",
        "--log-level=error",
    ]
    _say("starting dockerd")
    with (STATE / "log").open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", start_new_session=True
        )
    deadline = time.monotonic() + _START_TIMEOUT_S
    while reason := answers(SOCKET):
        if process.poll() is not None or time.monotonic() > deadline:
            tail = (STATE / "log").read_text(errors="replace")[-2000:]
            raise TimeoutError(f"dockerd does not answer: {reason}\n{tail}")
        time.sleep(0.05)


async def put_once(word: Word, image: store.Image) -> None:
    """Have the engine hold this very image."""
    service = reach(word)
    try:
        found = await engines.inspect(service.engine, image.name)
    finally:
        service.close()
    labels = ((found or {}).get("Config") or {}).get("Labels") or {}
    if labels.get(engines.LABEL) != image.digest:
        await engines.put(word, image, _say)


def stop() -> None:
    """End the engine that ``start`` started, if it runs."""
    pid = _running()
    if pid is None:
        return
    _say("stopping dockerd")
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + _STOP_TIMEOUT_S
    while _running() == pid:
        if time.monotonic() > deadline:
            raise TimeoutError("dockerd does not stop")
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
        time.sleep(0.05)


def _running() -> int | None:
    """The pid of our dockerd: its command line must name our data folder."""
    try:
        pid = int(_PID_FILE.read_text())
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (OSError, ValueError):
        return None
    return pid if f"--data-root={STATE}/data".encode() in command.split(b"\0") else None


@contextlib.contextmanager
def _nothing_starts() -> Iterator[None]:
    """Keep packages from starting their services: policy-rc.d, as Debian policy 9.3.3.2 has it."""
    if _POLICY.exists():
        yield
        return
    _POLICY.write_text("#!/bin/sh\nexit 101\n")
    _POLICY.chmod(0o755)
    try:
        yield
    finally:
        _POLICY.unlink()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
