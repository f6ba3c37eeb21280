"""The outer guard of the control, run as a file of its own: starts the program and bounds it from outside.

The limits are far above what any attack asks for, and far below what hurts the machine.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import time

WALL_S = 15.0
MEMORY_BYTES_MAX = 2 << 30
PROCESSES_MAX = 600
FILE_BYTES_MAX = 512 << 20
_LOOK_S = 0.05

_PR_SET_CHILD_SUBREAPER = 36
_CLONE_NEWNS, _CLONE_NEWUTS = 0x00020000, 0x04000000
_MS_REC_PRIVATE = 0x4000 | 0x40000


def main() -> None:
    """Run the program that the settings file holds, report its exit as a line of stdout, and stay until told."""
    with open(sys.argv[1]) as file:
        settings = json.load(file)
    os.unlink(sys.argv[1])
    library = ctypes.CDLL(None)
    library.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if settings["throwaway"] and os.geteuid() == 0:
        library.unshare(_CLONE_NEWNS | _CLONE_NEWUTS)
        library.mount(b"none", b"/", None, _MS_REC_PRIVATE, None)
    child = os.fork()
    if child == 0:
        _bound()
        os.execv(settings["python"], [settings["python"], "-c", settings["program"]])
    try:
        _watch(child, settings["lifeline"])
    finally:
        kill_all()


def _bound() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES_MAX, FILE_BYTES_MAX))


def _watch(child: int, lifeline: int) -> None:
    os.close(0)
    os.close(2)
    deadline = time.monotonic() + WALL_S
    running = True
    while time.monotonic() < deadline:
        if running:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                running = False
                _report(os.waitstatus_to_exitcode(status))
        if select.select([lifeline], [], [], _LOOK_S)[0]:
            return
        below = descendants()
        if len(below) > PROCESSES_MAX or sum(map(_resident_bytes, below)) > MEMORY_BYTES_MAX:
            return
    kill_all()
    if running:
        _report(-signal.SIGKILL)
    select.select([lifeline], [], [], 60)


def _report(code: int) -> None:
    try:
        os.write(1, b"\n::exit=%d::\n" % code)
    except OSError:
        pass
    os.close(1)


def descendants() -> list[int]:
    """Every live process below this one."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                rest = file.read().rpartition(b") ")[2].split()
        except OSError:
            continue
        if rest[0] != b"Z":
            children.setdefault(int(rest[1]), []).append(int(name))
    found: list[int] = []
    queue = [os.getpid()]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def _resident_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def kill_all() -> None:
    """Kill every descendant, again and again until none is left: a process that forks is faster than one look."""
    for _ in range(200):
        below = descendants()
        if not below:
            return
        for pid in below:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
        while True:
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    break
            except ChildProcessError:
                return
        time.sleep(0.01)


if __name__ == "__main__":
    main()
