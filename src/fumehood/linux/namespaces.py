"""Namespaces: their flags, ``clone3`` into new ones, and the maps of a user namespace.

Flags are from ``include/uapi/linux/sched.h``. ``clone3`` is called raw, since Python has no wrapper for it and
``fork`` followed by ``unshare`` would cost a second process for the PID namespace.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct

from fumehood.linux.libc import syscall

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
CLONE_PIDFD = 0x00001000

_CLONE3 = 435  # the same number on every architecture

# struct clone_args, include/uapi/linux/sched.h: eleven 64-bit fields, of which three are used here.
_ARGS = struct.Struct("=11Q")


def clone3(flags: int) -> tuple[int, int]:
    """A copy of this process in new namespaces: ``(0, -1)`` in the child, ``(pid, pidfd)`` in the parent.

    The process must have one thread. Python's own fork hooks run as for ``os.fork``. Raises OSError.
    """
    pidfd = ctypes.c_int(-1)
    args = ctypes.create_string_buffer(
        _ARGS.pack(flags | CLONE_PIDFD, ctypes.addressof(pidfd), 0, 0, signal.SIGCHLD, 0, 0, 0, 0, 0, 0)
    )
    ctypes.pythonapi.PyOS_BeforeFork()
    try:
        pid = syscall("clone3", _CLONE3, args, _ARGS.size)
    except OSError:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
        raise
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
        return 0, -1
    ctypes.pythonapi.PyOS_AfterFork_Parent()
    return pid, pidfd.value


def write_id_maps(pid: int | str, uid_map: str, gid_map: str, *, deny_setgroups: bool) -> None:
    """Map the ids of the user namespace of ``pid``; each map is "inside outside count" (user_namespaces(7)).

    ``deny_setgroups`` is needed where the writer has no CAP_SETGID in the parent namespace. Raises OSError.
    """
    if deny_setgroups:
        _write(f"/proc/{pid}/setgroups", "deny")
    _write(f"/proc/{pid}/uid_map", uid_map)
    _write(f"/proc/{pid}/gid_map", gid_map)


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None
    finally:
        os.close(fd)
