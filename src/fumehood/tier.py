"""The contract between a runner and a tier.

A tier builds one kind of boundary. It promises ``features`` (constant for the process, a test behind each yes),
answers ``probe()`` (does this host have it, why not, what to do), and creates sandboxes. Everything that a tier
cannot hold is refused by :func:`require` before anything starts.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from fumehood.errors import UnsupportedError
from fumehood.model import Artifact, Boundary, Code, Command, Display, Limits, Policy, Program, Receipt, Result

Stream = Literal["stdout", "stderr"]

#: Called with each piece of output as it comes, within Limits.output_bytes. It must not block. One that has a method
#: ``display`` as well (a :class:`DisplaySink`) is called there with each display.
Sink = Callable[[Stream, bytes], None]


class DisplaySink(Protocol):
    """A sink that takes displays as they come, too. Neither method may block."""

    def __call__(self, stream: Stream, data: bytes, /) -> None: ...

    def display(self, display: Display, /) -> None: ...


@dataclass(frozen=True, slots=True)
class Features:
    """What a tier promises on every host that has it."""

    boundary: Boundary
    summary: str  # one line for `fumehood tiers`
    live: bool = False  # open(): state and files last between execs
    files: bool = False  # files in and artifacts out
    commands: bool = False  # exec(Command)
    contexts: bool = False  # Code.context, in a live sandbox
    displays: bool = False  # Code.displays, top-level await, Result.displays
    background: bool = False  # FullSandbox.start(): handles, standard input as it comes, commands in the background
    pty: bool = False  # Command.pty
    environments: bool = False  # Policy.environment and preload
    mounts: bool = False  # Policy.mounts
    images: bool = False  # Policy.image: the tier's class takes it as ``image``
    runtimes: bool = False  # Policy.runtime: the tier's class takes it as ``runtime``
    egress_open: bool = False  # Policy.egress == ("*",)
    egress_list: bool = False  # Policy.egress as an allow-list
    #: Limits that are held here when they are not the default; another one that is set is refused by name.
    limits: tuple[str, ...] = tuple(f.name for f in fields(Limits))
    claimed: bool = False  # the boundary is a provider's word: never chosen by a floor alone
    full_python: bool = True  # any Python program, not a subset of the language
    note: str = ""  # what a user must know wherever the tier is named, e.g. "not a boundary"


@dataclass(frozen=True, slots=True)
class Probe:
    """Whether this host has a tier. ``hard`` names the limits that it can hold exactly here (see HARD_LIMITS)."""

    available: bool
    reason: str = ""  # why not
    remedy: str = ""  # what the operator can do
    hard: tuple[str, ...] = ()
    details: tuple[tuple[str, str], ...] = ()  # facts for `fumehood doctor`: (name, value)


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One entry of a sandbox's work folder."""

    path: str
    kind: Literal["file", "folder", "other"]
    size_bytes: int
    modified_s: int | None = None  # seconds since 1970, as the sandbox says; not in a listing
    mode: int | None = None  # permission bits; not in a listing


class Enclosure(Protocol):
    """What a tier holds of a sandbox from outside, around the guest."""

    def alive(self) -> bool:
        """Whether the first process inside still runs, as far as can be told without waiting."""
        ...

    def kill(self) -> None:
        """Kill every process inside, at once, whatever they do. Idempotent; does not wait, does not raise."""
        ...

    async def wait_dead(self) -> None:
        """Return when the last process inside is gone, and at once if it is gone already. After :meth:`kill`."""
        ...

    def usage(self) -> tuple[float | None, int | None]:
        """CPU seconds used so far and peak memory in bytes, all processes together; None for what nobody counts.

        Works from creation to release, also when every process is dead. Must not block.
        """
        ...

    def memory_killed(self) -> bool:
        """Whether the memory limit has killed a process inside."""
        ...

    def lost_reason(self) -> str:
        """Why the guest is gone, as far as the tier can tell, for an error message; "" if it cannot."""
        ...

    def workdir_fd(self) -> int | None:
        """A descriptor of the work folder, owned by the enclosure, good after death; None if it has none."""
        ...

    async def release(self) -> None:
        """Remove cgroups, folders and descriptors. Called when all are dead. Idempotent."""
        ...


