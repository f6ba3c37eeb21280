"""What a tier made ahead for one policy serves no other, and all of it is gone with the tier."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path

import pytest
from support.needs import need_tier
from support.residue import Look, settled

from fumehood.linux.process import pid_of_pidfd
from fumehood.model import Code, Limits, MiB, Policy
from fumehood.runner import AsyncRunner
from fumehood.tier import Tier
from fumehood.tiers.jail.client import Request
from fumehood.tiers.jail.controls import DATA, SINGLE, TERMINALS
from fumehood.tiers.jail.tier import _NEXT_AFTER_S, AHEAD, JailTier, Zygote

BASE = Policy(limits=Limits(wall_s=20, open_files=100), env={"WHO": "base"})

#: Policies that differ in one thing each, of all kinds of things that a sandbox is made with or told later.
OTHERS = {
    "rlimit": replace(BASE, limits=replace(BASE.limits, open_files=120)),
    "memory": replace(BASE, limits=replace(BASE.limits, memory_bytes=100 * MiB)),
    "disk": replace(BASE, limits=replace(BASE.limits, disk_bytes=20 * MiB)),
    "output": replace(BASE, limits=replace(BASE.limits, output_bytes=4000)),
    "overflow": replace(BASE, overflow="stop"),
    "terminals": replace(BASE, terminals=True),
    "environment": replace(BASE, env={"WHO": "another"}),
}

LOOK = Code(
    "import os, resource\n"
    "disk = os.statvfs('/work')\n"
    "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], disk.f_blocks * disk.f_frsize, os.path.ismount('/dev/pts'),"
    " os.environ['WHO'])"
)


def expected(policy: Policy) -> str:
    limits = policy.limits
    return f"{limits.open_files} {limits.disk_bytes} {policy.terminals} {policy.env['WHO']}\n"


async def filled(tier: JailTier) -> None:
    """Until as many are made ahead as there can be."""
    async with asyncio.timeout(20):
        while len(tier._ahead) < AHEAD or tier._making:
            await asyncio.sleep(0.005)


async def check(runner: AsyncRunner, *, files: bool) -> None:
    """One run, in a sandbox with an agent if files go in: it sees its own policy, and so does its receipt."""
    policy = runner.policy
    result = await runner.run(LOOK, files={"a": b""} if files else None)
    assert result.stdout == expected(policy), result.stderr
    seen = {control.name: control.value for control in result.receipt.controls}
    assert f"NOFILE={policy.limits.open_files} " in seen["rlimits"]
    assert seen["disk"] == f"size={policy.limits.disk_bytes // 1024}k"
    assert (seen["terminals"] != "none") == policy.terminals
    assert policy.overflow in next(c.mechanism for c in result.receipt.controls if c.name == "output")
    assert seen["memory"] == str(policy.limits.memory_bytes)


@pytest.mark.parametrize("cgroups", [True, False])
@pytest.mark.parametrize("difference", OTHERS)
def test_a_sandbox_made_ahead_serves_its_own_policy_only(cgroups: bool, difference: str) -> None:
    need_tier("jail")

    async def main() -> None:
        tier = JailTier(cgroups=cgroups)
        async with AsyncRunner(tier=tier, policy=BASE) as one, AsyncRunner(tier=tier, policy=OTHERS[difference]) as two:
            for files in (False, True):
                for _ in range(2):  # from the second on, the next is made ahead
                    await check(one, files=files)
                await filled(tier)
                await check(two, files=files)
                await check(one, files=not files)
                await check(two, files=files)

    asyncio.run(main())


def test_a_sandbox_for_one_program_is_no_live_one() -> None:
    """Those made ahead for single programs have no agent: whoever wants files or a live sandbox gets another."""
    need_tier("jail")

    async def main() -> None:
        tier = JailTier()
        async with AsyncRunner(tier=tier, policy=BASE) as runner:
            for _ in range(2):
                await check(runner, files=False)
            await filled(tier)
            assert all(seat.kind[-1] for seat in tier._ahead)
            async with runner.open() as live:
                await live.write_file("a", b"1")
                assert (await live.exec(Code("x = open('a').read(); print(x)"))).stdout == "1\n"
                await check(runner, files=False)
                assert (await live.exec(Code("print(x)"))).stdout == "1\n"
            assert (await runner.run(Code("print(input())"), stdin=b"in\n")).stdout == "in\n"

    asyncio.run(main())


def test_what_was_asked_for_while_another_kind_came_into_use_is_thrown_away() -> None:
    need_tier("jail")

    async def main() -> None:
        tier = JailTier()
        async with AsyncRunner(tier=tier, policy=BASE) as one, AsyncRunner(tier=tier, policy=OTHERS["rlimit"]) as two:
            for _ in range(2):
                await check(one, files=False)
            await half_asked(tier)
            assert tier._making or tier._ahead
            for _ in range(2):  # one that was still being made at the first is thrown away at the second
                await check(two, files=False)
            await settled(tier)
            assert all(seat.kind[1] == OTHERS["rlimit"].limits for seat in tier._ahead)
            assert tier._live == len(tier._ahead)

    asyncio.run(main())


async def half_asked(tier: Tier) -> None:
    """The next one's processes are asked for once a caller has the result, and the process of the last is dead."""
    assert isinstance(tier, JailTier)
    await settled(tier)
    await asyncio.sleep(4 * _NEXT_AFTER_S)


