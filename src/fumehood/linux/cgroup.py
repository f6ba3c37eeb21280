"""Control groups, v2 by delegation and v1 where its controllers are writable: hard limits on a whole sandbox.

Theory of operation. ``find()`` says what this host lets the supervisor use, having made and removed a group there.
``Found.open()`` makes the supervisor's own folder, below which each sandbox gets one group::

    <where we may>/fumehood/<owner>/<sandbox>        owner = pid-starttime-pidnamespace-serial of the supervisor

On v2 <where we may> is the group that was delegated to us; since a group that holds processes cannot pass controllers
to its children ("no internal processes", cgroups(7)), its processes first move into a leaf ``fumehood-supervisor``
beside ``fumehood``. Root outside of any delegation uses the top of the tree, as container engines do. On v1 every
controller has a tree of its own (``cpu`` and ``cpuacct`` may share one), nothing needs to move, and the folder lies
below the supervisor's own group, so that limits on the supervisor hold for its sandboxes too.

A supervisor that was killed leaves its folder behind. The owner's name tells whether it still lives, so the next one
removes it when it opens (``sweep``); folders of other PID namespaces are left alone, since nobody here can tell.

All calls on a live group go by name relative to one descriptor per tree: a group itself costs no descriptor. The v2
half is tested on a tree that looks like it, the v1 half on the kernel's own. Interface files:
Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType

from fumehood.linux import process

FOLDER = "fumehood"
LEAF = "fumehood-supervisor"

PERIOD_US = 100_000  # the kernel's default for cfs_period_us and cpu.max, written nowhere on v1
_QUOTA_US_MIN = 1000  # the kernel refuses less (min_cfs_quota_period)
_PIDFDS_AT_ONCE = 64
_ROUNDS = 8  # attempts against a race with a process that starts or a supervisor that ends

#: What a process writes to the descriptors of :meth:`Cgroup.entries`: 0 stands for the writer.
ENTER = b"0"

_serial = itertools.count()


@dataclass(frozen=True, slots=True)
class Place:
    """One tree that groups can be made in: the group to start from, and the controllers that it has."""

    path: str
    mount_point: str
    controllers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """What this host has. ``version`` is 2, 1, or 0 for nothing, which ``reason`` and ``remedy`` then explain.

    With a version, ``reason`` says why a limit that is not in ``hard`` is missing, if that is known.
    """

    version: int
    hard: tuple[str, ...] = ()  # of "memory", "pids", "cpu": held by the kernel, exactly
    reason: str = ""
    remedy: str = ""
    places: tuple[Place, ...] = ()

    def open(self, *, sweep: bool = True) -> Hierarchy:
        """Make the supervisor's folder, on v2 moving processes out of the way first, and sweep what others left.

        Call it before time matters. Raises OSError (EBUSY: the processes of the delegated group would not move;
        EOPNOTSUPP: ``version`` is 0); nothing has changed then.
        """
        if not self.version:
            raise OSError(errno.EOPNOTSUPP, f"no control groups: {self.reason}")
        return Hierarchy(self, sweep=sweep)


def find(*, mountinfo: str = "/proc/self/mountinfo", membership: str = "/proc/self/cgroup") -> Found:
    """Which control groups can hold sandboxes here: the version that holds more limits, v2 if both do.

    Writability is proven by making and removing a group; nothing else changes. About a millisecond: keep the answer.
    Never raises. The parameters are the two files that say where the trees and the own groups are.
    """
    try:
        with open(mountinfo, "rb") as file:
            mounts = process.parse_mountinfo(file.read())
        with open(membership, "rb") as file:
            own = _membership(file.read())
    except OSError as error:
        return Found(0, reason=f"control groups cannot be listed: {error}", remedy="use Linux with /proc mounted")
    both = (_find_v2(mounts, own), _find_v1(mounts, own))
    best = max(both, key=lambda found: len(found.hard))
    if best.hard:
        return best
    reasons = [found.reason for found in both if found.reason]
    remedies = [found.remedy for found in both if found.remedy]
    return Found(0, reason="; ".join(reasons), remedy=remedies[0] if remedies else "")


class Hierarchy:
    """The supervisor's folder in every tree it uses, and the maker of groups in it. Made by :meth:`Found.open`.

    One descriptor per tree (v2: 1, v1: at most 4). ``hard`` names the limits that the kernel holds exactly. Threads
    may share it.
    """

    def __init__(self, found: Found, *, sweep: bool = True) -> None:
        self.version = found.version
        self.owner = f"{_owner_here()}-{next(_serial)}"
        self._places = found.places
        self._branches: list[_Branch] = []
        try:
            for place in found.places:
                if found.version == 2:
                    _make_room(place)
                folder, fd = _make_owner(place, self.owner, found.version)
                self._branches.append(_Branch(fd, folder, frozenset(place.controllers)))
            if sweep:
                self.sweep()
            self._survey()
        except BaseException:
            self.close()
            raise

    def _survey(self) -> None:
        """Look at the files that a group really has, which differ with kernel version and boot options."""
        by_controller: dict[str, _Branch] = {}
        for branch in self._branches:
            for controller in branch.controllers:
                by_controller[controller] = branch
        self._memory = by_controller.get("memory")
        self._pids = by_controller.get("pids")
        self._cpu = by_controller.get("cpu")
        self._cpuacct = self._branches[0] if self.version == 2 else by_controller.get("cpuacct")
        names = set().union(*(os.listdir(branch.folder) for branch in self._branches))
        self.hard = _hard(set(by_controller), names, self.version)
        self._swap_file = next((n for n in ("memory.memsw.limit_in_bytes", "memory.swap.max") if n in names), None)
        self._has_peak = "memory.peak" in names
        self._has_kill = "cgroup.kill" in names
        self._cpus_max: float | None = None
        if self.version == 1:
            if self._cpu:
                self._cpus_max = _cpu_ceiling(next(p for p in self._places if "cpu" in p.controllers))
            if self._memory:
                _restore_oom_killer(self._memory)

    def create(self, name: str, *, memory_bytes: int | None, pids: int | None, cpus: float | None) -> Cgroup:
        """A new group with its limits written. Swap is refused to it, so that ``memory_bytes`` is all it gets.
        None is no limit.

        The kernel rounds memory down to a page and ``cpus`` is cut to 10 us per 1 s; on v1, where the kernel refuses
        a group more processor than its ancestors have, ``cpus`` is lowered to theirs. ``read_back`` shows it.

        Raises FileExistsError, ValueError (``name`` is no file name), OSError; no group is left then.
        """
        if not name or "/" in name or name in (".", ".."):
            raise ValueError(f"not a name for a group: {name!r}")
        group = Cgroup(self, name)
        made: list[_Branch] = []
        try:
            for branch in self._branches:
                os.mkdir(name, 0o755, dir_fd=branch.fd)
                made.append(branch)
            (self._limit_v2 if self.version == 2 else self._limit_v1)(name, memory_bytes, pids, cpus)
        except OSError:
            for branch in made:
                with contextlib.suppress(OSError):
                    os.rmdir(name, dir_fd=branch.fd)
            raise
        return group

    def _limit_v1(self, name: str, memory_bytes: int | None, pids: int | None, cpus: float | None) -> None:
        if self._memory and memory_bytes is not None:
            # In this order: memory and swap together may never be less than memory alone.
            _put(self._memory.fd, f"{name}/memory.limit_in_bytes", memory_bytes)
            if self._swap_file:
                _put(self._memory.fd, f"{name}/{self._swap_file}", memory_bytes)
            else:
                _put(self._memory.fd, f"{name}/memory.swappiness", 0)
        if self._pids and pids is not None:
            _put(self._pids.fd, f"{name}/pids.max", pids)
        if self._cpu and cpus is not None:
            quota_us = _quota_us(cpus if self._cpus_max is None else min(cpus, self._cpus_max))
            _put(self._cpu.fd, f"{name}/cpu.cfs_quota_us", quota_us)

    def _limit_v2(self, name: str, memory_bytes: int | None, pids: int | None, cpus: float | None) -> None:
        fd = self._branches[0].fd
        if self._memory and memory_bytes is not None:
            _put(fd, f"{name}/memory.max", memory_bytes)
            if self._swap_file:
                _put(fd, f"{name}/{self._swap_file}", 0)
        if self._pids and pids is not None:
            _put(fd, f"{name}/pids.max", pids)
        if self._cpu and cpus is not None:
            _put(fd, f"{name}/cpu.max", f"{_quota_us(cpus)} {PERIOD_US}")

    def sweep(self) -> int:
        """Kill and remove the groups of supervisors that are gone; returns how many groups went. Never raises."""
        gone = 0
        for place in self._places:
            folder = f"{place.path}/{FOLDER}"
            with contextlib.suppress(OSError):
                for owner in os.listdir(folder):
                    if _owner_is_gone(owner):
                        gone += _bury(f"{folder}/{owner}")
        return gone

    def close(self) -> None:
        """Kill what still runs in the supervisor's groups and remove them with its folder. Idempotent, never raises.

        Its groups are gone then and must not be asked anything more.

        On v2 the supervisor stays in its leaf: where its group came from may have controllers enabled by then.
        """
        while self._branches:
            branch = self._branches.pop()
            os.close(branch.fd)
            _bury(branch.folder)
            with contextlib.suppress(OSError):  # not empty: another supervisor uses it
                os.rmdir(os.path.dirname(branch.folder))

    def __enter__(self) -> Hierarchy:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class Cgroup:
    """The group of one sandbox: one folder in each tree. Made by :meth:`Hierarchy.create`.

    Unless it says otherwise a method raises FileNotFoundError once the group was removed.
    """

    __slots__ = ("_fd", "_kept", "_tree", "name")

    def __init__(self, tree: Hierarchy, name: str) -> None:
        self.name = name
        self._tree = tree
        self._fd = -1
        self._kept: dict[str, int] = {}  # descriptors of its files

    @property
    def hard(self) -> tuple[str, ...]:
        """The limits that the kernel holds exactly on this group."""
        return self._tree.hard

    def read_back(self) -> dict[str, int | float | None]:
        """The limits that the kernel now has: ``memory_bytes``, ``swap_bytes``, ``pids``, ``cpus``.

        A limit whose controller is missing is left out; None means that the kernel holds no limit.
        """
        tree, name = self._tree, self.name
        out: dict[str, int | float | None] = {}
        if tree._memory:
            fd = tree._memory.fd
            if tree.version == 2:
                out["memory_bytes"] = _number(_get(fd, f"{name}/memory.max"))
                if tree._swap_file:
                    out["swap_bytes"] = _number(_get(fd, f"{name}/{tree._swap_file}"))
            else:
                memory = _number_v1(_get(fd, f"{name}/memory.limit_in_bytes"))
                out["memory_bytes"] = memory
                if tree._swap_file:
                    both = _number_v1(_get(fd, f"{name}/{tree._swap_file}"))
                    out["swap_bytes"] = None if both is None or memory is None else both - memory
        if tree._pids:
            out["pids"] = _number(_get(tree._pids.fd, f"{name}/pids.max"))
        if tree._cpu:
            fd = tree._cpu.fd
            if tree.version == 2:
                quota, period = _get(fd, f"{name}/cpu.max").split()
            else:
                quota, period = _get(fd, f"{name}/cpu.cfs_quota_us"), _get(fd, f"{name}/cpu.cfs_period_us")
            out["cpus"] = None if quota.strip() in (b"max", b"-1") else int(quota) / int(period)
        return out

    def add(self, pid: int) -> None:
        """Move a process in; its later children are born here. Threads go along.

        Usually about 55 us on v1, but after some quiet the kernel waits for an RCU grace period, 10 ms and more:
        do it before time matters. Raises ProcessLookupError, PermissionError.
        """
        for branch in self._tree._branches:
            _put(branch.fd, f"{self.name}/cgroup.procs", pid)

    def entries(self) -> list[int]:
        """Descriptors by which a process of one thread moves itself in: it writes ``ENTER`` to each. Empty on v2.

        A thread that moves itself alone needs no lock on its thread group, so that nothing waits for a grace period
        (cgroup_procs_write_start() in kernel/cgroup/cgroup.c, since Linux 5.6), as it may in :meth:`add`. Who may do
        so is judged by who opened the file. The caller closes them. Raises OSError.
        """
        opened: list[int] = []
        try:
            if self._tree.version == 1:
                for branch in self._tree._branches:
                    opened.append(os.open(f"{self.name}/tasks", os.O_WRONLY | os.O_CLOEXEC, dir_fd=branch.fd))
        except OSError:
            for fd in opened:
                os.close(fd)
            raise
        return opened

    def holds(self, pid: int) -> bool:
        """Whether the process is in the group, in every tree. Raises ProcessLookupError or FileNotFoundError."""
        with open(f"/proc/{pid}/cgroup", "rb", buffering=0) as stream:
            found = _membership(stream.readall())
        place = f"/{FOLDER}/{self._tree.owner}/{self.name}"
        controllers = [""] if self._tree.version == 2 else [c for b in self._tree._branches for c in b.controllers]
        return all(found.get(controller, "").endswith(place) for controller in controllers)

    def fd(self) -> int | None:
        """A descriptor for clone3 with CLONE_INTO_CGROUP, owned by the group and closed by ``remove``; None on v1."""
        if self._tree.version != 2:
            return None
        if self._fd < 0:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
            self._fd = os.open(self.name, flags, dir_fd=self._tree._branches[0].fd)
        return self._fd

    def keep_open(self) -> None:
        """Have the files of what is read at a program's end open until :meth:`remove`: usage, tasks, kills for memory.

        Who reads them then looks up no path, which waits for whoever makes or removes a group anywhere. It takes four
        descriptors, none of them from the upper half of this process's table: without room nothing changes.
        """
        tree = self._tree
        v1 = tree.version == 1
        peak = tree._memory if v1 or tree._has_peak else None
        files = (
            (tree._cpuacct, "cpuacct.usage" if v1 else "cpu.stat"),
            (peak, "memory.max_usage_in_bytes" if v1 else "memory.peak"),
            (tree._pids, "pids.current"),
            (tree._memory, "memory.oom_control" if v1 else "memory.events"),
        )
        for branch, file in files:
            if branch is None or file in self._kept:
                continue
            with contextlib.suppress(OSError):
                fd = os.open(f"{self.name}/{file}", os.O_RDONLY | os.O_CLOEXEC, dir_fd=branch.fd)
                if fd < resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2:
                    self._kept[file] = fd
                else:
                    os.close(fd)

    def _read(self, branch: _Branch, file: str) -> bytes:
        kept = self._kept.get(file)
        return _get(branch.fd, f"{self.name}/{file}") if kept is None else os.pread(kept, 4096, 0)

    def cpu_s(self) -> float | None:
        """Processor seconds, user and system, of all processes that were ever in the group; None if not counted."""
        branch = self._tree._cpuacct
        if branch is None:
            return None
        if self._tree.version == 2:
            return _field(self._read(branch, "cpu.stat"), b"usage_usec") / 1e6
        return int(self._read(branch, "cpuacct.usage")) / 1e9

    def memory_peak_bytes(self) -> int | None:
        """The most memory ever charged, files of a tmpfs and kernel memory included; None before Linux 5.19 on v2."""
        branch = self._tree._memory
        if branch is None:
            return None
        if self._tree.version == 1:
            return int(self._read(branch, "memory.max_usage_in_bytes"))
        return int(self._read(branch, "memory.peak")) if self._tree._has_peak else None

    def oom_kills(self) -> int:
        """Processes that the kernel killed because the group was out of memory; 0 without a memory controller."""
        branch = self._tree._memory
        if branch is None:
            return 0
        file = "memory.oom_control" if self._tree.version == 1 else "memory.events"
        return _field(self._read(branch, file), b"oom_kill")

    def tasks(self) -> int | None:
        """How many threads are in the group, with those that are dead and not yet waited for; None if unknown."""
        branch = self._tree._pids
        return None if branch is None else int(self._read(branch, "pids.current"))

    def pids_denied(self) -> int:
        """Forks that failed with EAGAIN at ``pids``; 0 without a pids controller."""
        branch = self._tree._pids
        return 0 if branch is None else _field(_get(branch.fd, f"{self.name}/pids.events"), b"max")

    def populated(self) -> bool:
        """Whether a live process is in the group; a zombie is not."""
        branches = self._tree._branches
        if self._tree.version == 2:
            return _field(_get(branches[0].fd, f"{self.name}/cgroup.events"), b"populated") != 0
        return any(_pids_in(branch.fd, self.name) for branch in branches)

    def kill(self, *, within_s: float = 0.5) -> bool:
        """SIGKILL to everything in the group, until it is empty or the time is over; returns whether it is empty.

        Where the kernel cannot kill a group (v1, and v2 before Linux 5.14), forks are stopped first by ``pids.max``,
        so nothing can outrun the signals. Usually well under a millisecond. True for a group that was removed.
        """
        tree = self._tree
        try:
            if tree._has_kill:
                _put(tree._branches[0].fd, f"{self.name}/cgroup.kill", 1)
                return _until(lambda: not self.populated(), within_s)
            if tree._pids and self.populated():
                _put(tree._pids.fd, f"{self.name}/pids.max", 0)
            # Members are the same in every tree: the next one is looked at when the one before is empty.
            return _until(lambda: not any(_kill_in(branch.fd, self.name) for branch in tree._branches), within_s)
        except FileNotFoundError:
            return True

    def hasten(self) -> None:
        """Help a group to die whose first process was killed: signal all at once and let them use any processor.

        The kernel kills the others of a PID namespace only when the first is scheduled, and a process that has used up
        its group's share of the processor is not scheduled before the next period, not even to die. Nothing runs in
        user mode once it has been signalled, so the share is of no use any more. Waits for nothing, never raises.
        """
        tree = self._tree
        try:
            if tree._pids and int(_get(tree._pids.fd, f"{self.name}/pids.current")) <= 1:
                return  # the first process alone, as after most programs
            self.kill(within_s=0)
        except OSError:
            pass  # it only takes longer
        self.let_off()

    def let_off(self) -> None:
        """Take the bound on the share of the processor away, for what is dying. Waits for nothing, never raises."""
        tree = self._tree
        if tree._cpu:
            file, value = ("cpu.max", "max") if tree.version == 2 else ("cpu.cfs_quota_us", "-1")
            try:
                _put(tree._cpu.fd, f"{self.name}/{file}", value)
            except OSError:
                pass  # it only takes longer

    def remove(self, *, within_s: float = 0.1) -> bool:
        """Remove the empty group, trying again while the kernel still calls it busy; returns whether it is gone.

        Idempotent. Does not kill: a group with a live process stays. Raises OSError other than EBUSY.
        """
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        while self._kept:
            os.close(self._kept.popitem()[1])
        # A list, not a generator: one busy tree must not keep the others.
        return _until(lambda: all([_rmdir(branch.fd, self.name) for branch in self._tree._branches]), within_s)


@dataclass(frozen=True, slots=True)
class _Branch:
    """The supervisor's folder in one tree."""

    fd: int
    folder: str
    controllers: frozenset[str]


