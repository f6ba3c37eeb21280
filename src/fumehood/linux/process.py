"""What the kernel says of a process, from /proc, and pidfds.

Used by the supervisor to read back what holds a sandbox (a receipt is never a repetition of the request), to tell a
process from a later one with the same id (``start_time``), and to count where no cgroup does (``tree_usage``).

Everything here races with a process that may end at any time: functions about one process then raise
ProcessLookupError, functions about many leave it out. Linux only: elsewhere the module imports and every function
raises OSError(ENOSYS). Formats: proc(5), Documentation/filesystems/proc.rst.
"""

from __future__ import annotations

import errno
import functools
import os
import re
import select
import signal
import struct
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypedDict

UNLIMITED = -1  # resource.RLIM_INFINITY as Linux has it in Python

#: struct pidfd_info: the mask, the control group, eleven ids, the wait status.
_PIDFD_INFO = struct.Struct("=QQ11Ii")
_PIDFD_INFO_EXIT = 1 << 3
_PIDFD_GET_INFO = 0xC0000000 | _PIDFD_INFO.size << 16 | 0xFF << 8 | 11  # _IOWR(0xFF, 11, struct pidfd_info)

_READ_BYTES = 16384  # more than any file here that the kernel hands over in one piece


def start_time(pid: int) -> int:
    """When ``pid`` started, in clock ticks since boot: with the pid it names one process until the next boot.

    Raises ProcessLookupError.
    """
    return int(_stat(pid)[_STARTTIME])


def alive(pid: int, start: int) -> bool:
    """Whether the process that ``start_time`` once described still runs; a zombie does not."""
    try:
        fields = _stat(pid)
    except ProcessLookupError:
        return False
    return int(fields[_STARTTIME]) == start and fields[_STATE] not in (b"Z", b"X")


