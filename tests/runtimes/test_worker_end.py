"""When the end of a worker's program is told, and what of the worker is left then. See docs/decisions/0007."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from support.needs import need_tier

from fumehood.enclosure import PidfdEnclosure
from fumehood.errors import ClosedError, StartError
from fumehood.model import Code, Limits, MiB, Outcome, Policy
from fumehood.pool import Pool
from fumehood.tiers import worker
from fumehood.tiers.interpreter.tier import InterpreterTier
from fumehood.tiers.worker import WorkerSandbox

Check = Callable[[InterpreterTier], Coroutine[Any, Any, None]]


def check(test: Check, jailed: bool | None) -> None:
    need_tier("interpreter")

    async def run() -> None:
        tier = InterpreterTier(jailed=jailed)
        try:
            await test(tier)
        finally:
            await tier.close()

    asyncio.run(run())


def dead(sandbox: WorkerSandbox) -> bool:
    """Whether this process has heard of the end of the worker's last process."""
    enclosure = sandbox._enclosure
    assert isinstance(enclosure, PidfdEnclosure)
    return enclosure.dead


async def eventually_dead(sandbox: WorkerSandbox) -> None:
    async with asyncio.timeout(20):
        while not dead(sandbox):
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("jailed", [None, False], ids=["jail", "plain"])
def test_a_worker_that_is_told_to_be_over_serves_nobody_and_dies_by_itself(jailed: bool | None) -> None:
    async def test(tier: InterpreterTier) -> None:
        sandbox = await tier.create(Policy())
        result = await sandbox.exec(Code("print(sum(i * i for i in range(100_000)))"), last=True)
        assert result.stdout == "333328333350000\n"
        assert not sandbox.alive
        with pytest.raises(ClosedError):
            await sandbox.exec(Code("print(1)"))
        assert result.usage.cpu_s is not None and 0.001 < result.usage.cpu_s < 10
        assert result.usage.memory_peak_bytes is None or result.usage.memory_peak_bytes > 1 * MiB
        await eventually_dead(sandbox)  # nobody has closed it
        await sandbox.close()

    check(test, jailed)


@pytest.mark.parametrize("jailed", [None, False], ids=["jail", "plain"])
def test_close_waits_for_the_worker_to_be_dead(jailed: bool | None) -> None:
    async def test(tier: InterpreterTier) -> None:
        for _ in range(5):
            sandbox = await tier.create(Policy())
            await sandbox.exec(Code("print(1)"), last=True)
            await sandbox.close()
            assert dead(sandbox)

    check(test, jailed)


@pytest.mark.parametrize(
    ("program", "outcome"),
    [
        ("while True: pass", Outcome.WALL),
        ("x = 'a' * (1 << 29)", Outcome.MEMORY),
        ("print('x' * 9999)", Outcome.OUTPUT),
    ],
)
def test_a_limit_is_told_when_the_worker_is_dead(program: str, outcome: Outcome) -> None:
    policy = Policy(limits=Limits(wall_s=0.5, memory_bytes=64 * MiB, output_bytes=1000), overflow="stop")

    async def test(tier: InterpreterTier) -> None:
        sandbox = await tier.create(policy)
        assert (await sandbox.exec(Code(program), last=True)).outcome is outcome
        assert dead(sandbox)
        await sandbox.close()

    check(test, None)


def test_a_pool_that_is_closed_has_waited_for_every_worker() -> None:
    async def test(tier: InterpreterTier) -> None:
        pool = Pool(tier, size=2)
        enclosures = []
        for _ in range(4):
            sandbox = await pool.create(Policy())
            enclosures.append(sandbox._enclosure)  # type: ignore[attr-defined]
            assert (await sandbox.exec(Code("print(1)"), last=True)).ok
            await sandbox.close()
        await pool.close()
        assert all(enclosure.dead for enclosure in enclosures)

    check(test, None)


@pytest.mark.parametrize("jailed", [None, False], ids=["jail", "plain"])
@pytest.mark.parametrize("hang", [1, 2])
def test_a_worker_that_hangs_while_it_starts_is_made_anew_once(
    jailed: bool | None, hang: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[WorkerSandbox] = []
    start = worker.WorkerHost._start

    async def hanging(*args: Any) -> WorkerSandbox:
        made.append(await start(*args))
        if len(made) <= hang:
            made[-1]._around.signal(signal.SIGSTOP)
        return made[-1]

    async def test(tier: InterpreterTier) -> None:
        if hang == 2:
            with pytest.raises(StartError, match="not ready"):
                await tier.create(Policy())
        else:
            sandbox = await tier.create(Policy())
            assert (await sandbox.exec(Code("print(1)"), last=True)).stdout == "1\n"
            await sandbox.close()
        assert len(made) == 2 and all(map(dead, made))

    monkeypatch.setattr(worker.WorkerHost, "_start", hanging)
    monkeypatch.setattr(worker, "_HANGS_S", 0.5)
    monkeypatch.setattr(worker, "_READY_TIMEOUT_S", 0.5 if hang == 2 else 60)
    check(test, jailed)
