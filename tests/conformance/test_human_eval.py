"""Ordinary code is not hurt: the 164 programs of HumanEval, each with its canonical solution and its own test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from support.human_eval import problems, program

from fumehood.model import Limits, MiB, Policy
from fumehood.runner import AsyncRunner

CONCURRENCY = 2


@pytest.mark.usefixtures("full_python")
def test_all_164_pass(async_runner_factory: Callable[..., AsyncRunner]) -> None:
    tasks = problems()
    failed: dict[str, str] = {}

    async def main() -> None:
        slots = asyncio.Semaphore(CONCURRENCY)
        policy = Policy(limits=Limits(wall_s=120, cpu_s=120, memory_bytes=512 * MiB))
        async with async_runner_factory(policy) as runner:

            async def one(problem: dict[str, Any]) -> None:
                async with slots:
                    result = await runner.run(program(problem))
                if not result.ok or result.stdout != "passed\n":
                    failed[problem["task_id"]] = f"{result.outcome.value} {result.exit_code}: {result.stderr[-300:]}"

            await asyncio.gather(*(one(problem) for problem in tasks))

    asyncio.run(main())
    assert not failed, f"{len(failed)} of {len(tasks)}: {failed}"
