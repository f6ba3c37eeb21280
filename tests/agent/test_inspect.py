"""Inspect's own conformance suite on the sandbox environment."""

from __future__ import annotations

from collections.abc import AsyncIterator

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