# --- finding -----------------------------------------------------------------------------------------------------

_V1 = ("memory", "pids", "cpu", "cpuacct")
_V2 = ("memory", "pids", "cpu")


def _membership(text: bytes) -> dict[str, str]:
    """The own group by controller, "" for v2, from lines such as ``4:cpu,cpuacct:/user.slice`` and ``0::/``."""
    own = {}
    for line in os.fsdecode(text).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for controller in controllers.split(","):
            own[controller] = path
    return own


def _below(mount: process.MountInfo, path: str) -> str | None:
    """Where the group ``path`` is in the file tree; None if it lies outside of what is mounted."""
    root = mount.root.rstrip("/")
    if not (path == root or path.startswith(f"{root}/")) or ".." in path.split("/"):
        return None
    return (mount.mount_point + path[len(root) :]).rstrip("/")


def _find_v1(mounts: list[process.MountInfo], own: dict[str, str]) -> Found:
    places: dict[str, tuple[str, list[str]]] = {}  # by path: the mount point, the controllers
    names: set[str] = set()
    problems = []
    taken: set[str] = set()
    for mount in mounts:
        wanted = [c for c in _V1 if c in mount.super_options and c in own and c not in taken]
        if mount.fs_type != "cgroup" or not wanted:
            continue
        taken.update(wanted)
        path = _below(mount, own[wanted[0]])
        if path is None:
            problems.append(f"the own {wanted[0]} group is not visible below {mount.mount_point}")
            continue
        try:
            names |= _probe(path)
        except OSError as error:
            problems.append(_denied(path, error))
            continue
        places[path] = (mount.mount_point, wanted)
    hard = _hard({c for _, controllers in places.values() for c in controllers}, names, 1)
    if hard:
        found = tuple(Place(path, at, tuple(controllers)) for path, (at, controllers) in places.items())
        return Found(1, hard, reason="; ".join(problems), places=found)
    if not problems:
        return Found(0, reason="cgroup v1: no controller is mounted")
    return Found(0, reason=f"cgroup v1: {'; '.join(problems)}", remedy="run as root")


