"""Writing a root file system as the archive that a kernel unpacks into its first root: cpio, format "newc".

The format is in the kernel's Documentation/driver-api/early-userspace/buffer-format.rst. Everything belongs to root,
and device nodes are mere records, so no privilege is needed to write one.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO


class Archive:
    """One archive, written entry by entry to ``file``. Several may follow each other: the kernel unpacks all."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._inode = 0
        self._bytes = 0

    def folder(self, name: str) -> None:
        """A folder that all may read."""
        self._entry(name, stat.S_IFDIR | 0o755)

    def device(self, name: str, mode: int, major: int, minor: int) -> None:
        """A character device."""
        self._entry(name, stat.S_IFCHR | mode, device=(major, minor))

    def link(self, name: str, target: str) -> None:
        """A symbolic link."""
        self._entry(name, stat.S_IFLNK | 0o777, os.fsencode(target))

    def content(self, name: str, data: bytes, *, executable: bool = False) -> None:
        """A regular file that nobody but root may write."""
        self._entry(name, stat.S_IFREG | (0o755 if executable else 0o644), data)

    def tree(self, root: Path, below: str = "") -> None:
        """All that is in ``root``, in a fixed order, put in the folder ``below``. Raises OSError."""
        for folder, folders, files in os.walk(root):
            folders.sort()
            inside = os.path.join(below, os.path.relpath(folder, root)).removesuffix(".").rstrip("/")
            for name in sorted(folders + files):
                path = os.path.join(folder, name)
                info = os.lstat(path)
                target = os.path.join(inside, name)
                if stat.S_ISLNK(info.st_mode):
                    self.link(target, os.readlink(path))
                elif stat.S_ISDIR(info.st_mode):
                    self.folder(target)
                elif stat.S_ISREG(info.st_mode):
                    self.content(target, Path(path).read_bytes(), executable=bool(info.st_mode & stat.S_IXUSR))

    def close(self) -> None:
        """The entry that ends an archive."""
        self._entry("TRAILER!!!", 0)
        self._pad(512)

    def _entry(self, name: str, mode: int, data: bytes = b"", device: tuple[int, int] = (0, 0)) -> None:
        self._inode += 1
        raw = os.fsencode(name) + b"\0"
        fields = (self._inode, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(raw), 0)
        self._write(b"070701" + b"".join(b"%08X" % value for value in fields) + raw)
        self._pad(4)
        self._write(data)
        self._pad(4)

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._bytes += len(data)

    def _pad(self, size: int) -> None:
        self._write(bytes(-self._bytes % size))
