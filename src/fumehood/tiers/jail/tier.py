"""The jail as a tier: zygotes by environment, one sandbox per call, and what is held around it from outside."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import platform
import random
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from fumehood.enclosure import PidfdEnclosure, let_go, sealed
from fumehood.environments import packages_of
from fumehood.errors import FumehoodError, StartError, UnavailableError
from fumehood.linux.cgroup import Cgroup, Found, Hierarchy, find
from fumehood.linux.rlimits import refuse_higher
from fumehood.model import Boundary, Limits, Policy, Receipt
from fumehood.session import GuestSandbox
from fumehood.threads import in_thread
from fumehood.tier import Features, Probe, Sandbox, require
from fumehood.tiers.jail import client, posture
from fumehood.tiers.jail.client import AGENT, Exit, Guest, Request, Spawned, Zygote, ZygoteLostError
from fumehood.tiers.jail.controls import DATA, REHEARSED, SINGLE, TERMINALS, numbers
from fumehood.tiers.jail.graves import Graves
from fumehood.tiers.jail.hosts import remedy_for
from fumehood.tiers.jail.runtime import program_env
from fumehood.tiers.jail.single import SingleChannel, SingleSandbox
from fumehood.wire import Channel

_NAMES = itertools.count(1)

#: Sandboxes made ahead: as many as a caller that takes one every 10 ms uses up while the kernel makes it wait for one.
AHEAD = 2
_LEFT_MAX = 16  # dying programs that no run waits for
_NEXT_AFTER_S = 0.0005  # until then the caller has the result and may have asked for the next run
_READY_TIMEOUT_S = 30.0

FEATURES = Features(
    boundary=Boundary.KERNEL,
    summary="namespaces, seccomp, Landlock and cgroups around a forked interpreter; no root, no daemon",
    live=True,
    files=True,
    commands=True,
    contexts=True,
    displays=True,
    background=True,
    pty=True,
    environments=True,
    mounts=True,
)

#: A sandbox's channel to its guest, what holds it from outside, and what was read back.
Started = tuple[Channel, PidfdEnclosure, Receipt]
StartedBare = tuple[socket.socket, PidfdEnclosure, Receipt]

#: What makes a zygote fit a policy: site-packages folder, modules imported, operator's mounts.
Key = tuple[str | None, tuple[str, ...], tuple[tuple[str, str], ...]]
#: What makes a sandbox fit: its zygote, its limits, what its receipt says of output, terminals, and whether it has an
#: agent or is for a single program.
Kind = tuple[Key, Limits, str, bool, bool]
_BARE: Key = (None, (), ())

#: Limits that the supervisor watches -> the control each is, and a value that no attack of the suite reaches.
_WATCHES = {"wall_s": "wall", "cpu_s": "cpu_time", "output_bytes": "output"}
_LIFTED: dict[str, Any] = {"wall_s": 3600.0, "cpu_s": 3600.0, "output_bytes": 1 << 30}


class _Host:
    """What this process learned about the host, once: the answer of the probe and the zygote it left over."""

    lock = threading.Lock()
    probe: Probe | None = None
    spare: Zygote | None = None


class JailTier:
    """Tier ``jail``.

    ``disabled`` switches controls off by name (``controls.NAMES``): for the attack suite's mutation only, it is
    reachable by no policy and no name. ``cgroups=False`` does without them as on a host that has none. ``guest`` is
    what serves inside, for tiers that run a language runtime in a jail; they call :meth:`start`.
    """

    name = "jail"
    features = FEATURES

    def __init__(self, *, disabled: frozenset[str] = frozenset(), cgroups: bool = True, guest: Guest = AGENT) -> None:
        self._disabled = disabled
        self._guest = guest
        self._cgroups = cgroups
        self._hierarchy: asyncio.Task[Hierarchy] | None = None
        self._zygotes: dict[Key, Zygote] = {}
        self._starting: dict[Key, asyncio.Task[Zygote]] = {}
        self._ahead: deque[_Seat] = deque()
        self._ahead_kind: Kind | None = None
        self._wish: tuple[Kind, Policy] | None = None
        self._making = 0
        self._live = 0  # sandboxes that exist, those made ahead included
        self._tasks: set[asyncio.Task[None]] = set()
        self._leaving: set[asyncio.Future[Any]] = set()  # sandboxes whose program is dying
        self._halves: dict[Zygote, tuple[int, Request]] = {}  # sandboxes that wait for their limits, with their flags
        self._graves = Graves(_NEXT_AFTER_S)
        self._closed = False

    def probe(self) -> Probe:
        """Starts a zygote, which seals a throwaway sandbox; the answer is kept for this process."""
        with _Host.lock:
            if _Host.probe is None:
                _Host.probe = _try_host()
            found = _Host.probe
        if not self._cgroups and found.available:
            return Probe(True, hard=("disk",), details=found.details)
        return found

    async def create(self, policy: Policy) -> GuestSandbox:
        """A new sandbox, sealed, with its receipt read back. A zygote that was lost is replaced once."""
        require(self, policy)
        channel, enclosure, receipt = await self.start(policy)
        return GuestSandbox(channel, enclosure, self._watched(policy), receipt, env=program_env())

    async def create_warm(self, policy: Policy) -> GuestSandbox:
        """The same for later use: it has gone through a run and waits for a program. See :mod:`fumehood.pool`."""
        require(self, policy)
        channel, enclosure, receipt = await self.start(policy, warm=self._guest is AGENT)
        sandbox = GuestSandbox(channel, enclosure, self._watched(policy), receipt, env=program_env())
        try:
            await sandbox.ready(_READY_TIMEOUT_S)
        except BaseException:
            await asyncio.shield(sandbox.close())
            raise
        return sandbox

    async def create_single(self, policy: Policy, *, warm: bool = False) -> Sandbox:
        """A sandbox for one program, which is code without displays, standard input and files. Raises as ``create``.

        It has no agent (:mod:`fumehood.tiers.jail.single`), unless this zygote cannot do without one.
        """
        require(self, policy)
        try:
            zygote = await self._zygote(_key(policy))
        except OSError as error:
            if isinstance(error, FumehoodError):
                raise
            raise StartError(f"the sandbox could not be set up: {error}", tier="jail") from None
        if not zygote.single:
            return await (self.create_warm(policy) if warm else self.create(policy))
        seat = await self._start(policy, warm, single=True)
        spawned, enclosure = seat.spawned, seat.enclosure
        out, err = seat.pipes
        if warm:
            enclosure.expect_usage()

        def on_exit(told: Callable[[Exit | None], object]) -> None:
            def ended(how: Exit | None) -> None:
                if how is not None:
                    enclosure.program_ended()
                told(how)

            seat.zygote.on_exit(spawned.ident, ended)

        channel = SingleChannel(seat.end, out, err, spawned.program_fd, on_exit, enclosure.end_program)
        watched = self._watched(policy)
        return SingleSandbox(channel, enclosure, watched, seat.receipt, env=program_env(), leave=self._leave)

    def _leave(self, closing: asyncio.Future[Any]) -> bool:
        """Whether a sandbox may go beside what runs, for :meth:`close` to wait for: few at a time."""
        if len(self._leaving) >= _LEFT_MAX:
            return False
        self._leaving.add(closing)
        closing.add_done_callback(self._leaving.discard)
        return True

    def _watched(self, policy: Policy) -> Policy:
        """The policy whose limits the supervisor watches: all of it, but for what a test switched off."""
        lifted = {name: value for name, value in _LIFTED.items() if _WATCHES[name] in self._disabled}
        return replace(policy, limits=replace(policy.limits, **lifted)) if lifted else policy

    async def start(self, policy: Policy, *, warm: bool = False) -> Started:
        """The parts of a sandbox, sealed. They belong to the caller, who makes a sandbox of them at once."""
        end, enclosure, receipt = await self.start_bare(policy, warm=warm)
        fd = end.detach()
        return Channel(fd, fd), enclosure, receipt

    async def start_bare(self, policy: Policy, *, warm: bool = False) -> StartedBare:
        """The same with the guest's socket as it is, for a guest that does not begin with frames."""
        seat = await self._start(policy, warm)
        return seat.end, seat.enclosure, seat.receipt

    async def _start(self, policy: Policy, warm: bool, *, single: bool = False) -> _Seat:
        """A sandbox's parts. A zygote that is lost meanwhile is replaced once."""
        try:
            return await self._seat(policy, warm, single)
        except ZygoteLostError:
            return await self._seat(policy, warm, single)
        except OSError as error:
            if isinstance(error, FumehoodError):
                raise
            raise StartError(f"the sandbox could not be set up: {error}", tier="jail") from None

    async def _seat(self, policy: Policy, warm: bool, single: bool) -> _Seat:
        kind = (_key(policy), policy.limits, policy.overflow, policy.terminals, single)
        seat = None if warm else self._take_ahead(kind)
        if seat is None:
            seat = await self._make_seat(kind, policy, warm)
        self._keep_ahead(kind, policy, warm)
        if "memory" not in seat.hard:
            seat.enclosure.poll_memory(policy.limits.memory_bytes)
        return seat

    async def _make_seat(self, kind: Kind, policy: Policy, warm: bool) -> _Seat:
        """A sandbox, sealed, in its cgroup, its receipt read."""
        limits, single = policy.limits, kind[-1]
        zygote = await self._zygote(kind[0])
        single = single and zygote.single
        tree = await self._tree()
        hard = tree.hard if tree is not None else ()
        # Of ours there is one process beside the program's: the agent; or a PID 1 that is of the zygote's own uid.
        beside = 0 if single else 1
        rlimits = _rlimits(limits, hard, pids=limits.pids + (beside if zygote.has_ids else 1))
        refuse_higher(rlimits, tier=self.name)
        bound = "disk" not in self._disabled
        word = numbers(disk_bytes=limits.disk_bytes * bound, files=limits.files * bound, rlimits=rlimits, touch=warm)
        flags = SINGLE * single | TERMINALS * policy.terminals | DATA * ("DATA" in rlimits)
        request = self._take_half(zygote, flags) or zygote.request(flags)
        ours = request.end
        group = None
        try:
            group = self._group(tree, limits, limits.pids + beside)  # while the zygote clones
            # An agent's ids are not mapped yet; a single program's were before it was born.
            hurried = single and "cpu" in hard and group is not None and self._let_enter(ours, group, word)
            spawned = await request.answer()
        except BaseException as error:
            request.give_up()
            if group is not None:
                group.remove()
            _blame_lost(zygote, error)
            raise
        enclosure = self._enclose(zygote, spawned, flags, group)
        self._live += 1
        pipes: list[int] = []
        try:
            guest = spawned.program or spawned.pid
            if not hurried:
                await self._prepare(ours, guest, limits, hard, group, word)
            pipes = await sealed(ours, tier=self.name)
            if len(pipes) == 2 * single + 1:
                enclosure.work_fd = pipes.pop()
            elif len(pipes) != 2 * single:
                raise StartError("the sandbox handed over what was not asked for", tier=self.name)
            receipt = self._receipt(zygote, guest, spawned, policy, rlimits, group, hard, beside)
            ours.setblocking(False)
            return _Seat(kind, ours, enclosure, receipt, zygote, hard, spawned, pipes)
        except BaseException as error:
            ours.close()
            for fd in pipes:
                os.close(fd)
            if spawned.program_fd >= 0:
                os.close(spawned.program_fd)
            await asyncio.shield(enclosure.discard())
            _blame_lost(zygote, error)
            raise

    async def _prepare(
        self,
        end: socket.socket,
        pid: int,
        limits: Limits,
        hard: tuple[str, ...],
        group: Cgroup | None,
        word: bytes,
    ) -> None:
        """Put a process that waits where it does not go by itself, and let it go on."""
        if "cpu" not in hard:
            _bind_to_cpus(pid, limits)
        if group is not None and self._let_enter(end, group, word):
            return
        if group is not None:  # a thread, since it may wait for a grace period of the kernel's, and others wait for us
            await in_thread(group.add, pid)
        let_go(end, tier=self.name, word=word)

    def _let_enter(self, end: socket.socket, group: Cgroup, word: bytes) -> bool:
        """Let a process go on that moves itself into its group; False if it cannot do that here."""
        entries = group.entries()
        try:
            if entries:
                let_go(end, tier=self.name, entries=entries, word=word)
        finally:
            for fd in entries:
                os.close(fd)
        return bool(entries)

    def _enclose(self, zygote: Zygote, spawned: Spawned, flags: int, group: Cgroup | None) -> PidfdEnclosure:
        return PidfdEnclosure(
            spawned.pid,
            spawned.pidfd,
            group,
            program=spawned.program,
            cpu_after_death=lambda: zygote.exited(spawned.ident),
            forget=lambda: self._after(zygote, spawned, flags),
            bury=self._graves.bury,
        )

    def _after(self, zygote: Zygote, spawned: Spawned, flags: int) -> None:
        """A sandbox is over: forget it. When the caller has the result, the next ones are made."""
        zygote.forget(spawned.ident)
        self._live -= 1
        asyncio.get_running_loop().call_later(_NEXT_AFTER_S, self._make_next, zygote, flags)

    def _make_next(self, zygote: Zygote, flags: int) -> None:
        """Make the sandbox that was wished for, and the processes of one more."""
        wish, self._wish = self._wish, None
        idle = self._live <= len(self._ahead) + self._making
        while wish is not None and len(self._ahead) + self._making < AHEAD and not self._closed:
            self._making += 1
            self._spawn_task(self._make_ahead(*wish, idle=idle))
        if flags & SINGLE:
            asyncio.get_running_loop().call_soon(self._make_half, zygote, flags)  # after those have taken what is there

    def _make_half(self, zygote: Zygote, flags: int) -> None:
        """Ask for the processes of the next sandbox, whatever its limits will be: they come with the word to go on."""
        if self._halves.get(zygote, (flags,))[0] != flags:  # of another kind, and likely to stay so
            self._drop_half(zygote)
        if zygote not in self._halves and not zygote.lost and not self._closed:
            rehearsed = 0 if self._live > len(self._ahead) + self._making else REHEARSED  # at a cost of spare time only
            with contextlib.suppress(OSError, FumehoodError):  # no descriptor is left; the next run asks, and says so
                self._halves[zygote] = flags, zygote.request(flags | rehearsed)

    def _take_half(self, zygote: Zygote, flags: int) -> Request | None:
        """A sandbox that is there, or on its way, and waits for its limits; None if there is none of this kind."""
        kept, half = self._halves.get(zygote, (0, None))
        if half is None or kept != flags:
            return None
        del self._halves[zygote]
        if half.alive:
            return half
        half.give_up()
        return None

    def _drop_half(self, zygote: Zygote) -> None:
        _, half = self._halves.pop(zygote, (0, None))
        if half is not None:
            half.give_up()

    def _take_ahead(self, kind: Kind) -> _Seat | None:
        """A sandbox that was made ahead, if there is one of this kind that lives. What does not fit is thrown away."""
        while self._ahead:
            seat = self._ahead.popleft()
            if seat.kind == kind and seat.alive:
                return seat
            self._spawn_task(seat.discard())
        return None

    def _keep_ahead(self, kind: Kind, policy: Policy, warm: bool) -> None:
        """Have the next sandbox made when this one is over, if there was a program like it before.

        See docs/decisions/0006: the wait for a grace period of the kernel's, which moving a process into a cgroup can
        need, is then met by nobody.
        """
        usual = not warm and self._guest is AGENT
        again, self._ahead_kind = self._ahead_kind == kind, kind
        self._wish = (kind, policy) if usual and again else None

    async def _make_ahead(self, kind: Kind, policy: Policy, *, idle: bool) -> None:
        """One sandbox for later. On an idle machine it goes through a run beforehand: that costs only what is spare."""
        try:
            seat = await self._make_seat(kind, policy, idle)
        except (FumehoodError, OSError):
            return  # the next run makes its own and reports
        finally:
            self._making -= 1
        if self._closed or self._ahead_kind != kind:
            await seat.discard()
        else:
            self._ahead.append(seat)

    def _spawn_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _group(self, tree: Hierarchy | None, limits: Limits, pids: int) -> Cgroup | None:
        if tree is None:
            return None
        try:
            off = self._disabled
            return tree.create(
                f"s{next(_NAMES)}",
                memory_bytes=None if "memory" in off else limits.memory_bytes,
                pids=None if "pids" in off else pids,
                cpus=None if "cpu" in off else limits.cpus,
            )
        except OSError as error:
            raise StartError(f"cannot make a cgroup: {error}", tier="jail") from None

    def _receipt(
        self,
        zygote: Zygote,
        pid: int,
        spawned: Spawned,
        policy: Policy,
        rlimits: dict[str, int],
        group: Cgroup | None,
        hard: tuple[str, ...],
        beside: int,
    ) -> Receipt:
        if group is not None and not group.holds(pid):
            raise StartError("not held as asked: the sandbox is not in its cgroup", tier="jail")
        return posture.read_back(
            pid,
            host_uid=spawned.host_uid,
            policy=policy,
            rlimits=rlimits,
            cgroup=group.read_back() if group is not None else {},
            hard=tuple(name for name in hard if name not in self._disabled),
            beside=beside,
            seccomp=zygote.seccomp,
            landlock=zygote.landlock,
            disabled=self._disabled,
            notes=(),
        )

    async def _zygote(self, key: Key) -> Zygote:
        """The zygote for ``key``, started if there is none that lives."""
        found = self._zygotes.get(key)
        if found is not None and not found.lost:
            return found
        starting = self._starting.get(key)
        if starting is None:
            # A task, because a caller who is cancelled does not stop the thread, and the zygote must have an owner.
            starting = self._starting[key] = asyncio.create_task(self._start_zygote(key, found))
            starting.add_done_callback(lambda done: done.cancelled() or done.exception())  # not awaited by everybody
        return await asyncio.shield(starting)

    async def _start_zygote(self, key: Key, lost: Zygote | None) -> Zygote:
        try:
            usual = not self._disabled and self._guest is AGENT
            started = _take_spare() if usual and key == _BARE else None
            if started is None:
                site_packages, preload, mounts = key
                started = await in_thread(
                    client.start,
                    site_packages=site_packages,
                    preload=preload,
                    mounts=mounts,
                    disabled=self._disabled,
                    guest=self._guest,
                )
            started.attach(asyncio.get_running_loop())
            self._zygotes[key] = started
            if lost is not None:
                self._drop_half(lost)
                await in_thread(lost.close)
            return started
        finally:
            del self._starting[key]

    async def _tree(self) -> Hierarchy | None:
        """This tier's folders of cgroups, made by the first that asks."""
        if self._hierarchy is None or (self._hierarchy.done() and self._hierarchy.exception()):
            if not self._cgroups or not _found().version:
                return None
            self._hierarchy = asyncio.create_task(in_thread(_found().open))
            self._hierarchy.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(self._hierarchy)

    async def close(self) -> None:
        """Kill the zygotes and what is left of their sandboxes, and remove this tier's cgroups. Idempotent."""
        self._closed = True
        await self._settle()
        if self._starting:
            await asyncio.wait(tuple(self._starting.values()))
        for zygote in tuple(self._halves):
            self._drop_half(zygote)
        zygotes, self._zygotes = list(self._zygotes.values()), {}
        for zygote in zygotes:
            await in_thread(zygote.close)
        while self._leaving:  # now they are dead with their zygote
            await asyncio.wait(tuple(self._leaving))
        await self._settle()
        if self._hierarchy is not None:
            opening, self._hierarchy = self._hierarchy, None
            with contextlib.suppress(OSError):
                await in_thread((await opening).close)

    async def _settle(self) -> None:
        """Until nothing is under way: what was made ahead is ended, what is to be removed is."""
        while self._tasks or self._ahead:
            if self._tasks:
                await asyncio.wait(tuple(self._tasks))
            if self._ahead:
                await self._ahead.popleft().discard()
        await self._graves.empty()


