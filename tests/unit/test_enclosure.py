"""When a program's process that says that it ends is taken at its word: if it is all that is left, and only then."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import cast

import pytest

from fumehood.enclosure import PidfdEnclosure
from fumehood.linux.cgroup import Cgroup

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs pidfds")


class Group:
    """Stands for a control group: what it counts at each look, and what happens meanwhile."""

    def __init__(self, *looks: int | Callable[[], int], oom_kills: int = 0) -> None:
        self._looks = list(looks)
        self._kills = oom_kills

    def tasks(self) -> int:
        look = self._looks.pop(0)
        return look if isinstance(look, int) else look()

    def oom_kills(self) -> int:
        return self._kills


def believes(make: Callable[[subprocess.Popen[bytes]], Group]) -> tuple[bool | None, int | None]:
    """Whether a process is believed that sleeps, and how it ended meanwhile (None: not at all)."""

    async def main() -> tuple[bool | None, int | None]:
        with subprocess.Popen(["sleep", "60"]) as child:
            program_fd, pidfd = os.pidfd_open(child.pid), os.pidfd_open(os.getpid())
            group = cast(Cgroup, make(child))
            enclosure = PidfdEnclosure(
                os.getpid(), pidfd, group, cpu_after_death=lambda: asyncio.sleep(0), program=child.pid
            )
            try:
                told = enclosure.end_program(program_fd)
                assert enclosure.doomed is bool(told)
                try:
                    status = child.wait(0.2)
                except subprocess.TimeoutExpired:
                    status = None
                return told, status
            finally:
                child.kill()
                asyncio.get_running_loop().remove_reader(pidfd)
                os.close(pidfd)
                os.close(program_fd)

    return asyncio.run(main())


def reaped(child: subprocess.Popen[bytes]) -> int:
    """It is waited for, and another is counted in its place."""
    child.kill()
    child.wait()
    return 1


def test_one_that_is_alone_is_killed_and_believed() -> None:
    assert believes(lambda child: Group(1, 1)) == (True, -signal.SIGKILL)


@pytest.mark.parametrize("others", [0, 2, 40])
def test_one_that_is_not_alone_is_not_touched(others: int) -> None:
    assert believes(lambda child: Group(others)) == (None, None)


def test_one_beside_which_another_was_killed_for_memory_is_not_touched() -> None:
    assert believes(lambda child: Group(1, oom_kills=1)) == (None, None)


def test_one_that_has_forked_before_it_was_killed_is_not_believed() -> None:
    assert believes(lambda child: Group(1, 2)) == (False, -signal.SIGKILL)


def test_one_that_was_counted_must_be_itself() -> None:
    """It may be dead, and what is counted a process that it left: before it is killed, or while that is done."""
    told, _ = believes(lambda child: Group(lambda: reaped(child)))
    assert not told
    told, _ = believes(lambda child: Group(1, lambda: reaped(child)))
    assert not told


def test_where_nothing_can_be_counted_nobody_is_believed() -> None:
    def gone() -> int:
        raise FileNotFoundError

    assert believes(lambda child: Group(gone)) == (None, None)
    assert believes(lambda child: Group(1, gone)) == (False, -signal.SIGKILL)
