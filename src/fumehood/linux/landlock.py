"""Landlock: a process gives up, for itself and its descendants, what it will not need of the file system and network.

Theory of operation. ``create()`` makes a ruleset that handles (and so refuses) everything this kernel's ABI can
handle; ``add_path()`` gives rights back beneath a file or folder; ``restrict()`` puts the calling thread under it, for
ever. Handled but never given back: TCP bind and connect, abstract Unix sockets of processes outside, and signals to
them.

- A rule holds an inode, so one for a tmpfs can only be made once that is mounted, and rules cannot be copied from one
  ruleset to another: each sandbox makes its own, so keep the rules few.
- A path is allowed by a rule on any folder above it, through mounts: a rule on ``/`` covers all that is mounted there.
  A bind of a folder inside a tmpfs does not lie beneath the tmpfs, but beneath the place where it is bound.
- After ``restrict()`` the thread can no longer mount, unmount or pivot_root: restrict after the root is built.
- Descriptors opened before keep what they had.

Rights and sizes: ``<linux/landlock.h>`` and Documentation/userspace-api/landlock.rst of Linux 6.18.
"""

from __future__ import annotations

import errno
import os
import struct

from fumehood.linux import libc

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

# Newer than syscalls.FIRST_COMMON, so the same on every machine.
_NR_CREATE_RULESET, _NR_ADD_RULE, _NR_RESTRICT_SELF = 444, 445, 446
_CREATE_RULESET_VERSION = 1
_RULE_PATH_BENEATH = 1


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


def create(version: int) -> int:
    """A ruleset that handles all that ABI ``version`` knows, as a descriptor (close-on-exec).

    ``version`` comes from ``abi()``, or is lower. Raises OSError: EINVAL or E2BIG for a version the kernel lacks,
    EOPNOTSUPP or ENOSYS where it has no Landlock.
    """
    attributes = struct.pack("=Q", rights(version))  # struct landlock_ruleset_attr, as long as the ABI knows it
    if version >= 4:
        attributes += struct.pack("=Q", BIND_TCP | CONNECT_TCP)
    if version >= 6:
        attributes += struct.pack("=Q", SCOPE_ABSTRACT_UNIX_SOCKET | SCOPE_SIGNAL)
    return libc.syscall("landlock_create_ruleset", _NR_CREATE_RULESET, attributes, len(attributes), 0)


def add_path(ruleset: int, path: str, access: int) -> None:
    """Give back ``access`` beneath ``path``, or on it where it is a file (then only the rights that a file can have).

    ``access`` may hold only rights that the ruleset handles: mask it by ``rights()``. Raises OSError, with the path
    where opening it failed (a link at its end is not followed: ELOOP).
    """
    parent = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        kind = os.fstat(parent).st_mode & 0o170000
        if kind == 0o120000:
            raise OSError(errno.ELOOP, f"landlock_add_rule: {os.strerror(errno.ELOOP)}", path)
        if kind != 0o040000:
            access &= FILE_RIGHTS
        rule = struct.pack("=Qi", access, parent)  # struct landlock_path_beneath_attr, packed
        libc.syscall("landlock_add_rule", _NR_ADD_RULE, ruleset, _RULE_PATH_BENEATH, rule, 0)
    finally:
        os.close(parent)


def restrict(ruleset: int) -> None:
    """Put the calling thread, and what it starts from now on, under ``ruleset``. Cannot be undone.

    Needs no_new_privs or CAP_SYS_ADMIN. Raises OSError: EPERM without either, E2BIG when already under 16 rulesets.
    """
    libc.syscall("landlock_restrict_self", _NR_RESTRICT_SELF, ruleset, 0)


def jail_ruleset(read_only: list[str], writable: list[str], devices: list[str], version: int | None = None) -> int:
    """The ruleset of a jail, as a descriptor to ``restrict()`` by and close.

    Files are read and executed beneath ``read_only`` (``["/"]`` will do), used freely beneath ``writable`` but for
    making or driving devices, and devices are read, written and asked beneath ``devices`` (``["/dev"]`` is one rule
    where five files are five). Anything else is refused, as are TCP bind and connect (ABI 4), abstract Unix sockets
    and signals to processes outside (ABI 6).

    ``version`` is an ABI no higher than the kernel's, None for the kernel's own. Raises OSError: ENOSYS where the
    kernel has no Landlock (ask ``abi()`` first), otherwise as ``create()`` and ``add_path()``.
    """
    if version is None:
        version = abi()
    if version == 0:
        raise OSError(errno.ENOSYS, "landlock_create_ruleset: this kernel has no Landlock")
    ruleset = create(version)
    try:
        for paths, access in ((read_only, READ_ONLY), (writable, WRITABLE), (devices, DEVICE)):
            for path in paths:
                add_path(ruleset, path, access & rights(version))
    except OSError:
        os.close(ruleset)
        raise
    return ruleset


def covers(version: int) -> str:
    """For a receipt: what ``jail_ruleset()`` holds at ABI ``version``, and what that ABI is too old for."""
    if version == 0:
        return "absent"
    parts = ((1, "files"), (3, "truncate"), (4, "TCP"), (5, "device ioctl"), (6, "abstract sockets"), (6, "signals"))
    held = ", ".join(part for since, part in parts if version >= since)
    missing = ", ".join(part for since, part in parts if version < since)
    return f"ABI {version}: {held}" + (f"; not {missing}" if missing else "")