def _find_v2(mounts: list[process.MountInfo], own: dict[str, str]) -> Found:
    mount = next((m for m in mounts if m.fs_type == "cgroup2"), None)
    if mount is None or "" not in own:
        return Found(0, reason="cgroup v2: not mounted", remedy="mount cgroup2 on /sys/fs/cgroup")
    path = _below(mount, own[""])
    if path is None:
        return Found(0, reason=f"cgroup v2: the own group is not visible below {mount.mount_point}", remedy=_remedy())
    base = _base_v2(mount.mount_point.rstrip("/"), path)
    if base is None:
        return Found(0, reason=f"cgroup v2: {path} is not delegated to this process", remedy=_remedy())
    try:
        offered = _get_path(f"{base}/cgroup.controllers").decode().split()
        controllers = tuple(c for c in _V2 if c in offered)
        if not controllers:
            has = ", ".join(offered) or "none"
            reason = f"cgroup v2: {base} has no controller for memory, pids or cpu ({has})"
            return Found(0, reason=reason)
        _probe(base)
        # The own files of a group show what the kernel offers; the top of the tree has none.
        hard = _hard(set(controllers), set(os.listdir(base)), 2, top=_is_top(base))
    except OSError as error:
        return Found(0, reason=f"cgroup v2: {_denied(base, error)}", remedy=_remedy())
    return Found(2, hard, places=(Place(base, mount.mount_point, controllers),))


