"""Approval by a person: whether a run needs it, who is asked, and what was answered.

An :class:`Approval` holds when to ask (always, never, or where a rule matches) and whom (an :class:`Approver`: a
callback, a terminal, or a store where the question waits for an answer from elsewhere). No answer in time is a no.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import re
import sqlite3
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from fumehood.errors import FumehoodError, PolicyError
from fumehood.model import Code, Command, Policy, Program
from fumehood.threads import in_thread

#: The names of actions are those of the tools: a run of Python, a run of a command, and files saved on the host.
Action = Literal["run_python", "run_command", "save_files"]

#: How long a person has to answer unless told otherwise.
TIMEOUT_S = 300.0

#: How often a waiting caller looks into a store.
LOOK_EVERY_S = 0.2


@dataclass(frozen=True, slots=True)
class Ask:
    """One question: may this be done?"""

    ident: str
    action: Action
    program: Program | None  # None for save_files
    session: str
    key: str
    tier: str
    policy: Policy
    saves_files: bool = False  # files that the program leaves are saved on the host
    reasons: tuple[str, ...] = ()  # why it is asked

    def code(self) -> str:
        """The program as text, raw: escape it where it is shown."""
        if isinstance(self.program, Code):
            return self.program.data.decode("utf-8", "replace")
        if isinstance(self.program, Command):
            return json.dumps(list(self.program.argv), ensure_ascii=False)
        return ""


@dataclass(frozen=True, slots=True)
class Decision:
    """An answer: by whom (for the audit log) and, if they gave one, why."""

    approved: bool
    by: str
    reason: str = ""
    timed_out: bool = False


class Approver(Protocol):
    """Whoever can be asked."""

    async def decide(self, ask: Ask, *, timeout_s: float) -> Decision:
        """The answer. It need not watch the time: the caller cancels it at the deadline."""
        ...


@dataclass(frozen=True, slots=True)
class Rule:
    """A reason to ask: ``matches`` gives it in words, or None."""

    name: str
    matches: Callable[[Ask], str | None]


def tool_call(*actions: Action) -> Rule:
    """Ask before each of these actions."""
    return Rule("tool_call", lambda ask: f"it is a {ask.action}" if ask.action in actions else None)


def file_out() -> Rule:
    """Ask before files from a sandbox are saved on the host."""
    return Rule("file_out", lambda ask: "files are saved on the host" if ask.saves_files else None)


def code_matches(pattern: str) -> Rule:
    """Ask before a program whose text matches a regular expression. It catches the honest only; see `egress`."""
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise PolicyError(f"{pattern!r} is not a regular expression: {error}") from None
    return Rule("code_matches", lambda ask: f"it holds {pattern!r}" if expression.search(ask.code()) else None)


def new_egress_host() -> Rule:
    """Ask before the first run of a session that could reach a host of the policy's ``egress``."""
    return Rule(_EGRESS, lambda ask: "it can reach: " + ", ".join(ask.policy.egress) if ask.policy.egress else None)


_EGRESS = "new_egress_host"


@dataclass(slots=True)
class Approval:
    """When to ask, and whom. ``when`` is "always", "never" or a sequence of rules."""

    approver: Approver
    when: Literal["always", "never"] | Sequence[Rule] = "always"
    timeout_s: float = TIMEOUT_S
    _known_hosts: dict[str, set[str]] = field(default_factory=dict, init=False)  # session -> approved

    def __post_init__(self) -> None:
        if isinstance(self.when, str) and self.when not in ("always", "never"):
            raise PolicyError(f'approval is asked "always", "never" or by rules, not {self.when!r}')
        if not 0 < self.timeout_s <= 86400:
            raise PolicyError(f"approval's timeout must be over 0 and at most 86400 s, not {self.timeout_s!r}")

    def reasons(self, ask: Ask) -> tuple[str, ...]:
        """Why ``ask`` must be asked; empty if it need not be."""
        if self.when == "never":
            return ()
        if self.when == "always":
            return ("every run is asked",) if ask.action != "save_files" else ()
        assert not isinstance(self.when, str)
        return tuple(reason for rule in self.when if (reason := self._match(rule, ask)))

    def _match(self, rule: Rule, ask: Ask) -> str | None:
        if rule.name == _EGRESS and set(ask.policy.egress) <= self._known_hosts.get(ask.session, set()):
            return None
        return rule.matches(ask)

    async def decide(self, ask: Ask) -> Decision:
        """The answer to ``ask``; a no if there is none in time. Raises what the approver raises."""
        try:
            async with asyncio.timeout(self.timeout_s) as deadline:
                decision = await self.approver.decide(ask, timeout_s=self.timeout_s)
        except TimeoutError:
            if not deadline.expired():
                raise
            return Decision(False, "nobody", f"approval was not given within {self.timeout_s:g} s", timed_out=True)
        if decision.approved:
            self._known_hosts.setdefault(ask.session, set()).update(ask.policy.egress)
        return decision


