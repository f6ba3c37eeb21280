"""What a process looks like from outside, read from /proc without the code under test."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36

CREDENTIALS = [
    "Uid",
    "Gid",
    "Groups",
    "CapInh",
    "CapPrm",
    "CapEff",
    "CapBnd",
    "CapAmb",
    "NoNewPrivs",
    "Seccomp",
    "Seccomp_filters",
]  # of each thread, proc(5)


def fields(path: str) -> dict[str, str]:
    """A file of ``name: value`` lines."""
    lines = (line.partition(":") for line in Path(path).read_text().splitlines())
    return {name: " ".join(value.split()) for name, _, value in lines}


def children(pid: int) -> list[int]:
    """All descendants of ``pid``, parents first, by the children files of every thread."""
    found = [pid]
    for parent in found:
        try:
            for thread in os.listdir(f"/proc/{parent}/task"):
                found += map(int, Path(f"/proc/{parent}/task/{thread}/children").read_text().split())
        except OSError:
            continue
    return found[1:]


def command(pid: int) -> list[str]:
    """Its argument vector; empty for a zombie."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]
    except OSError:
        return []


def zygote_of(launcher: int) -> int:
    """The zygote below a jail's launcher: its child, or that one's where root started it."""
    return next(pid for pid in children(launcher) if "zygote.py" in " ".join(command(pid)))


def threads(pid: int) -> list[dict[str, str]]:
    """What each thread of ``pid`` may do."""
    found = []
    for thread in os.listdir(f"/proc/{pid}/task"):
        status = fields(f"/proc/{pid}/task/{thread}/status")
        found.append({name: status[name] for name in CREDENTIALS})
    return found


def namespaces(pid: int) -> dict[str, str]:
    return {name: os.readlink(f"/proc/{pid}/ns/{name}") for name in os.listdir(f"/proc/{pid}/ns")}


def descriptors(pid: int) -> dict[int, str]:
    """Number -> what it is, without the inode number."""
    folder = f"/proc/{pid}/fd"
    return {int(name): os.readlink(f"{folder}/{name}").partition("[")[0] for name in os.listdir(folder)}


@dataclass(frozen=True, order=True)
class Mount:
    """One line of mountinfo: where, what, and both kinds of flags."""

    point: str
    kind: str
    root: str
    options: str
    super_options: str


def mounts(pid: int) -> list[Mount]:
    found = []
    for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        _, _, _, root, point, options, *_ = left.split(" ")
        kind, _, super_options = right.split(" ")
        found.append(Mount(point, kind, root, options, super_options))
    return found


def limits(pid: int) -> dict[str, tuple[str, str]]:
    """Label -> soft and hard limit."""
    found = {}
    for line in Path(f"/proc/{pid}/limits").read_text().splitlines()[1:]:
        found[line[:26].strip().removeprefix("Max ")] = tuple(line[26:].split()[:2])
    return found  # type: ignore[return-value]


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Processes below this one whose parents die become its children, so that none escapes its sight."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    try:
        yield
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def seconds_until_gone(pids: list[int], patience_s: float) -> float | None:
    """How long the processes go on from now, by their pidfds; None if one still runs at the end. Reaps orphans."""
    started = time.monotonic()
    poll = select.poll()
    waiting = set()
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        poll.register(fd, select.POLLIN)
        waiting.add(fd)
    try:
        while waiting:
            left = patience_s - (time.monotonic() - started)
            if left <= 0:
                return None
            for fd, _ in poll.poll(left * 1000):
                poll.unregister(fd)
                waiting.discard(fd)
                os.close(fd)
        return time.monotonic() - started
    finally:
        for fd in waiting:
            os.close(fd)
        for pid in pids:
            try:
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)
            except ChildProcessError:
                continue


def kill_hard(pids: list[int]) -> None:
    """For the end of a test that failed."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
