"""The host's side of a sandbox for one program, see :mod:`fumehood.tiers.jail.program`.

There is no agent in it. :class:`SingleChannel` does on this side what an agent would do on the other, and speaks its
frames, so that limits, outcomes and receipts are :class:`fumehood.session.GuestSandbox`'s as everywhere. From inside
come bytes of output, and at the end an exit status in the mode of a pipe: there is no message of the guest's to be
parsed, and nothing to be believed, since that word is the process's last (docs/decisions/0013).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import sys
import termios
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from fumehood.enclosure import PidfdEnclosure
from fumehood.execs import Run, Stdin
from fumehood.linux import process
from fumehood.model import Artifact, Code, Outcome, Policy, Program, Receipt
from fumehood.session import GRACE_S, GuestSandbox
from fumehood.tier import Sink
from fumehood.tiers.jail.client import Exit
from fumehood.tiers.jail.program import ENDED, HEAD, STATUS_MASK
from fumehood.wire import ChannelClosed, Header, Link, OnFrame, OnLost

_READ_BYTES = 64 << 10  # what a pipe holds by default, pipe(7)

#: An ordinary user can enlarge a pipe to this (/proc/sys/fs/pipe-max-size): the most that is left in one at the end.
_PIPE_MAX = 1 << 20

#: Output that nobody keeps is thrown away no more often than this: first, so that much output costs its program little
#: time; and after so many looks, so that a flood that goes on costs this process, whose time no limit of the sandbox's
#: bounds, some 3 % of a processor and not 25 %.
_FLOOD_PACE_S = 0.001
_LONG_FLOOD_PACE_S = 0.008
_LONG_FLOOD_LOOKS = 100

#: Where nobody wants output as it comes, it is left in the pipes until a look after the first time shows more than a
#: little of it, and no longer than for both times: most programs end before, and then it is read at once, and nothing
#: was waited for by itself. A program that fills a pipe at once waits for the look.
_LOOK_S, _PATIENCE_S = 0.002, 0.002
_LITTLE_BYTES = 16 << 10

_PROCESS_GROUP = 4  # PIDFD_SIGNAL_PROCESS_GROUP, Linux 6.9


class SingleSandbox(GuestSandbox):
    """A sandbox for one program: ``exec(…, last=True)`` of code without displays and standard input."""

    guest_is_agent = False

    def __init__(
        self,
        channel: SingleChannel,
        enclosure: PidfdEnclosure,
        policy: Policy,
        receipt: Receipt,
        *,
        env: Mapping[str, str] | None = None,
        leave: Callable[[asyncio.Future[tuple[Artifact, ...]]], bool] = lambda closing: False,
    ) -> None:
        """``leave`` says whether close() may return before a process that was killed is dead, and waits for that."""
        super().__init__(channel, enclosure, policy, receipt, env=env)
        self._way = channel
        self._around = enclosure
        self._leave = leave
        self._heard = False  # that the program's process is dead
        self._leaving: asyncio.Future[None] | None = None
        self._left: asyncio.Future[tuple[Artifact, ...]] | None = None  # what close() has not waited for
        channel.on_gone = self._gone

    def _begin(self, program: Program, stdin: Stdin, sink: Sink | None, last: bool, background: bool = False) -> Run:
        """As in GuestSandbox. Raises UnsupportedError for what only an agent could do, and for a second program."""
        if not isinstance(program, Code) or stdin.wanted:
            raise self._unsupported("standard input" if isinstance(program, Code) else "commands")
        if self._codes:
            raise self._unsupported("a second program")
        self._way.patient = sink is None
        return super()._begin(program, stdin, sink, last, background)

    async def _end(self, run: Run) -> None:
        """As in GuestSandbox. Where nothing can run any more, what is left to do can wait for close()."""
        if self._around.over or self._around.doomed:
            self._killed = self._killed or "it was for one program only"
        else:
            await super()._end(run)

    async def close(self, *, out: Path | None = None) -> tuple[Artifact, ...]:
        """As in GuestSandbox, and at once where there is nothing to wait for, or somebody else does."""
        if self._closing is None and out is None:
            closing: asyncio.Future[tuple[Artifact, ...]] = self._loop.create_future()
            if self._around.over:
                self._closing = closing
                await self._let_go(closing)
                return ()
            if self._around.doomed and not self._heard and self._leave(closing):
                self._closing = self._left = closing
                return ()
        return await super().close(out=out)

    def _gone(self) -> None:
        """The program's process has been waited for, or who would do that is lost."""
        self._heard = True
        if self._left is not None and not self._left.done():
            self._leaving = asyncio.ensure_future(self._let_go(self._left))

    async def _let_go(self, closing: asyncio.Future[tuple[Artifact, ...]]) -> None:
        """Release everything. Waits for nothing, and so cannot be cancelled, where all is over."""
        self._kill("close() was called")
        try:
            await self._clean_up(None)
        finally:
            closing.set_result(())

    async def _ask(self, operation: str, *, body: bytes = b"", limit: int = 0, **fields: int) -> NoReturn:
        raise self._unsupported("files")

    async def interrupt(self, *, grace_s: float | None = GRACE_S) -> None:
        """As in GuestSandbox; the kill of a program that does not end is the sandbox's."""
        await super().interrupt(grace_s=None)
        run = self._run
        if run is not None and run.interrupted and grace_s is not None:
            run.timers.append(self._loop.call_later(grace_s, self._impose, run, Outcome.CANCELLED))


