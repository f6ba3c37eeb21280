"""The audit log: what was asked, who decided, what ran and how it ended, in a file that shows later changes.

One record is one line of JSON (ASCII, so that no reader's terminal obeys what it quotes). Each carries the hash of the
one before (``prev``) and ends with its own (``hash``), the SHA-256 of the line without it. So a changed byte, a record
that was removed and two that changed places break the chain at that record.

A chain cannot show that its end is missing. For that there is a second file beside the log, ``NAME.head``, with the
number and hash of the last record; it is replaced after each record. What stays undetectable by the two files alone:
whoever can write both can forge both, and can cut the log back to a state it once had. An operator who must exclude
that copies the head elsewhere from time to time and gives it to :func:`verify`.

Writers in any number of threads and processes take turns by a lock on the log (flock(2): a local file system is
needed). A record is on the disk (fsync) when :meth:`AuditLog.append` returns. A writer that is killed in the middle of
a line leaves a torn end; the next one cuts it off and says in its own record how many bytes that were.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fumehood.errors import FumehoodError

#: What the first record names as the one before.
GENESIS = "0" * 64

_HASH_MEMBER = re.compile(rb',"hash":"([0-9a-f]{64})"\}\Z')
_HASH_MEMBER_BYTES = len(',"hash":""}') + 64


class AuditError(FumehoodError):
    """The audit log cannot be written or is not what its head says. The run that it was for was not started, or,
    where the message says so, its result is withheld."""


@dataclass(frozen=True, slots=True)
class Head:
    """The last record of a log: its number from 1, its hash, and the log's size up to its end."""

    seq: int
    hash: str
    size_bytes: int

    def __str__(self) -> str:
        return f"{self.seq}:{self.hash}:{self.size_bytes}"

    @classmethod
    def parse(cls, text: str) -> Head:
        """The reverse of ``str()``. Raises ValueError."""
        seq, hash_, size = text.strip().split(":")
        if not re.fullmatch("[0-9a-f]{64}", hash_):
            raise ValueError(f"{hash_!r} is not a SHA-256")
        return cls(int(seq), hash_, int(size))


@dataclass(frozen=True, slots=True)
class Keep:
    """What of a run's content is kept in the log beside its hash. Both may hold secrets of whoever asked."""

    code: bool = False
    output: bool = False


