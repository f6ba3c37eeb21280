"""Quotas in Postgres, for callers on several hosts. Needs the extra ``postgres`` (psycopg 3)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fumehood.errors import UnavailableError

if TYPE_CHECKING:
    from psycopg import Connection

    from fumehood.agent.quotas import Transaction

#: The key of the advisory lock that takes the place of SQLite's one writer: "fumehood" in ASCII.
LOCK_KEY = int.from_bytes(b"fumehood", "big")

CONNECT_TIMEOUT_S = 10
LOCK_TIMEOUT = "30s"


class PostgresDatabase:
    """One connection, made again after it was lost. ``url`` is as libpq takes it."""

    def __init__(self, url: str, schema: str) -> None:
        try:
            import psycopg
        except ImportError as error:
            raise UnavailableError(
                "quotas in Postgres need psycopg", remedy="pip install 'fumehood[postgres]'"
            ) from error
        self._psycopg = psycopg
        self._url = url
        self._schema = schema
        self._lock = threading.Lock()
        self._connection: Connection[tuple[Any, ...]] | None = None
        with self.transaction():
            pass  # a database that cannot be used is told now

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """See :class:`fumehood.agent.quotas.Database`. Raises UnavailableError."""
        with self._lock:
            try:
                if self._connection is None or self._connection.closed:
                    self._connection = self._open()
                connection = self._connection
                with connection.transaction():
                    connection.execute("SELECT pg_advisory_xact_lock(%s)", (LOCK_KEY,))
                    yield _PostgresTransaction(connection)
            except self._psycopg.Error as error:
                # The driver's message may hold the URL's host and user; the log of whoever catches this has the cause.
                kind = type(error).__name__
                raise UnavailableError(f"the quota database cannot be used ({kind})") from error

    def _open(self) -> Connection[tuple[Any, ...]]:
        connection = self._psycopg.connect(self._url, autocommit=True, connect_timeout=CONNECT_TIMEOUT_S)
        connection.execute(f"SET lock_timeout = '{LOCK_TIMEOUT}'")
        # IF NOT EXISTS does not keep two sessions from making the same table at once.
        with connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(%s)", (LOCK_KEY,))
            for statement in filter(str.strip, self._schema.split(";")):
                connection.execute(statement.encode())
        return connection

    def close(self) -> None:
        """See :class:`fumehood.agent.quotas.Database`."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None


class _PostgresTransaction:
    def __init__(self, connection: Connection[tuple[Any, ...]]) -> None:
        self._connection = connection

    def query(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        cursor = self._connection.execute(sql.replace("?", "%s").encode(), values)
        return cursor.fetchall() if cursor.description is not None else []

    def now(self) -> float:
        return float(self.query("SELECT EXTRACT(EPOCH FROM clock_timestamp())")[0][0])
