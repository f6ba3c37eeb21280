"""The files of an audit log: the one that is written to, earlier parts that were moved aside, its lock and its head.

``audit.jsonl`` is written to. A file beside it whose name goes on with a number or a date (``audit.jsonl.000000000412``
``audit.jsonl.1`` ``audit.jsonl-20270131.gz``) is an earlier part, whoever moved it there: :class:`AuditLog` itself at a
size, or logrotate(8). Parts are put into order by the number of their first record and not by their names.

The lock is a file of its own, because a log that is moved takes a lock on it along, and the writer of the next file
would not see it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gzip
import os
import re
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path

#: What follows the log's own name in that of an earlier part. Suffixes of logrotate(8), with ``dateext`` or without.
_PART = re.compile(r"[.-][0-9][0-9-]*(\.gz)?\Z")
_SEQ = re.compile(rb'\{"seq":([0-9]{1,18}),')


def head_path(path: Path) -> Path:
    """Where the head of the log ``path`` is kept."""
    return path.with_name(path.name + ".head")


def lock_path(path: Path) -> Path:
    """What the writers of the log ``path`` lock."""
    return path.with_name(path.name + ".lock")


def full_path(path: Path, last_seq: int) -> Path:
    """Where the log is moved when it is full; the number of its last record makes the name a new one."""
    return path.with_name(f"{path.name}.{last_seq:012d}")


@contextlib.contextmanager
def locked(path: Path, *, for_writing: bool) -> Iterator[None]:
    """Hold the log's lock. A reader of a log that never had a writer here (a copy) needs none. Raises OSError."""
    access = os.O_RDWR | os.O_CREAT if for_writing else os.O_RDONLY
    try:
        fd = os.open(lock_path(path), access | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except FileNotFoundError:
        if for_writing:
            raise
        yield
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX if for_writing else fcntl.LOCK_SH)
        yield
    finally:
        os.close(fd)


def moved_parts(path: Path) -> list[Path]:
    """The earlier parts of the log, the last moved first. Raises OSError."""
    found = []
    for entry in os.scandir(path.parent):
        if entry.name.startswith(path.name) and _PART.match(entry.name, len(path.name)):
            with contextlib.suppress(FileNotFoundError):  # logrotate is at work
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    found.append((status.st_mtime_ns, path.parent / entry.name))
    return [part for _, part in sorted(found, reverse=True)]


def parts_in_order(path: Path) -> list[Path]:
    """All parts with something in them, by the number of their first record, ``path`` the last. Raises OSError."""
    numbered = [(seq, part) for part in moved_parts(path) if (seq := first_seq(part)) is not None]
    earlier = [part for _, part in sorted(numbered)]
    return [*earlier, path] if path.exists() or not earlier else earlier


def first_seq(path: Path) -> int | None:
    """The number that a part's first line claims: 0 if it claims none, None for a part without a line."""
    line = next(lines(path), b"")
    match = _SEQ.match(line)
    return int(match[1]) if match else 0 if line else None


def lines(path: Path) -> Iterator[bytes]:
    """The lines of a part, unpacked if it is compressed. Raises OSError, also for a compressed one that is damaged."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield from file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise OSError(errno.EIO, f"{path.name} is damaged: {error}") from error