def _base_v2(mount_point: str, own: str) -> str | None:
    """The group to start from, or None: the own one if it was delegated, else for root the top of the tree.

    "Delegated" is the kernel documentation's word: the folder belongs to our user (systemd hands it over so), or
    systemd marked it for root (``Delegate=yes`` sets the attribute), or it is all that a container's cgroup
    namespace shows. Root in any other group has a service manager above it that expects to be the only writer there.
    """
    if os.path.basename(own) == LEAF and own != mount_point:
        own = os.path.dirname(own)  # an earlier supervisor moved us, or our parent
    if _is_top(own):
        return own if os.geteuid() == 0 else None
    if os.geteuid() != 0:
        return own if _owner_uid(own) == os.geteuid() else None
    if own == mount_point or _marked_delegated(own):
        return own
    return mount_point if _is_top(mount_point) else None


def _is_top(path: str) -> bool:
    """Whether ``path`` is the root of the whole tree, the only group without a type and with processes inside."""
    return not os.path.exists(f"{path}/cgroup.type")


def _owner_uid(path: str) -> int | None:
    try:
        return os.stat(path).st_uid
    except OSError:
        return None


def _marked_delegated(path: str) -> bool:
    """systemd's mark, ``trusted.`` from its system manager and ``user.`` since v252 (systemd cgroup.c)."""
    for attribute in ("trusted.delegate", "user.delegate"):
        with contextlib.suppress(OSError):
            if os.getxattr(path, attribute) == b"1":
                return True
    return False


