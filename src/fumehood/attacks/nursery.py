"""Where workers come from: a process that has imported all they need and forks one for each attack.

``python -m fumehood.attacks.nursery FD`` serves a SOCK_SEQPACKET socket: a datagram is a worker's spec, with its three
standard streams beside it; the answer is its process id. It ends with the socket's other end. It never runs an attack
itself, has one thread, and starts no tier, so that every worker begins as a fresh one would.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import traceback

from fumehood import registry
from fumehood.attacks import worker
from fumehood.attacks.stage import ENV_NAME, new_canary

_SPEC_MAX = 1 << 16
_STREAMS = 3


class Nursery:
    """The suite's side of it. One request at a time: the caller holds a lock."""

    def __init__(self, env: dict[str, str]) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fumehood.attacks.nursery", str(theirs.fileno())],
                stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True, env=env,
            )  # fmt: skip

    def worker(self, spec: str, streams: tuple[int, int, int]) -> int:
        """Start a worker on three descriptors, which stay the caller's; its pid. Raises OSError."""
        socket.send_fds(self._control, [spec.encode()], streams)
        answer = self._control.recv(64)
        if not answer:
            raise OSError("the process that forks workers is gone")
        return int(answer)

    def close(self) -> None:
        """Let it end; workers that still run are not its own to end."""
        self._control.close()
        self._process.wait()


def serve(control: socket.socket) -> None:
    """Fork a worker for each request, until the other end closes."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps them
    while True:
        message, fds, _, _ = socket.recv_fds(control, _SPEC_MAX, _STREAMS)
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            control.close()
            _become_worker(message.decode(), fds)
        for fd in fds:
            os.close(fd)
        control.send(str(pid).encode())


def _become_worker(spec: str, fds: list[int]) -> None:
    """In the child: what a process of its own would have had. Never returns."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
        os.closerange(_STREAMS, max(fds) + 1)
        _renew_canary()
        code = worker.main(spec)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _renew_canary() -> None:
    """A canary of this worker's own, also where others read it: /proc/PID/environ shows the memory that exec filled."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    fresh = new_canary("env")
    assert len(fresh) == len(os.environ[ENV_NAME])
    ctypes.memmove(getenv(ENV_NAME.encode()), fresh.encode(), len(fresh))
    os.environ[ENV_NAME] = fresh


def main() -> None:
    """Import, then serve."""
    for name in registry.names():
        with contextlib.suppress(ImportError):  # the worker that needs it tells
            registry.make(name)
    serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
