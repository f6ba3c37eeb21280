"""P0 and P1 of a sandbox of tier ``subprocess``; see the package's theory of operation.

``launcher.py CONTROL CHANNEL`` takes its plan from the control socket, a SOCK_SEQPACKET on which P0 answers
``{"spawned": true, "folder": path, "shown_at": path}`` with P1's pidfd and, at the end, ``{"exited": status, "cpu_s":
seconds}``. The folders are P0's (the work folder, and where packages are shown): it makes them, and waits at last for
the word ``removed``. If the socket ends without it, at whatever moment, P0 removes them. So a supervisor that is killed
leaves none. P1 waits on the channel for one byte, seals itself, reports there, and serves frames.
``launcher.py --probe root|user`` only clones and exits.
"""

from __future__ import annotations

import array
import importlib
import json
import os
import resource
import select
import signal
import socket
import sys

sys.path.insert(0, __file__.rsplit("/fumehood/", 1)[0])

from fumehood.guest import agent
from fumehood.linux import capabilities
from fumehood.linux.mounts import MS_NODEV, MS_NOSUID, MS_RDONLY, bind, make_private
from fumehood.linux.namespaces import (
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    clone3,
    write_id_maps,
)
from fumehood.linux.steps import at_once

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

CHANNEL_FD = 3
REMOVED = b"removed"
_MESSAGE_MAX = 1 << 18


def flags(root: bool, network: bool, mounts: bool = False) -> int:
    """Namespaces of a sandbox: those that hold something here, the user namespace that an ordinary user needs, and
    with ``mounts`` one to show it a folder in that its user may not reach."""
    wanted = CLONE_NEWPID | CLONE_NEWIPC
    if not network:
        wanted |= CLONE_NEWNET
    if not root:
        wanted |= CLONE_NEWUSER
    if mounts:
        wanted |= CLONE_NEWNS
    return wanted


def map_own_id(pid: int) -> None:
    """In the user namespace of ``pid``, this user is itself and nobody else exists."""
    uid, gid = os.geteuid(), os.getegid()
    write_id_maps(pid, f"{uid} {uid} 1", f"{gid} {gid} 1", deny_setgroups=True)


def main() -> None:
    """Be P0."""
    if sys.argv[1] == "--probe":
        probe(sys.argv[2] == "root")
    folders = Folders()
    try:
        last = hold(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), folders)
    except (OSError, ValueError):  # whoever cannot be told, or does not tell a plan, is gone
        last = b""
    if last != REMOVED:
        folders.remove()
    os._exit(0)


class Folders:
    """What P0 has made in the folder for temporary files."""

    def __init__(self) -> None:
        self.work: tuple[int, str] | None = None
        self.shown_at: str | None = None

    def make(self, base: str, uid: int | None, shown: bool) -> None:
        """The work folder, of user ``uid`` if that is another, and where packages are to be shown."""
        path = make_folder(base)
        self.work = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC), path
        if uid is not None:
            os.chown(path, uid, uid)
        if shown:
            self.shown_at = make_folder(base)

    def remove(self) -> None:
        """In place of a supervisor that has been killed."""
        from fumehood.folders import place_of, remove_tree

        if self.shown_at is not None:
            os.rmdir(self.shown_at)
        if self.work is not None:
            remove_tree(place_of(*self.work))


def make_folder(base: str) -> str:
    """As tempfile.mkdtemp(), whose import takes longer than P0."""
    path = f"{base}/fumehood-{os.urandom(8).hex()}"
    os.mkdir(path, 0o700)
    return path