class CallbackApprover:
    """Asks a function, plain or asynchronous, that returns a Decision or a bool. A plain one runs in a thread."""

    def __init__(
        self, function: Callable[[Ask], Decision | bool | Awaitable[Decision | bool]], *, name: str = "callback"
    ) -> None:
        self._function = function
        self._name = name

    async def decide(self, ask: Ask, *, timeout_s: float) -> Decision:
        """See :class:`Approver`."""
        if inspect.iscoroutinefunction(self._function):
            answer = await self._function(ask)
        else:
            answer = await in_thread(self._function, ask)
            if inspect.isawaitable(answer):
                answer = await answer
        if isinstance(answer, Decision):
            return answer
        return Decision(answer is True, self._name)


@dataclass(frozen=True, slots=True)
class Pending:
    """A question that waits in a store."""

    ident: str
    action: str
    code: str  # raw: escape it where it is shown
    session: str
    key: str
    tier: str
    reasons: tuple[str, ...]
    deadline_s: float  # seconds since 1970


class StoreApprover:
    """Puts the question into a SQLite file, where :meth:`pending` shows it and :meth:`answer` answers it.

    The asker and who answers may be different processes. A question is gone when its asker is (cancelled, timed out);
    after a crash it stays until its deadline. The file is made with mode 0600: whoever can write it can approve.
    Raises FumehoodError if it cannot be used.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        try:  # whoever can write it can approve
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise FumehoodError(f"the approval store cannot be used: {error.strerror}") from error
        with self._database() as database:
            database.execute(
                "CREATE TABLE IF NOT EXISTS asks (id TEXT PRIMARY KEY, action TEXT, code TEXT, session TEXT, "
                "key TEXT, tier TEXT, reasons TEXT, deadline_s REAL, approved INTEGER, by TEXT, reason TEXT)"
            )

    @contextlib.contextmanager
    def _database(self) -> Iterator[sqlite3.Connection]:
        try:
            connection = sqlite3.connect(self._path, timeout=30)
            with contextlib.closing(connection), connection:
                yield connection
        except sqlite3.Error as error:
            raise FumehoodError(f"the approval store cannot be used: {error}") from error

    async def decide(self, ask: Ask, *, timeout_s: float) -> Decision:
        """See :class:`Approver`."""
        await in_thread(self._put, ask, time.time() + timeout_s)
        try:
            while True:
                decision = await in_thread(self._answered, ask.ident)
                if decision is not None:
                    return decision
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            await asyncio.shield(in_thread(self._remove, ask.ident))

    def _put(self, ask: Ask, deadline_s: float) -> None:
        code = ask.code().encode("utf-8", "replace").decode()
        row = (ask.ident, ask.action, code, ask.session, ask.key, ask.tier, json.dumps(ask.reasons), deadline_s)
        with self._database() as database:
            database.execute("INSERT INTO asks VALUES (?, ?, ?, ?, ?, ?, ?, ?, NULL, NULL, NULL)", row)

    def _answered(self, ident: str) -> Decision | None:
        with self._database() as database:
            row = database.execute("SELECT approved, by, reason FROM asks WHERE id = ?", (ident,)).fetchone()
        if row is None:
            return Decision(False, "nobody", "the question was removed from the store")
        approved, by, reason = row
        return None if approved is None else Decision(approved == 1, by, reason)

    def _remove(self, ident: str) -> None:
        with self._database() as database:
            database.execute("DELETE FROM asks WHERE id = ?", (ident,))

    def pending(self) -> tuple[Pending, ...]:
        """The questions that still wait, the most urgent first."""
        with self._database() as database:
            rows = database.execute(
                "SELECT id, action, code, session, key, tier, reasons, deadline_s FROM asks "
                "WHERE approved IS NULL AND deadline_s > ? ORDER BY deadline_s",
                (time.time(),),
            ).fetchall()
        return tuple(
            Pending(ident, action, code, session, key, tier, tuple(json.loads(reasons)), deadline_s)
            for ident, action, code, session, key, tier, reasons, deadline_s in rows
        )

    def answer(self, ident: str, *, approved: bool, by: str, reason: str = "") -> bool:
        """Answer a question; False if it does not wait (any longer)."""
        with self._database() as database:
            cursor = database.execute(
                "UPDATE asks SET approved = ?, by = ?, reason = ? WHERE id = ? AND approved IS NULL AND deadline_s > ?",
                (int(approved), by, reason, ident, time.time()),
            )
            return cursor.rowcount == 1


def new_ident() -> str:
    """A name for a question or a run."""
    return uuid.uuid4().hex
