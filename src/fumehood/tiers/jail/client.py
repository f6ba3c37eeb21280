"""The supervisor's end of the zygote: start it, ask it for sandboxes, notice when it dies or misbehaves.

The zygote runs nobody's code, yet what comes from it is checked like a guest's word: a message that is not of the
expected form, or none in time, means that it is lost, and a lost zygote is killed and never asked again.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import json
import math
import os
import random
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

import fumehood
from fumehood.errors import StartError, UnavailableError
from fumehood.linux import process
from fumehood.tiers.jail import runtime
from fumehood.tiers.jail.controls import HOSTNAME, SINGLE

_PACKAGE = Path(fumehood.__file__).parent
_LAUNCHER = _PACKAGE / "tiers" / "jail" / "launcher.py"
_ZYGOTE = f"{runtime.CODE_HOME}/fumehood/tiers/jail/zygote.py"
# As in the zygote.
REQUEST = struct.Struct("!QIB")  # number of the request, id of the sandbox, flags
ANSWER = struct.Struct("!cQqd")  # kind, number of the request, wait status or -1, CPU seconds
SPAWNED, EXITED, REFUSED = b"s", b"x", b"r"  # the last with the reason behind

# Plain numbers: operations on the enums of ``socket`` are calls of Python functions.
_SOL_SOCKET, _SCM_RIGHTS = int(socket.SOL_SOCKET), int(socket.SCM_RIGHTS)
_MSG_TRUNC, _MSG_CTRUNC = int(socket.MSG_TRUNC), int(socket.MSG_CTRUNC)
_ANSWER_MAX = 4096
_STATUS_MAX = 0xFFFF  # of wait(2)
_PIDFDS_SPACE = socket.CMSG_SPACE(4 * 4)
_MESSAGE_MAX = 1 << 18
_PIDFDS_MAX = 2
_START_TIMEOUT_S = 60.0  # imports of everything that is preloaded included
_SPAWN_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 2.0

#: Host ids for root's sandboxes: systemd's table of id ranges leaves 0x70000000 and up unused
#: (https://systemd.io/UIDS-GIDS/). Each zygote takes a block of 65536 at random, each sandbox one id of the block.
_UID_FIRST = 0x70000000
_UID_BLOCKS = 0x0FFE
IDS_PER_BLOCK = 65536

#: A fork copies one thread, and a clone runs none of the handlers by which libraries stop theirs before a fork: so what
#: is preloaded must start none. Programs that preload such a library have its one-thread form.
_PRELOAD_ENV = {name: "1" for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")}
# Without a folder named to it, matplotlib makes one and leaves its removal to the end of every program.
_PRELOAD_ENV["MPLCONFIGDIR"] = "/tmp"


class ZygoteLostError(StartError):
    """The zygote died or broke the protocol before the sandbox existed; another may be started."""


@dataclass(frozen=True, slots=True)
class Guest:
    """What serves a sandbox's channel. A tier that runs a language runtime in the jail puts its own worker here.

    ``modules`` are files of this package, relative to it, that are copied into the root beside the jail's own;
    ``binds`` are (host path, path inside) pairs, seen read-only, files or folders. ``filters`` is the module whose
    ``allow_list()``, ``seal()`` and ``describe()`` make the seccomp filters. ``root``, where it is not the jail's own,
    is a folder inside that becomes the whole of what a sandbox sees, with the empty folders ``proc``, ``tmp``,
    ``work``, ``dev/shm`` in it: for a sandbox that executes one foreign program and needs nothing else. ``devices`` of
    the host's, such as /dev/kvm, stand there under their own names; who may open them is for their modes to say.
    """

    entry: str = "fumehood.guest.agent:serve"  # module:function, called with read_fd, write_fd, workdir
    modules: tuple[str, ...] = ()
    binds: tuple[tuple[str, str], ...] = ()
    filters: str = "fumehood.linux.seccomp"
    root: str = "/"
    devices: tuple[str, ...] = ()


AGENT = Guest()


@dataclass(frozen=True, slots=True)
class Spawned:
    """A sandbox's first process, waiting for the word to go on."""

    ident: int
    pid: int
    pidfd: int
    host_uid: int  # as the host counts it
    program: int = 0  # the program's process, if it is another
    program_fd: int = -1  # its pidfd