class Sandbox(Protocol):
    """One live boundary. Not safe for concurrent execs: a second exec while one runs raises RuntimeError."""

    @property
    def receipt(self) -> Receipt: ...

    async def exec(
        self, program: Program, *, stdin: bytes = b"", sink: Sink | None = None, last: bool = False
    ) -> Result:
        """Run one program. ``last`` says that none follows, so it may run as a whole process to its exit.

        Raises ClosedError, OutcomeUnknownError (the boundary was lost), RuntimeError (an exec is running).
        """
        ...

    async def write_file(self, path: str, data: bytes) -> None:
        """Create or replace a file of the work folder, making its folders. Raises FileError, ClosedError."""
        ...

    async def read_file(self, path: str, *, max_bytes: int = ...) -> bytes:
        """A regular file's content. Raises FileError (missing, not regular, larger than max_bytes), ClosedError."""
        ...

    async def list_files(self) -> tuple[FileInfo, ...]:
        """The work folder's entries, recursively, sorted by path, at most Limits.files of them."""
        ...

    async def remove(self, path: str) -> None:
        """Remove a file or a folder with all in it. Raises FileError, ClosedError."""
        ...

    async def interrupt(self) -> None:
        """Send the running exec what Ctrl-C would; nothing if none runs.

        A program that does not end within a bounded time is killed; if it is code, its variables are lost then
        (Result.interpreter_lost), while the sandbox and its files live on.
        """
        ...

    async def close(self, *, out: Path | None = None) -> tuple[Artifact, ...]:
        """Kill everything, then, if ``out`` is given, save the files left in the work folder below it.

        Idempotent. Only what is new or changed since it was written by the host is saved.
        """
        ...


class RunningProgram(Protocol):
    """A program that was started and is not awaited. After its end the methods do no harm."""

    @property
    def done(self) -> bool: ...

    @property
    def stdout_data(self) -> bytes: ...

    @property
    def stderr_data(self) -> bytes: ...

    async def wait(self) -> Result:
        """Its end. Raises what :meth:`Sandbox.exec` does. Cancelling this does not end the program."""
        ...

    async def write(self, data: bytes) -> None:
        """Give it something to read; waits while much is unread. Raises ClosedError if it is over."""
        ...

    async def close_stdin(self) -> None:
        """End of file, once it has read what was written."""
        ...

    async def signal(self, number: int) -> None:
        """A signal to its process group."""
        ...

    async def kill(self) -> None:
        """SIGKILL to its process group."""
        ...

    async def resize(self, rows: int, columns: int) -> None:
        """Another size for its pseudo-terminal. Raises PolicyError."""
        ...


class FullSandbox(Sandbox, Protocol):
    """What a live sandbox is in tiers with the guest agent; Features says which parts a tier promises."""

    def expire_after(self, *, idle_s: float | None = None, lifetime_s: float | None = None) -> None:
        """Close down after ``lifetime_s`` in all, and when nothing was under way for ``idle_s``.

        All inside is killed then, an exec under way has Outcome.WALL, and later calls raise ClosedError. The files
        can still be saved by close(). Call it once.
        """
        ...

    async def start(
        self, program: Program, *, stdin: bool = False, sink: Sink | None = None, background: bool = False
    ) -> RunningProgram:
        """Begin to run a program; ``stdin`` opens its standard input for :meth:`RunningProgram.write`.

        Without ``background`` it is the sandbox's one exec until it ends. With it, a command runs beside execs, up to
        32 of them, without a deadline of its own; its usage is part of the sandbox's. Raises what exec() does;
        PolicyError for code in the background.
        """
        ...

    async def write_stream(self, path: str, source: AsyncIterable[bytes] | Iterable[bytes]) -> None:
        """Create or replace a file from pieces, holding one at a time. Raises FileError, ClosedError.

        What ``source`` raises is passed on, and no part of the file is left.
        """
        ...

    def read_stream(self, path: str) -> AsyncIterator[bytes]:
        """A regular file in pieces of at most 1 MiB, up to Limits.disk_bytes in all. Raises FileError, ClosedError.

        A program that changes the file meanwhile is seen doing it.
        """
        ...

    async def stat(self, path: str) -> FileInfo:
        """One entry, a link itself and not what it points to. Raises FileError, ClosedError."""
        ...

    async def rename(self, path: str, new_path: str) -> None:
        """Move a file or folder, replacing a file. Raises FileError, ClosedError."""
        ...

    async def make_folder(self, path: str) -> None:
        """Make a folder with its parents; one that exists is fine. Raises FileError, ClosedError."""
        ...

    def export_tar(self, path: str = "", *, skipped: Callable[[str, str], None] | None = None) -> AsyncIterator[bytes]:
        """A folder ("": the work folder) as a tar stream, made on this side, of its regular files and folders.

        ``skipped`` is called with the path and the reason of what is left out: links, devices, names that deceive or
        that tools act upon (see :mod:`fumehood.artifacts`). Raises FileError, ClosedError.
        """
        ...

    async def import_tar(self, source: AsyncIterable[bytes] | Iterable[bytes], path: str = "") -> None:
        """Unpack an uncompressed tar stream into a folder; see :mod:`fumehood.tar` for what is refused.

        At most Limits.files members and Limits.disk_bytes are taken. Raises FileError at the first member that is
        refused (those before it are there), ClosedError.
        """
        ...


