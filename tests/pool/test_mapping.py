"""Many programs at once, on the stand-in tier: order, bounds, what is tried again and what is not."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import pytest

from fumehood.errors import ClosedError, OutcomeUnknownError, PolicyError, StartError
from fumehood.mapping import WINDOW, Job, Refused
from fumehood.model import Code
from fumehood.runner import AsyncRunner, Runner

from .stand_in import StandIn


def count_to(number: int) -> Iterator[str]:
    return (str(n) for n in range(number))


def test_in_order_all_once() -> None:
    with Runner(tier=StandIn()) as runner:
        items = list(runner.map(count_to(200), concurrency=7))
    assert [item.index for item in items] == list(range(200))
    assert [item.result.stdout for item in items if item.result] == list(count_to(200))


def test_as_they_finish_all_once() -> None:
    with Runner(tier=StandIn()) as runner:
        items = list(runner.map(count_to(200), concurrency=7, ordered=False))
    assert sorted(item.index for item in items) == list(range(200))
    assert all(item.result and item.result.stdout == str(item.index) for item in items)


def test_as_many_at_a_time_as_asked_for() -> None:
    async def main() -> None:
        tier = StandIn()
        tier.gate.clear()
        async with AsyncRunner(tier=tier) as runner:
            results = runner.map(count_to(100), concurrency=3)
            first = asyncio.ensure_future(anext(results))
            while tier.running < 3:
                await asyncio.sleep(0.001)
            tier.gate.set()
            assert (await first).index == 0
            assert len([item async for item in results]) == 99
            assert tier.running_most == 3

    asyncio.run(main())


@pytest.mark.parametrize("ordered", [True, False])
def test_the_input_is_read_as_there_is_room(ordered: bool) -> None:
    read = 0

    def endless() -> Iterator[str]:
        nonlocal read
        while True:
            read += 1
            yield "x"

    with Runner(tier=StandIn()) as runner:
        results = runner.map(endless(), concurrency=2, ordered=ordered)
        for taken in range(1, 50):
            next(results)
            # What was taken, what is under way, and the one that waits for room.
            assert read <= taken + 2 * 2 * WINDOW + 1
        results.close()  # type: ignore[attr-defined]


def test_one_slow_program_holds_back_a_window_and_no_more() -> None:
    async def main() -> None:
        tier = StandIn()
        tier.gate.clear()
        async with AsyncRunner(tier=tier) as runner:
            results = runner.map(count_to(10_000), concurrency=2)
            first = asyncio.ensure_future(anext(results))
            await asyncio.sleep(0.05)
            assert len(tier.made) == 2 and not first.done()
            tier.gate.set()
            assert (await first).index == 0
            await results.aclose()  # type: ignore[attr-defined]
            assert tier.living == 0

    asyncio.run(main())


def test_leaving_early_leaves_no_sandbox() -> None:
    tier = StandIn()
    with Runner(tier=tier) as runner:
        for item in runner.map(count_to(1000), concurrency=4):
            if item.index == 10:
                break
        del item
        assert tier.living == 0, "the iterator of a for loop is gone when the loop is left"


def test_a_slow_source_does_not_keep_results_back() -> None:
    async def main() -> None:
        more = asyncio.Event()

        async def source() -> AsyncIterator[str]:
            yield "first"
            await more.wait()
            yield "second"

        async with (
            AsyncRunner(tier=StandIn()) as runner,
            contextlib.aclosing(runner.map(source(), concurrency=4)) as results,  # type: ignore[type-var]
        ):
            assert (await asyncio.wait_for(anext(results), 10)).result.stdout == "first"
            more.set()
            assert (await asyncio.wait_for(anext(results), 10)).result.stdout == "second"

    asyncio.run(main())


def test_what_never_started_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fumehood.mapping.RETRY_PAUSES_S", (0.0, 0.0, 0.0))
    tier = StandIn()
    tier.refuse = 3
    with Runner(tier=tier) as runner:
        (item,) = runner.map(["x"])
    assert item.result is not None and len(tier.made) == 1


def test_and_given_up_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fumehood.mapping.RETRY_PAUSES_S", (0.0, 0.0))
    tier = StandIn()
    tier.refuse = 3
    with Runner(tier=tier) as runner:
        items = list(runner.map(["a", "b"], concurrency=1))
    assert isinstance(items[0].error, StartError) and not items[0].may_have_run
    assert items[1].result is not None


def test_what_may_have_run_is_not_tried_again() -> None:
    tier = StandIn()
    asked: Counter[str] = Counter()

    def failure(text: str) -> Exception | None:
        asked[text] += 1
        return OutcomeUnknownError("lost") if text == "bad" else None

    tier.failure = failure
    with Runner(tier=tier) as runner:
        items = list(runner.map(["good", "bad", "good2"]))
    assert isinstance(items[1].error, OutcomeUnknownError) and items[1].may_have_run
    assert asked == {"good": 1, "bad": 1, "good2": 1}


def test_a_job_that_cannot_be_is_an_item_of_its_own() -> None:
    with Runner(tier=StandIn()) as runner:
        jobs = [Job(Code("a"), "one", files={"../x": b""}), Refused(PolicyError("no"), 7), Job(Code("b"), "two")]
        items = list(runner.map(jobs))
    assert [item.ident for item in items] == ["one", 7, "two"]
    assert isinstance(items[0].error, PolicyError) and isinstance(items[1].error, PolicyError)
    assert items[2].result is not None


def test_a_fault_ends_the_whole() -> None:
    tier = StandIn()
    tier.failure = lambda text: ZeroDivisionError("a fault") if text == "5" else None
    with Runner(tier=tier) as runner:
        with pytest.raises(ZeroDivisionError):
            list(runner.map(count_to(100), concurrency=2))
        assert tier.living == 0
    with pytest.raises(ClosedError):
        list(runner.map(["x"]))


def test_an_error_of_the_source_is_the_callers() -> None:
    def source() -> Iterator[str]:
        yield "x"
        raise KeyError("gone")

    tier = StandIn()
    with Runner(tier=tier) as runner:
        with pytest.raises(KeyError):
            list(runner.map(source()))
        assert tier.living == 0


@pytest.mark.parametrize("concurrency", [0, -1, True, 1.5, 5000])
def test_senseless_concurrency_is_refused_at_once(concurrency: int) -> None:
    with Runner(tier=StandIn()) as runner, pytest.raises(PolicyError, match="concurrency"):
        runner.map(["x"], concurrency=concurrency)
