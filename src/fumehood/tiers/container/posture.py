"""What a started container is really held to, turned into its receipt.

Two witnesses: the engine, asked what it applied (inspect), and the kernel, asked through /proc about the container's
first process. Where both can tell, it is the kernel that is believed. A value that is not what was asked for is an
error: nothing of a program has run then.
"""

from __future__ import annotations

import os
from typing import Any

from fumehood.errors import StartError
from fumehood.linux import process
from fumehood.model import Boundary, Control, Held, Limits, Policy, Receipt
from fumehood.tiers.container.spec import SHM, TMP, WORK, Scratch

_NAMESPACES = {
    "pid_ns": "pid",
    "net_ns": "net",
    "ipc_ns": "ipc",
    "uts_ns": "uts",
    "mount_ns": "mnt",
    "cgroup_ns": "cgroup",
}
_SCRATCH = (WORK, TMP, SHM)
#: Mounts that a runtime makes writable and the sandbox's user cannot write to, or whose use its rlimits forbid.
_RUNTIME_MOUNTS = ("/proc", "/dev", "/dev/pts", "/dev/mqueue", "/dev/console")
#: Bound one by one from the host where a user namespace cannot make them.
_DEVICES = tuple(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty"))


class Reading:
    """Collects controls and, at the end, refuses if any was not what it should be."""

    def __init__(self, tier: str) -> None:
        self.tier = tier
        self.controls: list[Control] = []
        self.wrong: list[str] = []

    def take(self, name: str, good: bool, value: object, mechanism: str, held: Held = Held.HARD) -> None:
        """One control as read back."""
        if not good:
            self.wrong.append(f"{name} is {value}")
        self.controls.append(Control(name, held, mechanism, str(value)))

    def receipt(self, boundary: Boundary, *, host: str, notes: tuple[str, ...] = ()) -> Receipt:
        """The receipt. Raises StartError naming every wrong value."""
        if self.wrong:
            raise StartError(f"not held as asked: {'; '.join(self.wrong)}", tier=self.tier)
        return Receipt(self.tier, boundary, tuple(self.controls), host=host, notes=notes)


def kernel_view(reading: Reading, pid: int, *, own_kernel: bool) -> None:
    """What /proc says of the first process, for runtimes whose containers are processes of this kernel."""
    if not own_kernel:
        return
    status = process.status(pid)
    own, theirs = process.namespaces(os.getpid()), process.namespaces(pid)
    for name, kind in _NAMESPACES.items():
        reading.take(name, theirs[kind] != own[kind], theirs[kind], "a namespace of its own")
    uid = status["Uid"][0]
    reading.take("uid", uid != 0 and status["Uid"] == (uid,) * 4, uid, "setresuid(2) by the runtime")
    if theirs["user"] != own["user"]:
        reading.take("user_ns", True, theirs["user"], "a namespace of its own")
    sets = [status[key] for key in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")]
    reading.take("capabilities", not any(sets), "none" if not any(sets) else f"{max(sets):x}", "all dropped")
    reading.take("no_new_privs", status["NoNewPrivs"] == 1, status["NoNewPrivs"], "PR_SET_NO_NEW_PRIVS")
    reading.take("seccomp", status["Seccomp"] == 2, f"mode {status['Seccomp']}", "our allow-list, by the runtime")


def mounts_view(reading: Reading, pid: int, policy: Policy, targets: tuple[str, ...]) -> None:
    """The container's mounts as the kernel has them: what is writable, and how large."""
    writable, sizes = [], {}
    seen = process.mounts(pid)
    for at, mount in enumerate(seen):
        if any(mount.mount_point.startswith(f"{later.mount_point}/") for later in seen[at + 1 :]):
            continue  # a later mount hides it
        if mount.mount_point in _SCRATCH:
            options = dict(o.partition("=")[::2] for o in mount.super_options)
            sizes[mount.mount_point] = (_kib(options.get("size", "")), options.get("nr_inodes", ""))
        elif "ro" not in (*mount.options, *mount.super_options) and not _harmless(mount):
            writable.append(mount.mount_point)
        if mount.mount_point in targets and "ro" not in mount.options:
            writable.append(mount.mount_point)
    reading.take("read_only", not writable, f"writable: {writable}" if writable else "all but scratch", "mount options")
    wanted = Scratch.of(policy.limits)
    asked = {WORK: wanted.work_bytes, TMP: wanted.side_bytes, SHM: wanted.side_bytes}
    files = {WORK: wanted.work_files, TMP: wanted.side_files, SHM: wanted.side_files}
    good = all(sizes.get(path, (0, ""))[0] == size for path, size in asked.items())
    text = " ".join(f"{path}={sizes.get(path, ('none',))[0]}" for path in asked)
    reading.take("disk", good, text, "size of each tmpfs, together the limit")
    good = all(sizes.get(path, (0, ""))[1] == str(count) for path, count in files.items())
    text = " ".join(f"{path}={sizes.get(path, (0, 'none'))[1]}" for path in files)
    reading.take("files", good, text, "inodes of each tmpfs, together the limit")


def _harmless(mount: process.MountInfo) -> bool:
    """A mount that is not read-only and leads nowhere: the runtime's own, or /dev/null over a masked file."""
    return mount.mount_point in (*_RUNTIME_MOUNTS, *_DEVICES) or (
        mount.root == "/null" and mount.mount_point.startswith("/proc/")
    )


def engine_view(reading: Reading, inspected: dict[str, Any], policy: Policy, hard: tuple[str, ...]) -> None:
    """What the engine says that it applied."""
    host = inspected["HostConfig"]
    limits = policy.limits
    reading.take("network", host["NetworkMode"] == "none", host["NetworkMode"], "the engine: no network attached")
    reading.take("privileged", host["Privileged"] is False, host["Privileged"], "the engine")
    dropped = not host.get("CapAdd")
    reading.take("added_capabilities", dropped, host.get("CapAdd") or "none", "the engine")
    shared = [k for k in ("PidMode", "UTSMode", "IpcMode", "UsernsMode") if str(host.get(k, "")).startswith("host")]
    reading.take("host_namespaces", not shared, shared or "none", "the engine")
    cgroup = "cgroup of the container, by the engine"
    if "memory" in hard:
        value, both = host["Memory"], host["MemorySwap"]
        reading.take("memory", value == limits.memory_bytes and both == value, value, f"{cgroup}; no swap")
    else:
        reading.take("memory", True, limits.memory_bytes, "RLIMIT_DATA each", Held.BEST_EFFORT)
    if "pids" in hard:
        reading.take("pids", host["PidsLimit"] == limits.pids + 1, limits.pids, cgroup)
    else:
        reading.take("pids", True, limits.pids, "RLIMIT_NPROC", Held.BEST_EFFORT)
    if "cpu" in hard:
        cpus = host["NanoCpus"] / 1e9 or _quota(host)
        reading.take("cpu", 0 < cpus <= limits.cpus + 1e-4, cpus, cgroup)
    else:
        reading.take("cpu", True, limits.cpus, "nothing slows it down", Held.OFF)


def cgroup_view(
    reading: Reading,
    found: dict[str, int | float | None],
    limits: Limits,
    hard: tuple[str, ...],
    *,
    overhead_pids: int,
) -> None:
    """Limits of a cgroup of our own, as the kernel has them; ``overhead_pids`` are the runtime's own tasks."""
    page = os.sysconf("SC_PAGE_SIZE")
    if "memory" in hard:
        value, swap = found.get("memory_bytes"), found.get("swap_bytes", 0)
        good = value == limits.memory_bytes // page * page and not swap
        reading.take("memory", good, value, "cgroup of ours, the runtime included; no swap")
    else:
        reading.take("memory", True, limits.memory_bytes, "RLIMIT_DATA each, and a poller", Held.BEST_EFFORT)
    if "pids" in hard:
        good = found.get("pids") == limits.pids + overhead_pids
        reading.take("pids", good, limits.pids, f"RLIMIT_NPROC inside; cgroup of ours at {limits.pids + overhead_pids}")
    else:
        reading.take("pids", True, limits.pids, "RLIMIT_NPROC inside", Held.BEST_EFFORT)
    if "cpu" in hard:
        value = found.get("cpus")
        reading.take("cpu", value is not None and value <= limits.cpus + 1e-4, value, "cgroup of ours")
    else:
        reading.take("cpu", True, limits.cpus, "nothing slows it down", Held.OFF)


def common_view(
    reading: Reading, policy: Policy, rlimits: dict[str, int], report: dict[str, Any], counted: bool
) -> None:
    """What the supervisor itself holds, and what the bootstrap read back of its own rlimits before any program ran."""
    asked = {name: [value, value] for name, value in rlimits.items()}
    text = " ".join(f"{name}={value}" for name, value in rlimits.items())
    reading.take("rlimits", report.get("rlimits") == asked, text, "setrlimit(2)")
    reading.take("environment", True, "PATH LANG HOME", "the engine and the agent: nothing of the supervisor's")
    limits = policy.limits
    held = Held.HARD if counted else Held.BEST_EFFORT
    reading.take("cpu_time", True, limits.cpu_s, "the supervisor reads the cgroup's count and kills", held)
    reading.take("wall", True, limits.wall_s, "the supervisor's clock and a kill of the container")
    reading.take("output", True, limits.output_bytes, f"bounded reader, {policy.overflow}")


def _quota(host: dict[str, Any]) -> float:
    period = host.get("CpuPeriod") or 0
    return (host.get("CpuQuota") or 0) / period if period else 0.0


def _kib(text: str) -> int:
    return int(text[:-1]) * 1024 if text.endswith("k") and text[:-1].isdigit() else 0