@dataclass(slots=True)
class _Seat:
    """A sandbox that waits for its program, and all that belongs to it."""

    kind: Kind
    end: socket.socket
    enclosure: PidfdEnclosure
    receipt: Receipt
    zygote: Zygote
    hard: tuple[str, ...]
    spawned: Spawned
    pipes: list[int]  # of stdout and stderr, where there is no agent

    @property
    def alive(self) -> bool:
        return not self.zygote.lost and self.enclosure.alive()

    async def discard(self) -> None:
        self.end.close()
        for fd in (*self.pipes, self.spawned.program_fd):
            if fd >= 0:
                os.close(fd)
        await self.enclosure.discard()


def _blame_lost(zygote: Zygote, error: BaseException) -> None:
    """Raise ZygoteLostError if a sandbox did not come to be since its zygote had died: then there is another try."""
    if isinstance(error, StartError) and zygote.gone():
        raise ZygoteLostError(f"the zygote died: {error.message}", tier="jail") from None


def _bind_to_cpus(pid: int, limits: Limits) -> None:
    """Where no cgroup holds the share of the processors, let the waiting process have as many as it may use."""
    ours = sorted(os.sched_getaffinity(0))
    count = min(len(ours), max(1, math.ceil(limits.cpus)))
    os.sched_setaffinity(pid, random.sample(ours, count))


