"""What the host sees of processes, read from its own /proc and through pidfds."""

from __future__ import annotations

import ctypes
import os
import socket
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field

from fumehood.linux import libc

CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

#: Kinds of namespace, as below /proc/PID/ns.
NAMESPACES = ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup")

# include/uapi/asm-generic/unistd.h: the same numbers on every architecture
_PIDFD_OPEN, _PIDFD_GETFD = 434, 438
_SO_DOMAIN = 39  # asm-generic/socket.h
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


@dataclass(frozen=True, slots=True)
class Proc:
    """One line of the process table."""

    pid: int
    ppid: int
    comm: str
    state: str
    session: int
    cpu_s: float
    nice: int
    threads: int
    started: int  # clock ticks since boot; with the pid it names a process for good

    @property
    def alive(self) -> bool:
        """Whether it is more than a zombie."""
        return self.state not in "ZX"


def read_text(path: str) -> str:
    """A file of /proc, or an empty string if it is gone or may not be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def process(pid: int) -> Proc | None:
    """The process ``pid``, or None if there is none."""
    text = read_text(f"/proc/{pid}/stat")
    if not text:
        return None
    comm = text[text.index("(") + 1 : text.rindex(")")]
    rest = text[text.rindex(")") + 2 :].split()
    return Proc(
        pid=pid,
        ppid=int(rest[1]),
        comm=comm,
        state=rest[0],
        session=int(rest[3]),
        cpu_s=(int(rest[11]) + int(rest[12])) / CLOCK_TICKS_PER_S,
        nice=int(rest[16]),
        threads=int(rest[17]),
        started=int(rest[19]),
    )


def descendants(root: int | None = None, *, others: Iterable[int] = ()) -> dict[int, Proc]:
    """Every process below ``root`` (by default this one), zombies included, by pid; ``others`` and below them too."""
    root = os.getpid() if root is None else root
    table = [p for p in (process(int(name)) for name in os.listdir("/proc") if name.isdigit()) if p is not None]
    children: dict[int, list[Proc]] = {}
    for entry in table:
        children.setdefault(entry.ppid, []).append(entry)
    wanted = set(others)
    found = {entry.pid: entry for entry in table if entry.pid in wanted}
    queue = [root, *wanted]
    while queue:
        for child in children.get(queue.pop(), ()):
            if child.pid not in found:
                found[child.pid] = child
                queue.append(child.pid)
    return found


def status(pid: int) -> dict[str, str]:
    """/proc/PID/status as a dictionary; empty if the process is gone."""
    lines = read_text(f"/proc/{pid}/status").splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def memory_bytes(pid: int) -> int:
    """Anonymous and shared memory that a process has touched; files mapped from a disk are not counted."""
    fields = status(pid)
    return sum(int(fields[k].split()[0]) << 10 for k in ("RssAnon", "RssShmem") if k in fields)


def resident_bytes() -> int:
    """This process's own resident memory."""
    return int(read_text("/proc/self/statm").split()[1]) * PAGE_BYTES


def namespaces(pid: int | str = "self") -> dict[str, str]:
    """Kind of namespace -> its identity; a kind that may not be read is missing."""
    found = {}
    for kind in NAMESPACES:
        try:
            found[kind] = os.readlink(f"/proc/{pid}/ns/{kind}")
        except OSError:
            continue
    return found


def limits(pid: int | str = "self") -> dict[str, str]:
    """Hard resource limits by the kernel's name for them, such as "Max open files"."""
    lines = read_text(f"/proc/{pid}/limits").splitlines()[1:]
    return {line[:26].strip(): line[26:].split()[1] for line in lines}


def become_subreaper() -> None:
    """Let orphans of every sandbox come to this process, so that none can leave its tree unseen."""
    libc.prctl("PR_SET_CHILD_SUBREAPER", _PR_SET_CHILD_SUBREAPER, 1)


def stop_subreaper() -> None:
    """Let orphans go to where they went before."""
    libc.prctl("PR_SET_CHILD_SUBREAPER", _PR_SET_CHILD_SUBREAPER, 0)


def reap(pids: Iterable[int]) -> None:
    """Collect the exit status of adopted orphans; others are left alone."""
    for pid in pids:
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            continue


