"""Reaching an engine: the socket that is there, or for Podman, which needs no daemon, a service of our own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time

from fumehood.errors import UnavailableError
from fumehood.folders import remove_tree
from fumehood.images.engine import Engine, Word, answers, socket_paths

#: A service of ours ends by itself when nobody has called it for this long.
IDLE_S = 60
#: Runs the command in its arguments until that ends, or until its standard input does, with the supervisor's death.
#: The parent-death signal would not do: it goes off when the thread ends that started the child (prctl(2)).
_LIFELINE = """
exec 3<&0 </dev/null
"$@" 3<&- &
service=$!
{ read -r word <&3; kill "$service"; } 2>/dev/null &
wait "$service"
kill $! 2>/dev/null
"""
_START_TIMEOUT_S = 20.0
_STOP_TIMEOUT_S = 5.0
_LOOK_S = 0.02
_BASE_MAX = 64


class Service:
    """A reachable engine; :meth:`close` ends what was started for it."""

    def __init__(self, engine: Engine, process: subprocess.Popen[bytes] | None = None, folder: str = "") -> None:
        self.engine = engine
        self._process = process
        self._folder = folder

    @property
    def lost(self) -> bool:
        """Whether a service of ours has ended."""
        return self._process is not None and self._process.poll() is not None

    def close(self) -> None:
        """Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            with contextlib.suppress(OSError):
                remove_tree(self._folder)


def reach(word: Word) -> Service:
    """The engine called ``word``, ready to be called. Blocks for as long as a service takes to start.

    Raises UnavailableError with the remedy.
    """
    paths, problem = socket_paths(word)
    reasons = [problem] if problem else []
    for path in paths:
        reason = answers(path)
        if not reason:
            return Service(Engine(word, path))
        reasons.append(f"{path}: {reason}")
    if word == "podman" and not problem:
        return _start_podman()
    raise UnavailableError(
        f"no Docker engine answers: {'; '.join(reasons) or 'there is no socket'}", tier=word, remedy=_remedy(reasons)
    )


def _remedy(reasons: list[str]) -> str:
    if any("ermission" in reason for reason in reasons):
        return "run as root, or use rootless Docker or Podman; the docker group is root by another name"
    if any("names" in reason for reason in reasons):
        return "point DOCKER_HOST to unix:///path, or unset it"
    if shutil.which("dockerd"):
        return "start it: `systemctl start docker`, or `dockerd` as root"
    return "install and start it: `apt-get install docker.io`"


def _start_podman() -> Service:
    program = shutil.which("podman")
    if program is None:
        raise UnavailableError("podman is not installed", tier="podman", remedy="`apt-get install podman`")
    # A socket's path has room for 107 bytes (unix(7)), which a deep folder for temporary files would use up.
    base = tempfile.gettempdir()
    folder = tempfile.mkdtemp(prefix="fumehood-podman-", dir=base if len(base) <= _BASE_MAX else "/tmp")
    path = f"{folder}/podman.sock"
    serve = (program, "--log-level=error", "system", "service", f"--time={IDLE_S}", f"unix://{path}")
    log = open(f"{folder}/log", "w+b")  # noqa: SIM115 - read below, closed with the service's start
    with log:
        try:
            process = subprocess.Popen(
                ["/bin/sh", "-c", _LIFELINE, "sh", *serve],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd="/",
                start_new_session=True,
                env={k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "XDG_RUNTIME_DIR", "USER", "LANG")},
            )
        except OSError as error:
            remove_tree(folder)
            raise UnavailableError(f"podman cannot be started: {error}", tier="podman") from None
        service = Service(Engine("podman", path), process, folder)
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not os.path.exists(path) or answers(path):
            if service.lost or time.monotonic() > deadline:
                log.seek(0)
                said = log.read(4096).decode("utf-8", "replace").strip()
                service.close()
                raise UnavailableError(
                    f"podman does not serve: {said[-500:] or 'time is over'}",
                    tier="podman",
                    remedy=podman_remedy(said),
                )
            time.sleep(_LOOK_S)
    return service


def podman_remedy(said: str) -> str:
    """What to do about what podman complains of."""
    if "subuid" in said or "newuidmap" in said or "user namespace" in said or "namespaces" in said:
        return (
            "rootless Podman needs uidmap installed and ranges for this user in /etc/subuid and /etc/subgid "
            "(`usermod --add-subuids 100000-165535 --add-subgids 100000-165535 USER`), or run as root"
        )
    return "see what `podman info` says"
