"""What the supervisor goes through in a warm run, in numbers that no noise changes.

After a pause each function of ours costs a microsecond or two before the processor has it in its caches, so their
number is most of what a warm run takes beside the interpreter.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from support.needs import need_tier

from fumehood.linux import process
from fumehood.model import Code, Policy, Result
from fumehood.runner import AsyncRunner
from fumehood.tiers.interpreter.tier import InterpreterTier

#: Python functions and turns of coroutines in all, asyncio's included: as measured, and a few more.
CALLS_BEFORE_IT_IS_SENT = 48
CALLS_AFTER_ITS_ANSWER = 60
CALLS_WITHOUT_CGROUP = 20  # more, to read what the processes used

#: Minor page faults of worker and interpreter in a warm run: none of what it writes to is new or shared.
FAULTS_MAX = 3


@pytest.fixture(autouse=True)
def _needed() -> None:
    need_tier("interpreter")


async def traced(runner: AsyncRunner, program: str, pause_s: float = 0.01) -> tuple[Result, list[str]]:
    """The result of a warm run after a pause, and the functions that were called from its begin to its end."""
    await runner.fill()
    await asyncio.sleep(pause_s)
    calls: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            calls.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        return await runner.run(program), calls
    finally:
        sys.setprofile(None)


def test_little_is_gone_through_before_the_program_is_sent_and_after_its_answer_has_come() -> None:
    async def main() -> tuple[Result, list[str]]:
        async with AsyncRunner(tier=InterpreterTier(), warm=1) as runner:
            await traced(runner, "print(1)")
            return await traced(runner, "print(2)")

    result, calls = asyncio.run(main())
    assert result.stdout == "2\n"
    assert calls.count("Channel.post_text") == calls.count("Channel._on_readable") == 1
    sent, answered = calls.index("Channel.post_text"), calls.index("Channel._on_readable")
    assert sent <= CALLS_BEFORE_IT_IS_SENT, calls[:sent]
    counted = "Cgroup.cpu_s" in calls
    assert len(calls) - answered <= CALLS_AFTER_ITS_ANSWER + (not counted) * CALLS_WITHOUT_CGROUP, calls[answered:]
    assert "BaseEventLoop._run_once" not in calls[answered:]
    # What can wait until the program is on its way does.
    assert not {"GuestSandbox._start_clock", "BaseEventLoop.call_later"} & {*calls[:sent], *calls[answered:]}


def faults(pids: list[int]) -> int:
    """Minor page faults so far, field 10 of proc_pid_stat(5)."""
    return sum(int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[7]) for pid in pids)


def test_a_worker_from_a_shelf_has_its_pages() -> None:
    async def main() -> list[int]:
        tier = InterpreterTier()
        found = []
        for _ in range(5):
            sandbox = await tier.create_warm(Policy())
            first = sandbox._enclosure.pid  # type: ignore[attr-defined]
            pids = [first, *process.descendants(first)]
            before = faults(pids)
            assert (await sandbox.exec(Code("print(1)"), last=True)).stdout == "1\n"
            found.append(faults(pids) - before)  # it lives until the loop has its next turn
            await sandbox.close()
        await tier.close()
        return found

    found = asyncio.run(main())
    assert statistics.median(found) <= FAULTS_MAX, found
