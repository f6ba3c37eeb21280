"""Quotas: how many runs, CPU seconds, wall seconds, bytes of output and sandboxes at once a session or a key may have.

Before a run starts, the most that it can use by its policy's limits is reserved; when it has ended, the reservation is
replaced by what it used. Reserving and checking are one transaction, so a quota holds exactly however many callers
there are, and the price is that a run whose limits do not fit into what is left is refused even if it would have used
less.

A reservation names its owner: boot, PID namespace, process and the process's start time. If that process is gone
(SIGKILL), the next caller on the same host sees it and books the reservation as used up, which frees its place among
the sandboxes at once. Owners on other hosts, where a database is shared, are judged by a lease, which :meth:`renew`
extends and which outlasts the longest run.

SQLite (a file, write-ahead log, ``BEGIN IMMEDIATE``) serves the processes of one host; a URL ``postgresql://…`` (extra
``postgres``) serves several, with an advisory lock in place of SQLite's write lock.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Protocol

from fumehood.errors import PolicyError, QuotaError, UnavailableError

Resource = Literal["runs", "cpu_s", "wall_s", "output_bytes", "sandboxes"]
Per = Literal["session", "key"]

#: Records are kept this long, and no window may be longer.
WINDOW_MAX_S = 31 * 86400.0

#: A reservation whose owner cannot be looked at (another host) ends this long after it was last renewed.
LEASE_S = 120.0

_UNITS = {
    "runs": "runs",
    "cpu_s": "CPU seconds",
    "wall_s": "seconds of running time",
    "output_bytes": "bytes of output",
    "sandboxes": "sandboxes at once",
}


@dataclass(frozen=True, slots=True)
class Amounts:
    """How much of each resource."""

    runs: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    output_bytes: int = 0
    sandboxes: int = 0


_RESOURCES = tuple(f.name for f in fields(Amounts))


@dataclass(frozen=True, slots=True)
class Quota:
    """At most ``limit`` of ``resource`` for each session or key within any ``window_s`` seconds.

    ``sandboxes`` counts those that are alive, and has no window. Raises PolicyError.
    """

    per: Per
    resource: Resource
    limit: float
    window_s: float | None = None

    def __post_init__(self) -> None:
        if self.per not in ("session", "key"):
            raise PolicyError(f'a quota is per "session" or "key", not {self.per!r}')
        if self.resource not in _RESOURCES:
            raise PolicyError(f"a quota is on {', '.join(_RESOURCES)}, not {self.resource!r}")
        if isinstance(self.limit, bool) or not isinstance(self.limit, (int, float)) or not 0 <= self.limit < 1e18:
            raise PolicyError(f"a quota's limit must be a number from 0, not {self.limit!r}")
        if (self.window_s is None) != (self.resource == "sandboxes"):
            raise PolicyError("a quota has a window in seconds, except the one on sandboxes")
        if self.window_s is not None and not 0 < self.window_s <= WINDOW_MAX_S:
            raise PolicyError(f"a quota's window must be over 0 and at most {WINDOW_MAX_S:g} s, not {self.window_s!r}")

    def __str__(self) -> str:
        window = "" if self.window_s is None else f" in {self.window_s:g} s"
        return f"{self.limit:g} {_UNITS[self.resource]}{window} for each {self.per}"

    @classmethod
    def parse(cls, text: str) -> Quota:
        """A quota from ``session:runs=100/3600`` or ``key:sandboxes=4``. Raises PolicyError."""
        what, _, amount = text.partition("=")
        per, _, resource = what.partition(":")
        limit, slash, window = amount.partition("/")
        try:
            return cls(per, resource, float(limit), float(window) if slash else None)  # type: ignore[arg-type]
        except ValueError as error:
            if isinstance(error, PolicyError):
                raise
            raise PolicyError(
                f"{text!r} is not a quota", remedy="write session:runs=100/3600 or key:sandboxes=4"
            ) from None


class Database(Protocol):
    """Where reservations are kept: SQLite or Postgres."""

    def transaction(self) -> contextlib.AbstractContextManager[Transaction]:
        """An exclusive transaction, committed at the end of the block and rolled back on an exception."""
        ...

    def close(self) -> None: ...


class Transaction(Protocol):
    """An open exclusive transaction."""

    def query(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run one statement with ``?`` for the values."""
        ...

    def now(self) -> float:
        """The time that all users of the database share, in seconds since 1970."""
        ...


