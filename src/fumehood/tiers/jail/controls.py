"""The controls of the jail, in the order in which a sandbox's first process puts itself under them.

Each control is a function that adds the system calls by which a process puts itself under it, registered with its name
and mechanism, so that the list of what the jail enforces is read off the code (:data:`NAMES`). The zygote prepares them
once for each :class:`Box`; a sandbox goes through them (:mod:`fumehood.linux.steps`). A control whose name is in
``box.disabled`` is skipped: that set comes from a constructor argument of the tier that only the attack suite's
mutation uses.

Runs inside the zygote: every import here is memory in each sandbox.
"""

from __future__ import annotations

import ctypes
import os
import resource

from fumehood.linux import capabilities, landlock, seccomp
from fumehood.linux.mounts import MS_BIND, MS_NODEV, MS_NOEXEC, MS_NOSUID, MS_REC, pivot_to, tmpfs_options
from fumehood.linux.namespaces import (
    CLONE_NEWCGROUP,
    CLONE_NEWIPC,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    CLONE_NEWUTS,
)
from fumehood.linux.steps import AT_FDCWD, Result, Steps

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

UID = 1000  # inside; maps to one unprivileged host id
CHANNEL_FD = 3
GO = b"G"  # as in fumehood.enclosure, which is not loaded here
WORK = "/work"
HOSTNAME = "sandbox"
TERMINALS_MAX = 64  # of one sandbox; the kernel has 4096 for all (kernel.pty.max)

_SIG_SETMASK, _SIGSET_BYTES = 2, 8  # of the kernel, which are not the C library's
_WORK = WORK.encode()
_SCRATCH = ((b"work", _WORK), (b"shm", b"/dev/shm"), (b"tmp", b"/tmp"))  # the last covers what the others came from
_WORK_FLAGS = MS_NOSUID | MS_NODEV
_PROC_FLAGS = MS_NOSUID | MS_NODEV | MS_NOEXEC

#: Namespaces that the clone itself makes. The network namespace comes from the zygote's stock, the cgroup namespace is
#: made once the process stands in its cgroup.
CLONED = {
    "user_ns": CLONE_NEWUSER,
    "mount_ns": CLONE_NEWNS,
    "pid_ns": CLONE_NEWPID,
    "ipc_ns": CLONE_NEWIPC,
    "uts_ns": CLONE_NEWUTS,
}


#: Limits of each process, by the names of resource.RLIMIT_…, in the order in which Numbers has them. The last stands in
#: for a memory cgroup where there is none.
RLIMITS = ("CORE", "NOFILE", "NPROC", "MEMLOCK", "MSGQUEUE", "FSIZE", "CPU", "NICE", "RTPRIO", "SIGPENDING", "DATA")

#: What a sandbox is, besides its numbers: bits of a request.
SINGLE, TERMINALS, DATA = 1, 2, 4
REHEARSED = 8  # a single one goes through a run before it is told its numbers; as Numbers.touch, which comes later

_OPTIONS_BYTES = 94  # two numbers of 20 digits, and what is around them


class Numbers(ctypes.Structure):
    """What a policy says in numbers, as it comes with the word to go on, when the sandbox's processes exist already."""

    _fields_ = (
        ("word", ctypes.c_char),
        ("touch", ctypes.c_bool),  # the guest rehearses a run before it is ready
        ("disk", ctypes.c_char * _OPTIONS_BYTES),  # data of a mount, NUL-ended
        ("rlimits", (ctypes.c_uint64 * 2) * len(RLIMITS)),  # struct rlimit64: soft and hard
    )


def numbers(*, disk_bytes: int, files: int, rlimits: dict[str, int], touch: bool) -> bytes:
    """The word to go on, with a policy's numbers. 0 bytes or files is no bound.

    ``rlimits`` has all of RLIMITS, or all but the last. Raises KeyError, and ValueError for what is negative or too
    large.
    """
    if min(disk_bytes, files, *rlimits.values()) < 0:
        raise ValueError("a negative number is none of a limit")
    options = tmpfs_options(size_bytes=disk_bytes, inodes=files and files + len(_SCRATCH) + 1, mode="755", owner=UID)
    if len(options) >= _OPTIONS_BYTES:
        raise ValueError(f"too large: {options}")
    made = Numbers(GO, touch, options.encode())
    for at, name in enumerate(RLIMITS[: len(rlimits)]):
        made.rlimits[at][:] = [rlimits[name]] * 2
    return bytes(made)


class Box:
    """What sandboxes of one kind are held to, and what was done: the zygote makes it, each sandbox fills in its own."""

    def __init__(self, flags: int, config: dict[str, Any]) -> None:
        self.single = bool(flags & SINGLE)  # it has no agent
        self.terminals = bool(flags & TERMINALS)
        self.rlimits = RLIMITS if flags & DATA else RLIMITS[:-1]
        self.rehearsed = False
        self.host_uid = 0  # as the zygote's user namespace numbers it
        self.last_capability: int = config["last_capability"]
        self.landlock_abi: int = config["landlock_abi"]
        self.seal_filter: bytes = config["seal_filter"]
        self.serve: Callable[[int, int, str], object] = config["serve"]
        self.root: str = config["root"]
        self.disabled: frozenset[str] = config["disabled"]
        self.numbers = Numbers()
        self.init_fd = Result(-1)  # of the PID 1 whose namespaces a single program joins
        self.channel = Result(-1)  # the guest's end
        self.work_fd = Result(-1)
        self.begin = begin(self)
        self.seal = seal(self)

    def address(self, name: str) -> int:
        """Where a field of its numbers lies."""
        offset: int = getattr(Numbers, name).offset
        return ctypes.addressof(self.numbers) + offset

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


