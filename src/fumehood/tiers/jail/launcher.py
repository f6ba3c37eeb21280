"""Stage 1: makes the zygote's namespaces and its root, then execs Python inside it.

Run as a script; the one argument is the descriptor of the control socket, the only one of the supervisor's that is
open. The first message on it is the plan. Two processes: P0 stays in the host's mount namespace (it writes id maps,
waits, kills P1 if the supervisor dies, and passes on the exit status); P1 is PID 1 of the new PID namespace and becomes
the zygote. Started by root, P1 only waits, and its one child, PID 1 of a PID namespace below, becomes the zygote.

Whatever fails is sent as ``{"error": step and reason, "errno": n}`` before anything of a sandbox exists.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import stat
import sys

sys.path.insert(0, __file__.rsplit("/fumehood/", 1)[0])

from fumehood.linux.libc import mount, prctl, unshare
from fumehood.linux.mounts import (
    MS_BIND,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_RDONLY,
    MS_REMOUNT,
    bind,
    make_private,
    pivot_to,
    tmpfs,
)
from fumehood.linux.namespaces import (
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    CLONE_NEWUTS,
    write_id_maps,
)
from fumehood.linux.steps import at_once

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

CONTROL_FD = 3
_PR_SET_PDEATHSIG = 1
_MESSAGE_MAX = 1 << 18
_ROOT_BYTES = 32 << 20
_ROOT = "/tmp"  # any folder that every system has; the mount on it exists in P1's namespace only
IDS = 65536  # ids that the zygote's user namespace maps when root started it


class Step:
    """Names the step under way, for the error message."""

    now = "read the plan"


def main() -> None:
    """Launch as the plan on the control socket says; the exit status is the zygote's."""
    os.dup2(int(sys.argv[1]), CONTROL_FD)
    os.closerange(CONTROL_FD + 1, 1 << 30)
    control = socket.socket(fileno=CONTROL_FD)
    try:
        plan = json.loads(control.recv(_MESSAGE_MAX))
        become_p0(control, plan)
    except OSError as error:
        report(control, error)
        os._exit(1)


def report(control: socket.socket, error: OSError) -> None:
    """Tell the supervisor which step failed."""
    control.send(json.dumps({"error": f"{Step.now}: {error}", "errno": error.errno}).encode())


def become_p0(control: socket.socket, plan: dict[str, Any]) -> None:
    """Make the outer namespaces, fork P1, serve its one request for id maps, wait for its end or the supervisor's."""
    supervisor = os.pidfd_open(plan["supervisor"])
    if os.getppid() != plan["supervisor"]:
        os._exit(1)  # it is gone already
    if not plan["root"]:
        uid, gid = os.geteuid(), os.getegid()
        Step.now = "make a user namespace"
        unshare(CLONE_NEWUSER)
        Step.now = "map the user's id"
        write_id_maps("self", f"0 {uid} 1", f"0 {gid} 1", deny_setgroups=True)
    Step.now = "make PID, IPC, UTS and network namespaces"
    net = 0 if "net_ns" in plan["disabled"] else CLONE_NEWNET
    unshare(CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS | net)
    if "hostname" not in plan["disabled"]:
        socket.sethostname(plan["hostname"])  # each sandbox has a UTS namespace of its own, a copy of this
    wants_maps, asks = os.pipe()
    answers, has_maps = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(wants_maps)
        os.close(has_maps)
        try:
            become_zygote(plan, asks, answers)
        except OSError as error:
            report(control, error)
        os._exit(1)
    os.close(asks)
    os.close(answers)
    control.close()  # so that the supervisor sees the end of file when P1 is gone
    ended = select.poll()
    for fd in (wants_maps, supervisor, os.pidfd_open(pid)):
        ended.register(fd, select.POLLIN)
    ready = [fd for fd, _ in ended.poll()]
    if ready == [wants_maps]:
        if os.read(wants_maps, 1):
            give_maps(pid, plan["uid_base"], has_maps)
        ended.unregister(wants_maps)
        ended.poll()
    os.kill(pid, signal.SIGKILL)  # if it is the supervisor that ended; P1 may be busy importing and not listen
    _, status = os.waitpid(pid, 0)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def give_maps(pid: int, base: int, has_maps: int) -> None:
    """Map the ids of P1's new user namespace, or tell it why not."""
    try:
        write_id_maps(pid, f"0 {base} {IDS}", f"0 {base} {IDS}", deny_setgroups=False)
        os.write(has_maps, b"y")
    except OSError as error:
        os.write(has_maps, str(error).encode())


