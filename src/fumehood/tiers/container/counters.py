"""Reading a container's cgroup on this host, which the engine made: what it used, and whether memory killed in it.

The files are opened once, while the container lives; they stay readable by that until the group is removed, and after
that the last figures that were read stand.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from fumehood.linux import process

_V1 = (
    ("cpu", "cpuacct", "cpuacct.usage"),
    ("peak", "memory", "memory.max_usage_in_bytes"),
    ("oom", "memory", "memory.oom_control"),
)
_V2 = (("cpu", "cpu.stat"), ("peak", "memory.peak"), ("oom", "memory.events"))


class Counters:
    """The figures of the cgroup of ``pid``. Raises OSError if the cgroup cannot be read here."""

    def __init__(self, pid: int) -> None:
        self._fds: dict[str, int] = {}
        self.cpu_s: float | None = None
        self.peak_bytes: int | None = None
        self.oom_kills = 0
        try:
            self._open(pid)
        except BaseException:
            self.close()
            raise
        self.read()

    def _open(self, pid: int) -> None:
        own = _membership(pid)
        mounts = process.mounts(os.getpid())
        for name, controller, file in _V1:
            for mount in mounts:
                if mount.fs_type == "cgroup" and controller in mount.super_options and controller in own:
                    self._fds[name] = _open(mount, own[controller], file)
                    break
        unified = next((mount for mount in mounts if mount.fs_type == "cgroup2"), None)
        self._unified = "cpu" not in self._fds
        for name, file in _V2:
            if name not in self._fds and unified is not None and "" in own:
                with contextlib.suppress(FileNotFoundError):  # memory.peak is there since Linux 5.19
                    self._fds[name] = _open(unified, own[""], file)
        if "cpu" not in self._fds:
            raise FileNotFoundError(f"the cgroup of {pid} is not visible")

    def read(self) -> None:
        """Take the figures of now; those of before stay where the group is gone."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            text = self._text("cpu")
            self.cpu_s = int(text.split()[1]) / 1e6 if self._unified else int(text) / 1e9
        with contextlib.suppress(OSError, ValueError, KeyError):
            self.peak_bytes = int(self._text("peak"))
        with contextlib.suppress(OSError, ValueError, KeyError):
            words = self._text("oom").split()
            self.oom_kills = int(words[words.index(b"oom_kill") + 1])

    def _text(self, name: str) -> bytes:
        return os.pread(self._fds[name], 4096, 0)

    def close(self) -> None:
        """Idempotent."""
        while self._fds:
            os.close(self._fds.popitem()[1])


class TreeCounters:
    """The same where no cgroup counts: a walk over the process tree of ``pid``, an estimate (see ``tree_usage``)."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.cpu_s: float | None = None
        self.peak_bytes: int | None = None
        self.resident_bytes = 0
        self.oom_kills = 0  # counted by whoever kills for it

    def read(self) -> None:
        """Take the figures of now; those of before stay where the processes are gone."""
        used = process.tree_usage(self._pid)
        if used.count:
            self.resident_bytes = used.resident_bytes
            self.cpu_s = max(self.cpu_s or 0.0, used.cpu_s)
            self.peak_bytes = max(self.peak_bytes or 0, used.resident_bytes)

    def close(self) -> None:
        """Nothing is open."""


def _membership(pid: int) -> dict[str, str]:
    """The cgroup of ``pid`` by controller, "" for v2 (cgroups(7))."""
    own = {}
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for controller in controllers.split(","):
            own[controller] = path
    return own


def in_cgroup_of(pid: int, ident: str) -> bool:
    """Whether the cgroup of ``pid``, as this host has it, names the container ``ident``."""
    try:
        return any(ident in path for path in _membership(pid).values())
    except OSError:
        return False


def belongs_to(pid: int, ident: str) -> bool:
    """Whether ``pid`` is a process of the container ``ident`` here: its cgroup or its parent's command line names it.

    An engine in a virtual machine, or outside of our PID namespace, tells pids that mean another process here. The
    parent of a container's first process is its monitor (conmon, containerd-shim), which is started with its id.
    """
    if in_cgroup_of(pid, ident):
        return True
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        parent = int(status.partition("\nPPid:")[2].split(None, 1)[0])
        return ident.encode() in Path(f"/proc/{parent}/cmdline").read_bytes().split(b"\0")
    except (OSError, ValueError, IndexError):
        return False


def _open(mount: process.MountInfo, path: str, file: str) -> int:
    root = mount.root.rstrip("/")
    inner = path[len(root) :] if path.startswith(root) else path
    return os.open(f"{mount.mount_point.rstrip('/')}{inner}/{file}", os.O_RDONLY | os.O_CLOEXEC)
