"""Removing a folder that a hostile program filled: no recursion, no link followed, whatever the modes and the depth."""

from __future__ import annotations

import contextlib
import os
import stat


def place_of(fd: int, path: str) -> str:
    """Where the folder is now that was made at ``path``: a program may have renamed it, which the kernel follows.

    See proc(5) for /proc/pid/fd. ``path`` if it is gone, or no path leads there.
    """
    current = os.readlink(f"/proc/self/fd/{fd}")
    with contextlib.suppress(OSError):
        if os.path.samestat(os.lstat(current), os.fstat(fd)):
            return current
    return path


def remove_tree(path: str) -> None:
    """Remove ``path`` and all below it. Nobody else may be writing there any more. Raises OSError.

    A folder within a folder is first moved up beside the others, so that a tree of any depth is removed with one
    descriptor and paths of two components.
    """
    try:
        named = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        # By its descriptor, since the program may have taken the permission to open it and chmod(2) follows links.
        with contextlib.suppress(PermissionError):
            os.chmod(f"/proc/self/fd/{named}", 0o700)
        top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    finally:
        os.close(named)
    try:
        pending, serial = _clear(top, top, 0)
        while pending:
            name = pending.pop()
            with contextlib.suppress(PermissionError):  # not ours to change: the open below then tells
                os.chmod(name, 0o700, dir_fd=top)
            fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=top)
            try:
                more, serial = _clear(fd, top, serial)
            finally:
                os.close(fd)
            os.rmdir(name, dir_fd=top)
            pending += more
    finally:
        os.close(top)
    os.rmdir(path)


def _clear(fd: int, top: int, serial: int) -> tuple[list[bytes], int]:
    """Unlink the files of a folder and move its folders to ``top`` under new names, which are returned."""
    moved = []
    for raw in os.listdir(fd):
        name = os.fsencode(raw)
        if not stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=fd)
            continue
        new = b".fumehood-%d" % serial
        serial += 1
        with contextlib.suppress(PermissionError):
            os.chmod(name, 0o700, dir_fd=fd)  # a folder without write permission cannot be moved (its .. changes)
        with contextlib.suppress(FileNotFoundError):
            # The program may have used our names: then this one is cleared under its own.
            os.stat(new, dir_fd=top, follow_symlinks=False)
            new += b"-" + os.urandom(8).hex().encode()
        os.rename(name, new, src_dir_fd=fd, dst_dir_fd=top)
        moved.append(new)
    return moved, serial
