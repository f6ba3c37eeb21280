"""Control groups whose sandboxes are over, and which are removed beside what runs."""

from __future__ import annotations

import asyncio
import contextlib

from fumehood.linux.cgroup import Cgroup
from fumehood.threads import in_thread


class Graves:
    """Removes empty groups in a thread, one at a time: the kernel's lock on groups may be held for a grace period.

    It begins ``after_s`` seconds after a group came, when whoever waits for a result has it. :meth:`empty` is awaited
    in the end.
    """

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._groups: list[Cgroup] = []
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def bury(self, group: Cgroup) -> None:
        """Have it removed. From within a running loop."""
        self._groups.append(group)
        if self._timer is None and self._task is None:
            self._timer = asyncio.get_running_loop().call_later(self._after_s, self._begin)

    async def empty(self) -> None:
        """Until all are removed that can be."""
        while self._timer is not None or self._task is not None:
            if self._timer is not None:
                self._timer.cancel()
                self._begin()
            if self._task is not None:
                await asyncio.wait((self._task,))

    def _begin(self) -> None:
        self._timer = None
        self._task = asyncio.get_running_loop().create_task(self._dig())

    async def _dig(self) -> None:
        """As many at a time as have come meanwhile."""
        try:
            while self._groups:
                groups, self._groups = tuple(self._groups), []
                await in_thread(_remove_all, groups)
        finally:
            self._task = None


def _remove_all(groups: tuple[Cgroup, ...]) -> None:
    for group in groups:
        with contextlib.suppress(OSError):  # it stays, and is swept by the next supervisor
            group.remove()
