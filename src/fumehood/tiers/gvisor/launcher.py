"""P0 and P1 of the tier ``gvisor``; see the package's theory of operation.

``launcher.py CONTROL`` serves until the control socket, a SOCK_SEQPACKET, ends. Each message there is the plan of one
sandbox (marshal), with descriptors: a socket to answer on, and runsc's standard input (which is the channel), output
and error. P0 answers ``{"spawned": true}`` with P1's pidfd and, at the end, ``{"exited": status, "cpu_s": seconds}``.
P1 waits on the channel for one byte and, beside it, the ways into the cgroup
(:meth:`fumehood.linux.cgroup.Cgroup.entries`). It goes there, mounts, answers on the channel with the work folder's
descriptor, and becomes runsc.

It says one byte on the control socket when it serves. A tier's first sandbox may wait for that, so it imports little:
not ``socket``, ``signal`` or ``json``, but the C modules behind them.
"""

from __future__ import annotations

import _json
import _signal  # type: ignore[import-not-found]
import _socket as socket
import array
import marshal
import os
import select
import sys

sys.path.insert(0, __file__.rsplit("/fumehood/", 1)[0])

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
_RIGHTS_MAX = 4
_ENTRIES_MAX = 8
_GO, _SEALED, _FAILED = b"G", b"S", b"F"  # the words of fumehood.enclosure
_ENTER = b"0"  # as in fumehood.linux.cgroup, which is not loaded here


def main() -> None:
    """Be P0."""
    control = _of_fd(int(sys.argv[1]))
    control.send(b"R")
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
                data, given = receive(control, _MESSAGE_MAX, _RIGHTS_MAX)
                if not data:
                    os._exit(0)
                answer = _of_fd(given[0])
                started = spawn(marshal.loads(data), answer, given[1:])
                if started is not None:
                    pid, pidfd = started
                    living[pidfd] = pid, answer
                    poll.register(pidfd, select.POLLIN)


def _of_fd(fd: int) -> socket.socket:
    return socket.socket(-1, -1, -1, fd)


def receive(end: socket.socket, size: int, fds: int) -> tuple[bytes, list[int]]:
    """At most ``size`` bytes, and the descriptors beside them."""
    data, ancillary, _, _ = end.recvmsg(size, socket.CMSG_SPACE(fds * 4), socket.MSG_CMSG_CLOEXEC)
    return data, [fd for _, _, raw in ancillary for fd in array.array("i", raw[: len(raw) // 4 * 4])]


def spawn(plan: dict[str, Any], answer: socket.socket, given: list[int]) -> tuple[int, int] | None:
    """Make a P1 and say so; its pid and pidfd, None if there is none."""
    flags = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWNET
    try:
        started = clone3(flags | (0 if plan["root"] else CLONE_NEWUSER))
        if started[0] == 0:
            answer.close()
            become_runsc(plan, given)
    except OSError as error:
        _say_error(answer, error)
        return None
    finally:
        for fd in given:
            os.close(fd)
    try:
        if not plan["root"]:
            write_id_maps(started[0], f"0 {os.geteuid()} 1", f"0 {os.getegid()} 1", deny_setgroups=True)
    except OSError as error:
        _say_error(answer, error)  # whoever hears it closes the channel, and P1 ends with that
    else:
        _say(answer, '{"spawned": true}', started[1])
    return started


def tell_end(pid: int, answer: socket.socket) -> None:
    """Reap, and say what P1 and all that it waited for used."""
    _, status, used = os.wait4(pid, 0)
    _say(answer, f'{{"exited": {status}, "cpu_s": {used.ru_utime + used.ru_stime}}}')
    answer.close()


def _say_error(answer: socket.socket, error: OSError) -> None:
    _say(answer, f'{{"error": {_json.encode_basestring_ascii(str(error))}}}')


def _say(answer: socket.socket, message: str, *fds: int) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    try:
        answer.sendmsg([message.encode()], rights, socket.MSG_DONTWAIT)
    except OSError:
        pass  # nobody listens any more


def become_runsc(plan: dict[str, Any], standard: list[int]) -> None:
    """Be P1, with ``standard`` as descriptors 0 to 2. Never returns."""
    try:
        prctl("PR_SET_PDEATHSIG", PR_SET_PDEATHSIG, _signal.SIGKILL)  # runsc waits long, and not for the channel's end
        end = _of_fd(os.dup(standard[0]))
        word, entries = receive(end, 1, _ENTRIES_MAX)
        if word != _GO:
            os._exit(0)
        try:
            for entry in entries:
                os.write(entry, _ENTER)
            os.setsid()
            os.umask(0o022)
            rights = array.array("i", [prepare(plan)])
        except OSError as error:
            end.sendall(_FAILED + str(error).encode())
            os._exit(1)
        end.sendmsg([_SEALED], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        os.chdir(plan["folder"])  # its state is named from here: a socket's path has room for 107 bytes (unix(7))
        for number, fd in enumerate(standard):  # all of them lie above these
            os.dup2(fd, number)
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