@dataclass(slots=True)
class OpenFile:
    """A descriptor of another process."""

    fd: int
    link: str
    blocks_bytes: int = 0
    regular: bool = False
    writable: bool = False  # told of regular files
    identity: tuple[int, int] = (0, 0)
    family: int | None = None
    socket_kind: int | None = None


def open_files(pid: int, *, families: bool = False) -> list[OpenFile]:
    """The descriptors of ``pid``; ``families`` also asks each socket for its address family."""
    found = []
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return []
    for name in names:
        path = f"/proc/{pid}/fd/{name}"
        try:
            entry = OpenFile(int(name), os.readlink(path))
            info = os.stat(path)
        except OSError:
            continue
        entry.regular = stat.S_ISREG(info.st_mode)
        entry.writable = entry.regular and _is_writable(pid, name)
        entry.blocks_bytes = info.st_blocks * 512
        entry.identity = (info.st_dev, info.st_ino)
        if families and stat.S_ISSOCK(info.st_mode):
            entry.family, entry.socket_kind = _socket_of(pid, entry.fd)
        found.append(entry)
    return found


def _is_writable(pid: int, fd: str) -> bool:
    """Whether the descriptor was opened for writing, by the octal ``flags`` of proc_pid_fdinfo(5)."""
    for line in read_text(f"/proc/{pid}/fdinfo/{fd}").splitlines():
        if line.startswith("flags:"):
            return int(line.split()[1], 8) & os.O_ACCMODE != os.O_RDONLY
    return False


def _socket_of(pid: int, fd: int) -> tuple[int | None, int | None]:
    """Family and kind of another process's socket: a copy of the descriptor is asked, not the process."""
    try:
        pidfd = libc.syscall("pidfd_open", _PIDFD_OPEN, pid, 0)
    except OSError:
        return None, None
    try:
        copy = libc.syscall("pidfd_getfd", _PIDFD_GETFD, pidfd, fd, 0)
    except OSError:
        return None, None
    finally:
        os.close(pidfd)
    try:
        return _option(copy, _SO_DOMAIN), _option(copy, socket.SO_TYPE)
    finally:
        os.close(copy)


def _option(fd: int, name: int) -> int | None:
    """getsockopt without a socket object, which would refuse a family that Python does not know."""
    value, size = ctypes.c_int(), ctypes.c_uint(4)
    answer = ctypes.CDLL(None).getsockopt(fd, socket.SOL_SOCKET, name, ctypes.byref(value), ctypes.byref(size))
    return value.value if answer == 0 else None


@dataclass(slots=True)
class Posture:
    """All that the host can read of one process of a sandbox at one moment."""

    pid: int
    proc: Proc
    status: dict[str, str]
    threads: list[dict[str, str]]
    namespaces: dict[str, str]
    limits: dict[str, str]
    mountinfo: list[str]
    cgroup: str
    personality: str
    environ: str
    files: list[OpenFile] = field(default_factory=list)
    root: tuple[int, int] | None = None
    scheduler: int = 0

    @property
    def readable(self) -> bool:
        """Whether the kernel let the host read what it guards with the ptrace check."""
        return bool(self.namespaces)


def posture(pid: int) -> Posture | None:
    """What /proc says of ``pid``, or None if it is gone."""
    entry = process(pid)
    if entry is None or not entry.alive:
        return None
    tasks = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            lines = read_text(f"/proc/{pid}/task/{task}/status").splitlines()
            tasks.append({k: v.strip() for k, _, v in (line.partition(":") for line in lines)})
        scheduler = os.sched_getscheduler(pid)
    except OSError:
        return None
    try:
        info = os.stat(f"/proc/{pid}/root/")
        root = (info.st_dev, info.st_ino)
    except OSError:
        root = None
    return Posture(
        pid=pid,
        proc=entry,
        status=status(pid),
        threads=[t for t in tasks if t],
        namespaces=namespaces(pid),
        limits=limits(pid),
        mountinfo=read_text(f"/proc/{pid}/mountinfo").splitlines(),
        cgroup=read_text(f"/proc/{pid}/cgroup"),
        personality=read_text(f"/proc/{pid}/personality").strip(),
        environ=read_text(f"/proc/{pid}/environ"),
        files=open_files(pid, families=True),
        root=root,
        scheduler=scheduler,
    )
