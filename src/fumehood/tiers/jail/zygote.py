"""Stage 2: the zygote. PID 1 of the outer PID namespace, inside the root, uid 0 of a user namespace without privilege.

It imports what sandboxes start with, loads the long seccomp filter, proves on a throwaway child that this host lets a
sandbox seal itself, and then serves its control socket. Messages are datagrams with descriptors beside them:

    supervisor -> zygote   REQUEST (id, uid, flags) + the guest's end of the channel
    zygote -> supervisor   {"ready": …}                                     once
                           ANSWER (SPAWNED, id) + pidfds, or (REFUSED, id) and the reason
                           ANSWER (EXITED, id, status, seconds)     of what is dead and reaped

A sandbox is one child, which becomes the agent and PID 1; or, for a single program, two: a PID 1 that does nothing, and
beside it the program's own process (:mod:`fumehood.tiers.jail.program`). The pidfds are PID 1's and the other's; it is
the other's end that is told, and PID 1 is killed then. They exist before anybody knows their limits: those come over
the channel, with the word to seal (:class:`fumehood.tiers.jail.controls.Numbers`).

It runs nobody's code itself, in namespaces from which it is invisible; a PID 1 that does nothing shares its memory and
is shut to programs: it is not dumpable, and belongs to another user namespace.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # without the enums of ``signal``: this is done for each sandbox
import array
import builtins
import errno
import gc
import importlib
import json
import os
import resource
import select
import shutil
import signal
import socket
import struct
import sys
import traceback
import types

sys.path.insert(0, __file__.rsplit("/fumehood/", 1)[0])

from fumehood.guest import agent
from fumehood.linux import capabilities, landlock
from fumehood.linux.forks import Forks
from fumehood.linux.libc import setns, umount, unshare
from fumehood.linux.mounts import MNT_DETACH, MS_NODEV, MS_NOEXEC, MS_NOSUID, tmpfs
from fumehood.linux.namespaces import CLONE_NEWNET, CLONE_NEWPID, WAIT_ALL, IdleInit, write_id_maps
from fumehood.linux.seccomp import load as load_filter
from fumehood.linux.steps import at_once
from fumehood.tiers.jail.controls import CHANNEL_FD, CLONED, REHEARSED, RLIMITS, SINGLE, UID, WORK, Box, numbers
from fumehood.tiers.jail.program import SEALED, answer, become_single, go_on, practise

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

CONTROL_FD = 3
REQUEST = struct.Struct("!QIB")  # ident, uid, flags of controls
ANSWER = struct.Struct("!cQqd")  # kind, ident, wait status or -1, CPU seconds
SPAWNED, EXITED, REFUSED = b"s", b"x", b"r"
_REASON_BYTES = 1000
_MESSAGE_MAX = 1 << 18
_SELF_TEST_RLIMITS = dict.fromkeys(RLIMITS, 0) | {"NOFILE": 64, "CPU": 10}
_PRELOAD_BYTES = 64 << 20
_NETWORKS_MAX = 64  # empty network namespaces kept for the next sandboxes
#: What must not be switched off where a PID 1 does nothing: it makes the namespaces, and shares the zygote's memory.
NEEDED_ALONE = frozenset((*CLONED, "undumpable"))
#: What ordinary programs import first; in every sandbox for the price of a copy-on-write page.
_COMMON = (
    "base64 bisect collections contextlib copy csv dataclasses datetime decimal enum functools hashlib heapq io "
    "itertools json math operator random re statistics string struct textwrap time types typing"
)


class Networks:
    """Network namespaces that nobody uses: a sandbox enters one from here and it returns when the sandbox is dead.

    Making one takes a third of a millisecond and its removal by the kernel more; nothing can be left in one, since
    its only device is down, no process in it ever had a capability over it, and a socket dies with its process.
    """

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._free: list[int] = []

    def enter(self) -> int:
        """Move this process into an unused network namespace, for the child it clones next."""
        if not self._enabled:
            return -1
        if self._free:
            fd = self._free.pop()
            setns(fd, CLONE_NEWNET)
            return fd
        unshare(CLONE_NEWNET)
        return os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    def give_back(self, fd: int) -> None:
        """Keep the namespace for another sandbox; its last process is dead."""
        if fd < 0:
            return
        if len(self._free) < _NETWORKS_MAX:
            self._free.append(fd)
        else:
            os.close(fd)


class Sandbox:
    """A sandbox that lives: its first process, and the program's if that is another."""

    def __init__(self, ident: int | None, network: int) -> None:
        self.ident = ident  # of the request; None: the zygote's own
        self.network = network
        self.init = self.init_fd = -1
        self.program = -1


