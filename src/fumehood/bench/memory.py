"""What sandboxes that wait take of the host's memory."""

from __future__ import annotations

import os
from pathlib import Path

from fumehood.linux import process


def of_sandboxes(count: int) -> tuple[int, str] | None:
    """Bytes that each of ``count`` sandboxes below this process takes, and who counted; None if nobody can.

    Where each has a control group with a memory controller, the group is asked, which counts kernel memory too.
    Else the processes' proportional share is summed (PSS, proc_pid_smaps(5)), templates included.
    """
    below = process.descendants(os.getpid())
    groups = {group for pid in below if (group := _group(pid)) is not None} - {_group(os.getpid())}
    if len(groups) == count:
        return sum(_charged(group) for group in groups) // count, "cgroup, kernel memory included"
    shares = [share for pid in below if (share := _pss(pid)) is not None]
    return (sum(shares) // count, "PSS, templates included") if shares else None


def _group(pid: int) -> Path | None:
    """The folder of a process's control group in the tree with the memory controller."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return None
    own = {}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        own[controllers] = path
    for mount in process.mounts(os.getpid()):
        v1 = mount.fs_type == "cgroup" and "memory" in mount.super_options
        name = next((c for c in own if "memory" in c.split(",")), None) if v1 else ""
        if (v1 or mount.fs_type == "cgroup2") and name in own:
            folder = Path(mount.mount_point + own[name].removeprefix(mount.root.rstrip("/")))
            if any((folder / file).exists() for file in _FILES):
                return folder
    return None


_FILES = ("memory.current", "memory.usage_in_bytes")


def _charged(group: Path) -> int:
    return next(int((group / file).read_text()) for file in _FILES if (group / file).exists())


def _pss(pid: int) -> int | None:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None