def _key(policy: Policy) -> Key:
    return packages_of(policy), policy.preload, tuple((m.source, m.target) for m in policy.mounts)


def _rlimits(limits: Limits, hard: tuple[str, ...], *, pids: int) -> dict[str, int]:
    """Limits of each process, by name; a backstop where a cgroup holds the whole."""
    values = {
        "CORE": 0,
        "NOFILE": limits.open_files,
        "NPROC": pids,
        "MEMLOCK": 0,
        "MSGQUEUE": 0,
        "FSIZE": limits.disk_bytes,
        "CPU": math.ceil(limits.cpu_s) + 1,
        "NICE": 0,
        "RTPRIO": 0,
        "SIGPENDING": 1024,
    }
    if "memory" not in hard:
        values["DATA"] = limits.memory_bytes
    return values


@lru_cache(maxsize=1)
def _found() -> Found:
    return find()


def _take_spare() -> Zygote | None:
    with _Host.lock:
        spare, _Host.spare = _Host.spare, None
    return spare


def drop_spare() -> None:
    """End the zygote that a probe has started, if no tier has taken it. Waits for its end."""
    spare = _take_spare()
    if spare is not None:
        spare.close()


def _try_host() -> Probe:
    if sys.platform != "linux":
        return Probe(False, f"needs Linux namespaces; this is {platform.system()}", "use a tier of another kind")
    try:
        zygote = client.start()
    except UnavailableError as error:
        return Probe(False, error.message, remedy_for(error.message))
    except Exception as error:
        return Probe(False, f"{type(error).__name__}: {error}", remedy_for(str(error)))
    _Host.spare = zygote
    found = _found()
    details = [("seccomp", zygote.seccomp), ("landlock", zygote.landlock)]
    details.append(("cgroup", f"v{found.version}: {', '.join(found.hard)}" if found.version else found.reason))
    if found.remedy:
        details.append(("cgroup remedy", found.remedy))
    return Probe(True, hard=(*found.hard, "disk"), details=tuple(details))