_SCHEMA = """
CREATE TABLE IF NOT EXISTS fumehood_usage (
    id TEXT NOT NULL, per TEXT NOT NULL, subject TEXT NOT NULL,
    settled INTEGER NOT NULL, at_s DOUBLE PRECISION NOT NULL, lease_until_s DOUBLE PRECISION NOT NULL,
    owner TEXT NOT NULL,
    runs BIGINT NOT NULL, cpu_s DOUBLE PRECISION NOT NULL, wall_s DOUBLE PRECISION NOT NULL,
    output_bytes BIGINT NOT NULL, sandboxes BIGINT NOT NULL,
    PRIMARY KEY (per, subject, id));
CREATE INDEX IF NOT EXISTS fumehood_usage_open ON fumehood_usage (settled, lease_until_s);
CREATE INDEX IF NOT EXISTS fumehood_usage_id ON fumehood_usage (id);
CREATE INDEX IF NOT EXISTS fumehood_usage_window ON fumehood_usage (per, subject, at_s);
"""


class Quotas:
    """Quotas over a database: ``where`` is a file's path or a ``postgresql://`` URL.

    All methods block for at most the database's lock time (30 s) and may be called from any thread.
    Raises UnavailableError if the database cannot be used.
    """

    def __init__(self, quotas: Sequence[Quota], where: str | os.PathLike[str]) -> None:
        self.quotas = tuple(quotas)
        self._owner = Owner.of_this_process()
        self._database = _connect(where)

    def reserve(self, subjects: Mapping[Per, str], most: Amounts, *, lease_s: float = 0.0) -> str:
        """Set ``most`` aside for a run or sandbox of ``subjects``, and return the reservation's name.

        ``lease_s`` is added to LEASE_S: how long it may run without :meth:`renew`. Raises QuotaError, UnavailableError.
        """
        ident = uuid.uuid4().hex
        with self._database.transaction() as transaction:
            now = transaction.now()
            self._bury_the_dead(transaction, now)
            for quota in self.quotas:
                if quota.per in subjects:
                    self._check(transaction, quota, subjects[quota.per], most, now)
            amounts = [getattr(most, name) for name in _RESOURCES]
            for per, subject in subjects.items():
                transaction.query(
                    "INSERT INTO fumehood_usage (id, per, subject, settled, at_s, lease_until_s, owner, "
                    f"{', '.join(_RESOURCES)}) VALUES (?, ?, ?, 0, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (ident, per, subject, now, now + LEASE_S + lease_s, str(self._owner), *amounts),
                )
        return ident

    def renew(self, ident: str, *, lease_s: float = 0.0) -> None:
        """Extend a reservation's lease."""
        with self._database.transaction() as transaction:
            transaction.query(
                "UPDATE fumehood_usage SET lease_until_s = ? WHERE id = ? AND settled = 0",
                (transaction.now() + LEASE_S + lease_s, ident),
            )

    def settle(self, ident: str, used: Amounts) -> None:
        """Replace a reservation by what was used. With nothing used it is as if it had never been. Idempotent."""
        with self._database.transaction() as transaction:
            if used == Amounts():
                transaction.query("DELETE FROM fumehood_usage WHERE id = ? AND settled = 0", (ident,))
                return
            transaction.query(
                "UPDATE fumehood_usage SET settled = 1, at_s = ?, sandboxes = 0, runs = ?, cpu_s = ?, wall_s = ?, "
                "output_bytes = ? WHERE id = ? AND settled = 0",
                (transaction.now(), used.runs, used.cpu_s, used.wall_s, used.output_bytes, ident),
            )

    def used(self, quota: Quota, subject: str) -> float:
        """How much of a quota is used or reserved now."""
        with self._database.transaction() as transaction:
            now = transaction.now()
            self._bury_the_dead(transaction, now)
            return self._used(transaction, quota, subject, now)

    def close(self) -> None:
        """Close the database. Idempotent."""
        self._database.close()

    def _check(self, transaction: Transaction, quota: Quota, subject: str, most: Amounts, now: float) -> None:
        asked = getattr(most, quota.resource)
        if not asked:
            return
        used = self._used(transaction, quota, subject, now)
        # Sums of binary fractions: a billionth of the quota is no run's worth.
        if used + asked <= quota.limit * (1 + 1e-9):
            return
        left = max(quota.limit - used, 0)
        message = f"the quota of {quota} is used up: {left:g} left"
        message += f", and this run may use {asked:g}" if asked > 1 else ""
        if asked > quota.limit:
            raise QuotaError(f"{message}; it never fits", quota=str(quota))
        raise QuotaError(message, quota=str(quota), retry_after_s=self._retry_after(transaction, quota, subject, now))

    def _used(self, transaction: Transaction, quota: Quota, subject: str, now: float) -> float:
        window_s = quota.window_s if quota.window_s is not None else 0.0
        [(total,)] = transaction.query(
            f"SELECT COALESCE(SUM({quota.resource}), 0) FROM fumehood_usage "
            "WHERE per = ? AND subject = ? AND (settled = 0 OR at_s > ?)",
            (quota.per, subject, now - window_s),
        )
        return float(total)

    def _retry_after(self, transaction: Transaction, quota: Quota, subject: str, now: float) -> float | None:
        """When the oldest use falls out of the window; None if all of it is still under way."""
        if quota.window_s is None:
            return None
        [(oldest,)] = transaction.query(
            "SELECT MIN(at_s) FROM fumehood_usage "
            f"WHERE per = ? AND subject = ? AND settled = 1 AND at_s > ? AND {quota.resource} > 0",
            (quota.per, subject, now - quota.window_s),
        )
        return None if oldest is None else max(oldest + quota.window_s - now, 1.0)

    def _bury_the_dead(self, transaction: Transaction, now: float) -> None:
        """Book reservations of lost owners as used up, and forget what no window reaches."""
        open_ = transaction.query("SELECT DISTINCT owner, lease_until_s FROM fumehood_usage WHERE settled = 0")
        for owner, lease_until_s in open_:
            if Owner.parse(owner).is_gone(self._owner, lease_over=lease_until_s < now):
                transaction.query(
                    "UPDATE fumehood_usage SET settled = 1, at_s = ?, sandboxes = 0 "
                    "WHERE settled = 0 AND owner = ? AND lease_until_s = ?",
                    (now, owner, lease_until_s),
                )
        transaction.query("DELETE FROM fumehood_usage WHERE settled = 1 AND at_s < ?", (now - WINDOW_MAX_S,))