def _hard(controllers: set[str], names: set[str], version: int, *, top: bool = False) -> tuple[str, ...]:
    """The limits held exactly, given the ``names`` of a group's files.

    Memory counts only where swap is held as well or where there is none; cpu only where usage is counted too.
    """
    swap_held = top or "memory.memsw.limit_in_bytes" in names or "memory.swap.max" in names or not _has_swap()
    held = {
        "memory": "memory" in controllers and swap_held,
        "pids": "pids" in controllers,
        "cpu": "cpu" in controllers and (version == 2 or ("cpuacct" in controllers and "cpu.cfs_quota_us" in names)),
    }
    return tuple(name for name, yes in held.items() if yes)


def _has_swap() -> bool:
    try:
        return len(_get_path("/proc/swaps").splitlines()) > 1
    except OSError:
        return True


def _probe(path: str) -> set[str]:
    """Make a group below ``path``, list its files, remove it. Raises OSError."""
    group = f"{path}/{FOLDER}-probe-{os.urandom(8).hex()}"
    os.mkdir(group, 0o755)
    try:
        return set(os.listdir(group))
    finally:
        os.rmdir(group)


def _denied(path: str, error: OSError) -> str:
    return f"no group can be made in {path} ({error.strerror})"


def _remedy() -> str:
    if os.geteuid():
        return "run under `systemd-run --user --scope -p Delegate=yes`, or as root"
    return (
        "run as a service with Delegate=yes; in a container, give it a private cgroup namespace and a writable "
        "/sys/fs/cgroup"
    )


