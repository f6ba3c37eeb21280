"""What the tier ``gvisor`` makes before it is asked: used once, for the same policy alone, never left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from asked import need

from fumehood.images import store
from fumehood.linux import process
from fumehood.model import Code, Limits, Mount, Policy
from fumehood.tier import Sandbox
from fumehood.tiers.gvisor.tier import GvisorTier

POLICY = Policy()
OTHER = Policy(limits=Limits(memory_bytes=300 << 20, pids=20))

Steps = Callable[[GvisorTier], Awaitable[None]]


async def prints(sandbox: Sandbox) -> None:
    result = await sandbox.exec(Code("print(1)"), last=True)
    assert result.stdout == "1\n"
    await sandbox.close()


async def once(tier: GvisorTier, policy: Policy = POLICY) -> None:
    await prints(await tier.create(policy))


async def ahead(tier: GvisorTier) -> int:
    """The pid of what was made ahead, which may not wait yet."""
    for _ in range(200):
        if tier._ahead is not None:
            return tier._ahead.enclosure.pid
        await asyncio.sleep(0.05)
    raise AssertionError("nothing was made ahead")


async def waits(tier: GvisorTier) -> int:
    """The same once it waits."""
    pid = await ahead(tier)
    for _ in range(200):
        if "sh" in names_below(pid):
            return pid
        await asyncio.sleep(0.05)
    raise AssertionError(f"it does not wait: {names_below(pid)}")


def names_below(pid: int) -> list[str]:
    found = []
    for below in process.descendants(pid):
        try:
            found.append(Path(f"/proc/{below}/comm").read_text().strip())
        except OSError:
            pass  # it is over
    return found


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
    bundles = tmp_path / "bundles"
    bundles.mkdir(mode=0o711)
    monkeypatch.setattr(tempfile, "tempdir", str(bundles))
    return bundles


@pytest.fixture
def lives(folder: Path) -> Callable[[Steps], None]:
    """Take steps with a tier from its beginning to its end, and see that nothing is left."""

    def run(steps: Steps) -> None:
        async def main() -> None:
            tier = GvisorTier()
            try:
                await steps(tier)
            finally:
                await tier.close()
            assert tier._live == set() and not tier._tasks and tier._ahead is None
            await asyncio.sleep(0.05)  # nor does anything begin after the end
            assert not tier._tasks and tier._ahead is None

        asyncio.run(main())
        assert list(folder.iterdir()) == []

    return run


def test_the_next_is_made_after_a_run_and_used_once(lives: Callable[[Steps], None]) -> None:
    async def steps(tier: GvisorTier) -> None:
        assert tier._ahead is None
        await once(tier)
        first = await waits(tier)
        sandbox = await tier.create(POLICY)
        assert tier._ahead is None and {e.pid for e in tier._live} == {first}
        await prints(sandbox)
        assert await waits(tier) != first

    lives(steps)


def test_none_is_kept_that_was_due_in_the_moment_of_the_end(lives: Callable[[Steps], None]) -> None:
    async def steps(tier: GvisorTier) -> None:
        await once(tier)
        assert tier._timer is not None and not tier._timer.cancelled()
        tier._timer._run()  # its task has not begun when close() does
        tier._timer.cancel()
        await tier.close()
        assert tier._ahead is None

    lives(steps)


def test_while_it_waits_nothing_of_a_guest_exists(lives: Callable[[Steps], None]) -> None:
    """What runs a guest's code is traced, and holds its memory; and its first word would be on the channel."""

    async def steps(tier: GvisorTier) -> None:
        await once(tier)
        pid = await waits(tier)
        await asyncio.sleep(1)
        below = process.descendants(pid)
        assert len(below) > 2
        traced = [each for each in below if "TracerPid:\t0\n" not in Path(f"/proc/{each}/status").read_text()]
        assert all(int(Path(f"/proc/{each}/statm").read_text().split()[1]) < 64 for each in traced), "pages"
        assert tier._ahead is not None
        with pytest.raises(BlockingIOError):
            tier._ahead.channel.recv(1)
        await once(tier)

    lives(steps)


def test_it_may_be_taken_before_it_has_come_to_wait(lives: Callable[[Steps], None]) -> None:
    async def steps(tier: GvisorTier) -> None:
        for _ in range(3):
            await once(tier)
            pid = await ahead(tier)
            sandbox = await tier.create(POLICY)
            assert {e.pid for e in tier._live} == {pid}
            await prints(sandbox)

    lives(steps)


@pytest.mark.parametrize("what", ["limits", "mounts"])
def test_another_policy_never_gets_what_was_made_for_this_one(
    what: str, lives: Callable[[Steps], None], folder: Path
) -> None:
    mounted = Policy(mounts=(Mount(str(folder.parent), "/mnt/host"),))
    (folder.parent / "told").write_text("here")

    async def steps(tier: GvisorTier) -> None:
        await once(tier)
        first = await waits(tier)
        sandbox = await tier.create(OTHER if what == "limits" else mounted)
        if what == "limits":
            memory, pids = sandbox.receipt.control("memory"), sandbox.receipt.control("pids")
            assert memory is not None and int(memory.value) == 300 << 20
            assert pids is not None and int(pids.value) == 20
        else:
            seen = await sandbox.exec(Code("print(open('/mnt/host/told').read())"))
            assert seen.stdout == "here\n"
        await sandbox.close()
        await asyncio.gather(*tier._tasks)
        assert gone(first)
        if what == "mounts":  # the host's folder may be another one by the next call
            await asyncio.sleep(0.1)
            assert tier._ahead is None

    lives(steps)


def test_an_image_that_was_built_anew_is_another(
    lives: Callable[[Steps], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def steps(tier: GvisorTier) -> None:
        await once(tier)
        first = await waits(tier)
        image = store.find(tier.image)
        assert image is not None
        anew = replace(image, built_at="later")
        monkeypatch.setattr(store, "find", lambda name: anew)
        sandbox = await tier.create(POLICY)
        assert first not in {e.pid for e in tier._live if e.alive()}
        await prints(sandbox)

    lives(steps)


def test_one_that_died_while_it_waited_is_not_used(lives: Callable[[Steps], None]) -> None:
    async def steps(tier: GvisorTier) -> None:
        await once(tier)
        os.kill(await waits(tier), signal.SIGKILL)
        await asyncio.sleep(0.1)
        await once(tier)

    lives(steps)


@pytest.mark.parametrize("delay", [0.0, 0.02, 0.025, 0.03, 0.05, 0.3])
def test_a_tier_that_closes_takes_it_along_at_any_moment(delay: float, lives: Callable[[Steps], None]) -> None:
    async def steps(tier: GvisorTier) -> None:
        await once(tier)
        await asyncio.sleep(delay)

    lives(steps)


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
    starts = {each: process.start_time(each) for each in (pid, *process.descendants(pid))}
    assert len(starts) > 3
    child.kill()
    child.communicate()
    deadline = time.monotonic() + 10
    while any(process.alive(each, start) for each, start in starts.items()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