@dataclass(frozen=True, slots=True)
class Owner:
    """A process, such that no later one is taken for it."""

    boot: str
    pid_namespace: str
    pid: int
    started: str  # field 22 of /proc/PID/stat, clock ticks since boot; "" if that cannot be read

    def __str__(self) -> str:
        return f"{self.boot} {self.pid_namespace} {self.pid} {self.started}"

    @classmethod
    def parse(cls, text: str) -> Owner:
        """The reverse of ``str()``."""
        boot, namespace, pid, started = text.split(" ")
        return cls(boot, namespace, int(pid), started)

    @classmethod
    def of_this_process(cls) -> Owner:
        """This process."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            namespace = os.readlink("/proc/self/ns/pid").replace(" ", "")
        except OSError:
            boot, namespace = "unknown-" + uuid.uuid4().hex, "unknown"
        return cls(boot, namespace, os.getpid(), _started(os.getpid()))

    def is_gone(self, looker: Owner, *, lease_over: bool) -> bool:
        """Whether this process has ended, as far as ``looker`` can tell; by its lease where it cannot look."""
        if (self.boot, self.pid_namespace) != (looker.boot, looker.pid_namespace) or not self.started:
            return lease_over
        started = _started(self.pid)
        if started:
            return started != self.started
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:  # it is there, and /proc hides it from us (hidepid)
            return lease_over
        return _started(self.pid) != self.started  # a zombie


def _started(pid: int) -> str:
    """When a process started; "" if it cannot be read or the process is a zombie, whose work is over."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return ""
    rest = stat.rpartition(")")[2].split()  # the name before it may hold anything
    return "" if rest[0] in "ZX" else rest[19]


def _connect(where: str | os.PathLike[str]) -> Database:
    text = os.fspath(where)
    if text.startswith(("postgresql://", "postgres://")):
        from fumehood.agent.quotas_postgres import PostgresDatabase

        return PostgresDatabase(text, _SCHEMA)
    return SqliteDatabase(text, _SCHEMA)


class SqliteDatabase:
    """One connection, made on first use in each process, and taken in turns by its threads."""

    def __init__(self, path: str, schema: str) -> None:
        self._path = path
        self._schema = schema
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        with self.transaction():
            pass  # a database that cannot be used is told now

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """See :class:`Database`. Raises UnavailableError."""
        with self._lock:
            try:
                connection = self._connection = self._connection or self._open()
                connection.execute("BEGIN IMMEDIATE")
                try:
                    yield _SqliteTransaction(connection)
                except BaseException:
                    connection.execute("ROLLBACK")
                    raise
                connection.execute("COMMIT")
            except sqlite3.Error as error:
                raise UnavailableError(f"the quota database cannot be used: {error}") from error

    def _open(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, timeout=30, isolation_level=None, check_same_thread=False)
        # In this mode a commit may be lost with the power, but not with the process; a quota can bear that.
        for statement in ("PRAGMA journal_mode = WAL", "PRAGMA synchronous = NORMAL"):
            connection.execute(statement)
        connection.executescript(self._schema)
        return connection

    def close(self) -> None:
        """See :class:`Database`."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None


class _SqliteTransaction:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def query(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        return self._connection.execute(sql, values).fetchall()

    def now(self) -> float:
        return time.time()