def become_zygote(plan: dict[str, Any], asks: int, answers: int) -> None:
    """P1: build the root, give up root, exec the second stage."""
    die_with_parent()
    Step.now = "make a mount namespace"
    unshare(CLONE_NEWNS)
    make_private()
    build_root(plan)
    Step.now = "pivot_root"
    at_once(pivot_to, _ROOT)
    set_flags_of_root()
    if plan["root"]:
        give_up_root(asks, answers)
        nest()
    die_with_parent()  # a change of uid clears the setting
    replace_standard_streams()
    os.set_inheritable(CONTROL_FD, True)
    Step.now = f"exec {plan['argv'][0]}"
    os.execve(plan["argv"][0], plan["argv"], plan["env"])


def die_with_parent() -> None:
    """SIGKILL when P0 is gone (prctl(2); P0 has one thread, so the thread rule of that setting does not matter)."""
    prctl("PR_SET_PDEATHSIG", _PR_SET_PDEATHSIG, signal.SIGKILL)


def build_root(plan: dict[str, Any]) -> None:
    """A tmpfs with the plan's binds, links, folders, files and copies, and a /proc of P1's PID namespace."""
    root = plan["rootfs"]
    # Sources are opened before the tmpfs hides what lies under its mount point.
    opened = [
        (os.open(source, os.O_PATH | os.O_CLOEXEC), source, target, flags) for source, target, flags in root["binds"]
    ]
    copies = [(*read_file(source), path) for source, path in root["copies"]]
    Step.now = "mount the root"
    tmpfs(_ROOT, size_bytes=_ROOT_BYTES, inodes=4096, mode="755", flags=MS_NOSUID | MS_NODEV)
    for path in root["folders"]:
        os.makedirs(_ROOT + path, exist_ok=True)
    for fd, source, target, flags in opened:
        Step.now = f"bind {source}"
        place = _ROOT + target
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            os.makedirs(place, exist_ok=True)
        else:
            write_file(place, b"")
        bind(f"/proc/self/fd/{fd}", place, flags)
        os.close(fd)
    Step.now = "write the root's files"
    for target, path in root["links"]:
        os.makedirs(os.path.dirname(_ROOT + path), exist_ok=True)
        os.symlink(target, _ROOT + path)
    for path, text in root["files"].items():
        write_file(_ROOT + path, text.encode())
    for data, changed_ns, path in copies:
        write_file(_ROOT + path, data)
        os.utime(_ROOT + path, ns=(changed_ns, changed_ns))  # compiled modules are valid for one time of their source
    Step.now = "mount /proc"
    mount("proc", _ROOT + "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)


def read_file(path: str) -> tuple[bytes, int]:
    """The whole of a small file and when it was changed, in nanoseconds."""
    with open(path, "rb", buffering=0) as file:
        return file.read(), os.fstat(file.fileno()).st_mtime_ns


def write_file(path: str, data: bytes) -> None:
    """A file with its folders, readable by all: the sandbox's uid is another one."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    os.write(fd, data)
    os.close(fd)


def set_flags_of_root() -> None:
    """The root itself read-only: only the mount at /, since those below have their own flags."""
    Step.now = "make the root read-only"
    mount(None, "/", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def give_up_root(asks: int, answers: int) -> None:
    """Become uid 0 of a user namespace that maps to host ids nobody has."""
    Step.now = "give up root"
    os.setgroups([])
    # The mount namespace is made again so that it belongs to the new user namespace: its mounts become locked.
    unshare(CLONE_NEWUSER | CLONE_NEWNS)
    os.write(asks, b"m")
    answer = os.read(answers, 4096)
    if answer != b"y":
        raise OSError(1, answer.decode())
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)


def nest() -> None:
    """Go on in a PID namespace that belongs to the new user namespace, as an ordinary user's does from the start.

    The zygote enters those of its sandboxes to bear a process there, and must be able to come back.
    """
    Step.now = "make a PID namespace"
    unshare(CLONE_NEWPID)
    pid = os.fork()
    if pid:
        die_with_parent()
        os.closerange(CONTROL_FD, 1 << 30)
        _, status = os.waitpid(pid, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)


def replace_standard_streams() -> None:
    """Descriptors 0-2 on the root's own /dev/null, and no other but the control socket."""
    os.closerange(CONTROL_FD + 1, 1 << 30)
    null = os.open("/dev/null", os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd, inheritable=True)
    os.close(null)


if __name__ == "__main__":
    os.umask(0o022)
    main()