#: A sandbox's process that is dead and reaped: CPU seconds of it and of those that it waited for, and its wait status,
#: None if the zygote was not told.
Exit = tuple[float, int | None]


class Zygote:
    """One zygote process and the requests under way. Belongs to the event loop it was attached to."""

    def __init__(
        self, child: subprocess.Popen[bytes], control: socket.socket, ready: dict[str, Any], base: int
    ) -> None:
        self._child = child
        self._control = control
        self._base = base
        self._next = 1
        self._spawning: dict[int, asyncio.Future[list[int]]] = {}
        self._exits: dict[int, asyncio.Future[Exit | None]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self.seccomp = str(ready.get("seccomp", ""))
        self.landlock = str(ready.get("landlock", ""))
        self.single = ready.get("single") is True  # whether it makes sandboxes for one program
        self.has_ids = base > 0  # each sandbox has a host id of its own
        self.lost = False
        self.pid = child.pid

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to listen. Call once, in ``loop``."""
        self._loop = loop
        self._control.setblocking(False)
        loop.add_reader(self._control, self._listen)

    def request(self, flags: int) -> Request:
        """Ask for a sandbox, by the flags of :mod:`fumehood.tiers.jail.controls`. Sent at once; await the answer.

        Raises ZygoteLostError.
        """
        if self.lost or self._loop is None:
            raise ZygoteLostError("the zygote is gone", tier="jail")
        ident = self._next
        self._next += 1
        inner_uid = 1 + ident % (IDS_PER_BLOCK - 1) if self._base else 0
        ours, theirs = socket.socketpair()
        future: asyncio.Future[list[int]] = self._loop.create_future()
        self._spawning[ident] = future
        self._exits[ident] = self._loop.create_future()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [theirs.fileno()]))]
        try:
            self._control.sendmsg([REQUEST.pack(ident, inner_uid, flags)], rights)
        except OSError as error:
            self._lose(f"the zygote takes no requests: {error}")
        finally:
            theirs.close()
        host_uid = self._base + inner_uid if self._base else os.geteuid()
        return Request(self, ident, host_uid, ours, future, 2 if flags & SINGLE else 1)

    async def exited(self, ident: int) -> float | None:
        """CPU seconds that a dead sandbox used, all its processes together; None if the zygote died first."""
        future = self._exits.get(ident)
        if future is None:
            return None
        try:
            async with asyncio.timeout(1.0):
                ended = await asyncio.shield(future)
        except (TimeoutError, StartError):
            return None
        return None if ended is None else ended[0]

    def on_exit(self, ident: int, told: Callable[[Exit | None], object]) -> None:
        """Have ``told`` called once, when a sandbox's process is dead; with None if the zygote is lost before that."""
        future = self._exits.get(ident)
        if future is None:
            assert self._loop is not None
            self._loop.call_soon(told, None)
        else:
            future.add_done_callback(lambda done: told(done.result()))

    def forget(self, ident: int) -> None:
        """No more is asked about this sandbox."""
        future = self._exits.pop(ident, None)
        if future is not None and not future.done():
            future.set_result(None)  # a cancelled one would cancel who waits for it

    def gone(self) -> bool:
        """Whether it is lost; asks, since the event loop may not have heard of it yet."""
        if not self.lost:
            try:
                hung_up = not self._control.recv(1, socket.MSG_PEEK)
            except BlockingIOError:
                hung_up = False
            except OSError:
                hung_up = True
            if hung_up:
                self._lose("the zygote is lost: it exited")
        return self.lost

    def _listen(self) -> None:
        fds: list[int] = []
        try:
            data, ancillary, flags, _ = self._control.recvmsg(_ANSWER_MAX, _PIDFDS_SPACE)
            for level, kind, raw in ancillary:
                if level == _SOL_SOCKET and kind == _SCM_RIGHTS:
                    fds += array.array("i", raw[: len(raw) - len(raw) % 4])
            if not data:
                raise ValueError("it exited")
            if flags & _MSG_TRUNC or len(fds) > _PIDFDS_MAX:
                raise ValueError("it sent an oversized message")
            self._take(data, fds, cut=flags & _MSG_CTRUNC != 0)
        except BlockingIOError:
            return
        except (OSError, ValueError, KeyError, struct.error) as error:
            for fd in fds:
                os.close(fd)
            self._lose(f"the zygote is lost: {error}")

    def _take(self, data: bytes, fds: list[int], *, cut: bool) -> None:
        """One message, see zygote.py. Takes the descriptors, or raises."""
        kind, ident, status, cpu_s = ANSWER.unpack_from(data)
        if fds and kind != SPAWNED:
            raise ValueError("it sent a descriptor unasked")
        if not -1 <= status <= _STATUS_MAX or not 0 <= cpu_s < math.inf:
            raise ValueError("it sent numbers that cannot be")
        if kind == EXITED:
            future = self._exits.get(ident)
            if future is not None and not future.done():
                future.set_result((cpu_s, None if status < 0 else status))
            return
        if kind not in (SPAWNED, REFUSED):
            raise ValueError("it sent what is no message")
        waiting = self._spawning[ident]
        if kind == SPAWNED and not cut and not fds:
            raise ValueError("it sent no pidfd")
        del self._spawning[ident]
        if kind == REFUSED:
            if not waiting.done():
                reason = data[ANSWER.size :].decode("utf-8", "replace")
                waiting.set_exception(StartError(reason[:500], tier="jail"))
        elif cut:  # recvmsg(2): there was no room in our own table of descriptors
            _kill(fds)
            if not waiting.done():
                waiting.set_exception(StartError("this process has no descriptor left for a sandbox", tier="jail"))
        elif waiting.done():
            _kill(fds)  # the caller gave up waiting
        else:
            waiting.set_result(fds)

    def _lose(self, reason: str) -> None:
        if self.lost:
            return
        self.lost = True
        if self._loop is not None:
            self._loop.remove_reader(self._control)
        self._control.close()
        with contextlib.suppress(OSError):
            self._child.kill()
        for future in self._spawning.values():
            if not future.done():
                future.set_exception(ZygoteLostError(reason, tier="jail"))
        self._spawning.clear()
        for exit_ in self._exits.values():
            if not exit_.done():
                exit_.set_result(None)
        self._exits.clear()

    def close(self) -> None:
        """Kill the zygote and with it every sandbox it made; wait until it is gone. Blocks, idempotent."""
        self._lose("the tier is closed")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(_STOP_TIMEOUT_S)


@dataclass(slots=True, eq=False)
class Request:
    """A sandbox that was asked for, and once it is there waits for the word to seal itself.

    Owns ``end``, our end of its channel, until somebody takes that over.
    """

    zygote: Zygote
    ident: int
    host_uid: int
    end: socket.socket
    future: asyncio.Future[list[int]]
    processes: int  # of which there is a pidfd in the answer
    taken: bool = False

    async def answer(self) -> Spawned:
        """The sandbox, whose pidfds the caller owns from here on. Raises ZygoteLostError, StartError."""
        late = "the zygote did not answer in time"
        timer = asyncio.get_running_loop().call_later(_SPAWN_TIMEOUT_S, self.zygote._lose, late)
        try:
            pidfds = await self.future
        finally:
            timer.cancel()
        self.taken = True
        try:
            if len(pidfds) != self.processes:
                raise OSError(errno.EPROTO, "the zygote sent other pidfds than were asked for")
            pids = [process.pid_of_pidfd(fd) for fd in pidfds]
        except OSError as error:
            _kill(pidfds)
            raise StartError(f"the sandbox died at once: {error}", tier="jail") from None
        program = (pids[1], pidfds[1]) if self.processes > 1 else ()
        return Spawned(self.ident, pids[0], pidfds[0], self.host_uid, *program)

    @property
    def alive(self) -> bool:
        """Whether there is something to wait for, or there already."""
        if not self.future.done():
            return not self.zygote.lost
        return self.future.exception() is None and not any(process.ended(fd) for fd in self.future.result())

    def give_up(self) -> None:
        """Nobody takes the sandbox: if it is there already it is killed here, or else when it comes. Idempotent."""
        self.end.close()
        self.zygote.forget(self.ident)
        if self.taken or self.future.cancel() or self.future.cancelled() or self.future.exception() is not None:
            return
        self.taken = True
        _kill(self.future.result())


def _kill(pidfds: list[int]) -> None:
    """Kill a sandbox by its first process, and close the descriptors."""
    for fd in pidfds:
        with contextlib.suppress(OSError):  # no pidfd
            process.kill_pidfd(fd)
        os.close(fd)


def start(
    *,
    site_packages: str | None = None,
    preload: tuple[str, ...] = (),
    mounts: tuple[tuple[str, str], ...] = (),
    disabled: frozenset[str] = frozenset(),
    guest: Guest = AGENT,
) -> Zygote:
    """Start a zygote and wait until it has proved that it can seal a sandbox. Blocks for 50 ms and more.

    Raises UnavailableError with the step that this host refused; nothing is left running then.
    """
    as_root = os.geteuid() == 0
    base = _UID_FIRST + random.SystemRandom().randrange(_UID_BLOCKS) * IDS_PER_BLOCK if as_root else 0
    root = runtime.describe_root(
        site_packages=site_packages, mounts=[*mounts, *guest.binds], read_only="read_only" not in disabled
    )
    copies = [copy for name in (*runtime.INSIDE, *guest.modules) for copy in _copies(name)]
    rootfs = asdict(root)
    rootfs["copies"] += copies
    if guest.root != "/":
        rootfs["folders"] += [guest.root + path for path in runtime.MOUNT_POINTS]
    rootfs["binds"] += [(path, guest.root.rstrip("/") + path, runtime.DEVICE_FLAGS) for path in guest.devices]
    env = dict(os.environ) if "environment" in disabled else runtime.program_env()
    if preload:
        env |= _PRELOAD_ENV
    plan = {
        "supervisor": os.getpid(),
        "root": as_root,
        "uid_base": base,
        "rootfs": rootfs,
        "hostname": HOSTNAME,
        "argv": [runtime.PYTHON, "-I", "-S", "-B", _ZYGOTE],
        "env": env,
        "disabled": sorted(disabled),
    }
    config = {
        "site_packages": next(path for path in root.folders if path.endswith("site-packages")),
        "prefix": runtime.ENVIRONMENT_HOME,
        "env": "".join(f"{name}={value}\0" for name, value in runtime.program_env().items()),
        "preload": list(preload),
        "guest": guest.entry,
        "single": guest is AGENT,
        "filters": guest.filters,
        "root": guest.root,
        "disabled": sorted(disabled),
        "self_test_uid": 1 if as_root else 0,
    }
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with theirs:
            child = subprocess.Popen(
                [runtime.base_python(), "-I", "-S", "-B", str(_LAUNCHER), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=env if "environment" in disabled else {},
                cwd="/",
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
    except OSError as error:
        ours.close()
        raise UnavailableError(f"cannot start {runtime.base_python()}: {error}", tier="jail") from None
    try:
        ours.settimeout(_START_TIMEOUT_S)
        ours.send(json.dumps(plan).encode())
        ours.send(json.dumps(config).encode())
        answer = ours.recv(_MESSAGE_MAX)
        ready = json.loads(answer) if answer else {"error": "the launcher died without a word"}
        if not isinstance(ready, dict) or "ready" not in ready:
            raise UnavailableError(str(ready.get("error", "the launcher did not answer"))[:2000], tier="jail")
        return Zygote(child, ours, ready, base)
    except (OSError, ValueError) as error:
        _discard(child, ours)
        raise UnavailableError(f"the zygote did not start: {error}", tier="jail") from None
    except BaseException:
        _discard(child, ours)
        raise


def _copies(module: str) -> Iterator[tuple[str, str]]:
    """Source and place inside of one of our modules, and of its compiled form where there is one: 50 ms per start."""
    place = f"{runtime.CODE_HOME}/fumehood/{module}"
    yield str(_PACKAGE / module), place
    compiled = cache_from_source(str(_PACKAGE / module))
    if os.path.exists(compiled):
        yield compiled, cache_from_source(place)


def _discard(child: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()
    child.kill()
    child.wait()
