"""The subprocess tier's side in the supervisor."""

from __future__ import annotations

import array
import asyncio
import contextlib
import json
import math
import os
import platform
import random
import socket
import stat
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from fumehood.enclosure import PidfdEnclosure, handshake, readable
from fumehood.environments import packages_of
from fumehood.errors import FumehoodError, StartError, UnavailableError
from fumehood.folders import place_of, remove_tree
from fumehood.linux import process
from fumehood.linux.rlimits import refuse_higher
from fumehood.model import Boundary, Control, Held, Limits, Policy, Receipt
from fumehood.session import GuestSandbox
from fumehood.threads import in_thread
from fumehood.tier import Features, Probe, require
from fumehood.tiers.jail.hosts import remedy_for
from fumehood.tiers.jail.runtime import base_python
from fumehood.wire import Channel

_LAUNCHER = str(Path(__file__).with_name("launcher.py"))
_MESSAGE_MAX = 1 << 16
_START_TIMEOUT_S = 30.0
_PROBE_TIMEOUT_S = 5.0
#: Host ids for root's children, in the block below the jail's; one at random for each sandbox.
_UID_FIRST = 0x6FFF0000
_UID_COUNT = 0xFFFF

FEATURES = Features(
    boundary=Boundary.LIMITS,
    summary="a child process with limits, no network and a folder of its own",
    live=True,
    files=True,
    commands=True,
    contexts=True,
    displays=True,
    background=True,
    pty=True,
    environments=True,
    egress_open=True,
    note="not a boundary: the program sees the host's files as the user it runs as",
)


class SubprocessTier:
    """Tier ``subprocess``. Holds nothing between sandboxes."""

    name = "subprocess"
    features = FEATURES

    def probe(self) -> Probe:
        """Clones once as a sandbox would; the answer is kept for this process."""
        return _try_host(os.geteuid() == 0)

    async def create(self, policy: Policy) -> GuestSandbox:
        """A new sandbox in a new folder. Raises UnsupportedError, UnavailableError, StartError."""
        require(self, policy)
        probe = self.probe()
        if not probe.available:
            raise UnavailableError(probe.reason, tier=self.name, remedy=probe.remedy)
        root = os.geteuid() == 0
        uid = _UID_FIRST + random.SystemRandom().randrange(_UID_COUNT) if root else os.geteuid()
        rlimits = _rlimits(policy.limits)
        refuse_higher(rlimits, tier=self.name)
        packages = packages_of(policy)
        enclosure: SubprocessEnclosure | None = None
        undo = contextlib.ExitStack()  # of what no enclosure owns yet
        try:
            ours, theirs = socket.socketpair()
            undo.enter_context(ours)
            undo.enter_context(theirs)
            plan = {
                "supervisor": os.getpid(),
                "root": root,
                "uid": uid,
                "network": policy.egress == ("*",),
                "rlimits": rlimits,
                "base": tempfile.gettempdir(),
                "site_packages": packages,
                "shown": root and packages is not None and hidden_part(packages) is not None,
                "preload": list(policy.preload),
            }
            child, control = _launch(plan, theirs)
            undo.callback(_reap, child)  # which removes its folders when the socket is closed
            undo.enter_context(control)
            message, pidfd = await _spawned(control)
            undo.callback(os.close, pidfd)
            pid = process.pid_of_pidfd(pidfd)
            work_fd = os.open(message["folder"], os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            enclosure = SubprocessEnclosure(pid, pidfd, child, control, message["folder"], work_fd, message["shown_at"])
            undo.pop_all()
            namespaces = process.namespaces(pid)  # while it can be asked: once sealed it is not dumpable
            await handshake(ours, enclosure, tier=self.name)
            receipt = _read_back(pid, uid, policy, rlimits, namespaces)
            enclosure.poll_memory(policy.limits.memory_bytes)
            fd = ours.detach()
            return GuestSandbox(Channel(fd, fd), enclosure, policy, receipt)
        except BaseException as error:
            undo.close()
            if enclosure is not None:
                ours.close()
                await asyncio.shield(enclosure.discard())
            if isinstance(error, OSError) and not isinstance(error, FumehoodError):
                raise StartError(f"the sandbox could not be set up: {error}", tier=self.name) from None
            raise

    async def close(self) -> None:
        """Nothing is kept."""


class SubprocessEnclosure(PidfdEnclosure):
    """A sandbox's process tree, the launcher that waits for it, its folder, and the one where it sees packages."""

    def __init__(
        self,
        pid: int,
        pidfd: int,
        child: subprocess.Popen[bytes],
        control: socket.socket,
        folder: str,
        work_fd: int,
        shown_at: str | None,
    ) -> None:
        super().__init__(pid, pidfd, None, cpu_after_death=self._used)
        self._child = child
        self._control = control
        self._folder = folder
        self._shown_at = shown_at
        self.work_fd = work_fd

    async def _used(self) -> float | None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, TimeoutError, EOFError):
            async with asyncio.timeout(1.0):
                message, _ = await _message(self._control)
            return float(message["cpu_s"])
        return None

    async def release(self) -> None:
        """Remove the folder and reap the launcher as well, which until then would do that in our place."""
        if self._released:
            return
        folder = place_of(self.work_fd, self._folder)
        await super().release()
        await in_thread(self._clean, folder)

    def _clean(self, folder: str) -> None:
        try:
            remove_tree(folder)
            if self._shown_at is not None:
                os.rmdir(self._shown_at)
        finally:
            with contextlib.suppress(OSError):
                self._control.send(b"removed")
            self._control.close()
            _reap(self._child)