def ended(pidfd: int) -> bool:
    """Whether the process has exited. Asks the kernel: an event loop may not have heard of it yet."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def descendants(pid: int) -> list[int]:
    """The children of ``pid``, their children and so on, parents first, ``pid`` itself left out.

    A process that forks or ends meanwhile may be missing. Where ``pid`` is PID 1 of a namespace this is all of the
    namespace, since its orphans become children of its PID 1 (pid_namespaces(7)).
    """
    if sys.platform != "linux":
        raise _not_linux()
    children_of = _children_by_thread if _has_children_files() else _children_by_scan()
    found = [pid]
    seen = {pid}
    for parent in found:  # grows while it is walked
        for child in children_of(parent):
            if child not in seen:
                seen.add(child)
                found.append(child)
    return found[1:]


@dataclass(frozen=True, slots=True)
class TreeUsage:
    """What a process and its descendants use together."""

    cpu_s: float  # user and system; that of children that were waited for in steps of a clock tick (10 ms)
    resident_bytes: int  # anonymous and shared memory; files of the runtime, shared by all, are not counted
    count: int  # processes; 0 when none is left
    threads: int  # what RLIMIT_NPROC and pids.max count


def tree_usage(pid: int, *, orphans_of: int = 0) -> TreeUsage:
    """Usage of ``pid`` and its descendants, for the poller that stands in for a cgroup. About 30 us a process.

    ``orphans_of``: the descendants of this process are counted as well, itself not.

    It matches by descent, not by the inode of the PID namespace: that needs ptrace access, which an ordinary user
    does not have over a process that is not dumpable. A page that several processes map counts once for each, and
    processor time of children that nobody waited for (SIGCHLD ignored) is lost: an estimate, to be reported as one.
    """
    cpu_s = 0.0
    ticks = resident_kib = count = threads = 0
    for member in (pid, *descendants(pid), *(descendants(orphans_of) if orphans_of else ())):
        try:
            fields = _stat(member)
            status_text = _read(f"/proc/{member}/status")
            cpu_s += cpu_clock(member)
        except ProcessLookupError:
            continue
        ticks += sum(map(int, fields[_CUTIME : _CSTIME + 1]))
        if fields[_STATE] in (b"Z", b"X"):
            continue
        count += 1
        threads += int(fields[_NUM_THREADS])
        resident_kib += sum(map(int, _RESIDENT.findall(status_text)))
    return TreeUsage(cpu_s + ticks / os.sysconf("SC_CLK_TCK"), resident_kib * 1024, count, threads)


def cpu_clock(pid: int) -> float:
    """Processor seconds of a process, threads that have ended included, as the scheduler counts them.

    What clock_getcpuclockid(3) makes of a pid (``CPUCLOCK_SCHED`` of include/linux/posix-timers_types.h); anybody may
    read it. Raises ProcessLookupError.
    """
    if sys.platform != "linux":
        raise _not_linux()
    try:
        return time.clock_gettime(~pid << 3 | 2)
    except OSError:
        raise ProcessLookupError(errno.ESRCH, f"no process {pid}") from None


def pidfd_open(pid: int) -> int:
    """A close-on-exec descriptor of the process ``pid``, to be closed by the caller. Raises ProcessLookupError."""
    if sys.platform != "linux":
        raise _not_linux()
    return os.pidfd_open(pid)


def pid_of_pidfd(fd: int) -> int:
    """The pid that ``fd`` refers to.

    Raises ProcessLookupError when the process has been reaped or lies outside this PID namespace, OSError(EINVAL)
    when ``fd`` is no pidfd.
    """
    match = re.search(rb"^Pid:\s*(-?\d+)$", _read(f"/proc/self/fdinfo/{fd}"), re.MULTILINE)
    if match is None:
        raise OSError(errno.EINVAL, f"descriptor {fd} is not a pidfd")
    pid = int(match[1])
    if pid <= 0:
        raise ProcessLookupError(errno.ESRCH, f"the process of pidfd {fd} is gone or not visible here")
    return pid


def exit_status(fd: int) -> int | None:
    """The wait status of the process of pidfd ``fd`` that has been reaped, by whomever; None before Linux 6.15.

    PIDFD_GET_INFO of include/uapi/linux/pidfd.h, as long as its first version.
    """
    if sys.platform != "linux":
        raise _not_linux()
    import fcntl  # not everywhere

    info = bytearray(_PIDFD_INFO.pack(_PIDFD_INFO_EXIT, *(0,) * 13))
    try:
        fcntl.ioctl(fd, _PIDFD_GET_INFO, info)
    except OSError:
        return None
    mask, *_, status = _PIDFD_INFO.unpack(info)
    return status if mask & _PIDFD_INFO_EXIT else None


def kill_pidfd(fd: int, sig: int = 9) -> bool:
    """Send ``sig``; False if the process had already ended. Raises PermissionError."""
    if sys.platform != "linux":
        raise _not_linux()
    try:
        signal.pidfd_send_signal(fd, sig)
    except ProcessLookupError:
        return False
    return True


class Status(TypedDict):
    """The part of /proc/PID/status that says what a process may do. Ids are as seen from the reader's namespaces."""

    Uid: tuple[int, ...]  # real, effective, saved, file system
    Gid: tuple[int, ...]
    Groups: tuple[int, ...]
    NSpid: tuple[int, ...]  # the pid in each namespace, outermost first
    CapInh: int
    CapPrm: int
    CapEff: int
    CapBnd: int
    CapAmb: int
    NoNewPrivs: int
    Seccomp: int  # 0 off, 1 strict, 2 filter
    Seccomp_filters: int | None  # None before Linux 5.9
    Threads: int