# --- the supervisor's folder -------------------------------------------------------------------------------------


def _make_room(place: Place) -> None:
    """Enable the controllers for children of a v2 group, moving its processes into a leaf if it has any.

    Raises OSError, with the processes back where they were.
    """
    enabled = _get_path(f"{place.path}/cgroup.subtree_control").decode().split()
    missing = [c for c in place.controllers if c not in enabled]
    if not missing:
        return
    moved: list[int] = []
    try:
        for attempt in itertools.count(1):
            if not _is_top(place.path):
                _move_all(place.path, moved)
            try:
                _enable(place.path, missing)
                return
            except OSError as error:
                # A process was born in between.
                if error.errno != errno.EBUSY or attempt == _ROUNDS:
                    raise
    except OSError:
        for pid in moved:
            with contextlib.suppress(OSError):
                _put_path(f"{place.path}/cgroup.procs", pid)
        with contextlib.suppress(OSError):
            os.rmdir(f"{place.path}/{LEAF}")
        raise


def _move_all(path: str, moved: list[int]) -> None:
    """Move every process of the group ``path`` into its leaf, noting each in ``moved``. Raises OSError."""
    pids = [int(pid) for pid in _get_path(f"{path}/cgroup.procs").split()]
    if 0 in pids:
        raise OSError(errno.EBUSY, f"{path} holds processes of another PID namespace, which cannot be moved from here")
    if not pids:
        return
    with contextlib.suppress(FileExistsError):
        os.mkdir(f"{path}/{LEAF}", 0o755)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            _put_path(f"{path}/{LEAF}/cgroup.procs", pid)
            moved.append(pid)


