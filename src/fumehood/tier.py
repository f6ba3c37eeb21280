"""The contract between a runner and a tier.

A tier builds one kind of boundary. It promises ``features`` (constant for the process, a test behind each yes),
answers ``probe()`` (does this host have it, why not, what to do), and creates sandboxes. Everything that a tier
cannot hold is refused by :func:`require` before anything starts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from fumehood.errors import UnsupportedError
from fumehood.model import Artifact, Boundary, Command, Limits, Policy, Program, Receipt, Result

Stream = Literal["stdout", "stderr"]

#: Called with each piece of output as it comes, within Limits.output_bytes. It must not block.
Sink = Callable[[Stream, bytes], None]


@dataclass(frozen=True, slots=True)
class Features:
    """What a tier promises on every host that has it."""

    boundary: Boundary
    summary: str  # one line for `fumehood tiers`
    live: bool = False  # open(): state and files last between execs
    files: bool = False  # files in and artifacts out
    commands: bool = False  # exec(Command)
    environments: bool = False  # Policy.environment and preload
    mounts: bool = False  # Policy.mounts
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
        """Send the running exec what Ctrl-C would; nothing if none runs."""
        ...

    async def close(self, *, out: Path | None = None) -> tuple[Artifact, ...]:
        """Kill everything, then, if ``out`` is given, save the files left in the work folder below it.

        Idempotent. Only what is new or changed since it was written by the host is saved.
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
    unmet: list[str] = []
    for who, wanted in (("the caller's floor", floor), ("the policy's floor", policy.floor)):
        if wanted is not None and not features.boundary.meets(wanted):
            unmet.append(f"{who} is {wanted.value!r} and its boundary is {features.boundary.value!r}")
    if policy.environment is not None and not features.environments:
        unmet.append("environment")
    if policy.preload and not features.environments:
        unmet.append("preload")
    if policy.mounts and not features.mounts:
        unmet.append("mounts")
    if policy.egress == ("*",):
        if not features.egress_open:
            unmet.append("egress to everywhere")
    elif policy.egress and not features.egress_list:
        unmet.append("egress by an allow-list")
    if isinstance(program, Command) and not features.commands:
        unmet.append("commands")
    usual = Limits()
    for field in fields(Limits):
        value = getattr(policy.limits, field.name)
        if field.name not in features.limits and value != getattr(usual, field.name):
            unmet.append(f"limits.{field.name}")
    if files and not features.files:
        unmet.append("files")
    if live and not features.live:
        unmet.append("live sandboxes")
    if policy.hard:
        held = tier.probe().hard
        unmet.extend(f"a hard limit on {name}" for name in policy.hard if name not in held)
    if unmet:
        raise UnsupportedError(
            f"cannot hold: {'; '.join(unmet)}",
            unmet=tuple(unmet),
            tier=tier.name,
            remedy="choose another tier (`fumehood tiers`) or change the policy",
        )
