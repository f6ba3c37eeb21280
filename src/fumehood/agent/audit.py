"""The audit log: what was asked, who decided, what ran and how it ended, in a file that shows later changes.

One record is one line of JSON (ASCII, so that no reader's terminal obeys what it quotes). Each carries the hash of the
one before (``prev``) and ends with its own (``hash``), the SHA-256 of the line without it. So a changed byte, a record
that was removed and two that changed places break the chain at that record.

A chain cannot show that its end is missing. For that there is a second file beside the log, ``NAME.head``, with the
number and hash of the last record; it is replaced after each record. What stays undetectable by the two files alone:
whoever can write both can forge both, and can cut the log back to a state it once had. An operator who must exclude
that copies the head elsewhere from time to time and gives it to :func:`verify`.

Writers in any number of threads and processes take turns by a lock (``NAME.lock``, flock(2): a local file system is
needed). A record is on the disk (fsync) when :meth:`AuditLog.append` returns. A writer that is killed in the middle of
a line leaves a torn end; the next one cuts it off and says in its own record how many bytes that were.

The chain goes on over files. A log is moved aside when it has grown to ``rotate_bytes``, or by logrotate(8) at any
time: the log is opened for each record, so the next one goes to the new file. An empty log is taken for a moved one
only if a file beside it holds the record that the head names (see :mod:`fumehood.agent.audit_files` for names);
otherwise nothing more is written. :func:`verify` and :func:`read` take all parts together.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fumehood.agent.audit_files import first_seq, full_path, head_path, lines, locked, moved_parts, parts_in_order
from fumehood.errors import AuditError, PolicyError

#: What the first record names as the one before.
GENESIS = "0" * 64

_HASH_MEMBER = re.compile(rb',"hash":"([0-9a-f]{64})"\}\Z')
_HASH_MEMBER_BYTES = len(',"hash":""}') + 64


@dataclass(frozen=True, slots=True)
class Head:
    """The last record of a log: its number from 1, its hash, and the size of its file up to its end."""

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


#: The smallest size at which a log may be moved aside: a start and an end with a receipt are some 10 KB.
ROTATE_BYTES_MIN = 1 << 16

_LOOK = "look into it with `fumehood audit verify`, put the log aside and start a new one"


class AuditLog:
    """Appends to the log at ``path``, made with mode 0600 if missing. Threads and processes may share it.

    With ``rotate_bytes``, a log that would grow beyond it is first moved to ``NAME.`` and the number of its last
    record. Parts are never removed here. Raises PolicyError for a size under 64 KiB.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, keep: Keep | None = None, rotate_bytes: int | None = None
    ) -> None:
        if rotate_bytes is not None and rotate_bytes < ROTATE_BYTES_MIN:
            raise PolicyError(f"an audit log is rotated at {ROTATE_BYTES_MIN} bytes or more, not {rotate_bytes}")
        self.path = Path(path)
        self.keep = keep if keep is not None else Keep()
        self._rotate_bytes = rotate_bytes
        self._head_path = head_path(self.path)

    def append(self, event: str, fields: Mapping[str, Any]) -> Head:
        """Write one record and wait until it is on the disk. Blocking. Raises AuditError."""
        try:
            with locked(self.path, for_writing=True):
                return self._append_locked(event, fields)
        except OSError as error:
            raise AuditError(f"the audit log cannot be written: {error.strerror}") from error

    def _append_locked(self, event: str, fields: Mapping[str, Any]) -> Head:
        with contextlib.ExitStack() as stack:
            fd = stack.enter_context(self._opened())
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
            if self._rotate_bytes is not None and head.size_bytes and head.size_bytes + len(line) > self._rotate_bytes:
                self._move_aside(head)
                head = replace(head, size_bytes=0)
                fd = stack.enter_context(self._opened())
            try:
                _write_all(fd, line)
                os.fsync(fd)
            except OSError:
                # A full disk: take back what was written of the line, or the next record would follow a torn one.
                with contextlib.suppress(OSError):
                    os.ftruncate(fd, head.size_bytes)
                raise
        new = Head(head.seq + 1, hash_, head.size_bytes + len(line))
        self._write_head(new)
        if head.size_bytes == 0:
            self._sync_names()
        return new

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            yield fd
        finally:
            os.close(fd)

    def _move_aside(self, head: Head) -> None:
        """Give the full log its other name. If this process dies here, the next writer finds the head in it."""
        self._write_head(head)
        target = full_path(self.path, head.seq)
        if os.path.lexists(target):
            raise AuditError(f"the audit log cannot be rotated: {target.name} is there already", remedy=_LOOK)
        with contextlib.suppress(FileNotFoundError):  # somebody else has just moved it
            os.rename(self.path, target)

    def _find_head(self, fd: int) -> tuple[Head, int]:
        """The last whole record, and how many bytes of a torn one were cut off behind it."""
        size = os.fstat(fd).st_size
        known = read_head(self.path)
        if known is None:
            if b"\n" in os.pread(fd, 1 << 20, 0):
                raise AuditError("the head of the audit log is missing or unreadable", remedy=_LOOK)
            return self._catch_up(fd, Head(0, GENESIS, 0), size)
        if size >= known.size_bytes and self._ends_with(fd, known):
            return self._catch_up(fd, known, size)
        torn_bytes, moved = self._end_of_moved(known)
        if moved is None:
            raise AuditError(
                "the audit log is not what its head says: records are missing or changed, or it was moved to where "
                "no file beside it holds its last record",
                remedy=_LOOK,
            )
        head, torn_here_bytes = self._catch_up(fd, replace(moved, size_bytes=0), size)
        return head, torn_bytes + torn_here_bytes

    def _end_of_moved(self, known: Head) -> tuple[int, Head | None]:
        """The last record of the part that holds the one that ``known`` names, and bytes cut off behind it."""
        mark = f'"hash":"{known.hash}"}}\n'.encode("ascii")
        for part in moved_parts(self.path):
            head: Head | None = None
            size_bytes = 0
            for line in lines(part):
                if head is None:
                    head = replace(known, size_bytes=0) if line.endswith(mark) and unseal(line) else None
                elif line.endswith(b"\n"):
                    head = _next_head(head, line)
                elif part.suffix != ".gz":
                    os.truncate(part, size_bytes)
                    return len(line), head
                size_bytes += len(line)
            if head is not None:
                return 0, head
        return 0, None

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
            head = _next_head(head, line)
        return head, 0

    def _write_head(self, head: Head) -> None:
        """Replace the head file. It may lag behind after a power failure: :meth:`_catch_up` reads on from there."""
        fd, name = tempfile.mkstemp(prefix=f".{self.path.name}.", dir=self.path.parent)
        try:
            with open(fd, "w", encoding="ascii") as file:
                file.write(f"{head}\n")
            os.rename(name, self._head_path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise

    def _sync_names(self) -> None:
        folder_fd = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder_fd)
        finally:
            os.close(folder_fd)


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