def _reap(child: subprocess.Popen[bytes]) -> None:
    try:
        child.wait(1.0)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _launch(plan: dict[str, Any], channel: socket.socket) -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        try:
            child = subprocess.Popen(
                [base_python(), "-I", "-S", "-B", _LAUNCHER, str(theirs.fileno()), str(channel.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
                cwd="/",
                pass_fds=(theirs.fileno(), channel.fileno()),
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
    channel.close()
    ours.setblocking(False)
    ours.send(json.dumps(plan).encode())
    return child, ours


async def _spawned(control: socket.socket) -> tuple[dict[str, Any], int]:
    """What P0 has made, and P1's pidfd. Raises StartError."""
    fds: list[int] = []
    try:
        async with asyncio.timeout(_START_TIMEOUT_S):
            message, fds = await _message(control)
        if "error" in message:
            raise StartError(str(message["error"])[:500], tier="subprocess")
        (pidfd,) = fds
        return message, pidfd
    except (OSError, EOFError, ValueError) as error:
        for fd in fds:
            os.close(fd)
        raise StartError(f"the launcher did not answer: {error}", tier="subprocess") from None


async def _message(control: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """One datagram of the launcher's and the descriptors beside it. Raises EOFError when it is gone."""
    await readable(control)
    data, ancillary, _, _ = control.recvmsg(_MESSAGE_MAX, socket.CMSG_SPACE(4))
    fds = [fd for _, _, raw in ancillary for fd in array.array("i", raw[: len(raw) // 4 * 4])]
    if not data:
        raise EOFError("it exited")
    message = json.loads(data)
    if not isinstance(message, dict):
        raise ValueError("malformed message")
    return message, fds


def _rlimits(limits: Limits) -> dict[str, int]:
    return {
        "CORE": 0,
        "NOFILE": limits.open_files,
        "NPROC": limits.pids + 1,  # the agent is one
        "MEMLOCK": 0,
        "MSGQUEUE": 0,
        "FSIZE": limits.disk_bytes,
        "CPU": math.ceil(limits.cpu_s) + 1,
        "DATA": limits.memory_bytes,
        "NICE": 0,
        "RTPRIO": 0,
        "SIGPENDING": 1024,
    }


def _read_back(
    pid: int,
    uid: int,
    policy: Policy,
    rlimits: dict[str, int],
    theirs: dict[str, int],
) -> Receipt:
    """The receipt, from /proc and the child's own reading of its rlimits. Raises StartError if a value is wrong."""
    status = process.status(pid)
    own = process.namespaces(os.getpid())
    private = {kind: theirs[kind] != own[kind] for kind in ("pid", "net", "ipc")}
    capabilities = any(status[key] for key in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"))
    wrong = []
    if status["Uid"] != (uid,) * 4 or uid == 0:
        wrong.append(f"uid is {status['Uid']}")
    if capabilities:
        wrong.append("capabilities are left")
    if status["NoNewPrivs"] != 1:
        wrong.append("no_new_privs is off")
    if not private["pid"] or not private["ipc"]:
        wrong.append("a namespace is the host's")
    if not private["net"] and policy.egress != ("*",):
        wrong.append("the network is the host's")
    found = process.limits(pid)
    wrong += [
        f"{name} is {found[name.lower()]}" for name, value in rlimits.items() if found[name.lower()] != (value, value)
    ]
    if wrong:
        raise StartError(f"not held as asked: {'; '.join(wrong)}", tier="subprocess")
    limits = policy.limits
    hard, best = Held.HARD, Held.BEST_EFFORT
    network = Control("net_ns", hard, "network namespace without a device that is up", str(theirs["net"]))
    if policy.egress == ("*",):
        network = Control("net_ns", Held.OFF, "the policy opens the network", str(theirs["net"]))
    controls = (
        Control("environment", hard, "execve(2) with an environment of its own", "PATH LANG"),
        Control("descriptors", hard, "close_range(2)", "applied"),
        Control("session", hard, "setsid(2)", "applied"),
        Control("uid", hard, "setresuid(2)", str(uid)),
        Control("capabilities", hard, "capset(2) and PR_CAPBSET_DROP", "none"),
        Control("no_new_privs", hard, "PR_SET_NO_NEW_PRIVS", "1"),
        Control("pid_ns", hard, "clone3(2)", str(theirs["pid"])),
        Control("ipc_ns", hard, "clone3(2)", str(theirs["ipc"])),
        network,
        Control("rlimits", hard, "setrlimit(2)", " ".join(f"{k}={v}" for k, v in rlimits.items())),
        Control("memory", best, "RLIMIT_DATA each, and a poller", str(limits.memory_bytes)),
        Control("pids", best, "RLIMIT_NPROC", str(limits.pids)),
        Control("disk", best, "RLIMIT_FSIZE, each file", str(limits.disk_bytes)),
        Control("files", Held.OFF, "nothing counts them", ""),
        Control("cpu", Held.OFF, "nothing slows it down", ""),
        Control("cpu_time", best, "RLIMIT_CPU each, and a poller", str(limits.cpu_s)),
        Control("wall", hard, "the supervisor's clock and a kill of the PID namespace", str(limits.wall_s)),
        Control("output", hard, f"bounded reader, {policy.overflow}", str(limits.output_bytes)),
    )
    system = os.uname()
    host = f"{system.sysname} {system.release} {system.machine}"
    return Receipt("subprocess", Boundary.LIMITS, controls, host=host, notes=(FEATURES.note,))


@lru_cache(maxsize=2)
def _try_host(root: bool) -> Probe:
    if sys.platform != "linux":
        return Probe(False, f"needs Linux namespaces; this is {platform.system()}", "use a tier of another kind")
    if root and (hidden := hidden_part(base_python())):
        return Probe(
            False,
            f"started by root it runs as an unprivileged user, who cannot read this Python ({hidden})",
            "use a Python that every user can read, such as the system's, or run as an ordinary user",
        )
    try:
        done = subprocess.run(
            [base_python(), "-I", "-S", "-B", _LAUNCHER, "--probe", "root" if root else "user"],
            capture_output=True,
            text=True,
            env={},
            timeout=_PROBE_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Probe(False, f"cannot start {base_python()}: {error}", "see `fumehood doctor`")
    if done.returncode:
        reason = (done.stdout.strip() or done.stderr.strip().rpartition("\n")[2])[:500]
        return Probe(False, f"cannot make its namespaces: {reason}", remedy_for(reason))
    return Probe(True)


def hidden_part(path: str) -> str | None:
    """The first part of ``path``, from the root on, that not every user may pass, or None."""
    for part in (*reversed(Path(path).parents), Path(path)):
        if not os.stat(part).st_mode & stat.S_IXOTH:
            return str(part)
    return None