class SingleChannel(Link):
    """The way to a sandbox without an agent, which cannot make us queue anything.

    Owns ``end`` (the socket), ``out`` and ``err`` (reading ends of the pipes) and ``program_fd`` (the pidfd of the
    program's process). ``on_exit`` is called once with whom to tell that process's end; ``on_gone`` then, if
    that of the program was told before. ``end_program`` kills a process that says that it ends, by its pidfd, and says
    whether nothing runs then; None: it did nothing. Made inside a running loop.
    """

    def __init__(
        self,
        end: socket.socket,
        out: int,
        err: int,
        program_fd: int,
        on_exit: Callable[[Callable[[Exit | None], object]], object],
        end_program: Callable[[int], bool | None] | None = None,
    ) -> None:
        super().__init__()
        self._end_program = end_program
        self._said: int | None = None  # the exit status of a process that was killed as it ended
        self._told = False  # before the process is dead
        self.on_gone: Callable[[], object] = lambda: None
        self._end: socket.socket | None = end
        self._pipes = {out: "out", err: "err"}
        self._err = err
        self._counts = {"out": 0, "err": 0}
        self._listened: set[int] = set()
        self.patient = False  # nobody wants output as it comes
        self._later: asyncio.TimerHandle | None = None
        self._program_fd = program_fd
        self._tell_exit = on_exit
        self._complete = False  # all of the program is in the outbox
        self._refused = False  # nobody took it whole
        self._writing = False
        self._ident: object = None
        self._budget = 0
        self._null = -1  # where a flood goes
        self._looks = 0  # at what nobody keeps
        self._on_frame: OnFrame = lambda header, body: None
        self._on_lost: OnLost = lambda why: None
        end.setblocking(False)
        for fd in self._pipes:
            os.set_blocking(fd, False)

    def subscribe(self, on_frame: OnFrame, on_lost: OnLost) -> None:
        """As :meth:`fumehood.wire.Channel.subscribe`. It is ready: it has sealed itself and waits."""
        self._on_frame, self._on_lost = on_frame, on_lost
        on_frame({"op": "ready"}, b"")
        self._tell_exit(self._exited)

    def post(self, header: Header, body: bytes | memoryview = b"") -> None:
        """Take a frame for the guest. Raises ChannelClosed; NotImplementedError for what only an agent could do."""
        if self.lost is not None:
            raise self.lost
        operation = header["op"]
        if operation == "interrupt":
            self._interrupt()
            return
        if operation == "more" and self._refused:
            return  # nobody takes the rest
        if operation == "exec":
            self._ident = header["id"]
            self._budget = header["output_bytes"]
            name = str(header["name"]).replace("\0", "?").encode("utf-8", "replace")
            env_bytes = header["env_bytes"]
            head = HEAD.pack(len(name), env_bytes, header["size"] - env_bytes) + name
            self._outbox.append(memoryview(b"".join((head, body))))
            self._complete = not header["more"]
            if self.patient:
                self._later = self._loop.call_later(_LOOK_S, self._look)
                if self._end_program is not None:
                    self._listen(self._err)
            else:
                self._listen_to_all()
        elif operation == "more":
            self._outbox.append(memoryview(body))
            self._complete = not header["more"]
        else:
            raise NotImplementedError(operation)
        self._flush()

    def close(self) -> None:
        """Let go of everything. Idempotent."""
        if self.lost is None:
            self.lost = ChannelClosed("closed")
            self._let_go()

    # --- the program goes in

    def _flush(self) -> None:
        end = self._end
        if end is None:
            return
        try:
            while self._outbox:
                sent = end.send(self._outbox[0])
                if sent < len(self._outbox[0]):
                    self._outbox[0] = self._outbox[0][sent:]
                else:
                    self._outbox.popleft()
        except BlockingIOError:
            if not self._writing:
                self._writing = True
                self._loop.add_writer(end, self._flush)
            return
        except OSError:  # it is dead or dying, and the zygote will tell
            self._outbox.clear()
            self._complete = self._refused = True
        if self._writing:
            self._writing = False
            self._loop.remove_writer(end)
        self._wake_sender()

    # --- output comes out

    def _look(self) -> None:
        """Listen at once where a pipe fills, else later."""
        waiting = (int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), sys.byteorder) for fd in self._pipes)
        if max(waiting) > _LITTLE_BYTES:
            self._listen_to_all()
        else:
            self._later = self._loop.call_later(_PATIENCE_S, self._listen_to_all)

    def _listen_to_all(self) -> None:
        for fd in self._pipes:
            self._listen(fd)

    def _listen(self, fd: int) -> None:
        self._listened.add(fd)
        self._loop.add_reader(fd, self._on_readable, fd)

    def _ignore(self, fd: int) -> None:
        if fd in self._listened:
            self._listened.remove(fd)
            self._loop.remove_reader(fd)

    def _on_readable(self, fd: int) -> None:
        stream = self._pipes[fd]
        if self._counts[stream] > self._budget:
            self._throw_away(fd)
        elif not self._read(fd):
            self._ignore(fd)
            if fd == self._err:
                self._closed()

    def _read(self, fd: int) -> int:
        """Pass on what is there, at most _READ_BYTES; how many bytes it was, -1 if nothing was there, 0 at the end."""
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return -1
        if data:
            stream = self._pipes[fd]
            self._counts[stream] += len(data)
            self._on_frame({"op": stream, "id": self._ident}, data)
        return len(data)

    def _throw_away(self, fd: int) -> None:
        """Nobody keeps more of this stream: empty the pipe without reading it, and look again after a pause."""
        self._ignore(fd)
        with contextlib.suppress(OSError):  # root's share of pipe memory may be used up; then it is 64 KiB at a time
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _PIPE_MAX)
        try:
            if self._null < 0:
                self._null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            # By pages and not by bytes: nothing is copied.
            gone = os.splice(fd, self._null, _PIPE_MAX, flags=os.SPLICE_F_NONBLOCK | os.SPLICE_F_MOVE)
        except BlockingIOError:
            gone = -1
        if gone:
            self._counts[self._pipes[fd]] += max(gone, 0)
            self._looks += 1
            pace_s = _FLOOD_PACE_S if self._looks < _LONG_FLOOD_LOOKS else _LONG_FLOOD_PACE_S
            self._loop.call_later(pace_s, self._listen_again, fd)

    def _listen_again(self, fd: int) -> None:
        if self.lost is None:
            self._listen(fd)

    # --- the end

    def _exited(self, ended: Exit | None) -> None:
        """The program's process is dead, so what it wrote is in the pipes, whoever else still writes to them."""
        if self._told:
            self.on_gone()
            return
        if self.lost is not None:
            return
        if self._ident is not None and not self._taken(dead=ended is not None):
            self._refused = True  # what is still to be sent is dropped
            self._outbox.clear()
            self._wake_sender()
            message = "its process was dead before it had the program"
            self._on_frame({"op": "failed", "id": self._ident, "message": message}, b"")
            return
        status = ended[1] if ended is not None else None
        if ended is not None and status is None:
            status = process.exit_status(self._program_fd)
        if status is None or self._ident is None:
            why = ChannelClosed("the zygote is gone" if ended is None else "the sandbox's process ended")
            self.lost = why
            self._let_go()
            self._on_lost(why)
            return
        code = os.waitstatus_to_exitcode(status)
        self._finish(self._said if self._said is not None and code == -signal.SIGKILL else code)

    def _closed(self) -> None:
        """Stderr has no writer left: perhaps the process has said before that it ends. Then that is all of it."""
        if self._end_program is None or self._ident is None or self._outbox or not self._complete or self._told:
            return
        mode = os.fstat(self._err).st_mode
        if not mode & ENDED:
            return
        alone = self._end_program(self._program_fd)
        if alone is not None:
            self._said = mode & STATUS_MASK
        if alone:
            self._told = True
            self._finish(mode & STATUS_MASK)

    def _finish(self, code: int) -> None:
        for fd in self._pipes:
            left = 2 * _PIPE_MAX
            while left > 0 and (got := self._read(fd)) > 0:
                left -= got
                if self.lost is not None:
                    return
        done: Header = {"op": "done", "id": self._ident, "status": code, "overflow": False, "lost": True}
        self._on_frame(done | {f"{stream}_bytes": count for stream, count in self._counts.items()}, b"")

    def _taken(self, *, dead: bool) -> bool:
        """Whether the process may have had all of the program. A dead one tells."""
        if self._end is None or self._refused or self._outbox or not self._complete:
            return False
        if not dead:
            return True
        try:
            return self._end.recv(1) == b""
        except OSError:  # ECONNRESET: closed with something unread in it (unix_release_sock() in net/unix/af_unix.c)
            return False

    def _interrupt(self) -> None:
        """SIGINT to the program's process group; where the kernel cannot do that by a pidfd, to its main process."""
        for flags in (_PROCESS_GROUP, 0):
            try:
                signal.pidfd_send_signal(self._program_fd, signal.SIGINT, None, flags)
                return
            except OSError:
                pass

    def _let_go(self) -> None:
        if self._later is not None:
            self._later.cancel()
        for fd in self._pipes:
            self._ignore(fd)
            os.close(fd)
        if self._end is not None:
            if self._writing:
                self._loop.remove_writer(self._end)
            self._end.close()
            self._end = None
        os.close(self._program_fd)
        if self._null >= 0:
            os.close(self._null)
        self._outbox.clear()
        self._wake_sender()
