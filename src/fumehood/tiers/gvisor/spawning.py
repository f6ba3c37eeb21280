"""The supervisor's side of the launcher (:mod:`.launcher`), one process that makes the first ones of all sandboxes."""

from __future__ import annotations

import array
import asyncio
import contextlib
import json
import marshal
import os
import select
import socket
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fumehood.enclosure import readable
from fumehood.errors import StartError
from fumehood.linux import process
from fumehood.tiers.jail.runtime import base_python

_LAUNCHER = str(Path(__file__).with_name("launcher.py"))
_MESSAGE_MAX = 1 << 16
_MARSHAL = 2  # a format that every Python 3 reads
_SPAWN_TIMEOUT_S = 30.0
_END_TIMEOUT_S = 2.0
_SERVED_TIMEOUT_S = 2.0


class Launcher:
    """Started when it is first asked, and again if it was lost. It ends with this object, at the latest.

    :meth:`start` and :meth:`wait_served` are for several threads at once, the rest is not.
    """

    def __init__(self) -> None:
        self._starting = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def ask(self, plan: dict[str, Any], fds: Sequence[int]) -> socket.socket:
        """Ask for a first process that waits for its word: the socket for :meth:`spawned`. Does not wait.

        ``fds`` are runsc's input, which is its channel, output and error. Whoever closes the channel ends what there
        may be. Raises StartError.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        try:
            with theirs:
                self._send(marshal.dumps(plan, _MARSHAL), [theirs.fileno(), *fds])
        except OSError as error:
            ours.close()
            raise _silent(error) from None
        except BaseException:
            ours.close()
            raise
        return ours

    async def spawned(self, answers: socket.socket) -> Spawned:
        """What was asked for; it owns ``answers``, which is closed if there is none. Raises StartError."""
        try:
            async with asyncio.timeout(_SPAWN_TIMEOUT_S):
                message, given = await _message(answers)
            if "error" in message:
                raise StartError(str(message["error"])[:500], tier="gvisor")
            (pidfd,) = given
            return Spawned(process.pid_of_pidfd(pidfd), pidfd, answers)
        except (OSError, TimeoutError, EOFError, ValueError) as error:
            answers.close()
            raise _silent(error) from None
        except BaseException:
            answers.close()
            raise

    def start(self) -> None:
        """Start it, where it is not, without waiting until it serves. Raises OSError."""
        with self._starting:
            if self._control is None:
                self._control = self._start()

    def wait_served(self) -> None:
        """Until it serves, or is lost, or takes too long. Blocks. Raises OSError."""
        self.start()
        control = self._control
        if control is not None:
            wait = select.poll()
            wait.register(control, select.POLLIN)  # its one word stays there to be seen
            wait.poll(_SERVED_TIMEOUT_S * 1000)

    def _send(self, data: bytes, fds: list[int]) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        if self._control is not None:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._control.sendmsg([data], rights)
                return
            self.close()
        self.start()
        assert self._control is not None
        self._control.sendmsg([data], rights)

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self._child = subprocess.Popen(
                    [base_python(), "-I", "-S", "-B", _LAUNCHER, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
                    cwd="/",
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
            except BaseException:
                ours.close()
                raise
        return ours

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """End the launcher, which ends none of what it started. Idempotent."""
        child, control = self._child, self._control
        self._child = self._control = None
        if control is not None:
            control.close()
        if child is not None:
            try:
                child.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def _silent(error: Exception) -> StartError:
    return StartError(f"the launcher did not answer: {error}", tier="gvisor")


class Spawned:
    """A first process, and who waits for it. The caller owns ``pidfd`` and calls :meth:`close`."""

    def __init__(self, pid: int, pidfd: int, answers: socket.socket) -> None:
        self.pid = pid
        self.pidfd = pidfd
        self._answers = answers

    async def used(self) -> float | None:
        """Once it is dead: the CPU seconds of it and of all that it waited for, None if nobody tells."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, TimeoutError, EOFError):
            async with asyncio.timeout(1.0):
                message, _ = await _message(self._answers)
            return float(message["cpu_s"])
        return None

    def close(self) -> None:
        """Listen no more. Idempotent."""
        self._answers.close()


async def _message(answers: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """One datagram of the launcher's and the descriptors beside it. Raises EOFError when it is gone."""
    await readable(answers)
    data, ancillary, _, _ = answers.recvmsg(_MESSAGE_MAX, socket.CMSG_SPACE(4))
    fds = [fd for _, _, raw in ancillary for fd in array.array("i", raw[: len(raw) // 4 * 4])]
    if not data:
        raise EOFError("it exited")
    try:
        message = json.loads(data)
        if not isinstance(message, dict):
            raise ValueError("malformed message")
    except ValueError:
        for fd in fds:
            os.close(fd)
        raise
    return message, fds