def status(pid: int) -> Status:
    """What ``pid`` may do, as the kernel has it now; of its main thread, where threads differ.

    Raises ProcessLookupError.
    """
    text = _read(f"/proc/{pid}/status")
    fields = dict(_STATUS_LINE.findall(text))

    def ids(name: bytes) -> tuple[int, ...]:
        return tuple(map(int, fields[name].split()))

    filters = fields.get(b"Seccomp_filters")
    return Status(
        Uid=ids(b"Uid"),
        Gid=ids(b"Gid"),
        Groups=ids(b"Groups"),
        NSpid=ids(b"NSpid"),
        CapInh=int(fields[b"CapInh"], 16),
        CapPrm=int(fields[b"CapPrm"], 16),
        CapEff=int(fields[b"CapEff"], 16),
        CapBnd=int(fields[b"CapBnd"], 16),
        CapAmb=int(fields[b"CapAmb"], 16),
        NoNewPrivs=int(fields[b"NoNewPrivs"]),
        Seccomp=int(fields[b"Seccomp"]),
        Seccomp_filters=None if filters is None else int(filters),
        Threads=int(fields[b"Threads"]),
    )


def namespaces(pid: int, kinds: Iterable[str] = ()) -> dict[str, int]:
    """The inode of every namespace of ``pid``, or of those ``kinds``, by kind (``user``, ``pid_for_children``, …).

    Raises ProcessLookupError, and PermissionError without ptrace access to it (ptrace(2)).
    """
    if sys.platform != "linux":
        raise _not_linux()
    folder = f"/proc/{pid}/ns"
    out = {}
    try:
        for name in kinds or os.listdir(folder):
            try:
                out[name] = os.stat(f"{folder}/{name}").st_ino
            except FileNotFoundError:
                # Either the process ended or, after unshare(CLONE_NEWPID), the namespace for children has no PID 1.
                if not name.endswith("_for_children"):
                    raise
    except FileNotFoundError:
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH), folder) from None
    return out


def limits(pid: int) -> dict[str, tuple[int, int]]:
    """Soft and hard resource limits of ``pid`` by the name that RLIMIT_ has in lower case (``nofile``, ``as``, …).

    Units are those of getrlimit(2); no limit is UNLIMITED. Raises ProcessLookupError.
    """
    return dict(_parse_limits(_read(f"/proc/{pid}/limits")))


@functools.lru_cache(maxsize=16)  # processes under one policy have one text
def _parse_limits(text: bytes) -> tuple[tuple[str, tuple[int, int]], ...]:
    return tuple(
        (_LIMIT_NAMES[match["label"]], (_limit(match["soft"]), _limit(match["hard"])))
        for match in _LIMIT_LINE.finditer(text.decode())
        if match["label"] in _LIMIT_NAMES
    )


@dataclass(frozen=True, slots=True)
class MountInfo:
    """One mount, as /proc/PID/mountinfo shows it; paths are as that process sees them, escapes decoded."""

    root: str  # the folder of the file system that is mounted
    mount_point: str
    options: tuple[str, ...]  # of this mount: ro, nosuid, …
    fs_type: str
    source: str
    super_options: tuple[str, ...]  # of the file system: ro, size=…, the controllers of a v1 cgroup tree, …


def mounts(pid: int) -> list[MountInfo]:
    """The mounts that ``pid`` sees, in the order they were made; ``uid=`` and ``gid=`` options are left out.

    Raises ProcessLookupError, PermissionError.
    """
    return list(_parse_alike(mountinfo(pid)))


def mountinfo(pid: int) -> bytes:
    """The text of /proc/PID/mountinfo without mount ids, device numbers and owners: alike for sandboxes that are.

    Raises as :func:`mounts`.
    """
    try:
        return _OWNERS.sub(b"", _IDS.sub(b"0 0 0:0 ", _read_all(f"/proc/{pid}/mountinfo")))
    except OSError as error:
        if error.errno == errno.EINVAL:  # the process has exited and has no mount namespace any more
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH), error.filename) from None
        raise


@functools.lru_cache(maxsize=16)
def _parse_alike(text: bytes) -> tuple[MountInfo, ...]:
    return tuple(parse_mountinfo(text))


