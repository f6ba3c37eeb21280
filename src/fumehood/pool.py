"""Warm single-use sandboxes: a tier that wraps a tier.

Theory of operation. :meth:`Pool.create` hands out a sandbox that was made before it was asked for, if there is one for
exactly this policy, and has the wrapped tier make one if there is none. One task, the *keeper*, does all that need not
be on a request's path: it makes the next sandboxes and releases those that are over, one thing at a time, and only
while no program of this pool runs, or else at a slow pace (:data:`PACE_S`). So it takes no processor from programs. A
pool makes runs start sooner, not cheaper: under full load its sandboxes are soon used up, and every run is a cold one,
which costs the least in all.

A sandbox leaves the shelf before it is handed out, so no two callers get the same one; a shelf belongs to one policy,
by its digest, and to one kind, for a simple program or for any; and what was handed out never comes back. A sandbox's
limits and its receipt are in force from when it was made; the wall clock starts with the program.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict, deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

from fumehood.errors import ClosedError, FumehoodError, PolicyError, PoolTimeoutError
from fumehood.model import Artifact, Policy, Program, Result
from fumehood.tier import Features, Probe, Sandbox, Single, Tier

#: How long no program must have run before the keeper works: a caller that runs one program after another comes back
#: sooner than this.
SETTLE_S = 0.001

#: While programs run all the time the keeper still does one thing in this time, so that a shelf fills in the end.
PACE_S = 0.02

#: Sandboxes that are over and wait for the keeper to remove their cgroups and descriptors; beyond it the caller waits.
RELEASES_MAX = 32

SIZE_MAX = 4096

#: After a sandbox could not be made the keeper waits, twice as long each time, from the first number to the second.
RETRY_S = (0.1, 10.0)


@runtime_checkable
class Warming(Protocol):
    """A tier that can make a sandbox readier than ``create`` does, at a price that is worth it beforehand only."""

    async def create_warm(self, policy: Policy) -> Sandbox:
        """As ``create``; the sandbox has done all that does not depend on the program. Raises the same."""
        ...


@dataclass(slots=True)
class PoolMetrics:
    """What a pool did since it was made, and what it holds now."""

    warm: int = 0  # handed out from a shelf
    cold: int = 0  # made when they were asked for
    made: int = 0  # made for a shelf
    dead: int = 0  # found dead on a shelf and thrown away
    dropped: int = 0  # thrown away alive, to make room for another policy
    failed: int = 0  # could not be made for a shelf
    timed_out: int = 0  # calls that found no room in time
    wait_s: float = 0.0  # spent in create() by all callers together
    wait_max_s: float = 0.0  # by the one that waited longest
    ready: int = 0  # on the shelves now
    live: int = 0  # handed out and not released yet
    waiting: int = 0  # callers that wait for room now


@dataclass(slots=True)
class _Shelf:
    """The warm sandboxes of one policy and kind."""

    policy: Policy
    single: bool  # for one simple program each, see fumehood.tier.Single
    ready: deque[Sandbox] = field(default_factory=deque)
    failures: int = 0  # in a row
    not_before: float = 0.0  # the loop's time of the next try


class Pool:
    """A tier whose sandboxes are made beforehand. Belongs to the event loop in which it is first used.

    ``size`` is how many warm sandboxes are kept over all policies and kinds: each that was asked for of late has an
    equal share, the one asked for longest ago loses its share first. ``live_max`` bounds the sandboxes that exist at
    one time, warm or handed out, and ``memory_bytes`` what their policies allow them together
    (:attr:`Limits.memory_bytes <fumehood.model.Limits>`). At a bound, warm sandboxes of other policies make room;
    then :meth:`create` waits, at most ``wait_s`` seconds.

    Owns ``tier``, which :meth:`close` closes. Raises PolicyError for a size, bound or time that makes no sense.
    """

    def __init__(
        self,
        tier: Tier,
        *,
        size: int,
        live_max: int | None = None,
        memory_bytes: int | None = None,
        wait_s: float = 60.0,
    ) -> None:
        for name, value in (("size", size), ("live_max", live_max), ("memory_bytes", memory_bytes)):
            if value is not None and (type(value) is not int or value < 1):
                raise PolicyError(f"pool: {name} must be a whole number from 1, not {value!r}")
        if size > SIZE_MAX:
            raise PolicyError(f"pool: size is at most {SIZE_MAX}, not {size}")
        if not wait_s >= 0:
            raise PolicyError(f"pool: wait_s must be a number of seconds from 0, not {wait_s!r}")
        self.tier = tier
        self._singles = tier if isinstance(tier, Single) else None  # the question costs more than a warm create()
        self.size = size
        self._live_max = live_max
        self._memory_bytes = memory_bytes
        self._wait_s = wait_s
        self._shelves: OrderedDict[tuple[str, bool], _Shelf] = OrderedDict()  # the one asked for last is last
        self._latest: _Shelf | None = None  # a digest costs more than the rest of a warm create()
        self._held = 0  # sandboxes that exist or are being made
        self._held_bytes = 0
        self._live = 0
        self._busy = 0  # programs that run, and calls that wait for a sandbox
        self._quiet_since = 0.0
        self._idle = asyncio.Event()
        self._work = asyncio.Event()
        self._settled = asyncio.Event()  # set when the keeper has nothing to do
        self._over: deque[_Lease] = deque()  # to be released by the keeper
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._keeper: asyncio.Task[None] | None = None
        self._stirring: asyncio.Handle | None = None  # the keeper will be told that a sandbox was taken
        self._closed = False
        self._counts = PoolMetrics()

    @property
    def name(self) -> str:
        """The wrapped tier's."""
        return self.tier.name

    @property
    def features(self) -> Features:
        """The wrapped tier's."""
        return self.tier.features

    def probe(self) -> Probe:
        """The wrapped tier's."""
        return self.tier.probe()

    def metrics(self) -> PoolMetrics:
        """A copy of the counters."""
        return replace(
            self._counts,
            ready=sum(len(shelf.ready) for shelf in self._shelves.values()),
            live=self._live,
            waiting=sum(not waiter.done() for waiter in self._waiters),
        )

    async def create(self, policy: Policy) -> Sandbox:
        """A sandbox for ``policy``: a warm one that is alive, or else a new one.

        Raises as the wrapped tier does; PoolTimeoutError if the bounds left no room within ``wait_s``; PolicyError if
        they never can; ClosedError.
        """
        return await self._create(policy, single=False)

    async def create_single(self, policy: Policy, *, warm: bool = False) -> Sandbox:
        """The same for one simple program, see :class:`fumehood.tier.Single`."""
        return await self._create(policy, single=self._singles is not None)

    async def _create(self, policy: Policy, *, single: bool) -> Sandbox:
        shelf = self._shelf(policy, single)
        sandbox = self._take(shelf) or await self._wait_for(shelf)
        self._live += 1
        return cast(Sandbox, _Lease(self, sandbox, policy))

    async def _wait_for(self, shelf: _Shelf) -> Sandbox:
        """Make room and a sandbox."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._busy += 1
        try:
            sandbox = await self._make_room(shelf) or await self._make_cold(shelf)
        finally:
            self._rest()
        waited = loop.time() - began
        self._counts.wait_s += waited
        self._counts.wait_max_s = max(self._counts.wait_max_s, waited)
        return sandbox

    def begin(self, policy: Policy) -> None:
        """Have the keeper make warm sandboxes for ``policy`` beforehand. Raises ClosedError, PolicyError.

        They are for simple programs where the tier makes such; others are kept once they were asked for.
        """
        self._shelf(policy, self._singles is not None)

    async def fill(self, policy: Policy) -> None:
        """Wait until there are as many warm sandboxes for ``policy`` as there is room for, or making them failed.

        Raises ClosedError, PolicyError.
        """
        if self._latest is None or self._latest.policy is not policy:
            self.begin(policy)
        elif self._closed:
            raise ClosedError("the pool is closed", tier=self.name)
        while not self._closed:
            self._settled.clear()
            self._work.set()
            await self._settled.wait()
            if not self._over and self._next_shelf() is None:
                return

    async def close(self) -> None:
        """Destroy the warm sandboxes, finish what is being released, and close the wrapped tier. Idempotent.

        What is handed out still belongs to its caller; the wrapped tier's close ends it.
        """
        self._closed = True
        self._settled.set()
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(ClosedError("the pool is closed", tier=self.name))
        if self._stirring is not None:
            self._stirring.cancel()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait((self._keeper,))
        while self._over:
            await self._over.popleft().release()
        shelves, self._shelves = self._shelves, OrderedDict()
        self._latest = None
        for shelf in shelves.values():
            while shelf.ready:
                await self._discard(shelf.ready.popleft(), shelf.policy)
        await self.tier.close()

    # --- shelves and room

    def _shelf(self, policy: Policy, single: bool) -> _Shelf:
        """The shelf of a policy and kind, now the one asked for last. Raises ClosedError, PolicyError."""
        if self._closed:
            raise ClosedError("the pool is closed", tier=self.name)
        if self._keeper is None:
            self._keeper = asyncio.get_running_loop().create_task(self._keep())
        latest = self._latest
        if latest is not None and latest.policy is policy and latest.single == single:
            return latest
        if self._memory_bytes is not None and policy.limits.memory_bytes > self._memory_bytes:
            raise PolicyError(
                f"the policy allows {policy.limits.memory_bytes} bytes of memory and the pool {self._memory_bytes}",
                tier=self.name,
            )
        key = policy.digest(), single
        shelf = self._shelves.setdefault(key, _Shelf(policy, single))
        self._shelves.move_to_end(key)
        self._latest = shelf
        self._work.set()
        return shelf

    def _take(self, shelf: _Shelf) -> Sandbox | None:
        """The warm sandbox that was made last, whose pages are likeliest still in the processor's caches."""
        while shelf.ready:
            sandbox = shelf.ready.pop()
            self._stir_soon()
            if getattr(sandbox, "alive", True):
                self._counts.warm += 1
                return sandbox
            self._counts.dead += 1
            self._over.append(_Lease(self, sandbox, shelf.policy, over=True, counted=False))
        return None

    def _stir_soon(self) -> None:
        """Tell the keeper that a sandbox was taken, but not in the moment in which the one who took it uses it."""
        if self._stirring is None:
            self._stirring = asyncio.get_running_loop().call_soon(self._stir_later)

    def _stir_later(self) -> None:
        self._stirring = asyncio.get_running_loop().call_later(SETTLE_S, self._stir)

    def _stir(self) -> None:
        self._stirring = None
        self._work.set()

    def _has_room(self, policy: Policy) -> bool:
        return (self._live_max is None or self._held < self._live_max) and (
            self._memory_bytes is None or self._held_bytes + policy.limits.memory_bytes <= self._memory_bytes
        )

    def _hold(self, policy: Policy, sign: int) -> None:
        """Count a sandbox that comes or goes; who waits for room looks again when one goes."""
        self._held += sign
        self._held_bytes += sign * policy.limits.memory_bytes
        if sign < 0:
            self._wake_waiter()
            self._work.set()

    def _wake_waiter(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    async def _make_room(self, shelf: _Shelf) -> Sandbox | None:
        """Wait until one more sandbox may be made, or a warm one is there after all. Raises PoolTimeoutError."""
        policy = shelf.policy
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._wait_s
        while not self._has_room(policy):
            if self._over:
                await self._over.popleft().release()
            elif (other := next((s for s in self._shelves.values() if s.ready and s is not shelf), None)) is not None:
                self._counts.dropped += 1
                await self._discard(other.ready.popleft(), other.policy)
            else:
                waiter: asyncio.Future[None] = loop.create_future()
                self._waiters.append(waiter)
                try:
                    async with asyncio.timeout_at(deadline):
                        await waiter
                except TimeoutError:
                    self._counts.timed_out += 1
                    raise PoolTimeoutError(
                        f"no room for a sandbox within {self._wait_s:g} s",
                        tier=self.name,
                        remedy="raise the pool's bounds, or send less at a time",
                    ) from None
                except asyncio.CancelledError:
                    if waiter.done() and not waiter.cancelled():
                        self._wake_waiter()  # the word was for somebody who waits still
                    raise
            sandbox = self._take(shelf)
            if sandbox is not None:
                return sandbox
        return None

    async def _make_cold(self, shelf: _Shelf) -> Sandbox:
        policy = shelf.policy
        self._hold(policy, +1)
        try:
            if shelf.single and self._singles is not None:
                sandbox = await self._singles.create_single(policy)
            else:
                sandbox = await self.tier.create(policy)
        except BaseException:
            self._hold(policy, -1)
            raise
        self._counts.cold += 1
        return sandbox

    async def _discard(self, sandbox: Sandbox, policy: Policy) -> None:
        """Destroy a sandbox that nobody was given."""
        try:
            await sandbox.close()
        finally:
            self._hold(policy, -1)

    # --- programs

    def _begin(self) -> None:
        self._busy += 1

    def _rest(self) -> None:
        self._busy -= 1
        if not self._busy:
            self._quiet_since = asyncio.get_running_loop().time()
            self._idle.set()

    def _may_wait(self) -> bool:
        """Whether one more release can be left to the keeper."""
        return not self._closed and not self._waiters and len(self._over) < RELEASES_MAX

    def _leave(self, lease: _Lease) -> None:
        self._over.append(lease)
        if self._stirring is None:  # or else it is told in a moment, and would wait for that anyway
            self._work.set()

    # --- the keeper

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._work.clear()
            if self._over:
                await self._calm()
                if self._over:
                    await self._release_first()
            elif (shelf := self._surplus()) is not None:
                self._counts.dropped += 1
                await self._discard(shelf.ready.popleft(), shelf.policy)
            elif (shelf := self._next_shelf()) is not None:
                await self._calm()
                await self._make_warm(shelf)
            else:
                self._settled.set()
                retries = [s.not_before for s in self._shelves.values() if s.not_before > loop.time()]
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(min(retries, default=None)):
                        await self._work.wait()

    async def _calm(self) -> None:
        """Wait until no program has run for a moment, or for the pace."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PACE_S):
                while True:
                    if self._busy:
                        self._idle.clear()
                        await self._idle.wait()
                    left = self._quiet_since + SETTLE_S - loop.time()
                    if left <= 0:
                        return
                    await asyncio.sleep(left)

    async def _release_first(self) -> None:
        lease = self._over.popleft()
        try:
            await lease.release()
        except FumehoodError:
            pass  # there are no artifacts to be lost, and the sandbox is released even so
        except asyncio.CancelledError:
            self._over.appendleft(lease)
            raise

    def _surplus(self) -> _Shelf | None:
        """A shelf with more than its share, since other policies came; shelves without a share go when empty."""
        share = self._share()
        for number, (key, shelf) in enumerate(reversed(tuple(self._shelves.items()))):
            if len(shelf.ready) > (share if number < self.size else 0):
                return shelf
            if number >= self.size:
                del self._shelves[key]
        return None

    def _share(self) -> int:
        """How many warm sandboxes each shelf has, of the ``size`` asked for last."""
        return self.size // max(1, min(self.size, len(self._shelves)))

    def _next_shelf(self) -> _Shelf | None:
        """The shelf that needs a sandbox and may have one now; the policy asked for last comes first."""
        now = asyncio.get_running_loop().time()
        share = self._share()
        for shelf in reversed(self._shelves.values()):
            if len(shelf.ready) < share and shelf.not_before <= now and not self._waiters:
                return shelf if self._has_room(shelf.policy) else None
        return None

    async def _make_warm(self, shelf: _Shelf) -> None:
        """Put one more sandbox on the shelf. A failure is counted, and tried again later; a caller meets it himself."""
        policy = shelf.policy
        self._hold(policy, +1)
        try:
            if shelf.single and self._singles is not None:
                sandbox = await self._singles.create_single(policy, warm=True)
            elif isinstance(self.tier, Warming):
                sandbox = await self.tier.create_warm(policy)
            else:
                sandbox = await self.tier.create(policy)
        except BaseException as error:
            self._hold(policy, -1)
            if not isinstance(error, (FumehoodError, OSError)):
                raise
            shelf.failures += 1
            self._counts.failed += 1
            pause = min(RETRY_S[0] * 2 ** (shelf.failures - 1), RETRY_S[1])
            shelf.not_before = asyncio.get_running_loop().time() + pause
            return
        shelf.failures = 0
        self._counts.made += 1
        shelf.ready.append(sandbox)
        self._wake_waiter()


class _Lease:
    """A sandbox that was handed out: the sandbox itself, but that its pool knows when it runs and when it is over."""

    def __init__(
        self, pool: Pool, sandbox: Sandbox, policy: Policy, *, over: bool = False, counted: bool = True
    ) -> None:
        self._pool = pool
        self._sandbox = sandbox
        self._policy = policy
        self._over = over  # nothing of it runs any more
        self._counted = counted
        self._held = True
        self._left = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sandbox, name)

    async def exec(self, program: Program, **options: Any) -> Result:
        """See :class:`fumehood.tier.Sandbox`."""
        self._pool._begin()
        try:
            result = await self._sandbox.exec(program, **options)
        finally:
            self._pool._rest()
        self._over = options.get("last") is True
        return result

    async def close(self, *, out: Path | None = None) -> tuple[Artifact, ...]:
        """See :class:`fumehood.tier.Sandbox`. After the last exec nothing runs, and the rest is left to the keeper."""
        if self._left:
            return ()
        if self._over and out is None and self._held and self._pool._may_wait():
            self._left = True
            self._pool._leave(self)
            return ()
        return await self.release(out)

    async def release(self, out: Path | None = None) -> tuple[Artifact, ...]:
        """Destroy the sandbox and give its room back."""
        try:
            return await self._sandbox.close(out=out)
        finally:
            if self._held:
                self._held = False
                self._pool._live -= self._counted
                self._pool._hold(self._policy, -1)
