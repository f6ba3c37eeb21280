"""What a sealed sandbox is really held to, read from outside and turned into its receipt.

The supervisor reads /proc and the cgroup of the sandbox's first process after it has sealed itself and before the
first byte of a program. A value that is not what was asked for is an error: nothing runs then.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import NamedTuple

from fumehood.errors import StartError
from fumehood.linux import process
from fumehood.model import Boundary, Control, Held, Policy, Receipt
from fumehood.tiers.jail.controls import CLONED, MECHANISMS, TERMINALS_MAX, WORK

#: Where the sandbox may write; the same three folders of one tmpfs.
WRITABLE = frozenset((WORK, "/tmp", "/dev/shm"))
_FILTERS = 2
_PAGE = os.sysconf("SC_PAGE_SIZE")  # the kernel rounds a tmpfs up to it and a memory limit down
_NAMESPACE_OF = {
    "user_ns": "user",
    "mount_ns": "mnt",
    "pid_ns": "pid",
    "ipc_ns": "ipc",
    "uts_ns": "uts",
    "net_ns": "net",
    "cgroup_ns": "cgroup",
}


@lru_cache(maxsize=1)
def _own_namespaces() -> dict[str, int]:
    return process.namespaces(os.getpid())


@lru_cache(maxsize=256)  # most of a receipt says what the one before said
def _hard(name: str, mechanism: str, value: str) -> Control:
    return Control(name, Held.HARD, mechanism, value)


class Reading:
    """Collects controls and, at the end, refuses if any was not what it should be."""

    def __init__(self, disabled: frozenset[str]) -> None:
        self.controls: list[Control] = []
        self.wrong: list[str] = []
        self._disabled = disabled

    def off(self, name: str) -> bool:
        """Whether a test switched this control off."""
        return name in self._disabled

    def take(self, name: str, good: bool, value: object, held: Held = Held.HARD, mechanism: str = "") -> None:
        """One control as read back."""
        if name in self._disabled:
            self.controls.append(Control(name, Held.OFF, "switched off by a test", str(value)))
            return
        if not good:
            self.wrong.append(f"{name} is {value}")
        mechanism = mechanism or MECHANISMS[name]
        if held is Held.HARD:
            self.controls.append(_hard(name, mechanism, str(value)))
        else:
            self.controls.append(Control(name, held, mechanism, str(value)))


def read_back(
    pid: int,
    *,
    host_uid: int,
    policy: Policy,
    rlimits: dict[str, int],
    cgroup: dict[str, int | float | None],
    hard: tuple[str, ...],
    beside: int,
    seccomp: str,
    landlock: str,
    disabled: frozenset[str],
    notes: tuple[str, ...],
) -> Receipt:
    """The receipt of the sandbox that ``pid`` serves. Raises StartError naming every wrong value.

    ``beside``: how many processes of ours the pids limit counts with the program's.
    """
    reading = Reading(disabled)
    try:
        _namespaces(reading, pid)
        _credentials(reading, pid, host_uid, seccomp)
        _mounts(reading, pid, policy)
        _rlimits(reading, pid, rlimits)
    except OSError as error:
        raise StartError(f"cannot read back what is enforced: {error}", tier="jail") from None
    # Landlock shows nowhere: the child would have failed, had the kernel refused the ruleset.
    reading.take("landlock", True, landlock, Held.OFF if landlock == "absent" else Held.HARD)
    for name in ("descriptors", "session", "environment", "hostname", "undumpable"):
        reading.take(name, True, "applied")  # as above
    _limits(reading, policy, cgroup, hard, beside)
    if reading.wrong:
        raise StartError(f"not held as asked: {'; '.join(reading.wrong)}", tier="jail")
    return Receipt("jail", Boundary.KERNEL, tuple(reading.controls), host=_host(), notes=notes)


@lru_cache(maxsize=1)
def _host() -> str:
    system = os.uname()
    return f"{system.sysname} {system.release} {system.machine}"


def _namespaces(reading: Reading, pid: int) -> None:
    own, theirs = _own_namespaces(), process.namespaces(pid, _NAMESPACE_OF.values())
    for name, kind in _NAMESPACE_OF.items():
        mechanism = "clone3(2)" if name in CLONED else ""
        reading.take(name, theirs[kind] != own[kind], theirs[kind], mechanism=mechanism)


def _credentials(reading: Reading, pid: int, host_uid: int, seccomp: str) -> None:
    status = process.status(pid)
    reading.take("uid", status["Uid"] == (host_uid,) * 4 == status["Gid"] or _user(status, host_uid), host_uid)
    sets = [status[key] for key in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")]
    reading.take("capabilities", not any(sets), "none" if not any(sets) else f"{max(sets):x}")
    reading.take("no_new_privs", status["NoNewPrivs"] == 1, status["NoNewPrivs"])
    filters = status["Seccomp_filters"]
    good = status["Seccomp"] == 2 and (filters is None or filters >= _FILTERS)
    reading.take("seccomp", good, seccomp if good else f"mode {status['Seccomp']}, {filters} filters")


def _rlimits(reading: Reading, pid: int, asked: dict[str, int]) -> None:
    found = process.limits(pid)
    good = all(found[name.lower()] == (value, value) for name, value in asked.items())
    shown = asked if good else {name: found[name.lower()] for name in asked}
    reading.take("rlimits", good, " ".join(f"{name}={value}" for name, value in shown.items()))


def _user(status: process.Status, host_uid: int) -> bool:
    """Started by an ordinary user, the sandbox is that user outside, in the user's own primary group."""
    return os.geteuid() != 0 and status["Uid"] == (host_uid,) * 4 and status["Gid"] == (os.getegid(),) * 4


