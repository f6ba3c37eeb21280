"""Namespaces: their flags, ``clone3`` into new ones, an idle first process of one, and the maps of a user namespace.

Flags are from ``include/uapi/linux/sched.h``. ``clone3`` is called raw, since Python has no wrapper for it and
``fork`` followed by ``unshare`` would cost a second process for the PID namespace.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import struct
import sys

from fumehood.linux.libc import syscall

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
CLONE_VM = 0x00000100
CLONE_FILES = 0x00000400
CLONE_PIDFD = 0x00001000

_CLONE3 = 435  # the same number on every architecture

# struct clone_args, include/uapi/linux/sched.h: eleven 64-bit fields, of which three are used here.
_ARGS = struct.Struct("=11Q")


#: Any child at all, also one whose end sends no signal (include/uapi/linux/wait.h).
WAIT_ALL = 0x40000000

_STACK_BYTES = 16 << 10

if sys.platform == "linux":
    _libc = ctypes.PyDLL(None, use_errno=True)
    _clone = _libc.clone
    _pause = _libc.pause


def clone3(flags: int, *, exit_signal: int = signal.SIGCHLD) -> tuple[int, int]:
    """A copy of this process in new namespaces: ``(0, -1)`` in the child, ``(pid, pidfd)`` in the parent.

    The process must have one thread. Python's own fork hooks run as for ``os.fork``. A child without an exit signal
    is waited for with ``WAIT_ALL``, and also where SIGCHLD is ignored. Raises OSError.
    """
    ctypes.pythonapi.PyOS_BeforeFork()
    try:
        pid, pidfd = clone3_bare(flags, exit_signal=exit_signal)
    except OSError:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
        raise
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    return pid, pidfd


def clone3_bare(flags: int, *, exit_signal: int) -> tuple[int, int]:
    """The same and nothing of Python's, see :class:`fumehood.linux.forks.Forks`."""
    pidfd = ctypes.c_int(-1)
    args = _ARGS.pack(flags | CLONE_PIDFD, ctypes.addressof(pidfd), 0, 0, exit_signal, 0, 0, 0, 0, 0, 0)
    pid = syscall("clone3", _CLONE3, args, _ARGS.size)
    return pid, pidfd.value


class IdleInit:
    """Makes first processes of namespaces that do nothing, for others to join: each lasts until it is killed.

    Such a process runs ``pause`` of the C library on a stack of its own, in the caller's memory and with the caller's
    descriptors (clone(2), CLONE_VM and CLONE_FILES). So it costs no page tables, and its end frees nothing. It must
    never run anything else: the caller blocks all signals before, or else a handler of the caller's could run in it.
    Where the caller ignores SIGCHLD it does as well, and the kernel reaps what becomes its child.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        self._used: dict[int, mmap.mmap] = {}

    def start(self, flags: int) -> tuple[int, int]:
        """One, in new namespaces, as (pid, pidfd); it is waited for with ``WAIT_ALL``. Raises OSError."""
        stack = self._free.pop() if self._free else mmap.mmap(-1, _STACK_BYTES)
        bottom = ctypes.addressof(ctypes.c_char.from_buffer(stack))
        pidfd = ctypes.c_int(-1)
        flags |= CLONE_VM | CLONE_FILES | CLONE_PIDFD
        pid = _clone(_pause, ctypes.c_void_p(bottom + _STACK_BYTES), flags, None, ctypes.byref(pidfd))
        if pid == -1:
            code = ctypes.get_errno()
            self._free.append(stack)
            raise OSError(code, f"clone: {os.strerror(code)}")
        self._used[pid] = stack
        return pid, pidfd.value

    def reaped(self, pid: int) -> None:
        """``pid`` has been waited for: if it was one of these, its stack may be used again."""
        stack = self._used.pop(pid, None)
        if stack is not None:
            self._free.append(stack)


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
