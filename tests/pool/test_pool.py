"""The pool's promises, on a tier without a boundary, where every sandbox can be counted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from fumehood.errors import ClosedError, PolicyError, PoolTimeoutError, StartError
from fumehood.model import Code, Limits, MiB, Policy
from fumehood.pool import RELEASES_MAX, Pool
from fumehood.runner import AsyncRunner
from fumehood.tier import Tier

from .stand_in import StandIn, StandInSandbox

A = Policy()
B = Policy(env={"B": "1"})
C = Policy(env={"C": "1"})


@asynccontextmanager
async def pool_of(tier: StandIn, **options: object):
    pool = Pool(tier, **options)  # type: ignore[arg-type]
    try:
        yield pool
    finally:
        await pool.close()
    assert tier.closed
    assert all(sandbox.closed for sandbox in tier.made if sandbox.execs == 0), "a warm one outlived its pool"


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))  # type: ignore[arg-type]


def inner(sandbox: object) -> StandInSandbox:
    found = sandbox._sandbox  # type: ignore[attr-defined]
    assert isinstance(found, StandInSandbox)
    return found


def test_a_pool_is_a_tier() -> None:
    async def main() -> None:
        tier = StandIn()
        async with pool_of(tier, size=1) as pool:
            assert isinstance(pool, Tier)
            assert (pool.name, pool.features, pool.probe()) == (tier.name, tier.features, tier.probe())

    run(main)


def test_it_is_filled_and_refilled_and_no_more_than_that() -> None:
    async def main() -> None:
        tier = StandIn()
        async with pool_of(tier, size=3) as pool:
            await pool.fill(A)
            assert (len(tier.made), pool.metrics().ready) == (3, 3)
            sandbox = await pool.create(A)
            await pool.fill(A)
            assert (len(tier.made), pool.metrics().ready, pool.metrics().live) == (4, 3, 1)
            assert pool.metrics().warm == 1 and pool.metrics().cold == 0
            await sandbox.close()
            await pool.fill(A)
            assert (len(tier.made), tier.living, pool.metrics().live) == (4, 3, 0)

    run(main)


def test_none_is_given_twice() -> None:
    async def main() -> None:
        tier = StandIn()
        given: list[StandInSandbox] = []
        async with pool_of(tier, size=4) as pool:

            async def caller() -> None:
                for _ in range(50):
                    sandbox = await pool.create(A)
                    given.append(inner(sandbox))
                    assert inner(sandbox).execs == 0 and not inner(sandbox).closed
                    await sandbox.exec(Code("x"), last=True)
                    await sandbox.close()

            await asyncio.gather(*(caller() for _ in range(8)))
            assert len(given) == 400 == len({id(sandbox) for sandbox in given})
            metrics = pool.metrics()
            assert metrics.warm + metrics.cold == 400
        assert tier.living == 0

    run(main)


def test_none_crosses_to_another_policy() -> None:
    async def main() -> None:
        tier = StandIn()
        async with pool_of(tier, size=4) as pool:
            for policy in (A, B, A, C, B, A) * 5:
                sandbox = await pool.create(policy)
                assert inner(sandbox).policy.digest() == policy.digest()
                await sandbox.close()
                await pool.fill(policy)

    run(main)


def test_an_equal_policy_that_is_another_object_finds_the_shelf() -> None:
    async def main() -> None:
        async with pool_of(StandIn(), size=1) as pool:
            await pool.fill(Policy(env={"X": "1"}))
            await (await pool.create(Policy(env={"X": "1"}))).close()
            assert pool.metrics().warm == 1

    run(main)


def test_policies_share_the_size() -> None:
    async def main() -> None:
        tier = StandIn()
        async with pool_of(tier, size=4) as pool:
            await pool.fill(A)
            await pool.fill(B)
            assert pool.metrics().ready == 4 and pool.metrics().dropped == 2
            for number in range(10):
                await pool.fill(Policy(env={"N": str(number)}))
                assert pool.metrics().ready <= 4
            assert len(pool._shelves) == 4, "forgotten policies are kept"

    run(main)


def test_a_dead_one_is_not_handed_out() -> None:
    async def main() -> None:
        tier = StandIn()
        async with pool_of(tier, size=2) as pool:
            await pool.fill(A)
            for sandbox in tier.made:
                sandbox.alive = False
            sandbox = await pool.create(A)
            assert inner(sandbox).alive and inner(sandbox).number == 2
            await sandbox.close()
            assert (pool.metrics().dead, pool.metrics().cold) == (2, 1)
            await pool.fill(A)
            assert all(sandbox.closed for sandbox in tier.made[:2])

    run(main)


def test_the_number_of_sandboxes_is_bounded() -> None:
    async def main() -> None:
        tier = StandIn()
        async with pool_of(tier, size=3, live_max=4) as pool:

            async def caller() -> None:
                sandbox = await pool.create(A)
                await sandbox.exec(Code("x"), last=True)
                await sandbox.close()

            await asyncio.gather(*(caller() for _ in range(100)))
            assert tier.living_most <= 4
            assert pool.metrics().waiting == 0

    run(main)


def test_their_memory_is_bounded() -> None:
    async def main() -> None:
        tier = StandIn()
        policy = Policy(limits=Limits(memory_bytes=100 * MiB))
        async with pool_of(tier, size=8, memory_bytes=350 * MiB) as pool:
            await pool.fill(policy)
            assert pool.metrics().ready == 3
            with pytest.raises(PolicyError, match="memory"):
                await pool.create(Policy(limits=Limits(memory_bytes=351 * MiB)))

    run(main)


def test_warm_ones_of_others_make_room() -> None:
    async def main() -> None:
        tier = StandIn()
        async with pool_of(tier, size=2, live_max=2) as pool:
            await pool.fill(A)
            sandbox = await pool.create(B)
            assert inner(sandbox).policy is B and tier.living <= 2
            await sandbox.close()

    run(main)


def test_waiting_ends_in_time() -> None:
    async def main() -> None:
        async with pool_of(StandIn(), size=1, live_max=1, wait_s=0.05) as pool:
            first = await pool.create(A)
            with pytest.raises(PoolTimeoutError) as raised:
                await pool.create(A)
            assert isinstance(raised.value, StartError) and isinstance(raised.value, TimeoutError)
            assert pool.metrics().timed_out == 1
            await first.close()
            await (await pool.create(A)).close()

    run(main)


def test_a_cancelled_caller_passes_its_turn_on() -> None:
    async def main() -> None:
        async with pool_of(StandIn(), size=1, live_max=1) as pool:
            first = await pool.create(A)
            waiting = [asyncio.create_task(pool.create(A)) for _ in range(3)]
            await asyncio.sleep(0.01)
            waiting[0].cancel()
            await first.close()
            waiting[1].cancel()
            await (await waiting[2]).close()

    run(main)


def test_a_failure_meets_the_caller_and_the_keeper_tries_again() -> None:
    async def main() -> None:
        tier = StandIn()
        tier.refuse = 2
        async with pool_of(tier, size=1) as pool:
            with pytest.raises(StartError, match="refused"):
                await pool.create(A)
            await pool.fill(A)
            assert pool.metrics().failed == 1 and pool.metrics().ready == 0
            async with asyncio.timeout(30):
                while not pool.metrics().ready:
                    await asyncio.sleep(0.02)

    run(main)


def test_programs_that_run_are_not_disturbed_but_for_the_pace() -> None:
    async def main() -> None:
        tier = StandIn()
        tier.gate.clear()
        async with pool_of(tier, size=64) as pool:
            sandbox = await pool.create(A)
            made = len(tier.made)
            running = asyncio.create_task(sandbox.exec(Code("x")))
            await asyncio.sleep(0.2)
            # 0.2 s have ten times the pace in them; without it all 64 would be there at once.
            assert 1 <= len(tier.made) - made <= 12
            tier.gate.set()
            await running
            await pool.fill(A)
            assert pool.metrics().ready == 64
            await sandbox.close()

    run(main)


def test_the_release_is_left_to_the_keeper_only_after_the_last_exec() -> None:
    async def main() -> None:
        tier = StandIn()
        async with pool_of(tier, size=1) as pool:
            live = await pool.create(A)
            await live.exec(Code("x"))
            await live.close()
            assert inner(live).closed, "its processes may live, so close() must see them dead"
            over = await pool.create(A)
            await over.exec(Code("x"), last=True)
            await over.close()
            assert not inner(over).closed
            await over.close()
            await pool.fill(A)
            assert inner(over).closed and tier.living == 1

    run(main)


def test_releases_do_not_pile_up() -> None:
    async def main() -> None:
        tier = StandIn()
        async with pool_of(tier, size=1) as pool:
            for _ in range(RELEASES_MAX + 50):
                sandbox = await pool.create(A)
                await sandbox.exec(Code("x"), last=True)
                await sandbox.close()
                assert tier.living <= RELEASES_MAX + 2

    run(main)


def test_close_ends_who_waits_and_what_comes_later() -> None:
    async def main() -> None:
        tier = StandIn()
        pool = Pool(tier, size=1, live_max=1)
        held = await pool.create(A)
        waiting = asyncio.create_task(pool.create(A))
        await asyncio.sleep(0.01)
        await pool.close()
        await pool.close()
        with pytest.raises(ClosedError):
            await waiting
        with pytest.raises(ClosedError):
            await pool.create(A)
        await held.close()
        assert tier.living == 0

    run(main)


def test_the_sandbox_is_the_tiers_own() -> None:
    async def main() -> None:
        async with pool_of(StandIn(), size=1) as pool:
            sandbox = await pool.create(A)
            assert sandbox.receipt.tier == "stand-in"
            assert (await sandbox.list_files())[0].path.startswith("number-")
            await sandbox.close()

    run(main)


@pytest.mark.parametrize(
    "options", [{"size": 0}, {"size": True}, {"size": 5000}, {"size": 1, "live_max": 0}, {"size": 1, "wait_s": -1}]
)
def test_senseless_bounds_are_refused(options: dict[str, int]) -> None:
    async def main() -> None:
        with pytest.raises(PolicyError):
            Pool(StandIn(), **options)  # type: ignore[arg-type]

    run(main)


def test_a_runner_with_warm_sandboxes() -> None:
    async def main() -> None:
        async with AsyncRunner(tier=StandIn(), warm=2) as runner:
            await runner.fill()
            assert (await runner.run("x")).stdout == "x"
            assert isinstance(runner.tier, Pool) and runner.tier.metrics().warm == 1

    run(main)