class _Mounts(NamedTuple):
    """What is to be known of the mounts of a sandbox."""

    writable: tuple[str, ...]
    unsafe: tuple[str, ...]
    size: str
    inodes: str
    proc: str
    terminals: str


@lru_cache(maxsize=16)  # by the text: sandboxes under one policy have one
def _look(mountinfo: bytes, with_terminals: bool) -> _Mounts:
    writable, unsafe, size, inodes, proc, terminals = [], [], "", "", "", "none"
    for mount in process.parse_mountinfo(mountinfo):
        if mount.mount_point in WRITABLE:
            size = next((o for o in mount.super_options if o.startswith("size=")), "")
            inodes = next((o for o in mount.super_options if o.startswith("nr_inodes=")), "")
        elif mount.fs_type == "proc":
            proc = ",".join(o for o in mount.super_options if o.startswith(("subset", "hidepid")))
        elif mount.fs_type == "devpts" and with_terminals:
            terminals = next((o for o in mount.super_options if o.startswith("max=")), "unbounded")
        elif "ro" not in mount.options:
            writable.append(mount.mount_point)
        if "nosuid" not in mount.options:
            unsafe.append(mount.mount_point)
    return _Mounts(tuple(writable), tuple(unsafe), size, inodes, proc, terminals)


def _mounts(reading: Reading, pid: int, policy: Policy) -> None:
    writable, unsafe, size, inodes, proc, terminals = _look(process.mountinfo(pid), policy.terminals)
    reading.take(
        "read_only", not writable and not unsafe, f"writable: {list(writable)}" if writable else "all but scratch"
    )
    reading.take("disk", size == f"size={-(-policy.limits.disk_bytes // _PAGE) * _PAGE // 1024}k", size or "unbounded")
    if not reading.off("disk"):
        good = inodes == f"nr_inodes={policy.limits.files + 4}"  # the three folders and the root of the tmpfs
        reading.take("files", good, inodes or "unbounded", mechanism=MECHANISMS["disk"])
    wanted = f"max={TERMINALS_MAX}" if policy.terminals else "none"
    reading.take("terminals", terminals == wanted, terminals)
    reading.take("proc", "subset=pid" in proc, proc or "the zygote's")


def _limits(
    reading: Reading, policy: Policy, cgroup: dict[str, int | float | None], hard: tuple[str, ...], beside: int
) -> None:
    limits = policy.limits
    if "memory" in hard:
        value = cgroup.get("memory_bytes")
        swap = cgroup.get("swap_bytes", 0)
        reading.take("memory", value == limits.memory_bytes // _PAGE * _PAGE and not swap, value)
    else:
        reading.take("memory", True, limits.memory_bytes, Held.BEST_EFFORT, "RLIMIT_DATA each, and a poller")
    if "pids" in hard:
        reading.take("pids", cgroup.get("pids") == limits.pids + beside, limits.pids)
    else:
        reading.take("pids", True, limits.pids, Held.BEST_EFFORT, "RLIMIT_NPROC in its own user namespace")
    if "cpu" in hard:
        value = cgroup.get("cpus")
        reading.take("cpu", value is not None and value <= limits.cpus + 1e-4, value)
    else:
        reading.take("cpu", True, limits.cpus, Held.BEST_EFFORT, "CPU affinity")
    reading.take("cpu_time", True, limits.cpu_s, _counted(hard))
    reading.take("wall", True, limits.wall_s)
    mechanism = f"{MECHANISMS['output']}, {policy.overflow}"
    reading.take("output", True, limits.output_bytes, mechanism=mechanism)


def _counted(hard: tuple[str, ...]) -> Held:
    return Held.HARD if "cpu" in hard else Held.BEST_EFFORT
