"""The controls of the jail, in the order in which a sandbox's first process puts itself under them.

Each control is a function of the :class:`Box` that it seals, registered with its name and mechanism, so that the list
of what the jail enforces is read off the code (:data:`NAMES`). A control whose name is in ``box.disabled`` is skipped:
that set comes from a constructor argument of the tier that only the attack suite's mutation uses.

Runs inside the zygote: every import here is memory in each sandbox.
"""

from __future__ import annotations

import os
import resource

from fumehood.linux import capabilities, landlock, seccomp
from fumehood.linux.libc import mount, unshare
from fumehood.linux.mounts import MS_BIND, MS_NODEV, MS_NOEXEC, MS_NOSUID, MS_REC, pivot_to, tmpfs
from fumehood.linux.namespaces import (
    CLONE_NEWCGROUP,
    CLONE_NEWIPC,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    CLONE_NEWUTS,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

UID = 1000  # inside; maps to one unprivileged host id
CHANNEL_FD = 3
WORK = "/work"
HOSTNAME = "sandbox"
TERMINALS_MAX = 64  # of one sandbox; the kernel has 4096 for all (kernel.pty.max)

_WORK_FLAGS = MS_NOSUID | MS_NODEV

#: Namespaces that the clone itself makes. The network namespace comes from the zygote's stock, the cgroup namespace is
#: made once the process stands in its cgroup.
CLONED = {
    "user_ns": CLONE_NEWUSER,
    "mount_ns": CLONE_NEWNS,
    "pid_ns": CLONE_NEWPID,
    "ipc_ns": CLONE_NEWIPC,
    "uts_ns": CLONE_NEWUTS,
}


class Box:
    """What a sandbox is to be held to, and what was done. Those of one shape are made from one, with their own ids."""

    def __init__(self, shape: dict[str, Any], config: dict[str, Any]) -> None:
        self.disk_bytes: int = shape["disk_bytes"]
        self.files: int = shape["files"]
        # By the numbers of the resource constants, which the request names without RLIMIT_.
        self.rlimits = [(getattr(resource, f"RLIMIT_{name}"), (n, n)) for name, n in shape["rlimits"].items()]
        self.host_uid = 0  # as the zygote's user namespace numbers it
        self.last_capability: int = config["last_capability"]
        self.landlock_abi: int = config["landlock_abi"]
        self.seal_filter: bytes = config["seal_filter"]
        self.serve: Callable[[int, int, str], object] = config["serve"]
        self.root: str = config["root"]
        self.terminals: bool = shape["terminals"]
        self.touch: bool = shape["touch"]  # the guest rehearses a run before it is ready
        self.single: bool = shape["single"]  # it has no agent
        self.disabled: frozenset[str] = config["disabled"]
        self.work_fd = -1

    def clone_flags(self) -> int:
        """Flags for clone3: the namespaces that are not switched off."""
        flags = 0
        for name, flag in CLONED.items():
            if name not in self.disabled:
                flags |= flag
        return flags

    def joined_flags(self) -> int:
        """Flags for setns: the same namespaces but the PID namespace, which a process is born in."""
        return self.clone_flags() & ~CLONE_NEWPID


SEAL: list[tuple[str, str, Callable[[Box], None]]] = []


def _control(name: str, mechanism: str) -> Callable[[Callable[[Box], None]], Callable[[Box], None]]:
    def register(apply: Callable[[Box], None]) -> Callable[[Box], None]:
        SEAL.append((name, mechanism, apply))
        return apply

    return register


@_control("descriptors", "close_range(2)")
def _descriptors(box: Box) -> None:
    os.closerange(CHANNEL_FD + 1, 1 << 30)


@_control("session", "setsid(2)")
def _session(box: Box) -> None:
    os.setsid()


@_control("uid", "setresuid(2) to one mapped id")
def _uid(box: Box) -> None:
    os.setresgid(UID, UID, UID)
    os.setresuid(UID, UID, UID)


@_control("cgroup_ns", "unshare(2)")
def _cgroup_ns(box: Box) -> None:
    unshare(CLONE_NEWCGROUP)


@_control("disk", "tmpfs size= and nr_inodes=")
def _disk(box: Box) -> None:
    # One tmpfs holds /work, /tmp and /dev/shm, so that one number bounds all that can be written.
    size, inodes = (0, 0) if "disk" in box.disabled else (box.disk_bytes, box.files + 4)  # 0 is no bound
    tmpfs("/tmp", size_bytes=size, inodes=inodes, mode="755", flags=_WORK_FLAGS, owner=UID)
    for name, target in (("work", WORK), ("shm", "/dev/shm"), ("tmp", "/tmp")):
        os.mkdir(f"/tmp/{name}", 0o700)
        mount(f"/tmp/{name}", target, None, MS_BIND)
    os.chdir(WORK)
    # Not O_PATH: the supervisor lists the folder through it when no process of this namespace is left.
    box.work_fd = os.open(WORK, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


@_control("terminals", "devpts newinstance, max=")
def _terminals(box: Box) -> None:
    if box.terminals:
        bound = "" if "terminals" in box.disabled else f",max={TERMINALS_MAX}"
        mount("devpts", "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, f"newinstance,ptmxmode=666,mode=600{bound}")


@_control("proc", "proc subset=pid")
def _proc(box: Box) -> None:
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, "subset=pid,hidepid=invisible")


@_control("rlimits", "setrlimit(2)")
def _rlimits(box: Box) -> None:
    for number, both in box.rlimits:
        resource.setrlimit(number, both)


@_control("capabilities", "capset(2) and PR_CAPBSET_DROP")
def _capabilities(box: Box) -> None:
    capabilities.drop_all(box.last_capability)


@_control("no_new_privs", "PR_SET_NO_NEW_PRIVS")
def _no_new_privs(box: Box) -> None:
    capabilities.no_new_privs()


@_control("landlock", "Landlock")
def _landlock(box: Box) -> None:
    if box.landlock_abi == 0:
        return  # not in this kernel: the receipt says so
    ruleset = landlock.jail_ruleset(["/"], [WORK, "/tmp", "/dev/shm"], ["/dev"], box.landlock_abi)
    landlock.restrict(ruleset)
    os.close(ruleset)


@_control("seccomp", "seccomp filter")
def _seccomp(box: Box) -> None:
    seccomp.load(box.seal_filter)


#: Controls that the launcher or the supervisor puts in place around the sandbox, with their mechanism.
AROUND = {
    "environment": "execve(2) with an environment of its own",
    "net_ns": "network namespace without a device that is up",
    "hostname": "sethostname(2)",
    "read_only": "mount_setattr(2) recursively read-only",
    "memory": "memory cgroup",
    "pids": "pids cgroup",
    "cpu": "cpu cgroup",
    "undumpable": "PR_SET_DUMPABLE of the agent",
}

#: Limits that the supervisor holds by itself, watching: :func:`unwatched` is a policy without them.
WATCHED = {
    "wall": "the supervisor's clock and a kill of the PID namespace",
    "cpu_time": "the supervisor reads the count and kills",
    "output": "bounded reader",
}

#: Every control of the jail, by name.
NAMES = (*AROUND, *WATCHED, *CLONED, *(name for name, _, _ in SEAL))

#: Name -> mechanism, for receipts.
MECHANISMS = {
    **AROUND,
    **WATCHED,
    **{name: "clone3(2)" for name in CLONED},
    **{name: mechanism for name, mechanism, _ in SEAL},
}


def seal(box: Box) -> None:
    """Put this process under every control, in order. Raises OSError at the first that the kernel refuses."""
    if box.root != "/":
        # The rest of the zygote's root is let go of, with the Python in it: what serves has imported what it needs.
        mount(box.root, box.root, None, MS_BIND | MS_REC)
        # Only where one is visible may another /proc be mounted (mount_too_revealing() in fs/namespace.c), as "proc"
        # does below, on top of this one.
        mount("proc", f"{box.root}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
        pivot_to(box.root)
    for name, _, apply in SEAL:
        # Without their bounds these are still mounted, unless what that needs is switched off as well.
        unbound = name in ("disk", "terminals") and not box.disabled & {"mount_ns", "user_ns", "uid"}
        if name not in box.disabled or unbound:
            try:
                apply(box)
            except OSError as error:
                raise OSError(error.errno, f"{name}: {error}") from None
