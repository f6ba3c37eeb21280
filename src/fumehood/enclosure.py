"""What holds a sandbox from outside when its first process is PID 1 of a PID namespace of this host.

Killing that process kills all in the namespace, and its pidfd turns readable when the last of them is dead
(pid_namespaces(7)), so neither a process that called setsid nor one that hides among others can be missed.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import os
import select
import socket
from collections.abc import Awaitable, Callable, Sequence

from fumehood.errors import StartError
from fumehood.linux import cgroup, process

_POLL_S = 0.05
_BLIND_LOOKS = 20  # in a row, and what runs is held no more
GO = b"G"
SEALED = b"S"
FAILED = b"F"
_REASON_MAX = 1000
_SEAL_TIMEOUT_S = 10.0
_GIVEN_SPACE = socket.CMSG_SPACE(3 * 4)


class PidfdEnclosure:
    """Implements :class:`fumehood.session.Enclosure` for a sandbox whose first process is PID 1 of its PID namespace.

    Takes ownership of ``pidfd`` and, when set, of ``work_fd``. ``program`` is the pid of the program's process where
    that is no descendant of PID 1, which then does nothing itself. ``cpu_after_death`` tells what the process and those
    it waited for used, where no cgroup counts it. Belongs to the running event loop.
    """

    def __init__(
        self,
        pid: int,
        pidfd: int,
        group: cgroup.Cgroup | None,
        *,
        cpu_after_death: Callable[[], Awaitable[float | None]],
        program: int = 0,
        forget: Callable[[], object] = lambda: None,
        bury: Callable[[cgroup.Cgroup], object] = cgroup.Cgroup.remove,
    ) -> None:
        self._pid = pid
        self._program = program
        self._pidfd = pidfd
        self._exit = select.poll()  # asks the kernel: the event loop may not have heard of it yet
        self._exit.register(pidfd, select.POLLIN)
        self._group = group
        self._cpu_after_death = cpu_after_death
        self._forget = forget
        self._bury = bury
        self._loop = asyncio.get_running_loop()
        self._death: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(pidfd, self._died)
        self._poller: asyncio.Task[None] | None = None
        self._over_memory = False
        self._lost = "its first process died"
        self._cpu_s: float | None = None
        self._peak: int | None = None
        self._released = False
        self._counted = False
        self._hastened = False
        self._emptied = False
        self._program_dead = False
        #: Whether all that is left of the program is one thread that has been killed, and may not be dead yet.
        self.doomed = False
        self.work_fd = -1

    def _died(self) -> None:
        # A pidfd is readable when the process has exited, and PID 1 of a namespace exits last of all in it.
        self._loop.remove_reader(self._pidfd)
        if not self._death.done():
            self._death.set_result(None)

    def alive(self) -> bool:
        """Whether the first process runs."""
        return not self._death.done() and not self._exit.poll(0)

    def poll_memory(self, memory_bytes: int) -> None:
        """Stand in for a memory cgroup: look at all processes every 50 ms and kill when they hold more together."""
        self._poller = self._loop.create_task(self._poll(memory_bytes))

    async def _poll(self, memory_bytes: int) -> None:
        blind = 0
        while not self._death.done():
            try:
                used = self._tree_usage()
            except OSError as error:  # no descriptor is left, say: another look may find one
                blind += 1
                if blind >= _BLIND_LOOKS:
                    self._lost = f"its memory could not be looked at: {error}"
                    self.kill()
                    return
            else:
                blind = 0
                if used.count:
                    self._cpu_s = max(self._cpu_s or 0.0, used.cpu_s)
                    self._peak = max(self._peak or 0, used.resident_bytes)
                if used.resident_bytes > memory_bytes:
                    self._over_memory = True
                    self.kill()
                    return
            await asyncio.sleep(_POLL_S)

    def _tree_usage(self) -> process.TreeUsage:
        if self._program:
            return process.tree_usage(self._program, orphans_of=self._pid)
        return process.tree_usage(self._pid)

    @property
    def pid(self) -> int:
        """PID 1 of the sandbox, as this process's PID namespace numbers it."""
        return self._pid

    @property
    def dead(self) -> bool:
        """Whether the last process is dead."""
        return self._death.done()

    def signal(self, number: int) -> None:
        """Send PID 1 of the sandbox a signal: of those that it does not handle, only SIGKILL and SIGSTOP act."""
        if not self._death.done():
            process.kill_pidfd(self._pidfd, number)

    def kill(self) -> None:
        """SIGKILL to PID 1 of the sandbox: the kernel kills all in its PID namespace with it."""
        if not self._death.done() and not self.over and not self.doomed:
            process.kill_pidfd(self._pidfd)
            if self._group is not None and not self._hastened and not self._vacant():
                self._hastened = True
                if self._program:  # PID 1 has no share of the group's to use up, and signals all when it dies
                    self._group.let_off()
                else:
                    self._group.hasten()

    def program_ended(self) -> None:
        """Whoever bore the program's process has waited for it, and kills a PID 1 that does nothing next."""
        self._program_dead = True

    @property
    def over(self) -> bool:
        """Whether nothing is left but a PID 1 that does nothing, and is being killed."""
        return self._program_dead and self._vacant()

    def end_program(self, program_fd: int) -> bool | None:
        """Kill the program's process, which says that it ends; whether that was all, so that nothing of it runs on.

        None: others of the program's are left, or one was killed for memory, and nothing was done.
        """
        group = self._group
        if group is None or self._over_memory:
            return None
        killed = False
        try:
            if group.tasks() != 1 or group.oom_kills():
                return None
            # Who is sent SIGKILL makes no other process (copy_process() in kernel/fork.c); and who was not waited for
            # yet is one of those counted before, so that there is no other.
            killed = process.kill_pidfd(program_fd)
            self.doomed = killed and group.tasks() == 1 and process.kill_pidfd(program_fd, 0)
        except OSError:
            pass
        return self.doomed if killed else None

    def _vacant(self) -> bool:
        """Whether all that is left is a PID 1 that does nothing: the program's process was in the group and is gone."""
        if self._program and self._group is not None and not self._emptied:
            try:
                self._emptied = self._group.tasks() == 0
            except OSError:
                pass
        return self._emptied

    async def wait_dead(self) -> None:
        """Until the last process of the sandbox is dead, but for a PID 1 that does nothing and is being killed."""
        if self._vacant():
            return
        if not self._death.done() and self._exit.poll(0):
            self._died()
        if not self._death.done():
            await asyncio.shield(self._death)
        if self._group is None and not self._counted:
            self._counted = True
            exact = await self._cpu_after_death()
            if exact is not None:  # finer than the poller's clock ticks, and with what ended between two looks
                self._cpu_s = max(self._cpu_s or 0.0, exact)

    def expect_usage(self) -> None:
        """Prepare :meth:`usage`, for who will ask for it while its caller waits."""
        if self._group is not None:
            self._group.keep_open()

    def usage(self) -> tuple[float | None, int | None]:
        """CPU seconds so far and peak memory in bytes, as the cgroup counts them; else as polled."""
        if self._group is None:
            if not self._death.done():
                with contextlib.suppress(OSError):
                    self._cpu_s = max(self._cpu_s or 0.0, self._tree_usage().cpu_s)
            return self._cpu_s, self._peak
        try:
            return self._group.cpu_s(), self._group.memory_peak_bytes()
        except OSError:
            return None, None

    async def discard(self) -> None:
        """Kill, wait, release: for a sandbox that did not come to be."""
        self.kill()
        await self.wait_dead()
        await self.release()

    def memory_killed(self) -> bool:
        """Whether the kernel, or the poller, killed for memory."""
        if self._group is None or self._over_memory:
            return self._over_memory
        try:
            return self._group.oom_kills() > 0
        except OSError:
            return False

    def lost_reason(self) -> str:
        """Why the channel may have closed."""
        return self._lost

    def workdir_fd(self) -> int | None:
        """The work folder, which outlives the sandbox's processes as long as this descriptor is open."""
        return self.work_fd if self.work_fd >= 0 else None

    async def release(self) -> None:
        """Let go of the cgroup and the descriptors."""
        if self._released:
            return
        self._released = True
        if self._poller is not None:
            self._poller.cancel()
        self._forget()
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        if self.work_fd >= 0:
            os.close(self.work_fd)
            self.work_fd = -1
        if self._group is not None:
            self._bury(self._group)