def hold(control: socket.socket, channel: int, folders: Folders) -> bytes:
    """Clone P1, see it to its end, and return the supervisor's last word, b"" if it has died."""
    plan = json.loads(control.recv(_MESSAGE_MAX))
    supervisor = os.pidfd_open(plan["supervisor"])
    if os.getppid() != plan["supervisor"]:
        return b""  # it is gone already
    try:
        folders.make(plan["base"], plan["uid"] if plan["root"] else None, plan["shown"])
        assert folders.work is not None
        plan["folder"], plan["shown_at"] = folders.work[1], folders.shown_at
        pid, pidfd = clone3(flags(plan["root"], plan["network"], plan["shown"]))
        if pid == 0:
            control.close()
            become_sandbox(plan, channel)
        os.close(channel)
        if not plan["root"]:
            map_own_id(pid)
    except OSError as error:
        control.send(json.dumps({"error": str(error)}).encode())
        return control.recv(_MESSAGE_MAX)
    rights = array.array("i", [pidfd])
    told = json.dumps({"spawned": True, "folder": plan["folder"], "shown_at": plan["shown_at"]}).encode()
    control.sendmsg([told], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
    ended = select.poll()
    for fd in (supervisor, pidfd):
        ended.register(fd, select.POLLIN)
    ended.register(control, 0)  # its end alone: the supervisor could not take what it was sent
    ended.poll()
    os.kill(pid, signal.SIGKILL)  # if it is the supervisor that ended; P1 may be busy importing and not listen
    _, status, used = os.wait4(pid, 0)
    control.send(json.dumps({"exited": status, "cpu_s": used.ru_utime + used.ru_stime}).encode())
    return control.recv(_MESSAGE_MAX)


def probe(root: bool) -> None:
    """Exit 0 if this host lets P0 do what it must; else print the reason and exit 1."""
    held, release = os.pipe()
    try:
        pid, _ = clone3(flags(root, network=False))
        if pid == 0:
            os.close(release)
            os.read(held, 1)  # its ids can be mapped only while it lives
            os._exit(0)
        if not root:
            map_own_id(pid)
        os.close(release)
        os.waitpid(pid, 0)
    except OSError as error:
        print(error, flush=True)
        os._exit(1)
    os._exit(0)


def become_sandbox(plan: dict[str, Any], channel: int) -> None:
    """Be P1: wait for the word, seal, report, serve. Never returns."""
    try:
        os.dup2(channel, CHANNEL_FD, inheritable=False)
        if os.read(CHANNEL_FD, 1) != b"G":
            os._exit(0)
        try:
            show_packages(plan)
            seal(plan)
            prepare(plan)
        except Exception as error:
            os.write(CHANNEL_FD, b"F" + f"{type(error).__name__}: {error}".encode())
            return
        os.write(CHANNEL_FD, b"S")
        agent.serve(CHANNEL_FD, CHANNEL_FD, plan["folder"])
    finally:
        os._exit(1)


def show_packages(plan: dict[str, Any]) -> None:
    """Bind packages that lie where only root may go to a folder that every user may enter."""
    if plan["shown_at"] is not None:
        make_private()
        bind(plan["site_packages"], plan["shown_at"], MS_RDONLY | MS_NOSUID | MS_NODEV)
        plan["site_packages"] = plan["shown_at"]


def seal(plan: dict[str, Any]) -> None:
    """Everything that holds this process from here on."""
    os.closerange(CHANNEL_FD + 1, 1 << 30)
    os.setsid()
    highest = capabilities.last()
    for name, value in plan["rlimits"].items():
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))
    if plan["root"]:
        os.setgroups([])
        os.setresgid(plan["uid"], plan["uid"], plan["uid"])
        at_once(capabilities.drop_bounding, highest)
        os.setresuid(plan["uid"], plan["uid"], plan["uid"])  # which empties the other sets
    else:
        at_once(capabilities.drop_all, highest)
    at_once(capabilities.no_new_privs)
    os.chdir(plan["folder"])
    os.umask(0o077)


def prepare(plan: dict[str, Any]) -> None:
    """The interpreter that programs see."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.path.pop(0)
    if plan["site_packages"]:
        sys.path.append(plan["site_packages"])
    for name in plan["preload"]:
        importlib.import_module(name)


if __name__ == "__main__":
    main()