class AuditLog:
    """Appends to the log at ``path``, made with mode 0600 if missing. Threads and processes may share it."""

    def __init__(self, path: str | os.PathLike[str], *, keep: Keep | None = None) -> None:
        self.path = Path(path)
        self.keep = keep if keep is not None else Keep()
        self._head_path = head_path(self.path)

    def append(self, event: str, fields: Mapping[str, Any]) -> Head:
        """Write one record and wait until it is on the disk. Blocking. Raises AuditError."""
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                return self._append_locked(fd, event, fields)
            finally:
                os.close(fd)
        except OSError as error:
            raise AuditError(f"the audit log cannot be written: {error.strerror}") from error

    def _append_locked(self, fd: int, event: str, fields: Mapping[str, Any]) -> Head:
        head, torn_bytes = self._find_head(fd)
        record = {
            "seq": head.seq + 1,
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "event": event,
            **fields,
            **({"torn_bytes": torn_bytes} if torn_bytes else {}),
            "prev": head.hash,
        }
        line, hash_ = seal(record)
        try:
            _write_all(fd, line)
            os.fsync(fd)
        except OSError:
            # A full disk: take back what was written of the line, or the next record would follow a torn one.
            with contextlib.suppress(OSError):
                os.ftruncate(fd, head.size_bytes)
            raise
        new = Head(head.seq + 1, hash_, head.size_bytes + len(line))
        self._write_head(new, first=head.seq == 0)
        return new

    def _find_head(self, fd: int) -> tuple[Head, int]:
        """The last whole record, and how many bytes of a torn one were cut off behind it."""
        size = os.fstat(fd).st_size
        known = read_head(self.path)
        if known is None:
            if b"\n" in os.pread(fd, 1 << 20, 0):
                raise AuditError(
                    "the head of the audit log is missing or unreadable",
                    remedy="look into it with `fumehood audit verify`, put the log aside and start a new one",
                )
            known = Head(0, GENESIS, 0)
        elif size < known.size_bytes or not self._ends_with(fd, known):
            raise AuditError(
                "the audit log is not what its head says: records are missing or changed",
                remedy="look into it with `fumehood audit verify`, put the log aside and start a new one",
            )
        return self._catch_up(fd, known, size)

    def _ends_with(self, fd: int, head: Head) -> bool:
        end = os.pread(fd, _HASH_MEMBER_BYTES, head.size_bytes - _HASH_MEMBER_BYTES - 1)
        match = _HASH_MEMBER.match(end)
        return match is not None and match[1].decode() == head.hash

    def _catch_up(self, fd: int, head: Head, size: int) -> tuple[Head, int]:
        """Pass over records whose writer died before it could replace the head, and cut off a torn one."""
        while head.size_bytes < size:
            line = _read_line(fd, head.size_bytes)
            if not line.endswith(b"\n"):
                os.ftruncate(fd, head.size_bytes)
                return head, len(line)
            record = unseal(line)
            if record is None or record[0].get("prev") != head.hash:
                raise AuditError("the audit log goes on behind its head with a record that does not follow")
            head = Head(head.seq + 1, record[1], head.size_bytes + len(line))
        return head, 0

    def _write_head(self, head: Head, *, first: bool) -> None:
        """Replace the head file. It may lag behind after a power failure: :meth:`_catch_up` reads on from there."""
        folder = self.path.parent
        fd, name = tempfile.mkstemp(prefix=f".{self.path.name}.", dir=folder)
        try:
            with open(fd, "w", encoding="ascii") as file:
                file.write(f"{head}\n")
            os.rename(name, self._head_path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
        if first:  # the names of both files
            folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(folder_fd)
            finally:
                os.close(folder_fd)


def head_path(path: Path) -> Path:
    """Where the head of the log ``path`` is kept."""
    return path.with_name(path.name + ".head")


def read_head(path: Path) -> Head | None:
    """The recorded head of the log ``path``; None if it is missing or not one. Raises OSError otherwise."""
    try:
        return Head.parse(head_path(path).read_text("ascii"))
    except (FileNotFoundError, ValueError):
        return None


def seal(record: Mapping[str, Any]) -> tuple[bytes, str]:
    """A record as its line, and its hash."""
    body = json.dumps(record, separators=(",", ":"), allow_nan=False).encode("ascii")
    hash_ = hashlib.sha256(body).hexdigest()
    return body[:-1] + f',"hash":"{hash_}"}}\n'.encode("ascii"), hash_


def unseal(line: bytes) -> tuple[dict[str, Any], str] | None:
    """The record of a line and its hash; None if the line is not what was hashed."""
    line = line.removesuffix(b"\n")
    match = _HASH_MEMBER.search(line)
    if match is None:
        return None
    body = line[: match.start()] + b"}"
    hash_ = match[1].decode()
    if hashlib.sha256(body).hexdigest() != hash_:
        return None
    try:
        record = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return (record, hash_) if isinstance(record, dict) else None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What :func:`verify` found: ``problems`` is empty if the log is whole."""

    records: int
    head: Head | None
    problems: tuple[str, ...]
    open_runs: tuple[str, ...]  # started, and no end recorded: still running, or their process was killed

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def verify(path: Path, *, expected: Head | None = None) -> Verdict:
    """Check every record of a log, its order and its end. ``expected`` is a head that was kept elsewhere.

    The log is locked against writers meanwhile. Raises AuditError if it cannot be read.
    """
    problems: list[str] = []
    open_runs: dict[str, None] = {}
    hashes_at: dict[int, str] = {}
    wanted = {h.size_bytes for h in (expected,) if h is not None}
    prev, count, size, head = GENESIS, 0, 0, None
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            recorded = read_head(path)
            wanted |= {recorded.size_bytes} if recorded else set()
            for number, line in enumerate(file, start=1):
                size += len(line)
                found = unseal(line) if line.endswith(b"\n") else None
                if found is None:
                    problems.append(f"line {number} was changed or is torn")
                    prev = ""
                    continue
                record, hash_ = found
                if prev and record.get("prev") != prev:
                    problems.append(f"line {number} does not follow line {number - 1}: removed or reordered records")
                elif record.get("seq") != number:
                    problems.append(f"line {number} has the number {record.get('seq')}")
                prev, count = hash_, count + 1
                head = Head(number, hash_, size)
                if size in wanted:
                    hashes_at[size] = hash_
                _note_run(record, open_runs)
    except OSError as error:
        raise AuditError(f"the audit log cannot be read: {error.strerror}") from error
    if recorded is None and count:
        problems.append("the head file is missing or unreadable: whether records are missing at the end is unknown")
    for who, wish in (("the head file", recorded), ("the expected head", expected)):
        if wish is not None and hashes_at.get(wish.size_bytes) != wish.hash:
            problems.append(f"the log does not hold record {wish.seq} of {who}: its end is missing or was rewritten")
    return Verdict(count, head, tuple(problems), tuple(open_runs))


def _note_run(record: Mapping[str, Any], open_runs: dict[str, None]) -> None:
    run = record.get("run")
    if isinstance(run, str):
        if record.get("event") == "started":
            open_runs[run] = None
        elif record.get("event") in ("ended", "failed"):
            open_runs.pop(run, None)


def read(path: Path, *, follow_s: float | None = None) -> Iterator[dict[str, Any]]:
    """The records, lines that are not what was hashed as ``{"event": "damaged"}``.

    With ``follow_s`` it goes on for ever, looking for more that often. Raises AuditError if it cannot be read.
    """
    try:
        with path.open("rb") as file:
            while True:
                at = file.tell()
                line = file.readline()
                if line.endswith(b"\n"):
                    found = unseal(line)
                    yield {**found[0], "hash": found[1]} if found else {"event": "damaged", "at_byte": at}
                elif follow_s is None:
                    return
                else:
                    file.seek(at)
                    time.sleep(follow_s)
    except OSError as error:
        raise AuditError(f"the audit log cannot be read: {error.strerror}") from error


def _read_line(fd: int, at: int) -> bytes:
    pieces = []
    while piece := os.pread(fd, 1 << 16, at):
        end = piece.find(b"\n")
        if end >= 0:
            pieces.append(piece[: end + 1])
            break
        pieces.append(piece)
        at += len(piece)
    return b"".join(pieces)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