SEAL: list[tuple[str, str, Callable[[Box, Steps], None]]] = []


def _control(name: str, mechanism: str) -> Callable[[Callable[[Box, Steps], None]], Callable[[Box, Steps], None]]:
    def register(add: Callable[[Box, Steps], None]) -> Callable[[Box, Steps], None]:
        SEAL.append((name, mechanism, add))
        return add

    return register


@_control("descriptors", "close_range(2)")
def _descriptors(box: Box, steps: Steps) -> None:
    steps.call("close_range", CHANNEL_FD + 1, 0xFFFFFFFF, 0)


@_control("session", "setsid(2)")
def _session(box: Box, steps: Steps) -> None:
    steps.call("setsid")


@_control("uid", "setresuid(2) to one mapped id")
def _uid(box: Box, steps: Steps) -> None:
    steps.call("setresgid", UID, UID, UID)
    steps.call("setresuid", UID, UID, UID)


@_control("cgroup_ns", "unshare(2)")
def _cgroup_ns(box: Box, steps: Steps) -> None:
    steps.call("unshare", CLONE_NEWCGROUP)


@_control("disk", "tmpfs size= and nr_inodes=")
def _disk(box: Box, steps: Steps) -> None:
    # One tmpfs holds /work, /tmp and /dev/shm, so that one number bounds all that can be written.
    steps.call("mount", b"tmpfs", b"/tmp", b"tmpfs", _WORK_FLAGS, box.address("disk"))
    for name, target in _SCRATCH:
        steps.call("mkdirat", AT_FDCWD, b"/tmp/" + name, 0o700)
        steps.call("mount", b"/tmp/" + name, target, None, MS_BIND, None)
    steps.call("chdir", _WORK)
    # Not O_PATH: the supervisor lists the folder through it when no process of this namespace is left.
    steps.call("openat", AT_FDCWD, _WORK, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, 0, to=box.work_fd)


@_control("terminals", "devpts newinstance, max=")
def _terminals(box: Box, steps: Steps) -> None:
    if box.terminals:
        bound = "" if "terminals" in box.disabled else f",max={TERMINALS_MAX}"
        options = f"newinstance,ptmxmode=666,mode=600{bound}"
        steps.call("mount", b"devpts", b"/dev/pts", b"devpts", MS_NOSUID | MS_NOEXEC, options.encode())


@_control("proc", "proc subset=pid")
def _proc(box: Box, steps: Steps) -> None:
    steps.call("mount", b"proc", b"/proc", b"proc", _PROC_FLAGS, b"subset=pid,hidepid=invisible")


@_control("rlimits", "setrlimit(2)")
def _rlimits(box: Box, steps: Steps) -> None:
    for at, name in enumerate(box.rlimits):
        limit = box.address("rlimits") + at * ctypes.sizeof(box.numbers.rlimits[at])
        steps.call("prlimit64", 0, getattr(resource, f"RLIMIT_{name}"), limit, None)


@_control("capabilities", "capset(2) and PR_CAPBSET_DROP")
def _capabilities(box: Box, steps: Steps) -> None:
    capabilities.drop_all(steps, box.last_capability)


@_control("no_new_privs", "PR_SET_NO_NEW_PRIVS")
def _no_new_privs(box: Box, steps: Steps) -> None:
    capabilities.no_new_privs(steps)


@_control("landlock", "Landlock")
def _landlock(box: Box, steps: Steps) -> None:
    if box.landlock_abi == 0:
        return  # not in this kernel: the receipt says so
    # Files are read and executed anywhere, written where scratch is, and one rule stands for all devices.
    beneath = [("/", landlock.READ_ONLY), *((path, landlock.WRITABLE) for path in (WORK, "/tmp", "/dev/shm"))]
    landlock.jail(steps, [*beneath, ("/dev", landlock.DEVICE)], box.landlock_abi)


@_control("seccomp", "seccomp filter")
def _seccomp(box: Box, steps: Steps) -> None:
    seccomp.load(steps, box.seal_filter)


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


def begin(box: Box) -> Steps:
    """What a sandbox's process does when it is born, before it waits for the word to seal itself."""
    steps = Steps()
    steps.purpose = "begin"
    if box.single:
        steps.call("setns", box.init_fd, box.joined_flags())
    steps.call("dup3", box.channel, CHANNEL_FD, os.O_CLOEXEC)
    steps.call("rt_sigprocmask", _SIG_SETMASK, bytes(_SIGSET_BYTES), None, _SIGSET_BYTES)  # the zygote hears no signals
    return steps


def seal(box: Box) -> Steps:
    """What puts a process under every control, in order. ``run`` of it raises OSError at the first that is refused."""
    steps = Steps()
    if box.root != "/":
        steps.purpose = "root"
        root = os.fsencode(box.root)
        # The rest of the zygote's root is let go of, with the Python in it: what serves has imported what it needs.
        steps.call("mount", root, root, None, MS_BIND | MS_REC, None)
        # Only where one is visible may another /proc be mounted (mount_too_revealing() in fs/namespace.c), as "proc"
        # does below, on top of this one.
        steps.call("mount", b"proc", root + b"/proc", b"proc", _PROC_FLAGS, None)
        pivot_to(steps, box.root)
    for name, _, add in SEAL:
        # Without their bounds these are still mounted, unless what that needs is switched off as well.
        unbound = name in ("disk", "terminals") and not box.disabled & {"mount_ns", "user_ns", "uid"}
        if name not in box.disabled or unbound:
            steps.purpose = name
            add(box, steps)
    return steps