def _enable(path: str, controllers: list[str] | tuple[str, ...]) -> None:
    _put_path(f"{path}/cgroup.subtree_control", " ".join(f"+{c}" for c in controllers))


def _make_owner(place: Place, owner: str, version: int) -> tuple[str, int]:
    """The folder of this supervisor, and a descriptor of it. Raises OSError."""
    shared = f"{place.path}/{FOLDER}"
    folder = f"{shared}/{owner}"
    for attempt in itertools.count(1):
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(shared, 0o755)
            if version == 2:
                _enable(shared, place.controllers)
            os.mkdir(folder, 0o755)
            break
        except FileNotFoundError:
            # Another supervisor ended and removed the shared folder in between.
            if attempt == _ROUNDS:
                raise
    try:
        if version == 2:
            _enable(folder, place.controllers)
        return folder, os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        os.rmdir(folder)
        raise


def _owner_here() -> str:
    pid = os.getpid()
    return f"{pid}-{process.start_time(pid)}-{_pid_namespace()}"


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _owner_is_gone(owner: str) -> bool:
    """Whether the supervisor of that name is dead: only if the name is of our form and of our PID namespace."""
    parts = owner.split("-")
    if len(parts) != 4 or not all(part.isdecimal() for part in parts):
        return False
    pid, start, namespace, _ = map(int, parts)
    return namespace == _pid_namespace() and not process.alive(pid, start)


def _cpu_ceiling(place: Place) -> float | None:
    """The least that an ancestor in sight grants on v1, in CPUs; None if none limits."""
    ceiling: float | None = None
    path = place.path
    while path.startswith(place.mount_point.rstrip("/")):
        with contextlib.suppress(OSError):
            quota, period = (int(_get_path(f"{path}/cpu.cfs_{what}_us")) for what in ("quota", "period"))
            if quota > 0:
                ceiling = min(quota / period, ceiling or quota / period)
        path = os.path.dirname(path)
    return ceiling


def _restore_oom_killer(branch: _Branch) -> None:
    """On v1 a group inherits ``oom_kill_disable``, with which a program out of memory hangs instead of dying."""
    if _field(_get(branch.fd, "memory.oom_control"), b"oom_kill_disable"):
        _put(branch.fd, "memory.oom_control", 0)


