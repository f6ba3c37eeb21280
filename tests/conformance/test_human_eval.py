"""Ordinary code is not hurt: the 164 programs of HumanEval, each with its canonical solution and its own test."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.human_eval import problems, program

from fumehood.model import Code, Limits, MiB, Policy, Result
from fumehood.runner import AsyncRunner

CONCURRENCY = 2

#: Where a sandbox takes tenths of a second to start, of so many programs the first is a single run and the others run
#: in one live sandbox, in turn; elsewhere every program is a single run.
PART = {"docker": 14, "podman": 14, "gvisor": 14, "microvm": 14}


@pytest.mark.usefixtures("full_python")
def test_all_164_pass(tier_name: str) -> None:
    tasks = problems()
    failed: dict[str, str] = {}
    size = PART.get(tier_name, 1)

    def see(problem: dict[str, Any], result: Result) -> None:
        if not result.ok or result.stdout != "passed\n":
            failed[problem["task_id"]] = f"{result.outcome.value} {result.exit_code}: {result.stderr[-300:]}"

    async def main() -> None:
        slots = asyncio.Semaphore(CONCURRENCY)
        policy = Policy(limits=Limits(wall_s=120, cpu_s=120 * size, memory_bytes=512 * MiB))
        async with AsyncRunner(tier=tier_name, policy=policy) as runner:

            async def some(first: dict[str, Any], *others: dict[str, Any]) -> None:
                async with slots:
                    see(first, await runner.run(program(first)))
                    if others:
                        async with runner.open() as sandbox:
                            for problem in others:
                                see(problem, await sandbox.exec(Code(program(problem))))

            await asyncio.gather(*(some(*tasks[at : at + size]) for at in range(0, len(tasks), size)))

    asyncio.run(main())
    assert not failed, f"{len(failed)} of {len(tasks)}: {failed}"
