"""Landlock: a process gives up, for itself and its descendants, what it will not need of the file system and network.

Theory of operation. A ruleset handles (and so refuses) everything that this kernel's ABI can handle; rules give rights
back beneath a file or folder; then a thread puts itself under it, for ever. Handled but never given back: TCP bind and
connect, abstract Unix sockets of processes outside, and signals to them.

- A rule holds an inode, so one for a tmpfs can only be made once that is mounted, and rules cannot be copied from one
  ruleset to another: each sandbox makes its own, so keep the rules few.
- A path is allowed by a rule on any folder above it, through mounts: a rule on ``/`` covers all that is mounted there.
  A bind of a folder inside a tmpfs does not lie beneath the tmpfs, but beneath the place where it is bound.
- Under a ruleset a thread can no longer mount, unmount or pivot_root: this comes after the root is built.
- Descriptors opened before keep what they had.

Rights and sizes: ``<linux/landlock.h>`` and Documentation/userspace-api/landlock.rst of Linux 6.18.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from fumehood.linux import libc
from fumehood.linux.steps import AT_FDCWD, Result, Steps

EXECUTE = 1 << 0
WRITE_FILE = 1 << 1
READ_FILE = 1 << 2
READ_DIR = 1 << 3
REMOVE_DIR = 1 << 4
REMOVE_FILE = 1 << 5
MAKE_CHAR = 1 << 6
MAKE_DIR = 1 << 7
MAKE_REG = 1 << 8
MAKE_SOCK = 1 << 9
MAKE_FIFO = 1 << 10
MAKE_BLOCK = 1 << 11
MAKE_SYM = 1 << 12
REFER = 1 << 13  # ABI 2: link and rename into another folder; before that always refused
TRUNCATE = 1 << 14  # ABI 3
IOCTL_DEV = 1 << 15  # ABI 5: ioctl on devices

BIND_TCP, CONNECT_TCP = 1 << 0, 1 << 1  # ABI 4
SCOPE_ABSTRACT_UNIX_SOCKET, SCOPE_SIGNAL = 1 << 0, 1 << 1  # ABI 6

FILE_RIGHTS = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV  # all that a rule on a file may give

READ_ONLY = EXECUTE | READ_FILE | READ_DIR
# Devices are neither made in scratch folders nor, should one be there all the same, spoken to.
WRITABLE = (
    READ_ONLY | WRITE_FILE | TRUNCATE | REFER | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_REG | MAKE_SOCK | MAKE_FIFO
) | MAKE_SYM
# null, zero, full, random and urandom know no harmful ioctl, and refusing would only turn ENOTTY of isatty into EACCES.
DEVICE = READ_FILE | WRITE_FILE | READ_DIR | TRUNCATE | IOCTL_DEV

_ABI_1 = (1 << 13) - 1  # EXECUTE to MAKE_SYM
_ADDED = ((2, REFER), (3, TRUNCATE), (5, IOCTL_DEV))

_NR_CREATE_RULESET = 444  # newer than syscalls.FIRST_COMMON, so the same on every machine
_CREATE_RULESET_VERSION = 1
_RULE_PATH_BENEATH = 1


class _PathBeneath(ctypes.Structure):
    """struct landlock_path_beneath_attr."""

    _pack_ = 1
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def abi() -> int:
    """Version of the kernel's Landlock interface, 0 where it has none, has it switched off, or refuses the question."""
    try:
        return libc.syscall("landlock_create_ruleset", _NR_CREATE_RULESET, 0, 0, _CREATE_RULESET_VERSION)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.ENOTSUP):
            raise
        return 0


def rights(version: int) -> int:
    """Every file-system right that ABI ``version`` (at least 1) can handle, as a mask."""
    return _ABI_1 | sum(right for since, right in _ADDED if version >= since)


def jail(steps: Steps, beneath: list[tuple[str, int]], version: int) -> None:
    """Add the steps that put the calling thread, and what it starts from then on, under a ruleset for ever.

    All that ABI ``version`` (1 to the kernel's own, see ``abi()``) can handle is refused but for the rights of
    ``beneath``: (path, rights) pairs, where a file may have FILE_RIGHTS only (else ENOTDIR) and a link at the end of a
    path is not followed (ENOTDIR, or EINVAL). Needs no_new_privs or CAP_SYS_ADMIN (else EPERM). TCP bind and connect
    (ABI 4), abstract Unix sockets and signals to processes outside (ABI 6) are refused whatever the paths.
    """
    attributes = struct.pack("=Q", rights(version))  # struct landlock_ruleset_attr, as long as the ABI knows it
    if version >= 4:
        attributes += struct.pack("=Q", BIND_TCP | CONNECT_TCP)
    if version >= 6:
        attributes += struct.pack("=Q", SCOPE_ABSTRACT_UNIX_SOCKET | SCOPE_SIGNAL)
    ruleset = Result()
    steps.call("landlock_create_ruleset", attributes, len(attributes), 0, to=ruleset)
    for path, access in beneath:
        folder = os.O_DIRECTORY if access & ~FILE_RIGHTS else 0
        rule = _PathBeneath(access & rights(version))
        place = Result.from_buffer(rule, _PathBeneath.parent_fd.offset)
        steps.call("openat", AT_FDCWD, os.fsencode(path), os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC | folder, to=place)
        steps.call("landlock_add_rule", ruleset, _RULE_PATH_BENEATH, rule, 0)
        steps.call("close", place)
    steps.call("landlock_restrict_self", ruleset, 0)
    steps.call("close", ruleset)


def covers(version: int) -> str:
    """For a receipt: what ``jail_ruleset()`` holds at ABI ``version``, and what that ABI is too old for."""
    if version == 0:
        return "absent"
    parts = ((1, "files"), (3, "truncate"), (4, "TCP"), (5, "device ioctl"), (6, "abstract sockets"), (6, "signals"))
    held = ", ".join(part for since, part in parts if version >= since)
    missing = ", ".join(part for since, part in parts if version < since)
    return f"ABI {version}: {held}" + (f"; not {missing}" if missing else "")
