"""An evaluation by Inspect's own runner, in our sandbox. Apart from its suite, which holds an event loop open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fumehood import registry

pytest.importorskip("inspect_ai", reason="the extra inspect is not installed")

import fumehood.agent.adapters.inspect_ai  # noqa: F401 - registers the environment


def test_an_evaluation_runs_in_the_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = registry.make("jail").probe()
    if not probe.available:
        pytest.skip(f"tier jail is not on this host: {probe.reason}")
    from inspect_ai import Task, eval
    from inspect_ai.dataset import Sample
    from inspect_ai.scorer import includes
    from inspect_ai.solver import Generate, TaskState, solver
    from inspect_ai.util import sandbox

    monkeypatch.setenv("INSPECT_CANARY", "canary-31f0")

    @solver
    def look() -> Any:
        async def solve(state: TaskState, generate: Generate) -> TaskState:
            shown = await sandbox().exec(
                ["python3", "-c", "import os; print(sum(range(10)), open('in.txt').read(), os.environ)"]
            )
            assert shown.success, shown.stderr
            state.output.completion = shown.stdout
            return state

        return solve

    task = Task(
        dataset=[Sample("x", target="45 from the sample", files={"in.txt": "from the sample"})],
        solver=look(),
        scorer=includes(),
        sandbox="fumehood",
    )
    [log] = eval(task, model="mockllm/model", log_dir=str(tmp_path), display="none")
    assert log.status == "success", log.error
    assert log.results is not None and log.results.scores[0].metrics["accuracy"].value == 1
    assert log.samples is not None
    assert "canary-31f0" not in log.samples[0].output.completion
