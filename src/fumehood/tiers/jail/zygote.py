"""Stage 2: the zygote. PID 1 of the outer PID namespace, inside the root, uid 0 of a user namespace without privilege.

It imports what sandboxes start with, loads the long seccomp filter, proves on a throwaway child that this host lets a
sandbox seal itself, and then serves its control socket. Messages are JSON datagrams with descriptors beside them:

    supervisor -> zygote   {"id", "disk_bytes", "files", "rlimits", "uid", "terminals", "touch"}
                           + the agent's end of the channel
    zygote -> supervisor   {"ready": …}                                     once
                           {"id", "spawned": true} + pidfd, or {"id", "error"}
                           {"id", "exited": status, "cpu_s": seconds}

It runs nobody's code: the program runs in children of its children, in namespaces from which this process is invisible.
"""

from __future__ import annotations

import array
import builtins
import errno
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import traceback
import types

sys.path.insert(0, __file__.rsplit("/fumehood/", 1)[0])

from fumehood.guest import agent
from fumehood.linux import capabilities, landlock
from fumehood.linux.libc import setns, umount, unshare
from fumehood.linux.mounts import MNT_DETACH, MS_NODEV, MS_NOEXEC, MS_NOSUID, tmpfs
from fumehood.linux.namespaces import CLONE_NEWNET, clone3, write_id_maps
from fumehood.linux.seccomp import load as load_filter
from fumehood.tiers.jail.controls import CHANNEL_FD, UID, WORK, Box, seal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

CONTROL_FD = 3
_MESSAGE_MAX = 1 << 18
GO, SEALED, FAILED = b"G", b"S", b"F"  # as in fumehood.enclosure, which is not loaded here
ENTER = b"0"  # as in fumehood.linux.cgroup
_ENTRIES_SPACE = socket.CMSG_SPACE(4 * 4)  # a cgroup has at most four trees
_PRELOAD_BYTES = 64 << 20
_NETWORKS_MAX = 64  # empty network namespaces kept for the next sandboxes
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


