"""P0 and P1 of the tier ``gvisor``; see the package's theory of operation.

``launcher.py CONTROL`` serves until the control socket, a SOCK_SEQPACKET, ends. Each message there is the plan of one
sandbox, with descriptors: a socket to answer on, the channel, a file for what runsc says, and the ways into the cgroup
(:meth:`fumehood.linux.cgroup.Cgroup.entries`). P0 answers ``{"spawned": true}`` with P1's pidfd and, at the end,
``{"exited": status, "cpu_s": seconds}``. P1 goes into the cgroup, waits on the channel for one byte, mounts, answers
there with the work folder's descriptor, and becomes runsc.
"""

from __future__ import annotations

import array
import json
import os
import select
import signal
import socket
import sys

sys.path.insert(0, __file__.rsplit("/fumehood/", 1)[0])

from fumehood.linux.cgroup import ENTER
from fumehood.linux.libc import mount, prctl
from fumehood.linux.mounts import MS_NODEV, MS_NOEXEC, MS_NOSUID, make_private, tmpfs
from fumehood.linux.namespaces import (
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    clone3,
    write_id_maps,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_MESSAGE_MAX = 1 << 18
_RIGHTS_MAX = 16
_GO, _SEALED, _FAILED = b"G", b"S", b"F"  # the words of fumehood.enclosure


def main() -> None:
    """Be P0."""
    control = socket.socket(fileno=int(sys.argv[1]))
    poll = select.poll()
    poll.register(control, select.POLLIN)
    living: dict[int, tuple[int, socket.socket]] = {}  # pidfd -> pid, where to tell its end
    while True:
        for fd, _ in poll.poll():
            if fd in living:
                poll.unregister(fd)
                os.close(fd)
                tell_end(*living.pop(fd))
            else:
                data, ancillary, _, _ = control.recvmsg(
                    _MESSAGE_MAX, socket.CMSG_SPACE(_RIGHTS_MAX * 4), socket.MSG_CMSG_CLOEXEC
                )
                if not data:
                    os._exit(0)
                given = [fd for _, _, raw in ancillary for fd in array.array("i", raw[: len(raw) // 4 * 4])]
                answer = socket.socket(fileno=given[0])
                started = spawn(json.loads(data), answer, given[1:])
                if started is not None:
                    pid, pidfd = started
                    living[pidfd] = pid, answer
                    poll.register(pidfd, select.POLLIN)


def spawn(plan: dict[str, Any], answer: socket.socket, given: list[int]) -> tuple[int, int] | None:
    """Make a P1 and say so; its pid and pidfd, None if there is none."""
    channel, stderr, *entries = given
    flags = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWNET
    try:
        started = clone3(flags | (0 if plan["root"] else CLONE_NEWUSER))
        if started[0] == 0:
            answer.close()
            become_runsc(plan, channel, stderr, entries)
    except OSError as error:
        _say(answer, {"error": str(error)})
        return None
    finally:
        for fd in given:
            os.close(fd)
    try:
        if not plan["root"]:
            write_id_maps(started[0], f"0 {os.geteuid()} 1", f"0 {os.getegid()} 1", deny_setgroups=True)
    except OSError as error:
        _say(answer, {"error": str(error)})  # whoever hears it closes the channel, and P1 ends with that
    else:
        _say(answer, {"spawned": True}, started[1])
    return started


def tell_end(pid: int, answer: socket.socket) -> None:
    """Reap, and say what P1 and all that it waited for used."""
    _, status, used = os.wait4(pid, 0)
    _say(answer, {"exited": status, "cpu_s": used.ru_utime + used.ru_stime})
    answer.close()


def _say(answer: socket.socket, message: dict[str, Any], *fds: int) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    try:
        answer.sendmsg([json.dumps(message).encode()], rights, socket.MSG_DONTWAIT)
    except OSError:
        pass  # nobody listens any more


def become_runsc(plan: dict[str, Any], channel: int, stderr: int, entries: list[int]) -> None:
    """Be P1. Never returns."""
    try:
        prctl("PR_SET_PDEATHSIG", PR_SET_PDEATHSIG, signal.SIGKILL)  # runsc waits long, and not for the channel's end
        if os.read(channel, 1) != _GO:
            os._exit(0)
        with socket.socket(fileno=os.dup(channel)) as end:
            try:
                for entry in entries:
                    os.write(entry, ENTER)
                os.setsid()
                os.umask(0o022)
                rights = array.array("i", [prepare(plan)])
            except OSError as error:
                end.sendall(_FAILED + str(error).encode())
                os._exit(1)
            end.sendmsg([_SEALED], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        os.chdir(plan["folder"])  # its state is named from here: a socket's path has room for 107 bytes (unix(7))
        os.dup2(channel, 0)
        os.dup2(channel, 1)
        os.dup2(stderr, 2)
        os.closerange(3, 1 << 30)
        os.execve(plan["argv"][0], plan["argv"], plan["env"])
    finally:
        os._exit(1)


def prepare(plan: dict[str, Any]) -> int:
    """The scratch, in a mount namespace that nobody else sees; a descriptor of the work folder."""
    make_private()
    # P1's own view: runsc looks at its children by the pids of this namespace.
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    scratch = plan["scratch"]
    tmpfs(scratch, size_bytes=plan["disk_bytes"], inodes=plan["files"], mode="0755", flags=MS_NOSUID | MS_NODEV)
    for name in plan["folders"]:
        os.mkdir(f"{scratch}/{name}", 0o755)
        os.chown(f"{scratch}/{name}", plan["uid"], plan["uid"])
    return os.open(f"{scratch}/{plan['folders'][0]}", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


if __name__ == "__main__":
    main()
