"""Measures one tier. Every figure takes turns with the plain process, so that both meet the same noise."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace

from fumehood import registry
from fumehood.bench import memory, plain, processor
from fumehood.bench.command import PlainCommand, plain_command
from fumehood.bench.figures import Spread, TierFigures
from fumehood.environments import packages_of
from fumehood.errors import UnavailableError, UnsupportedError
from fumehood.model import Limits, Policy, Result
from fumehood.pool import Pool
from fumehood.runner import AsyncRunner
from fumehood.threads import in_thread
from fumehood.tier import Stream, Tier

PROGRAM = "print(1)"
SPINNING = """
try:
    import os
    [os.fork() for _ in range(2)]
except Exception:
    pass
while True: pass
"""
PRINT_AND_SLEEP = "import time\nprint(time.monotonic_ns(), flush=True)\ntime.sleep(0.3)"
PRINT_ONLY = "print(1)"

KILL_WALL_S = 0.25
_SETTLE_S = 0.03  # in which a tier is done with what it does after a run
#: The same for a container's engine, whose work after a run and after a plain command is more.
_SETTLE_COMPARED_S = 0.2
_BUDGET_COMPARED = 3  # of a latency that takes turns with a command, which is as slow as what it is compared with
_WARM = 4
_OPEN_LOOP_WARM = 16
_MEMORY_WARM = 8
#: Tiers whose next sandbox is made, or half of it, when a run like the one before is over. Elsewhere cold is on demand.
_MAKE_AHEAD = ("jail", "gvisor")
_SEGMENT_S = 2.0  # of an open loop, then plain processes again
_SATURATED = 0.7  # of the throughput; beyond it an open loop measures its own queue

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure."""

    rounds: int = 200  # of each latency
    budget_s: float = 12.0  # a slow tier ends a latency sooner, but not before ``rounds_min``
    rounds_min: int = 8
    windows: int = 4  # of each throughput
    window_s: float = 1.0
    open_s: float = 12.0  # of each open loop
    rates: tuple[int, ...] = (20, 50, 200)  # arrivals a second
    callers: tuple[int, ...] = (1, 2, 8)


FULL = Effort()
QUICK = Effort(rounds=20, budget_s=6.0, rounds_min=4, windows=2, window_s=0.4, open_s=1.0, rates=(20, 50))