class Zygote:
    """The control socket, the living children, and what each needs."""

    def __init__(self, control: socket.socket, config: dict[str, Any]) -> None:
        self.control = control
        self.config = config
        self.networks = Networks("net_ns" not in config["disabled"])
        self.poll = select.poll()
        self.children: dict[int, tuple[int, int, int]] = {}  # pidfd -> request id, pid, network

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
        message, ancillary, _, _ = self.control.recvmsg(_MESSAGE_MAX, socket.CMSG_SPACE(4))
        if not message:
            return False
        channel = array.array("i", ancillary[0][2])[0]
        request = json.loads(message)
        try:
            self.spawn(request, channel)
        except OSError as error:
            self.send({"id": request["id"], "error": str(error)})
        finally:
            os.close(channel)
        return True

    def spawn(self, request: dict[str, Any], channel: int) -> None:
        """Clone a sandbox's first process and report its pidfd; it waits until the supervisor lets it go on."""
        box = Box(request, self.config)
        network = self.networks.enter()
        try:
            pid, pidfd = clone3(box.clone_flags())
        except OSError:
            self.networks.give_back(network)
            raise
        if pid == 0:
            become_sandbox(box, channel)
        self.children[pidfd] = (request["id"], pid, network)
        self.poll.register(pidfd, select.POLLIN)
        if "user_ns" not in box.disabled:
            write_id_maps(pid, f"{UID} {box.host_uid} 1", f"{UID} {box.host_uid} 1", deny_setgroups=False)
        self.send({"id": request["id"], "spawned": True}, pidfd)

    def reap(self, pidfd: int) -> None:
        """Collect a dead sandbox and tell what it used."""
        ident, pid, network = self.children.pop(pidfd)
        self.poll.unregister(pidfd)
        os.close(pidfd)
        _, status, used = os.wait4(pid, 0)
        self.networks.give_back(network)
        self.send({"id": ident, "exited": status, "cpu_s": used.ru_utime + used.ru_stime})

    def send(self, message: dict[str, Any], fd: int = -1) -> None:
        """One message, with a descriptor if given. The supervisor may be gone: then the loop ends by itself."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd >= 0 else []
        try:
            self.control.sendmsg([json.dumps(message).encode()], rights)
        except (BrokenPipeError, ConnectionResetError):
            pass


def become_sandbox(box: Box, channel: int) -> None:
    """In the child: wait for the word, seal, answer, serve. Never returns."""
    try:
        os.dup2(channel, CHANNEL_FD, inheritable=False)
        end = socket.socket(fileno=CHANNEL_FD)
        word, entries, _, _ = end.recvmsg(1, _ENTRIES_SPACE)
        if word == GO:
            try:
                enter(entries)
                seal(box)
            except Exception as error:
                end.send(FAILED + f"{type(error).__name__}: {error}".encode())
                return
            answer(end, box.work_fd)
            end.detach()
            if box.touch:
                agent.serve(CHANNEL_FD, CHANNEL_FD, WORK, touch=True)
            box.serve(CHANNEL_FD, CHANNEL_FD, WORK)
    finally:
        os._exit(1)


def enter(entries: list[tuple[int, int, bytes]]) -> None:
    """Move this process into the cgroup whose files came along; see Cgroup.entries(). The descriptors stay open until
    the sandbox closes all that are not its own. Raises OSError."""
    for _, _, given in entries:
        for fd in array.array("i", given):
            try:
                os.write(fd, ENTER)
            except OSError as error:
                raise OSError(error.errno, f"enter the cgroup: {error.strerror}") from None


def answer(end: socket.socket, work_fd: int) -> None:
    """Say that this process is sealed, and hand over its work folder."""
    if work_fd < 0:
        end.send(SEALED)
        return
    end.sendmsg([SEALED], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, work_fd.to_bytes(4, sys.byteorder))])
    os.close(work_fd)


def prepare(config: dict[str, Any], filters: types.ModuleType) -> None:
    """Everything that sandboxes share, done once."""
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
        capabilities.no_new_privs()
    if "seccomp" not in config["disabled"]:
        load_filter(filters.allow_list())
    module, _, function = config["guest"].partition(":")
    config["serve"] = getattr(importlib.import_module(module), function)
    builtins.exec(compile("x = 1\n", "<warm>", "exec"), {})
    sys.path.remove(__file__.rsplit("/fumehood/", 1)[0])
    if "undumpable" in config["disabled"]:
        agent.make_undumpable = agent.make_dumpable
    agent.prepare(config["env"].encode())  # programs see a plain interpreter
    gc.collect()
    gc.freeze()


def self_test(zygote: Zygote) -> str:
    """Seal one throwaway child as a sandbox would be; the error it met, or nothing."""
    ours, theirs = socket.socketpair()
    box = Box(zygote.config["self_test"], zygote.config)
    network = zygote.networks.enter()
    try:
        pid, pidfd = clone3(box.clone_flags())
    except OSError as error:
        return f"clone3 into new namespaces: {error}"
    if pid == 0:
        ours.close()
        become_sandbox(box, theirs.fileno())
    theirs.close()
    try:
        if "user_ns" not in box.disabled:
            write_id_maps(pid, f"{UID} {box.host_uid} 1", f"{UID} {box.host_uid} 1", deny_setgroups=False)
        ours.send(GO)
        said = ours.recv(_MESSAGE_MAX)
        if said[:1] != SEALED:
            return said[1:].decode() or "the child died while it sealed itself"
        return ""
    except OSError as error:
        return f"map ids: {error}"
    finally:
        ours.close()  # the agent's end of file: it exits
        os.waitpid(pid, 0)
        os.close(pidfd)
        zygote.networks.give_back(network)


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
        prepare(config, filters)
        zygote = Zygote(control, config)
        failed = self_test(zygote)
    except Exception as error:
        text = "".join(traceback.format_exception_only(error)).strip()
        control.send(
            json.dumps({"error": f"prepare the zygote: {text}", "errno": getattr(error, "errno", None)}).encode()
        )
        os._exit(1)
    if failed:
        control.send(json.dumps({"error": f"seal a sandbox: {failed}", "errno": errno.EPERM}).encode())
        os._exit(1)
    ready = {"ready": True, "seccomp": filters.describe(), "landlock": landlock.covers(config["landlock_abi"])}
    control.send(json.dumps(ready).encode())
    zygote.serve()
    os._exit(0)


if __name__ == "__main__":
    main()
