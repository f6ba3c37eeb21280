"""Inspect's own conformance suite on the sandbox environment, and one evaluation by its runner."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from fumehood import registry

pytest.importorskip("inspect_ai", reason="the extra inspect is not installed")

from inspect_ai.util._sandbox.self_check import *  # noqa: F403 - this is how Inspect's suite is taken up

from fumehood.agent.adapters.inspect_ai import POLICY, FumehoodSandboxEnvironment
from fumehood.runner import AsyncRunner

pytestmark = pytest.mark.anyio

#: Checks that cannot pass, with the reason.
EXCEPTIONS = {
    "test_exec_as_user": "a sandbox has one user: there is no root inside to add another with",
}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def sandbox_env(request: pytest.FixtureRequest, shared: FumehoodSandboxEnvironment) -> FumehoodSandboxEnvironment:
    name = request.node.originalname
    if name in EXCEPTIONS:
        request.node.add_marker(pytest.mark.xfail(reason=EXCEPTIONS[name], strict=True))
    return shared


@pytest.fixture(scope="module")
async def shared(anyio_backend: str) -> AsyncIterator[FumehoodSandboxEnvironment]:
    """One sandbox for all checks, as an evaluation's sample has one for all its commands."""
    probe = registry.make("jail").probe()
    if not probe.available:
        pytest.skip(f"tier jail is not on this host: {probe.reason}")
    async with AsyncRunner(tier="jail", policy=POLICY) as runner:
        environment = await FumehoodSandboxEnvironment.open(runner)
        try:
            yield environment
        finally:
            await environment.close()


def test_an_evaluation_runs_in_the_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    with contextlib.suppress(FileNotFoundError):
        Path(str(log.location)).unlink()