@runtime_checkable
class Tier(Protocol):
    """One way to build a boundary."""

    @property
    def name(self) -> str: ...

    @property
    def features(self) -> Features: ...

    def probe(self) -> Probe:
        """Whether this host has the tier. Never raises, never takes more than a few seconds."""
        ...

    async def create(self, policy: Policy) -> Sandbox:
        """A new sandbox. Raises UnsupportedError, UnavailableError, StartError; nothing is left behind then."""
        ...

    async def close(self) -> None:
        """Release what the tier keeps between sandboxes (templates). Idempotent."""
        ...


@runtime_checkable
class Single(Protocol):
    """A tier that makes a sandbox for one simple program at a lower price than one that lives on.

    The program is code without displays, context and standard input, executed with ``last``; no file goes in.
    """

    async def create_single(self, policy: Policy, *, warm: bool = False) -> Sandbox:
        """As :meth:`Tier.create`; ``warm`` as :class:`fumehood.pool.Warming` has it. Raises the same."""
        ...


def is_simple(program: Program, *, files: bool, stdin: bool) -> bool:
    """Whether a program may run in a sandbox that :meth:`Single.create_single` made."""
    return isinstance(program, Code) and not (program.displays or program.context or files or stdin)


#: A command that wants a pseudo-terminal where the operator gave none.
PTY_UNMET = "pty under a policy without terminals = true"


_USUAL_LIMITS = tuple((field.name, getattr(Limits(), field.name)) for field in fields(Limits))


def require(
    tier: Tier,
    policy: Policy,
    *,
    floor: Boundary | None = None,
    program: Program | None = None,
    files: bool = False,
    live: bool = False,
) -> None:
    """Refuse, by name and before anything starts, whatever ``tier`` cannot hold.

    ``floor`` is the caller's; the policy's own floor is checked beside it. ``files``: some go in or artifacts out;
    ``live``: the sandbox is opened for more than one exec. Raises UnsupportedError.
    """
    features = tier.features
    unmet = _unmet_by_program(features, policy, program, files)
    for who, wanted in (("the caller's floor", floor), ("the policy's floor", policy.floor)):
        if wanted is not None and not features.boundary.meets(wanted):
            unmet.append(f"{who} is {wanted.value!r} and its boundary is {features.boundary.value!r}")
    if policy.environment is not None and not features.environments:
        unmet.append("environment")
    if policy.preload and not features.environments:
        unmet.append("preload")
    if policy.mounts and not features.mounts:
        unmet.append("mounts")
    if policy.image is not None and not features.images:
        unmet.append("image")
    if policy.runtime is not None and not features.runtimes:
        unmet.append("runtime")
    if policy.egress == ("*",):
        if not features.egress_open:
            unmet.append("egress to everywhere")
    elif policy.egress and not features.egress_list:
        unmet.append("egress by an allow-list")
    for name, usual in _USUAL_LIMITS:
        if name not in features.limits and getattr(policy.limits, name) != usual:
            unmet.append(f"limits.{name}")
    if live and not features.live:
        unmet.append("live sandboxes")
    if policy.hard:
        held = tier.probe().hard
        unmet.extend(f"a hard limit on {name}" for name in policy.hard if name not in held)
    if unmet:
        raise _refusal(tier, unmet)


def require_program(tier: Tier, policy: Policy, program: Program, *, files: bool) -> None:
    """The same for one more program under a policy that :func:`require` has let pass for this tier."""
    unmet = _unmet_by_program(tier.features, policy, program, files)
    if unmet:
        raise _refusal(tier, unmet)


def _unmet_by_program(features: Features, policy: Policy, program: Program | None, files: bool) -> list[str]:
    unmet: list[str] = []
    if isinstance(program, Code):
        if program.displays and not features.displays:
            unmet.append("displays")
        if program.context and not features.contexts:
            unmet.append("contexts")
    elif isinstance(program, Command):
        if not features.commands:
            unmet.append("commands")
        if program.pty is not None and not features.pty:
            unmet.append("pty")
        elif program.pty is not None and not policy.terminals:
            unmet.append(PTY_UNMET)
    if files and not features.files:
        unmet.append("files")
    return unmet


def _refusal(tier: Tier, unmet: list[str]) -> UnsupportedError:
    return UnsupportedError(
        f"cannot hold: {'; '.join(unmet)}",
        unmet=tuple(unmet),
        tier=tier.name,
        remedy="choose another tier (`fumehood tiers`) or change the policy",
    )