class Zygote:
    """The control socket, the living children, and what each needs."""

    def __init__(self, control: socket.socket, config: dict[str, Any], forks: Forks) -> None:
        self.control = control
        self.forks = forks
        # What a sandbox's channel is in there, where it has the place of ``control``. Of no use here.
        self.guest_end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, CHANNEL_FD)
        self.config = config
        self.networks = Networks("net_ns" not in config["disabled"])
        self.poll = select.poll()
        self.children: dict[int, tuple[int, Sandbox]] = {}  # pidfd -> pid, sandbox
        self.inits = IdleInit()
        self.boxes: dict[int, Box] = {}  # by the flags of requests
        self.own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)

    def serve(self) -> None:
        """Until the supervisor's end of the control socket closes."""
        self.poll.register(self.control, select.POLLIN)
        while True:
            for fd, _ in self.poll.poll():
                if fd in self.children:
                    self.reap(fd)
                elif not self.take_request():
                    return

    def take_request(self) -> bool:
        """Serve one request; False at the end of file."""
        message, ancillary, _, _ = self.control.recvmsg(REQUEST.size, socket.CMSG_SPACE(4))
        if not message:
            return False
        channel = array.array("i", ancillary[0][2])[0]
        ident, uid, flags = REQUEST.unpack(message)
        try:
            box = self.box(flags & ~REHEARSED)
            box.rehearsed = bool(flags & REHEARSED)
            box.host_uid = uid
            spawn = self.spawn_single if box.single else self.spawn
            sandbox = Sandbox(ident, self.networks.enter())
            try:
                pidfds = spawn(box, channel, sandbox)
            except OSError:
                if sandbox.init < 0:  # or else when that is dead
                    self.networks.give_back(sandbox.network)
                raise
            self.send(ANSWER.pack(SPAWNED, ident, 0, 0), *pidfds)
        except OSError as error:
            self.send(ANSWER.pack(REFUSED, ident, 0, 0) + str(error).encode("utf-8", "replace")[:_REASON_BYTES])
        finally:
            os.close(channel)
        return True

    def box(self, flags: int) -> Box:
        """What sandboxes of this kind are held to."""
        box = self.boxes.get(flags)
        if box is None:
            box = self.boxes[flags] = Box(flags, self.config)
        return box

    def spawn(self, box: Box, channel: int, sandbox: Sandbox) -> list[int]:
        """Clone a sandbox's first process, for its pidfd; it waits until the supervisor lets it go on."""
        box.channel.value = channel
        pid, sandbox.init_fd = self.forks.clone3(box.clone_flags(), exit_signal=0)
        if pid == 0:
            become_sandbox(box, self.guest_end)
        sandbox.init = pid
        self.watch(sandbox.init, sandbox.init_fd, sandbox)
        if "user_ns" not in box.disabled:
            map_ids(sandbox.init, box)
        return [sandbox.init_fd]

    def spawn_single(self, box: Box, channel: int, sandbox: Sandbox) -> list[int]:
        """Start a PID 1 that does nothing and the program's process beside it, for their pidfds."""
        # PID 1 has nobody to wait for orphans, and is born to ignore SIGCHLD so that the kernel reaps them. Here it is
        # ignored for no longer than that: a program's process that executed another ends with SIGCHLD after all
        # (de_thread() in fs/exec.c), and who ignores that cannot wait for it.
        _signal.signal(_signal.SIGCHLD, _signal.SIG_IGN)
        try:
            sandbox.init, sandbox.init_fd = self.inits.start(box.clone_flags())
        finally:
            _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
        self.watch(sandbox.init, sandbox.init_fd, sandbox)
        try:
            map_ids(sandbox.init, box)
            setns(sandbox.init_fd, CLONE_NEWPID)
            try:
                box.init_fd.value, box.channel.value = sandbox.init_fd, channel
                sandbox.program, program_fd = self.forks.clone3(0, exit_signal=0)
                if sandbox.program == 0:
                    become_single(box, self.guest_end)
            finally:
                setns(self.own_pids, CLONE_NEWPID)
        except OSError:
            os.kill(sandbox.init, signal.SIGKILL)
            raise
        self.watch(sandbox.program, program_fd, sandbox)
        return [sandbox.init_fd, program_fd]

    def watch(self, pid: int, pidfd: int, sandbox: Sandbox) -> None:
        self.children[pidfd] = pid, sandbox
        self.poll.register(pidfd, select.POLLIN)

    def reap(self, pidfd: int) -> None:
        """Collect a dead process. The end of the one that counts is told; PID 1 takes with it whatever is left."""
        pid, sandbox = self.children.pop(pidfd)
        self.poll.unregister(pidfd)
        try:
            _, status, used = os.wait4(pid, WAIT_ALL)
            cpu_s = used.ru_utime + used.ru_stime
        except ChildProcessError:  # it ended in the moment of spawn_single: only its status is lost
            status, cpu_s = -1, 0.0
        if pid in (sandbox.program, sandbox.init if sandbox.program < 0 else -1) and sandbox.ident is not None:
            self.send(ANSWER.pack(EXITED, sandbox.ident, status, cpu_s))
        if pid == sandbox.program:
            if sandbox.init_fd >= 0:
                signal.pidfd_send_signal(sandbox.init_fd, signal.SIGKILL)
        else:
            sandbox.init_fd = -1
            self.inits.reaped(pid)
            self.networks.give_back(sandbox.network)
        os.close(pidfd)

    def send(self, message: bytes, *fds: int) -> None:
        """One message, with descriptors if given. The supervisor may be gone: then the loop ends by itself."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self.control.sendmsg([message], rights)
        except (BrokenPipeError, ConnectionResetError):
            pass


def map_ids(pid: int, box: Box) -> None:
    """The one id that a sandbox has, inside and outside. Raises OSError."""
    write_id_maps(pid, f"{UID} {box.host_uid} 1", f"{UID} {box.host_uid} 1", deny_setgroups=False)


def become_sandbox(box: Box, end: socket.socket) -> None:
    """In the child: wait for the word, seal, answer, serve. Never returns."""
    try:
        box.begin.run()
        if go_on(end, box):
            answer(end, box.work_fd.value)
            end.detach()
            if box.numbers.touch:
                agent.serve(CHANNEL_FD, CHANNEL_FD, WORK, touch=True)
            box.serve(CHANNEL_FD, CHANNEL_FD, WORK)
    finally:
        os._exit(1)


def prepare(config: dict[str, Any], filters: types.ModuleType, forks: Forks) -> None:
    """Everything that sandboxes share, done once."""
    heard = forks.listen()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.path.append(config["site_packages"])
    sys.prefix = sys.exec_prefix = config["prefix"]
    for name in _COMMON.split():
        importlib.import_module(name)
    if config["preload"]:
        # Packages such as matplotlib write caches when imported. Each sandbox has its own /tmp on top of this.
        tmpfs("/tmp", size_bytes=_PRELOAD_BYTES, inodes=4096, mode="1777", flags=MS_NOSUID | MS_NODEV | MS_NOEXEC)
        for name in config["preload"]:
            importlib.import_module(name)
            if len(os.listdir("/proc/self/task")) > 1:
                raise RuntimeError(f"preload: {name} started a thread when imported; leave it out")
        shutil.rmtree("/tmp", ignore_errors=True)
        umount("/tmp", MNT_DETACH)
    if "no_new_privs" not in config["disabled"]:
        at_once(capabilities.no_new_privs)
    if "seccomp" not in config["disabled"]:
        at_once(load_filter, filters.allow_list())
    module, _, function = config["guest"].partition(":")
    config["serve"] = getattr(importlib.import_module(module), function)
    builtins.exec(compile("x = 1\n", "<warm>", "exec"), {})
    sys.path.remove(__file__.rsplit("/fumehood/", 1)[0])
    if "undumpable" in config["disabled"]:
        agent.make_undumpable = agent.make_dumpable
    agent.prepare(config["env"].encode())  # programs see a plain interpreter
    agent.make_undumpable()  # a PID 1 that does nothing shares this memory, and programs see it
    signal.pthread_sigmask(signal.SIG_SETMASK, range(1, signal.NSIG))
    # Nor has that PID 1 a queue: as an ordinary user, its sandbox may send it signals where Landlock does not say no.
    resource.setrlimit(resource.RLIMIT_SIGPENDING, (0, resource.getrlimit(resource.RLIMIT_SIGPENDING)[1]))
    if config["single"]:
        gc.collect()
        gc.freeze()  # or else each round of practice would look through all that was imported
        practise()
    heard()
    gc.collect()
    gc.freeze()


def self_test(zygote: Zygote, *, single: bool) -> str:
    """Seal one throwaway child as a sandbox would be; the error it met, or nothing."""
    ours, theirs = socket.socketpair()
    box = zygote.box(SINGLE if single else 0)
    box.host_uid = zygote.config["self_test_uid"]
    sandbox = Sandbox(None, zygote.networks.enter())
    try:
        (zygote.spawn_single if single else zygote.spawn)(box, theirs.fileno(), sandbox)
    except OSError as error:
        return f"clone into new namespaces: {error}"
    theirs.close()
    try:
        ours.send(numbers(disk_bytes=1 << 20, files=64, rlimits=_SELF_TEST_RLIMITS, touch=False))
        said = ours.recv(_MESSAGE_MAX)
        if said[:1] != SEALED:
            return said[1:].decode() or "the child died while it sealed itself"
        return ""
    except OSError as error:
        return str(error)
    finally:
        ours.close()
        os.kill(sandbox.init, signal.SIGKILL)
        for fd in reversed(tuple(zygote.children)):  # a program before its PID 1
            zygote.reap(fd)


def main() -> None:
    """Take the configuration, prepare, test, serve."""
    control = socket.socket(fileno=CONTROL_FD)
    os.set_inheritable(CONTROL_FD, False)
    try:
        config = json.loads(control.recv(_MESSAGE_MAX))
        config["disabled"] = frozenset(config["disabled"])
        filters = importlib.import_module(config["filters"])
        config["seal_filter"] = filters.seal()
        config["landlock_abi"] = landlock.abi()
        config["last_capability"] = capabilities.last()
        forks = Forks()
        prepare(config, filters, forks)
        zygote = Zygote(control, config, forks)
        failed = self_test(zygote, single=False)
        wanted = config["single"] and not config["disabled"] & NEEDED_ALONE
        alone = wanted and not self_test(zygote, single=True)
    except Exception as error:
        text = "".join(traceback.format_exception_only(error)).strip()
        control.send(
            json.dumps({"error": f"prepare the zygote: {text}", "errno": getattr(error, "errno", None)}).encode()
        )
        os._exit(1)
    if failed:
        control.send(json.dumps({"error": f"seal a sandbox: {failed}", "errno": errno.EPERM}).encode())
        os._exit(1)
    covers = landlock.covers(config["landlock_abi"])
    ready = {"ready": True, "seccomp": filters.describe(), "landlock": covers, "single": alone}
    control.send(json.dumps(ready).encode())
    zygote.serve()
    os._exit(0)


if __name__ == "__main__":
    main()
