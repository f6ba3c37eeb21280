"""P0 and P1 of a sandbox of tier ``gvisor``; see the package's theory of operation.

``launcher.py CONTROL CHANNEL STDERR`` takes its plan from the control socket, a SOCK_SEQPACKET on which P0 answers
``{"spawned": true}`` with P1's pidfd and, at the end, ``{"exited": status, "cpu_s": seconds}``. P1 waits on the channel
for one byte, mounts, answers there with the work folder's descriptor, and becomes runsc.
"""

from __future__ import annotations

import array
import json
import os
import socket
import sys

sys.path.insert(0, __file__.rsplit("/fumehood/", 1)[0])

from fumehood.linux.libc import mount
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

_MESSAGE_MAX = 1 << 18
_GO, _SEALED, _FAILED = b"G", b"S", b"F"  # the words of fumehood.enclosure


def main() -> None:
    """Be P0."""
    control = socket.socket(fileno=int(sys.argv[1]))
    channel, stderr = int(sys.argv[2]), int(sys.argv[3])
    plan = json.loads(control.recv(_MESSAGE_MAX))
    flags = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWNET
    try:
        pid, pidfd = clone3(flags | (0 if plan["root"] else CLONE_NEWUSER))
        if pid == 0:
            control.close()
            become_runsc(plan, channel, stderr)
        os.close(channel)
        if not plan["root"]:
            write_id_maps(pid, f"0 {os.geteuid()} 1", f"0 {os.getegid()} 1", deny_setgroups=True)
    except OSError as error:
        control.send(json.dumps({"error": str(error)}).encode())
        os._exit(1)
    rights = array.array("i", [pidfd])
    control.sendmsg([b'{"spawned": true}'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
    os.close(pidfd)
    _, status, used = os.wait4(pid, 0)
    try:
        control.send(json.dumps({"exited": status, "cpu_s": used.ru_utime + used.ru_stime}).encode())
    except OSError:
        pass  # the supervisor is gone
    os._exit(0)


def become_runsc(plan: dict[str, Any], channel: int, stderr: int) -> None:
    """Be P1. Never returns."""
    try:
        if os.read(channel, 1) != _GO:
            os._exit(0)
        with socket.socket(fileno=os.dup(channel)) as end:
            try:
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