async def half_made(runner: AsyncRunner) -> tuple[JailTier, Zygote, Request]:
    """A tier after a run: it has the processes of another sandbox, which wait to be told their limits."""
    tier = runner.tier
    assert isinstance(tier, JailTier)
    await check(runner, files=False)
    await half_asked(tier)
    (zygote,) = tier._zygotes.values()
    flags, half = tier._halves[zygote]  # of an idle tier, so it has gone through a run
    assert flags & ~(DATA | TERMINALS) == SINGLE
    await asyncio.wait([half.future])
    return tier, zygote, half


@pytest.mark.parametrize("cgroups", [True, False])
@pytest.mark.parametrize("difference", OTHERS)
def test_a_sandbox_made_halfway_takes_any_limits(
    cgroups: bool, difference: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is used by the next single program, whatever its policy, unless that is for what processes are born with."""
    need_tier("jail")
    monkeypatch.setattr("fumehood.tiers.jail.tier.AHEAD", 0)

    async def main() -> None:
        tier = JailTier(cgroups=cgroups)
        async with AsyncRunner(tier=tier, policy=BASE) as one, AsyncRunner(tier=tier, policy=OTHERS[difference]) as two:
            _, zygote, half = await half_made(one)
            asked = zygote._next
            await check(two, files=True)  # that one has an agent, and is asked for by itself
            assert tier._halves[zygote][1] is half and zygote._next == asked + 1
            await check(two, files=False)
            await half_asked(tier)
            assert half.taken and half.end.fileno() == -1  # by that run, or let go of in favour of its kind
            assert zygote._next == asked + 2 + (difference == "terminals")  # one for the next, and perhaps its own

    asyncio.run(main())


def test_a_sandbox_made_halfway_on_an_idle_machine_has_gone_through_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds most pages in place; while others run, nobody's time is spent on that."""
    need_tier("jail")
    monkeypatch.setattr("fumehood.tiers.jail.tier.AHEAD", 0)

    async def faults_after(runner: AsyncRunner, beside: Awaitable[object] | None) -> int:
        """Of the process that was made after a run, from the time when it waits."""
        await half_asked(runner.tier)
        for zygote in tuple(runner.tier._halves):  # type: ignore[attr-defined]
            runner.tier._drop_half(zygote)  # type: ignore[attr-defined]
        await check(runner, files=False) if beside is None else await asyncio.gather(check(runner, files=False), beside)
        await half_asked(runner.tier)
        (zygote,) = runner.tier._zygotes.values()  # type: ignore[attr-defined]
        _, half = runner.tier._halves[zygote]  # type: ignore[attr-defined]
        await asyncio.wait([half.future])
        pid = pid_of_pidfd(half.future.result()[1])
        while stat_fields(pid)[0] != "S":
            await asyncio.sleep(0.001)
        before = int(stat_fields(pid)[7])
        result = await runner.run("print(open('/proc/self/stat').read())")
        return int(result.stdout.rpartition(")")[2].split()[7]) - before

    async def main() -> None:
        async with AsyncRunner(tier=JailTier(), policy=BASE) as runner:
            await check(runner, files=False)
            idle = await faults_after(runner, None)
            busy = await faults_after(runner, runner.run("import time; time.sleep(0.5)"))
            assert idle < 0.75 * busy, (idle, busy)

    asyncio.run(main())


def stat_fields(pid: int) -> list[str]:
    """Fields of proc_pid_stat(5) from the third, the state, on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def test_a_sandbox_made_halfway_is_of_the_kind_that_ran_last(monkeypatch: pytest.MonkeyPatch) -> None:
    need_tier("jail")
    monkeypatch.setattr("fumehood.tiers.jail.tier.AHEAD", 0)

    async def main() -> None:
        tier = JailTier()
        with_terminals = AsyncRunner(tier=tier, policy=OTHERS["terminals"])
        async with AsyncRunner(tier=tier, policy=BASE) as one, with_terminals as two:
            for runner in (two, one, one):
                _, _, half = await half_made(runner)
            await check(one, files=False)
            assert half.taken and len(tier._halves) <= 1

    asyncio.run(main())


@pytest.mark.parametrize("which", [0, 1])
def test_a_sandbox_made_halfway_that_died_is_not_used(which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    need_tier("jail")
    monkeypatch.setattr("fumehood.tiers.jail.tier.AHEAD", 0)

    async def main() -> None:
        async with AsyncRunner(tier=JailTier(), policy=BASE) as runner:
            _, zygote, half = await half_made(runner)
            signal.pidfd_send_signal(half.future.result()[which], signal.SIGKILL)
            while half.alive:
                await asyncio.sleep(0.001)
            await check(runner, files=False)
            assert half.end.fileno() == -1 and half.ident not in zygote._exits

    asyncio.run(main())


def test_a_sandbox_made_halfway_goes_with_its_zygote(private_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_tier("jail")
    monkeypatch.setattr("fumehood.tiers.jail.tier.AHEAD", 0)
    before = Look.take(private_tmp)

    async def main() -> None:
        async with AsyncRunner(tier=JailTier(), policy=BASE) as runner:
            tier, zygote, half = await half_made(runner)
            os.kill(zygote.pid, signal.SIGKILL)
            while not zygote.lost:
                await asyncio.sleep(0.001)
            await check(runner, files=False)
            assert half.end.fileno() == -1 and zygote not in tier._halves
            await half_made(runner)
        assert not tier._halves

    asyncio.run(main())
    assert before.left(private_tmp) == []


def test_a_sandbox_asked_for_halfway_is_taken_before_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a caller who then gives up: the next has another."""
    need_tier("jail")
    monkeypatch.setattr("fumehood.tiers.jail.tier.AHEAD", 0)

    async def main() -> None:
        async with AsyncRunner(tier=JailTier(), policy=BASE) as runner:
            for _ in range(20):
                await check(runner, files=False)  # the request for the next is on its way
                run = asyncio.create_task(check(runner, files=False))
                await asyncio.sleep(0)
                run.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await run

    asyncio.run(main())


def test_kinds_and_cancelled_runs_at_random(private_tmp: Path) -> None:
    """Under any order each run is held to its own policy, and nothing is left: descriptors, processes, groups."""
    need_tier("jail")
    before = Look.take(private_tmp)
    chance = random.Random(7)
    policies = [BASE, OTHERS["rlimit"], OTHERS["overflow"], OTHERS["terminals"]]

    async def one(runner: AsyncRunner) -> None:
        run = asyncio.create_task(check(runner, files=chance.random() < 0.3))
        if chance.random() < 0.5:
            await asyncio.sleep(chance.random() * 0.008)
            run.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await run

    async def main() -> None:
        tier = JailTier()
        async with contextlib.AsyncExitStack() as stack:
            runners = [await stack.enter_async_context(AsyncRunner(tier=tier, policy=policy)) for policy in policies]
            await check(runners[0], files=False)
            (zygote,) = tier._zygotes.values()
            for _ in range(60):
                runner = chance.choice(runners)
                await asyncio.gather(*(one(runner) for _ in range(chance.randrange(1, 4))))
            while tier._tasks or tier._live > len(tier._ahead) or zygote._spawning:
                await asyncio.sleep(0.005)
            assert len(zygote._exits) == len(tier._ahead) + len(tier._halves)
            assert tier._zygotes and not zygote.lost
            assert len(os.listdir("/proc/self/fd")) < len(before.descriptors) + 30

    asyncio.run(main())
    assert before.left(private_tmp) == []
