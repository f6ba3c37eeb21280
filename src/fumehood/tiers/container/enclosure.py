"""What holds a container from outside: its first process if this host sees it, and the engine."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable

from fumehood.errors import OutcomeUnknownError
from fumehood.images.engine import Engine, EngineError, EngineGoneError
from fumehood.linux import process
from fumehood.tiers.container import owners
from fumehood.tiers.container.counters import Counters, TreeCounters, belongs_to, in_cgroup_of
from fumehood.tiers.container.stream import Pump

_DEATH_TIMEOUT_S = 30.0
_POLL_S = 0.05


class ContainerEnclosure:
    """Implements :class:`fumehood.session.Enclosure`. Belongs to the running event loop.

    Made as soon as the container exists, so that whatever happens next can be undone by :meth:`discard`. ``forget`` is
    told at the end, and whether the engine has removed the container.
    """

    def __init__(self, engine: Engine, ident: str, forget: Callable[[ContainerEnclosure, bool], object]) -> None:
        self._forget = forget
        self.engine = engine
        self.ident = ident
        self.pump: Pump | None = None
        self.work_fd = -1
        self.pid = 0  # the first process, if it is this host's
        self._loop = asyncio.get_running_loop()
        self._pidfd = -1
        self._death: asyncio.Future[None] = self._loop.create_future()
        self._counters: Counters | TreeCounters | None = None
        self._poller: asyncio.Task[None] | None = None
        self._killing: asyncio.Task[None] | None = None
        self._releasing: asyncio.Task[None] | None = None

    def see(self, pid: int) -> bool:
        """Take hold of the container's first process, its cgroup and its work folder; whether they are this host's.

        ``pid`` is as the engine tells it. An engine in a virtual machine means another process by it.
        """
        if pid <= 0 or not belongs_to(pid, self.ident):
            return False
        try:
            pidfd = process.pidfd_open(pid)
            try:
                if not belongs_to(pid, self.ident):  # the pid may have changed hands before it was opened
                    raise ProcessLookupError
                self._counters = Counters(pid) if in_cgroup_of(pid, self.ident) else TreeCounters(pid)
            except BaseException:
                os.close(pidfd)
                raise
        except OSError:
            return False
        self._pidfd, self.pid = pidfd, pid
        self._loop.add_reader(pidfd, self._died)
        try:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            self.work_fd = os.open(f"/proc/{pid}/root/work", flags)
        except OSError:
            return False
        return True

    def poll_memory(self, memory_bytes: int) -> None:
        """Stand in for a memory cgroup: look at all processes every 50 ms and kill when they hold more together."""
        if isinstance(self._counters, TreeCounters):
            self._poller = self._loop.create_task(self._poll(self._counters, memory_bytes))

    async def _poll(self, counters: TreeCounters, memory_bytes: int) -> None:
        while not self._death.done():
            counters.read()
            if counters.resident_bytes > memory_bytes:
                counters.oom_kills += 1
                self.kill()
                return
            await asyncio.sleep(_POLL_S)

    def _died(self) -> None:
        # A pidfd is readable when the process has exited, and PID 1 of a namespace exits last of all in it.
        self._loop.remove_reader(self._pidfd)
        if not self._death.done():
            self._death.set_result(None)

    def alive(self) -> bool:
        """Whether the first process runs; of one that is not this host's, whether it is not known to be dead."""
        return not self._death.done() and not (self._pidfd >= 0 and process.ended(self._pidfd))

    def kill(self) -> None:
        """SIGKILL to the first process, and with it to all in its PID namespace; the engine is asked as well."""
        if self._releasing is not None:
            return
        if self._counters is not None:
            self._counters.read()
        killed = False
        if self._pidfd >= 0:
            with contextlib.suppress(OSError):  # not ours to signal: the engine does it
                process.kill_pidfd(self._pidfd)
                killed = True
        if not killed and self._killing is None:
            self._killing = self._loop.create_task(self._kill_by_engine())

    async def _kill_by_engine(self) -> None:
        with contextlib.suppress(EngineError, EngineGoneError):  # stopped already, or nobody is there to ask
            await self.engine.call("POST", f"/containers/{self.ident}/kill", query={"signal": "KILL"})

    async def wait_dead(self) -> None:
        """Until the last process is dead. Raises OutcomeUnknownError if it does not die of SIGKILL."""
        if self._killing is not None:
            await asyncio.shield(self._killing)
        try:
            async with asyncio.timeout(_DEATH_TIMEOUT_S):
                await asyncio.shield(self._death)
        except TimeoutError:
            raise OutcomeUnknownError("the container does not die", tier=self.engine.word) from None

    def usage(self) -> tuple[float | None, int | None]:
        """As the cgroup counted, until it was killed."""
        if self._counters is None:
            return None, None
        if not self._death.done():
            self._counters.read()
        return self._counters.cpu_s, self._counters.peak_bytes

    def memory_killed(self) -> bool:
        """Whether the kernel killed in the cgroup for memory."""
        if self._counters is None:
            return False
        if not self._death.done():
            self._counters.read()
        return self._counters.oom_kills > 0

    def lost_reason(self) -> str:
        """Why the stream may have ended: what the runtime wrote, or that the container is gone."""
        said = self.pump.stderr.decode("utf-8", "replace").strip()[-300:] if self.pump is not None else ""
        if said:
            return f"the container said: {said}"
        return "the container ended, or its engine closed the stream"

    def workdir_fd(self) -> int | None:
        """The work folder, opened through the first process's root; the tmpfs lives while this is open."""
        return self.work_fd if self.work_fd >= 0 else None

    async def discard(self) -> None:
        """Kill, wait, release: for a container whose sandbox did not come to be."""
        self.kill()
        if self._pidfd >= 0:
            with contextlib.suppress(OutcomeUnknownError):  # the engine is told to remove it all the same
                await self.wait_dead()
        await self.release()

    async def release(self) -> None:
        """Close everything here and have the engine remove the container. Whoever calls waits until that is done."""
        if self._releasing is None:
            self._releasing = self._loop.create_task(self._release())
        await asyncio.shield(self._releasing)

    async def _release(self) -> None:
        if self.pump is not None:
            self.pump.close()
        if self._poller is not None:
            self._poller.cancel()
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        if self.work_fd >= 0:
            os.close(self.work_fd)
            self.work_fd = -1
        if self._counters is not None:
            self._counters.close()
        if self._killing is not None:
            await self._killing
        removed = False
        with contextlib.suppress(EngineError, EngineGoneError):
            await owners.remove(self.engine, self.ident)
            removed = True
        self._forget(self, removed)
