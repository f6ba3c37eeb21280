"""The container engines that the tests need: ``python -m tests.services start``, ``stop``, or ``run -- COMMAND…``.

``start`` (idempotent, as root) installs Debian's packages where a command is missing, starts a Docker engine of its own
if none answers, and builds the image that the tiers take. The engine has its own socket and data folder and touches no
network of the host's: no bridge, no firewall rules, no forwarding. An engine that was there already is used and left
alone. ``stop`` ends what ``start`` started, by its pid, and keeps the images for the next time. ``run`` does both
around a command, with DOCKER_HOST set for it, and answers with the command's exit code. Podman and runsc need no
service. What cannot be had is told, and the tests that need it then skip, or fail where their tier is required.
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

from fumehood.errors import FumehoodError
from fumehood.images import engines, store
from fumehood.images.engine import EngineError, EngineGoneError, Word, answers, socket_paths
from fumehood.images.service import reach

#: Command -> Debian package. uidmap is what rootless Podman maps its users with.
PACKAGES = {
    "dockerd": "docker.io",
    "podman": "podman",
    "runsc": "runsc",
    "runc": "runc",
    "newuidmap": "uidmap",
    "qemu-system-x86_64": "qemu-system-x86",
}
ENGINES: tuple[Word, ...] = ("docker", "podman")
STATE = Path("/var/lib/fumehood-tests")
SOCKET = f"{STATE}/docker.sock"
_PID_FILE = STATE / "dockerd.pid"
_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 30.0
_POLICY = Path("/usr/sbin/policy-rc.d")
_LOCK_S = 300  # for another who installs packages


def main() -> int:
    """Do what the arguments say."""
    action, *rest = sys.argv[1:] or [""]
    if action == "run" and rest[:1] == ["--"] and len(rest) > 1:
        return run(rest[1:])
    if action not in ("start", "stop") or rest:
        print(f"usage: python -m tests.services start | stop | run -- COMMAND…\n\n{__doc__}", file=sys.stderr)
        return 2
    if action == "stop":
        stop()
    else:
        start()
    return 0


def run(command: list[str]) -> int:
    """Start, run ``command`` to its end, and stop what was started here."""
    running = _running()
    start()
    try:
        return subprocess.call(command)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        if running is None:
            stop()


def start() -> None:
    """Install, start, build; whatever fails is told."""
    if os.geteuid() != 0:
        _say("only root can start engines: what is there is used")
        return
    with _telling("packages"):
        install()
    if "DOCKER_HOST" not in os.environ and not any(not answers(path) for path in socket_paths("docker")[0]):
        os.environ["DOCKER_HOST"] = f"unix://{SOCKET}"
        with _telling("dockerd"):
            if answers(SOCKET):
                start_docker()
            _say(f"export DOCKER_HOST={os.environ['DOCKER_HOST']}")
    with _telling("image for microvm"):
        command = [sys.executable, "-m", "fumehood", "image", "build", "python", "--engine", "microvm"]
        subprocess.run(command, check=True)
    with _telling("image"):
        image = store.find(store.DEFAULT_NAME) or store.build(store.DEFAULT_NAME, progress=_say)
        for word in ENGINES:
            with _telling(f"image for {word}"):
                asyncio.run(put_once(word, image))


def install() -> None:
    """Packages whose command is missing. Nothing that they bring is started."""
    missing = [package for command, package in PACKAGES.items() if shutil.which(command) is None]
    if not missing:
        return
    _say(f"installing {' '.join(missing)}")
    with _nothing_starts():
        env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        apt = ["apt-get", "-q", "-o", f"DPkg::Lock::Timeout={_LOCK_S}"]
        command = [*apt, "install", "-y", "--no-install-recommends", *missing]
        if subprocess.run(command, env=env, stdout=subprocess.DEVNULL).returncode:
            subprocess.run([*apt, "update"], env=env, stdout=subprocess.DEVNULL, check=True)
            subprocess.run(command, env=env, stdout=subprocess.DEVNULL, check=True)


def start_docker() -> None:
    """An engine of our own, with runsc as a second runtime. Raises OSError, TimeoutError with its log's end."""
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
def _telling(what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, subprocess.SubprocessError, FumehoodError, EngineError, EngineGoneError) as error:
        _say(f"{what}: {error}")


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