def parse_mountinfo(text: bytes) -> list[MountInfo]:
    """The mounts that a mountinfo file lists (proc(5)); lines that are not of its form are left out."""
    out = []
    for line in text.splitlines():
        before, found, after = line.partition(b" - ")
        left, right = before.split(b" "), after.split(b" ")
        if not found or len(left) < 6 or len(right) < 3:
            continue
        out.append(
            MountInfo(
                root=_unescape(left[3]),
                mount_point=_unescape(left[4]),
                options=tuple(_unescape(left[5]).split(",")),
                fs_type=_unescape(right[0]),
                source=_unescape(right[1]),
                super_options=tuple(_unescape(right[2]).split(",")),
            )
        )
    return out


# Positions in /proc/PID/stat after the command name, which may hold anything: proc(5) counts them from 3.
_STATE, _PPID, _CUTIME, _CSTIME, _NUM_THREADS, _STARTTIME = 0, 1, 13, 14, 17, 19

_RESIDENT = re.compile(rb"^Rss(?:Anon|Shmem):\s*(\d+) kB$", re.MULTILINE)

_STATUS_LINE = re.compile(
    rb"^(Uid|Gid|Groups|NSpid|Threads|Cap\w+|NoNewPrivs|Seccomp|Seccomp_filters):[ \t]*(.*)$", re.MULTILINE
)
_IDS = re.compile(rb"^\d+ \d+ \d+:\d+ ", re.MULTILINE)
_OWNERS = re.compile(rb",[ug]id=\d+")
_LIMIT_LINE = re.compile(r"^Max (?P<label>\S+(?: \S+)*) {2,}(?P<soft>unlimited|\d+) +(?P<hard>unlimited|\d+)", re.M)

# Labels of fs/proc/base.c lnames[].
_LIMIT_NAMES = {
    "cpu time": "cpu",
    "file size": "fsize",
    "data size": "data",
    "stack size": "stack",
    "core file size": "core",
    "resident set": "rss",
    "processes": "nproc",
    "open files": "nofile",
    "locked memory": "memlock",
    "address space": "as",
    "file locks": "locks",
    "pending signals": "sigpending",
    "msgqueue size": "msgqueue",
    "nice priority": "nice",
    "realtime priority": "rtprio",
    "realtime timeout": "rttime",
}


def _not_linux() -> OSError:
    return OSError(errno.ENOSYS, "only Linux has this")


def _read(path: str) -> bytes:
    """A small file of /proc in one read. A process that is gone becomes ProcessLookupError."""
    if sys.platform != "linux":
        raise _not_linux()
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(fd, _READ_BYTES)
        finally:
            os.close(fd)
    except FileNotFoundError:
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH), path) from None


def _read_all(path: str) -> bytes:
    """A file of /proc that comes in several pieces."""
    if sys.platform != "linux":
        raise _not_linux()
    try:
        with open(path, "rb", buffering=0) as file:
            return file.readall()
    except FileNotFoundError:
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH), path) from None


def _stat(pid: int) -> list[bytes]:
    """The fields of /proc/PID/stat after the command name."""
    return _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()


@functools.cache
def _has_children_files() -> bool:
    """Whether the kernel was built with CONFIG_PROC_CHILDREN; without it the whole of /proc must be scanned."""
    return os.path.exists("/proc/thread-self/children")


def _children_by_thread(pid: int) -> Iterator[int]:
    """Children of ``pid``: each is listed with the thread that forked it."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return
    for thread in threads:
        try:
            listed = _read_all(f"/proc/{pid}/task/{thread}/children")
        except OSError:
            continue
        yield from map(int, listed.split())


def _children_by_scan() -> Callable[[int], list[int]]:
    """The same from the parent of every process there is, read once."""
    by_parent: defaultdict[int, list[int]] = defaultdict(list)
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                by_parent[int(_stat(int(name))[_PPID])].append(int(name))
            except ProcessLookupError:
                continue
    return lambda pid: by_parent.get(pid, [])


def _limit(text: str) -> int:
    return UNLIMITED if text == "unlimited" else int(text)


def _unescape(raw: bytes) -> str:
    r"""A field of mountinfo: space, tab, newline and backslash stand there as ``\040`` and so on."""
    return os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8) & 255]), raw))
