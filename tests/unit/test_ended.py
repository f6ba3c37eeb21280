"""The end of an exec as a future: who waits goes on at once, and every other way is a future's as ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from fumehood.execs import Ended


async def waiting(steps: list[str], end: Callable[[Ended], object]) -> list[str]:
    """What happened in which order, when a callback of the loop ended it by ``end``."""
    loop = asyncio.get_running_loop()
    ended = Ended(loop=loop)

    async def wait() -> None:
        try:
            await ended
            steps.append("waited")
        except BaseException as error:
            steps.append(type(error).__name__)

    def come() -> None:
        end(ended)
        steps.append("told")

    task = loop.create_task(wait())
    await asyncio.sleep(0)
    loop.call_soon(come)
    await asyncio.wait((task,))
    return steps


@pytest.mark.parametrize(
    ("end", "steps"),
    [
        (lambda ended: ended.tell(), ["waited", "told"]),
        (lambda ended: ended.set_result(None), ["told", "waited"]),
        (lambda ended: ended.set_exception(ValueError()), ["told", "ValueError"]),
        (lambda ended: ended.cancel(), ["told", "CancelledError"]),
    ],
    ids=["tell", "result", "exception", "cancel"],
)
def test_who_waits_goes_on(end: Callable[[Ended], object], steps: list[str]) -> None:
    assert asyncio.run(waiting([], end)) == steps


def test_a_task_that_tells_goes_on_first() -> None:
    async def main() -> list[str]:
        ended, steps = Ended(loop=asyncio.get_running_loop()), []

        async def wait() -> None:
            await ended
            steps.append("waited")

        task = asyncio.ensure_future(wait())
        await asyncio.sleep(0)
        ended.tell()
        steps.append("told")
        await task
        return steps

    assert asyncio.run(main()) == ["told", "waited"]


def test_a_task_that_waits_can_be_cancelled() -> None:
    async def main() -> None:
        ended = Ended(loop=asyncio.get_running_loop())

        async def wait() -> None:
            await ended

        task = asyncio.ensure_future(wait())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended.cancelled()

    asyncio.run(main())


def test_all_who_wait_go_on() -> None:
    async def main() -> None:
        ended = Ended(loop=asyncio.get_running_loop())

        async def wait() -> None:
            await ended

        tasks = [asyncio.ensure_future(wait()) for _ in range(3)]
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_soon(ended.tell)
        await asyncio.wait_for(asyncio.gather(*tasks), 10)
        await ended  # and who comes later does not wait

    asyncio.run(main())
