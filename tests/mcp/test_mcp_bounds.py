"""What a server holds at most: sessions, their idleness, artifacts; in this process, without a sandbox."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

mcp = pytest.importorskip("mcp", reason="the extra mcp is not installed")

from fumehood.mcp import Artifacts, Bounds, ToolServer  # noqa: E402
from fumehood.runner import AsyncRunner  # noqa: E402


async def opened(client: Any) -> Any:
    return await client.call_tool("open_session", {})


def test_sessions_are_bounded_and_end_when_idle() -> None:
    async def work() -> None:
        bounds = Bounds(sessions=2, session_idle_s=0.5)
        async with AsyncRunner(tier="subprocess", floor="limits") as runner:
            tools = ToolServer(runner, bounds=bounds)
            async with tools.lifetime(), mcp.Client(tools.server) as client:
                first = await opened(client)
                assert not (await opened(client)).is_error
                refused = await opened(client)
                assert refused.is_error and "2 sessions already" in refused.content[0].text
                name = first.content[0].text
                while tools._sessions:
                    await asyncio.sleep(0.05)
                again = await client.call_tool("run_in_session", {"session": name, "code": "1"})
                assert again.is_error and "idle" in again.content[0].text
                assert not (await opened(client)).is_error
            assert tools._sessions == {}

    asyncio.run(asyncio.wait_for(work(), 60))


def test_the_oldest_artifacts_make_room() -> None:
    kept = Artifacts(Bounds(artifacts=3, artifact_bytes=10))
    addresses = [kept.add(f"{n}", bytes(2)) for n in range(4)]
    assert [kept.get(a) is not None for a in addresses if a] == [False, True, True, True]
    big = kept.add("big", bytes(9))
    assert big is not None and [name for _, name, _ in kept.listing()] == ["big"]
    assert kept.add("too big", bytes(11)) is None
