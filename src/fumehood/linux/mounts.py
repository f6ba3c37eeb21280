"""Mounts: flags from ``include/uapi/linux/mount.h`` and the few operations that a sandbox's root is made of."""

from __future__ import annotations

import os
import struct

from fumehood.linux.libc import mount, syscall
from fumehood.linux.steps import AT_FDCWD, Steps

MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_REMOUNT = 0x20
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
MNT_DETACH = 0x2

_MOUNT_SETATTR = 442
_AT_RECURSIVE = 0x8000

# struct mount_attr: attr_set, attr_clr, propagation, userns_fd. The attribute bits equal the MS_ flags above.
_ATTR = struct.Struct("=4Q")


def make_private() -> None:
    """Cut every mount of this namespace off from its peers, so that nothing done here shows outside."""
    mount(None, "/", None, MS_REC | MS_PRIVATE)


def tmpfs(target: str, *, size_bytes: int, inodes: int, mode: str, flags: int, owner: int | None = None) -> None:
    """An empty tmpfs with a bound on bytes and inodes."""
    mount("tmpfs", target, "tmpfs", flags, tmpfs_options(size_bytes=size_bytes, inodes=inodes, mode=mode, owner=owner))


def tmpfs_options(*, size_bytes: int, inodes: int, mode: str, owner: int | None = None) -> str:
    """The data of a mount of a tmpfs (tmpfs(5))."""
    owned = "" if owner is None else f",uid={owner},gid={owner}"
    return f"size={size_bytes},nr_inodes={inodes},mode={mode}{owned}"


def bind(source: str, target: str, flags: int) -> None:
    """Bind ``source`` with all mounted below it to ``target`` and set ``flags`` on every one of those mounts.

    mount_setattr(2), Linux 5.12, is what reaches the mounts below: a remount with MS_BIND changes the top one only.
    """
    mount(source, target, None, MS_BIND | MS_REC)
    set_flags(target, flags)


def set_flags(target: str, flags: int) -> None:
    """Set MS_RDONLY, MS_NOSUID, MS_NODEV and MS_NOEXEC bits on the mount at ``target`` and all below it."""
    attr = _ATTR.pack(flags, 0, MS_PRIVATE, 0)
    syscall(f"mount_setattr {target}", _MOUNT_SETATTR, AT_FDCWD, os.fsencode(target), _AT_RECURSIVE, attr, len(attr))


def pivot_to(steps: Steps, root: str) -> None:
    """Add the steps that make ``root``, a mount point, the root of this mount namespace and let go of the old one."""
    steps.call("chdir", os.fsencode(root))
    # Both arguments ".": the old root is stacked on the new one and detached from there (pivot_root(2), NOTES).
    steps.call("pivot_root", b".", b".")
    steps.call("umount2", b".", MNT_DETACH)
    steps.call("chdir", b"/")