def _next_head(head: Head, line: bytes) -> Head:
    """The head after one more line. Raises AuditError if it does not follow."""
    record = unseal(line)
    if record is None or record[0].get("prev") != head.hash:
        raise AuditError("the audit log goes on behind its head with a record that does not follow", remedy=_LOOK)
    return Head(head.seq + 1, record[1], head.size_bytes + len(line))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What :func:`verify` found: ``problems`` is empty if the log is whole."""

    records: int
    head: Head | None
    problems: tuple[str, ...]
    open_runs: tuple[str, ...]  # started, and no end recorded: still running, or their process was killed
    parts: int = 1  # files

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def verify(path: Path, *, expected: Head | None = None, pruned: bool = False) -> Verdict:
    """Check every record of a log, its order and its end, over all its parts.

    ``expected`` is a head that was kept elsewhere. ``pruned`` accepts a log whose oldest parts were removed. Writers
    are kept waiting meanwhile. Raises AuditError if it cannot be read.
    """
    try:
        with locked(path, for_writing=False):
            return _Check(path, expected).of(parts_in_order(path), pruned=pruned)
    except OSError as error:
        raise AuditError(f"the audit log cannot be read: {error.strerror or error}") from error


class _Check:
    """One verification: what was seen up to the line that is looked at."""

    def __init__(self, path: Path, expected: Head | None) -> None:
        recorded = read_head(path)
        self.path = path
        self.wanted = {"the head file": recorded, "the expected head": expected}
        self.missing = {head.hash for head in (recorded, expected) if head is not None}
        self.problems: list[str] = []
        self.open_runs: dict[str, None] = {}
        self.prev = GENESIS  # "" behind a damaged line: nobody knows
        self.seq = self.records = 0
        self.head: Head | None = None

    def of(self, parts: list[Path], *, pruned: bool) -> Verdict:
        first = first_seq(parts[0])
        if first and first > 1:
            self.prev, self.seq = "", first - 1
            if not pruned:
                self.problems.append(f"the log begins with record {first}: what came before was removed")
        for part in parts:
            self._part(part, f" of {part.name}" if len(parts) > 1 else "")
        if self.wanted["the head file"] is None and self.records:
            self.problems.append(
                "the head file is missing or unreadable: whether records are missing at the end is unknown"
            )
        for who, wish in self.wanted.items():
            if wish is not None and wish.hash in self.missing:
                self.problems.append(
                    f"the log does not hold record {wish.seq} of {who}: its end is missing or was rewritten"
                )
        return Verdict(self.records, self.head, tuple(self.problems), tuple(self.open_runs), len(parts))

    def _part(self, part: Path, of_part: str) -> None:
        size_bytes = 0
        for number, line in enumerate(lines(part), start=1):
            size_bytes += len(line)
            self.seq += 1
            found = unseal(line) if line.endswith(b"\n") else None
            if found is None:
                self.problems.append(f"line {number}{of_part} was changed or is torn")
                self.prev = ""
                continue
            record, hash_ = found
            if self.prev and record.get("prev") != self.prev:
                before = f"line {number - 1}" if number > 1 else "the end of the part before it"
                self.problems.append(f"line {number}{of_part} does not follow {before}: removed or reordered records")
            elif record.get("seq") != self.seq:
                self.problems.append(f"line {number}{of_part} has the number {record.get('seq')}")
            if type(record.get("seq")) is int:
                self.seq = record["seq"]
            self.prev = hash_
            self.records += 1
            self.missing.discard(hash_)
            self.head = Head(self.seq, hash_, size_bytes)
            _note_run(record, self.open_runs)


def _note_run(record: Mapping[str, Any], open_runs: dict[str, None]) -> None:
    run = record.get("run")
    if isinstance(run, str):
        if record.get("event") == "started":
            open_runs[run] = None
        elif record.get("event") in ("ended", "failed"):
            open_runs.pop(run, None)


def read(path: Path, *, follow_s: float | None = None) -> Iterator[dict[str, Any]]:
    """The records of all parts, lines that are not what was hashed as ``{"event": "damaged"}``.

    With ``follow_s`` it goes on for ever, looking for more that often, also when the log is moved. Raises AuditError if
    it cannot be read.
    """
    try:
        parts = parts_in_order(path)
        for part in parts:
            at_byte = 0
            for line in lines(part) if part != path else ():
                yield _as_read(line, at_byte)
                at_byte += len(line)
        if path in parts or follow_s is not None:
            yield from _tail(path, follow_s)
    except OSError as error:
        raise AuditError(f"the audit log cannot be read: {error.strerror or error}") from error


def _tail(path: Path, follow_s: float | None) -> Iterator[dict[str, Any]]:
    """The records of the file that is written to, and with ``follow_s`` of each that takes its place."""
    while True:
        while follow_s is not None and not path.exists():  # it was moved, and the next record has not come yet
            time.sleep(follow_s)
        with path.open("rb") as file:
            moved = False
            while True:
                at_byte = file.tell()
                line = file.readline()
                if line.endswith(b"\n"):
                    yield _as_read(line, at_byte)
                    continue
                file.seek(at_byte)
                if follow_s is None:
                    return
                if moved:  # and looked at once more: a writer may have had it open when it was moved
                    break
                time.sleep(follow_s)
                moved = _is_another(file.fileno(), path)


def _is_another(fd: int, path: Path) -> bool:
    """Whether ``path`` is another file than the open one by now. One that is missing comes with the next record."""
    try:
        return not os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _as_read(line: bytes, at_byte: int) -> dict[str, Any]:
    found = unseal(line)
    return {**found[0], "hash": found[1]} if found else {"event": "damaged", "at_byte": at_byte}


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
