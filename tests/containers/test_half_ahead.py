"""What the tier ``gvisor`` begins before it is asked: used once, given up if it does not fit, never left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from asked import need

from fumehood.linux import process
from fumehood.model import Code, Limits, Policy
from fumehood.tiers.gvisor.tier import GvisorTier

POLICY = Policy()


async def once(tier: GvisorTier, policy: Policy = POLICY) -> None:
    sandbox = await tier.create(policy)
    result = await sandbox.exec(Code("print(1)"), last=True)
    assert result.stdout == "1\n"
    await sandbox.close()


async def waits(tier: GvisorTier) -> int:
    """The pid of what was begun."""
    for _ in range(200):
        if tier._ahead is not None:
            return tier._ahead.enclosure.pid
        await asyncio.sleep(0.05)
    raise AssertionError("nothing was begun")


def gone(pid: int) -> bool:
    try:
        process.start_time(pid)
    except (OSError, ValueError):
        return True
    return False


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where bundles are."""
    need("gvisor")
    os.chmod(tmp_path, 0o711)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_next_is_begun_after_a_run_and_used_once(folder: Path) -> None:
    async def main() -> None:
        tier = GvisorTier()
        assert tier._ahead is None
        await once(tier)
        first = await waits(tier)
        assert (
            Path(f"/proc/{first}/comm").read_text() == "runsc\n"
            or "runsc" in Path(f"/proc/{first}/cmdline").read_text()
        )
        sandbox = await tier.create(POLICY)
        assert tier._ahead is None and {e.pid for e in tier._live} == {first}
        assert (await sandbox.exec(Code("print(1)"), last=True)).stdout == "1\n"
        await sandbox.close()
        assert await waits(tier) != first
        await tier.close()
        assert tier._live == set()

    asyncio.run(main())
    assert list(folder.iterdir()) == []


def test_other_limits_are_never_held_by_what_was_begun_for_these(folder: Path) -> None:
    async def main() -> None:
        tier = GvisorTier()
        await once(tier)
        first = await waits(tier)
        limits = Limits(memory_bytes=300 << 20, pids=20)
        sandbox = await tier.create(Policy(limits=limits))
        memory, pids = sandbox.receipt.control("memory"), sandbox.receipt.control("pids")
        assert memory is not None and int(memory.value) == 300 << 20
        assert pids is not None and int(pids.value) == 20
        await sandbox.close()
        await asyncio.gather(*tier._tasks)
        assert gone(first)
        await tier.close()

    asyncio.run(main())
    assert list(folder.iterdir()) == []


def test_one_that_died_while_it_waited_is_not_used(folder: Path) -> None:
    async def main() -> None:
        tier = GvisorTier()
        await once(tier)
        os.kill(await waits(tier), signal.SIGKILL)
        await asyncio.sleep(0.1)
        await once(tier)
        await tier.close()

    asyncio.run(main())
    assert list(folder.iterdir()) == []


def test_a_tier_that_closes_takes_it_along_at_any_moment(folder: Path) -> None:
    async def main() -> None:
        for delay in (0.0, 0.02, 0.025, 0.03, 0.05, 0.3):
            tier = GvisorTier()
            await once(tier)
            await asyncio.sleep(delay)
            await tier.close()
            assert tier._live == set() and not tier._tasks and tier._ahead is None
            await asyncio.sleep(0.05)
            assert tier._ahead is None and not tier._tasks

    asyncio.run(main())
    assert list(folder.iterdir()) == []


_SUPERVISOR = """
import asyncio, sys
sys.path[:0] = sys.argv[1:]
import test_half_ahead as t
async def main():
    tier = t.GvisorTier()
    await t.once(tier)
    print(await t.waits(tier), flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def test_it_dies_with_its_supervisor(folder: Path) -> None:
    """It does not look at its channel: the launcher does, and it is killed with the launcher."""
    child = subprocess.Popen(
        [sys.executable, "-c", _SUPERVISOR, os.path.dirname(__file__)],
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    assert child.stdout is not None
    pid = int(child.stdout.readline())
    start = process.start_time(pid)
    child.kill()
    child.communicate()
    deadline = time.monotonic() + 10
    while process.alive(pid, start):
        assert time.monotonic() < deadline
        time.sleep(0.02)
