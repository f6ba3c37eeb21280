"""What a supervisor may not leave behind: one look at this process and its host, to be compared with a later one."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fumehood.linux import process
from fumehood.tiers.jail.tier import AHEAD, JailTier

from . import e2b_endpoint

#: What a sandbox that waits for its program takes, at most: PID 1 and the interpreter, or half of gVisor's six, since
#: that tier keeps one where the jail keeps two; its socket, two pidfds, two pipes and one more descriptor, and half of
#: the three of a zygote's half-made next one; a group in each of four trees of control groups; a bundle's folder.
SEAT = {"processes": 3, "descriptors": 8, "mounts": 0, "cgroups": 4, "files": 1}

#: How long the kernel of a busy machine may take to finish tearing down what was killed: what is left then, stays.
PATIENCE_S = 20.0


@dataclass(frozen=True, slots=True)
class Look:
    """Living processes below this one, its descriptors, mounts and control groups, and files where it keeps its own."""

    processes: frozenset[str]
    descriptors: frozenset[str]
    mounts: frozenset[str]
    cgroups: frozenset[str]
    files: frozenset[str]

    @classmethod
    def take(cls, folder: Path) -> Look:
        """Look now; ``folder`` is where temporary files go."""
        return cls(
            frozenset(_processes()),
            frozenset(_descriptors()),
            frozenset(_mounts(folder)),
            frozenset(_cgroups()),
            frozenset(str(p) for p in folder.iterdir()) | frozenset(_shared()),
        )

    def left(self, folder: Path, *, kept: int = 0) -> list[str]:
        """What is there now and was not then; waits a little for what is about to go.

        A tier may hold sandboxes ready for the next runs (and replace them at each), so while runners are open the
        caller says how many runners may have ``kept`` theirs: of each kind of thing no more than they need
        (:data:`SEAT`) is allowed.
        """
        deadline = time.monotonic() + PATIENCE_S
        while True:
            now = Look.take(folder)
            found = []
            for kind, seat in SEAT.items():
                new = sorted(getattr(now, kind) - getattr(self, kind))
                if len(new) > kept * AHEAD * seat:
                    found += [f"{kind}: {item}" for item in new]
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.05)


async def settled(tier: JailTier) -> None:
    """Until the tier is done with what it does beside what runs."""
    async with asyncio.timeout(PATIENCE_S):
        while waiting := {*tier._tasks, *tier._leaving}:
            await asyncio.wait(waiting)


@contextmanager
def own_folder() -> Iterator[Path]:
    """A folder for the temporary files of this process and of those that it starts, which must be empty at the end.

    Of what has our name: a supervisor that a test has killed, at whatever moment, may leave no other either. Everybody
    may use it, since sandboxes started by root run as other users.
    """
    folder = tempfile.mkdtemp(prefix="fht-")  # short, for the sockets that lie in it
    os.chmod(folder, 0o1777)
    before = tempfile.tempdir, os.environ.get("TMPDIR")
    tempfile.tempdir = os.environ["TMPDIR"] = folder
    try:
        yield Path(folder)
        deadline = time.monotonic() + PATIENCE_S
        while (left := _ours(Path(folder))) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left, f"left behind among the temporary files: {left}"
    finally:
        tempfile.tempdir, variable = before
        if variable is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = variable
        shutil.rmtree(folder, ignore_errors=True)


def _ours(folder: Path) -> list[str]:
    names = ("fumehood-", "fh-")  # of the tiers, and of the attack suite
    return sorted(f"{p.name} of user {p.lstat().st_uid}" for p in folder.iterdir() if p.name.startswith(names))


def _processes() -> list[str]:
    """Ours, and instead of the endpoint's that tier e2b is tested against, the sandboxes that live there."""
    found = [f"{ident} at the endpoint" for ident in e2b_endpoint.sandboxes()]
    endpoint = e2b_endpoint.pid()
    served = {endpoint, *process.descendants(endpoint)} if endpoint is not None else set()
    for pid in process.descendants(os.getpid()):
        if pid in served:
            continue
        try:
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            found.append(f"{pid} {name} started {process.start_time(pid)}")
        except OSError:
            continue
    return found


def _descriptors() -> list[str]:
    """All but those of the connections that E2B's SDK keeps for the process; test_e2b.py counts them."""
    pool = {f"socket:[{inode}]" for inode in e2b_endpoint.connections()}
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the descriptor that lists the folder
        if not target.startswith("/proc/") and target not in pool:
            found.append(f"{name} -> {target}")
    return found


def _mounts(folder: Path) -> list[str]:
    """Mounts of this namespace, but for what container engines and other users of this host mount meanwhile."""
    foreign = ("/var/", "/run/", "/tmp/", "/mnt/", "/home/")
    points = [mount.mount_point for mount in process.mounts(os.getpid())]
    return [p for p in points if p.startswith(str(folder)) or not p.startswith(foreign)]


def _cgroups() -> list[str]:
    """Folders that this process made in any control group tree; their names begin with its pid."""
    found = []
    for mount in process.mounts(os.getpid()):
        if mount.fs_type in ("cgroup", "cgroup2"):
            for folder, names, _ in os.walk(mount.mount_point):
                if os.path.basename(os.path.dirname(folder)) == "fumehood":
                    if os.path.basename(folder).startswith(f"{os.getpid()}-"):
                        found += [folder, *(f"{folder}/{name}" for name in names)]
                    names.clear()
    return found


def _shared() -> list[str]:
    """Entries of the host's shared memory folders that are not other tests' (whose names hold ``pym`` or ``psm``)."""
    return [f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if "fumehood" in name]