async def handshake(
    channel: socket.socket, enclosure: PidfdEnclosure, *, tier: str, entries: Sequence[int] = ()
) -> None:
    """Let a sandbox's waiting first process go on, until it has sealed itself and serves frames on ``channel``.

    By ``entries`` it moves itself into its cgroup, see :meth:`fumehood.linux.cgroup.Cgroup.entries`. Raises StartError.
    """
    let_go(channel, tier=tier, entries=entries)
    given = await sealed(channel, tier=tier)
    if given:
        enclosure.work_fd = given.pop(0)
    _close(given)  # none, from our own code


def let_go(channel: socket.socket, *, tier: str, entries: Sequence[int] = (), word: bytes = GO) -> None:
    """Send the word, and what goes with it, perhaps before there is anybody to hear it. Raises StartError."""
    channel.setblocking(False)
    try:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", entries))] if entries else []
        channel.sendmsg([word], rights)
    except OSError as error:
        raise StartError(f"the sandbox was lost before it sealed itself: {error}", tier=tier) from None


async def sealed(channel: socket.socket, *, tier: str) -> list[int]:
    """Wait for the answer; what descriptors came with it.

    It answers with one byte: SEALED, with what it hands over beside it, such as the descriptor of its work folder if
    it has one; or FAILED, followed by the reason as text to the end of the stream.
    The answer is written before any program runs, by our own code; it is bounded like a guest's word all the same.
    Raises StartError.
    """
    given: list[int] = []
    with contextlib.ExitStack() as undo:
        undo.callback(_close, given)
        try:
            async with asyncio.timeout(_SEAL_TIMEOUT_S):
                answer = await _receive(channel, 1, given)
                if answer == FAILED:
                    reason = (await _receive(channel, _REASON_MAX, given)).decode("utf-8", "replace")
                    raise StartError(f"the sandbox could not seal itself: {reason}", tier=tier)
        except TimeoutError:
            raise StartError("the sandbox did not seal itself in time", tier=tier) from None
        except OSError as error:
            raise StartError(f"the sandbox was lost while it sealed itself: {error}", tier=tier) from None
        if answer != SEALED:
            raise StartError("the sandbox died while it sealed itself", tier=tier)
        undo.pop_all()
    return given


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


async def _receive(channel: socket.socket, size: int, given: list[int]) -> bytes:
    """Up to ``size`` bytes, fewer at the end of the stream, and the descriptors that may come with them."""
    data = b""
    while len(data) < size:
        try:
            piece, ancillary, flags, _ = channel.recvmsg(size - len(data), _GIVEN_SPACE)
        except BlockingIOError:
            await readable(channel)
            continue
        for _, _, raw in ancillary:
            given += array.array("i", raw[: len(raw) // 4 * 4])
        if flags & socket.MSG_CTRUNC:
            raise OSError(errno.EMFILE, "this process has no descriptor left for what the sandbox hands over")
        if not piece:
            break
        data += piece
    return data


async def readable(channel: socket.socket) -> None:
    """Until ``channel`` has something to receive, or its end."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(channel, _settle, ready)
    try:
        await ready
    finally:
        loop.remove_reader(channel)


def _settle(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