def _bury(folder: str) -> int:
    """Kill all in ``folder`` and the groups below it, and remove them; returns how many groups went."""
    gone = 0
    for path, _, _ in os.walk(folder, topdown=False):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            with contextlib.suppress(OSError):
                _put(fd, "pids.max", 0)
            with contextlib.suppress(OSError):
                _until(lambda fd=fd: not _kill_in(fd, "."), 1.0)  # type: ignore[misc]
            gone += _until(lambda path=path: _rmdir(None, path), 0.1)  # type: ignore[misc]
        except OSError:
            continue
        finally:
            os.close(fd)
    return gone


# --- files, numbers, signals -------------------------------------------------------------------------------------


def _put(fd: int | None, path: str, value: int | str) -> None:
    """Write one control file below the folder ``fd``. Raises OSError with the path."""
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC, dir_fd=fd)
    try:
        os.write(file, f"{value}\n".encode())
    except OSError as error:
        raise OSError(error.errno, f"write {value}: {error.strerror}", path) from None
    finally:
        os.close(file)


def _get(fd: int | None, path: str) -> bytes:
    """Read one control file below the folder ``fd`` that is at most a few lines. Raises OSError with the path."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=fd)
    try:
        return os.read(file, 4096)
    finally:
        os.close(file)


def _put_path(path: str, value: int | str) -> None:
    _put(None, path, value)


def _get_path(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _quota_us(cpus: float) -> int:
    return max(_QUOTA_US_MIN, int(cpus * PERIOD_US + 1e-6))


def _number(text: bytes) -> int | None:
    """A limit of the kernel's: a number, or None for ``max``."""
    first = text.split()[0]
    return None if first == b"max" else int(first)


def _number_v1(text: bytes) -> int | None:
    """A v1 memory limit, where no limit is the greatest number of whole pages."""
    value = int(text)
    return None if value >= (1 << 63) - (1 << 20) else value


def _field(text: bytes, key: bytes) -> int:
    """The number beside ``key`` in a file of ``key number`` lines; 0 if the kernel has no such line."""
    words = text.split()
    for name, value in zip(words[::2], words[1::2], strict=False):
        if name == key:
            return int(value)
    return 0


def _pids_in(fd: int, name: str) -> list[int]:
    """The processes of a group, without those that a sibling PID namespace hides (shown as 0)."""
    file = os.open(f"{name}/cgroup.procs", os.O_RDONLY | os.O_CLOEXEC, dir_fd=fd)
    with open(file, "rb", buffering=0) as stream:
        return [pid for pid in map(int, stream.readall().split()) if pid]


def _kill_in(fd: int, name: str) -> bool:
    """One round of SIGKILL to the processes of a group; returns whether there were any.

    A pid that was read may belong to another process by the time it is signalled. So it is opened first and read
    again: what is still listed then is what was opened.
    """
    pids = _pids_in(fd, name)
    for at in range(0, len(pids), _PIDFDS_AT_ONCE):
        opened: dict[int, int] = {}
        try:
            for pid in pids[at : at + _PIDFDS_AT_ONCE]:
                with contextlib.suppress(ProcessLookupError):
                    opened[pid] = process.pidfd_open(pid)
            for pid in opened.keys() & set(_pids_in(fd, name)):
                process.kill_pidfd(opened[pid], signal.SIGKILL)
        finally:
            for pidfd in opened.values():
                os.close(pidfd)
    return bool(pids)


def _rmdir(fd: int | None, path: str) -> bool:
    """Remove a group; False while it is busy, True if it is gone, however that came."""
    try:
        os.rmdir(path, dir_fd=fd)
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno == errno.EBUSY:
            return False
        raise
    return True


def _pauses(within_s: float) -> Iterator[float]:
    """Growing pauses, from 0.05 ms to 5 ms, until the time is over."""
    end = time.monotonic() + within_s
    pause = 0.00005
    while (left := end - time.monotonic()) > 0:
        yield min(pause, left)
        pause = min(pause * 1.3, 0.005)


def _until(done: Callable[[], bool], within_s: float) -> bool:
    """Try ``done`` at once and then again and again until it is true or the time is over."""
    if done():
        return True
    for pause in _pauses(within_s):
        time.sleep(pause)
        if done():
            return True
    return False