class Bench:
    """One tier under measurement. ``make`` makes an instance of it, for each figure a new one."""

    def __init__(self, make: Callable[[], Tier], effort: Effort, progress: Progress) -> None:
        tier = make()
        self.make = make
        self.effort = effort
        self.features = tier.features
        self.figures = TierFigures(tier.name, note=tier.features.note)
        self._progress = progress
        self._plain: list[float] = []  # all of this tier's run

    async def all(self, preload: tuple[str, tuple[str, ...]] | None = None) -> TierFigures:
        """Every figure that this tier has. ``preload``: the name of an environment, and modules of it.

        Raises StartError, UnavailableError if the tier does not run at all.
        """
        figures = self.figures
        await self._figure("cold", self.cold)
        if figures.tier in _MAKE_AHEAD:
            await self._figure("on demand", self.on_demand)
        await self._figure("throughput", self.throughput)
        await self._figure("warm", self.warm)
        for rate in self.effort.rates:
            if figures.throughput and rate > _SATURATED * max(figures.throughput.values()):
                figures.skipped[f"open loop {rate}"] = "it does not do that many a second"
            else:
                await self._figure(f"open loop {rate}", lambda rate=rate: self.open_loop(rate))  # type: ignore[misc]
        await self._figure("memory", self.memory)
        await self._figure("first byte", self.first_byte)
        await self._figure("kill", self.kill)
        if preload is not None:
            await self._figure("preload", lambda: self.preload(*preload))
        figures.plain = Spread.of(self._plain, self._plain)
        return figures

    async def _figure(self, name: str, measure: Callable[[], object]) -> None:
        self._progress(f"{self.figures.tier}: {name}")
        try:
            await measure()  # type: ignore[misc]
        except UnsupportedError as error:
            self.figures.skipped[name] = error.message

    def _runner(self, policy: Policy | None = None, warm: int = 0) -> AsyncRunner:
        return AsyncRunner(tier=self.make(), policy=policy, warm=warm)

    async def _plain_once(self, times: list[float], arguments: tuple[str, ...] = plain.ARGUMENTS) -> None:
        """In a thread, and after a pause: a tier's own work between two runs is neither held up nor beside it."""
        await asyncio.sleep(_SETTLE_S)
        times.append(await in_thread(plain.once, arguments))
        if arguments == plain.ARGUMENTS:
            self._plain.append(times[-1])

    # --- latency

    async def cold(self) -> None:
        """From the call to its result, in a sandbox that is made for it; and what all of it costs the processor."""
        async with self._runner() as runner, self._beside() as beside:
            await _good(runner)
            plain_s, times = await self._rounds(lambda: _good(runner), beside=beside)
            self.figures.cold = Spread.of(times, plain_s)
            self.figures.cold_to_command = self._compare("cold", beside, plain_s, times)
            await self._processor("cold", lambda: _good(runner))

    async def on_demand(self) -> None:
        """The same for a policy that the run before did not have, so that nothing was made ahead for it."""
        tier = self.make()
        limits = Limits()
        policies = [Policy(limits=replace(limits, files=limits.files + more)) for more in (0, 1)]
        async with contextlib.AsyncExitStack() as stack:
            beside = await stack.enter_async_context(self._beside(jail=False))
            runners = [await stack.enter_async_context(AsyncRunner(tier=tier, policy=policy)) for policy in policies]
            turns = itertools.cycle(runners)
            await _good(next(turns))
            plain_s, times = await self._rounds(lambda: _good(next(turns)), beside=beside)
            self.figures.on_demand = Spread.of(times, plain_s)
            self.figures.on_demand_to_command = self._compare("on demand", beside, plain_s, times)

    async def warm(self) -> None:
        """The same from a full pool, by a caller who pauses between two calls."""
        async with self._runner(warm=_WARM) as runner, self._beside(_WARM) as beside:

            async def prepare() -> None:
                await runner.fill()
                await asyncio.sleep(0.01)

            plain_s, times = await self._rounds(lambda: _good(runner), prepare, beside)
            pool = runner.tier
            assert isinstance(pool, Pool)
            if pool.metrics().cold > len(times) // 10:
                self.figures.skipped["warm"] = "its sandboxes could not be made beforehand"
                return
            self.figures.warm = Spread.of(times, plain_s)
            self.figures.warm_to_command = self._compare("warm", beside, plain_s, times)

            async def filled() -> None:
                await runner.fill()
                await _good(runner)

            await self._processor("warm, its preparation included", filled)

    @contextlib.asynccontextmanager
    async def _beside(self, warm: int = 0, *, jail: bool = True) -> AsyncIterator[_Beside]:
        """The plain command of a tier that has one, and the jail, to take turns with it."""
        async with contextlib.AsyncExitStack() as stack:
            try:
                command = await stack.enter_async_context(plain_command(self.make()))
            except UnavailableError as error:
                self.figures.skipped["the plain command"] = error.message
                command = None
            runner = None
            if jail and command is not None and registry.make("jail").probe().available:
                runner = await stack.enter_async_context(AsyncRunner(tier="jail", warm=warm))
            yield _Beside(command, runner)

    def _compare(self, name: str, beside: _Beside, plain_s: list[float], times: list[float]) -> Spread | None:
        if beside.jail_s:
            self.figures.jail[name] = Spread.of(beside.jail_s, plain_s)
        if beside.command is None:
            return None
        title, note = beside.command.title, beside.command.note
        if self.figures.command is None:
            self.figures.command_title = f"{title} ({note})" if note else title
            self.figures.command = Spread.of(beside.command_s, plain_s)
        return Spread.of(times, beside.command_s)

    async def _rounds(
        self,
        once: Callable[[], object],
        prepare: Callable[[], object] | None = None,
        beside: _Beside | None = None,
    ) -> tuple[list[float], list[float]]:
        plain_s: list[float] = []
        times: list[float] = []
        began = time.perf_counter()
        effort = self.effort
        compared = beside is not None and beside.command is not None
        budget_s = effort.budget_s * (_BUDGET_COMPARED if compared else 1)
        while len(times) < effort.rounds_min or (len(times) < effort.rounds and time.perf_counter() - began < budget_s):
            if compared:
                if prepare is not None:
                    await prepare()  # type: ignore[misc]
                await asyncio.sleep(_SETTLE_COMPARED_S)
            await self._plain_once(plain_s)
            if beside is not None:
                await beside.once()
            if prepare is not None:
                await prepare()  # type: ignore[misc]
            started = time.perf_counter()
            await once()  # type: ignore[misc]
            times.append(time.perf_counter() - started)
        return plain_s, times

    async def _processor(self, name: str, once: Callable[[], object]) -> None:
        count = min(self.effort.rounds, 100)
        before = processor.used_s()
        for _ in range(count):
            await in_thread(plain.once)
        middle = processor.used_s()
        began = time.perf_counter()
        done = 0
        while done < count and time.perf_counter() - began < self.effort.budget_s:
            await once()  # type: ignore[misc]
            done += 1
        used = (processor.used_s() - middle) / done
        self.figures.cpu[name] = round(used / ((middle - before) / count), 3)

    async def open_loop(self, rate: int) -> None:
        """Callers that come by a Poisson process, whether or not earlier ones are served: from the arrival on."""
        chance = random.Random(rate)  # the same arrivals in every run
        times: list[float] = []
        plain_s: list[float] = []
        async with self._runner(warm=_OPEN_LOOP_WARM) as runner:
            left_s = self.effort.open_s
            while left_s > 0:
                segment = min(_SEGMENT_S, left_s)
                left_s -= segment
                for _ in range(5):
                    await self._plain_once(plain_s)
                await runner.fill()
                times += await _arrivals(runner, rate, segment, chance)
            pool = runner.tier
            assert isinstance(pool, Pool)
            metrics = pool.metrics()
        self.figures.open_loop[str(rate)] = Spread.of(times, plain_s)
        self.figures.cold_starts[str(rate)] = round(metrics.cold / (metrics.cold + metrics.warm), 3)

    async def throughput(self) -> None:
        """Runs a second of callers that come back at once, against plain processes by as many callers."""
        async with self._runner() as runner:
            await _good(runner)
            for callers in self.effort.callers:
                rates, ratios = [], []
                for _ in range(self.effort.windows):
                    processes = await in_thread(plain.per_second, callers, self.effort.window_s)
                    runs = await _per_second(runner, callers, self.effort.window_s)
                    rates.append(runs)
                    ratios.append(runs / processes)
                self.figures.throughput[str(callers)] = round(statistics.median(rates), 1)
                self.figures.throughput_ratio[str(callers)] = round(statistics.median(ratios), 2)

    # --- what else

    async def memory(self) -> None:
        """What a warm sandbox takes while it waits."""
        async with self._runner(warm=_MEMORY_WARM) as runner:
            await runner.fill()
            found = memory.of_sandboxes(_MEMORY_WARM)
            if found is None:
                self.figures.skipped["memory"] = "its sandboxes are not below this process"
            else:
                self.figures.warm_bytes, self.figures.warm_bytes_by = found

    async def first_byte(self) -> None:
        """From the moment that a program prints to the call of the sink, while the program goes on."""
        shared_clock = self.features.full_python
        program = PRINT_AND_SLEEP if shared_clock else PRINT_ONLY
        plain_s: list[float] = []
        times: list[float] = []
        async with self._runner() as runner:
            for _ in range(max(self.effort.rounds_min, self.effort.rounds // 10)):
                await self._plain_once(plain_s)
                came: list[tuple[int, bytes]] = []

                def sink(stream: Stream, data: bytes, came: list[tuple[int, bytes]] = came) -> None:
                    came.append((time.monotonic_ns(), data))

                started = time.monotonic_ns()
                result = await runner.run(program, sink=sink)
                if not result.ok or not came:
                    raise RuntimeError(f"the program failed: {result.stderr[-500:]}")
                printed = int(came[0][1].split()[0]) if shared_clock else 0
                if not started <= printed <= came[0][0]:  # another clock than ours, as in a virtual machine
                    shared_clock = False
                times.append((came[0][0] - (printed if shared_clock else started)) / 1e9)
        self.figures.first_byte_from = "printed" if shared_clock else "started"
        self.figures.first_byte = Spread.of(times, plain_s)

    async def kill(self) -> None:
        """From the deadline of a program with children, none of which end, to the last of them dead and reaped."""
        plain_s: list[float] = []
        times: list[float] = []
        async with self._runner(Policy(limits=Limits(wall_s=KILL_WALL_S))) as runner:
            for _ in range(max(self.effort.rounds_min, self.effort.rounds // 8)):
                await self._plain_once(plain_s)
                result = await runner.run(SPINNING)
                if not result.timed_out:
                    raise RuntimeError(f"the program ended by itself: {result.outcome.value} {result.stderr[-500:]}")
                times.append(result.seconds - KILL_WALL_S)
        self.figures.kill = Spread.of(times, plain_s)

    async def preload(self, environment: str, modules: tuple[str, ...]) -> None:
        """A warm run of a program that imports ``modules``, against a plain process that imports them."""
        policy = Policy(environment=environment, preload=modules)
        program = "".join(f"import {name}\n" for name in modules) + PROGRAM
        packages = packages_of(policy)
        arguments = ("-I", "-S", "-c", f"import sys; sys.path.append({packages!r})\n{program}")
        rounds = replace(self.effort, rounds=max(10, self.effort.rounds // 8))
        plain_s: list[float] = []
        times: list[float] = []
        async with self._runner(policy, warm=_WARM) as runner:
            for _ in range(rounds.rounds):
                await self._plain_once(plain_s, arguments)
                await runner.fill()
                await asyncio.sleep(0.01)
                began = time.perf_counter()
                await _good(runner, program)
                times.append(time.perf_counter() - began)
            await runner.fill()
            found = memory.of_sandboxes(_WARM)
        self.figures.preload = {
            "modules": list(modules),
            "warm": Spread.of(times, plain_s),
            "plain_p50_ms": round(statistics.median(plain_s) * 1e3, 1),
            "warm_bytes": found[0] if found else None,
        }


class _Beside:
    """What takes turns with a container tier, each after a pause: its plain command, and the jail."""

    def __init__(self, command: PlainCommand | None, jail: AsyncRunner | None) -> None:
        self.command = command
        self.jail = jail
        self.command_s: list[float] = []
        self.jail_s: list[float] = []

    async def once(self) -> None:
        """A round of both."""
        if self.jail is not None:
            await self.jail.fill()
            await asyncio.sleep(_SETTLE_S)
            began = time.perf_counter()
            await _good(self.jail)
            self.jail_s.append(time.perf_counter() - began)
        if self.command is not None:
            await asyncio.sleep(_SETTLE_COMPARED_S)
            self.command_s.append(await in_thread(self.command.once))
            await asyncio.sleep(_SETTLE_COMPARED_S)


async def _good(runner: AsyncRunner, program: str = PROGRAM) -> Result:
    result = await runner.run(program)
    if result.stdout != "1\n":
        raise RuntimeError(f"the program failed: {result.outcome.value} {result.stderr[-500:]}")
    return result


async def _per_second(runner: AsyncRunner, callers: int, seconds: float) -> float:
    end = time.perf_counter() + seconds

    async def caller() -> int:
        done = 0
        while time.perf_counter() < end:
            await _good(runner)
            done += 1
        return done

    began = time.perf_counter()
    done = sum(await asyncio.gather(*(caller() for _ in range(callers))))
    return done / (time.perf_counter() - began)


async def _arrivals(runner: AsyncRunner, rate: int, seconds: float, chance: random.Random) -> Sequence[float]:
    """Latencies of one stretch, each from its arrival.

    The arrivals come from a thread: a timer of the event loop is late by up to a millisecond, which is not the
    tier's doing; what keeps the loop from a call that has arrived is.
    """
    loop = asyncio.get_running_loop()
    times: list[float] = []
    calls: list[asyncio.Task[None]] = []

    async def call(arrived: float) -> None:
        await _good(runner)
        times.append(time.perf_counter() - arrived)

    def arrive(arrived: float) -> None:
        calls.append(loop.create_task(call(arrived)))

    def come() -> None:
        due = began = time.perf_counter()
        while (due := due + chance.expovariate(rate)) < began + seconds:
            time.sleep(max(0.0, due - time.perf_counter()))
            loop.call_soon_threadsafe(arrive, time.perf_counter())

    await in_thread(come)
    await asyncio.sleep(0)  # the last arrival is a task now
    failures = await asyncio.gather(*calls, return_exceptions=True)
    for failure in failures:
        if failure is not None:
            raise failure
    return times
