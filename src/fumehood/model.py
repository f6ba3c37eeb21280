"""The values that pass between a caller, a runner and a tier: frozen, checked when made, standard library only.

Sizes are bytes, times are seconds, and every field that has a unit carries it in its name.
"""

from __future__ import annotations

import base64
import enum
import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

from fumehood.errors import PolicyError

KiB = 1 << 10
MiB = 1 << 20
GiB = 1 << 30

#: The longest program text that any tier takes.
CODE_BYTES_MAX = 16 * MiB


#: The forms in which a display may come. Whoever shows it chooses one that it can show safely.
MIME_TYPES = (
    "text/plain",
    "text/html",
    "text/markdown",
    "text/latex",
    "image/svg+xml",
    "image/png",
    "image/jpeg",
    "application/pdf",
    "application/json",
)
BINARY_MIME_TYPES = frozenset({"image/png", "image/jpeg", "application/pdf"})  # the others are UTF-8


class Boundary(enum.Enum):
    """What code must break to reach the host, weakest first; compare with :meth:`meets`.

    ``EMULATED`` (a virtual machine without hardware virtualisation) ranks as ``KERNEL``: QEMU's authors make no
    security promise for its software emulation (https://www.qemu.org/docs/master/system/security.html), so what
    holds is the jail around it.
    """

    NONE = "none"
    LIMITS = "limits"
    INTERPRETER = "interpreter"
    KERNEL = "kernel"
    EMULATED = "emulated"
    RUNTIME = "runtime"
    USER_KERNEL = "user_kernel"
    HARDWARE = "hardware"

    @property
    def rank(self) -> int:
        """Position in the order; a higher rank is a stronger boundary."""
        return _RANK[self]

    def meets(self, floor: Boundary) -> bool:
        """Whether this boundary is at least as strong as ``floor``."""
        return self.rank >= floor.rank

    @classmethod
    def parse(cls, name: str | Boundary) -> Boundary:
        """The boundary called ``name``; PolicyError lists the names if there is none."""
        if isinstance(name, cls):
            return name
        try:
            return cls(name)
        except ValueError:
            known = ", ".join(b.value for b in cls if b is not cls.EMULATED)
            raise PolicyError(f"unknown boundary {name!r}; the floor is one of {known}") from None


_RANK = {
    Boundary.NONE: 0,
    Boundary.LIMITS: 1,
    Boundary.INTERPRETER: 2,
    Boundary.KERNEL: 3,
    Boundary.EMULATED: 3,
    Boundary.RUNTIME: 4,
    Boundary.USER_KERNEL: 5,
    Boundary.HARDWARE: 6,
}


class Outcome(enum.Enum):
    """How an exec ended: always exactly one of these."""

    EXITED = "exited"  # the program's own exit, whatever its code
    SIGNALED = "signaled"  # a signal that Fumehood did not send
    WALL = "wall"  # Limits.wall_s passed
    CPU = "cpu"  # Limits.cpu_s used up
    MEMORY = "memory"  # killed for memory
    OUTPUT = "output"  # Limits.output_bytes passed, with overflow="stop"
    DENIED = "denied"  # approval refused; nothing ran
    CANCELLED = "cancelled"  # the caller interrupted it


def _number(owner: str, name: str, value: object, low: float, high: float, whole: bool) -> None:
    label = f"{owner}.{name}"
    if isinstance(value, bool) or not isinstance(value, (int, float) if not whole else int):
        kind = "a whole number" if whole else "a number"
        raise PolicyError(f"{label} must be {kind}, not {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise PolicyError(f"{label} must be finite, not {value!r}")
    if not low <= value <= high:
        shown = f"{value!r}" if abs(value) < 10**30 else "a number of more than 30 digits"
        raise PolicyError(f"{label} must be between {low:g} and {high:g}, not {shown}")


@dataclass(frozen=True, slots=True)
class Limits:
    """What one sandbox may use. Every limit is for the whole sandbox unless it says "each"."""

    wall_s: float = 10.0  # per exec; the sandbox is killed (a live one is interrupted first)
    cpu_s: float = 10.0  # CPU seconds of all processes together; the sandbox is killed
    cpus: float = 1.0  # CPU seconds per second; slower beyond it
    memory_bytes: int = 256 * MiB  # files in the sandbox included; beyond it a process is killed
    pids: int = 64  # processes and threads; a further fork fails with EAGAIN
    disk_bytes: int = 64 * MiB  # all writable files together; beyond it ENOSPC
    files: int = 4096  # files and folders; beyond it ENOSPC
    open_files: int = 256  # descriptors, each process; beyond it EMFILE
    output_bytes: int = 1 * MiB  # stdout and stderr together, per exec; see Policy.overflow
    display_bytes: int = 8 * MiB  # displays of an exec together; the rest is dropped

    def __post_init__(self) -> None:
        for name, (low, high, whole) in _LIMIT_RANGES.items():
            _number("limits", name, getattr(self, name), low, high, whole)


_LIMIT_RANGES: dict[str, tuple[float, float, bool]] = {
    "wall_s": (0.01, 7 * 86400, False),
    "cpu_s": (0.01, 7 * 86400, False),
    "cpus": (0.01, 4096, False),
    "memory_bytes": (16 * MiB, 64 * 1024 * GiB, True),
    "pids": (1, 1 << 20, True),
    "disk_bytes": (64 * KiB, 64 * 1024 * GiB, True),
    "files": (16, 1 << 30, True),
    "open_files": (16, 1 << 20, True),
    "output_bytes": (0, 16 * GiB, True),
    "display_bytes": (0, 1 * GiB, True),
}


@dataclass(frozen=True, slots=True)
class ArtifactLimits:
    """How much is collected from the work folder once the sandbox is dead; the rest is listed as skipped."""

    count: int = 256
    total_bytes: int = 64 * MiB
    depth: int = 16  # folders within folders

    def __post_init__(self) -> None:
        _number("artifacts", "count", self.count, 0, 1 << 20, True)
        _number("artifacts", "total_bytes", self.total_bytes, 0, 64 * 1024 * GiB, True)
        _number("artifacts", "depth", self.depth, 1, 256, True)


@dataclass(frozen=True, slots=True)
class Mount:
    """A host folder that the operator lets code read, at ``target`` below /mnt."""

    source: str
    target: str

    def __post_init__(self) -> None:
        for name in ("source", "target"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value.startswith("/") or "\0" in value:
                raise PolicyError(f"mount.{name} must be an absolute path, not {value!r}")
        parts = PurePosixPath(self.target).parts
        if parts[:2] != ("/", "mnt") or len(parts) < 3 or ".." in parts:
            raise PolicyError(f"mount.target must lie below /mnt, not {self.target!r}")


#: Limits that a policy can demand to be held by the kernel exactly, not by a poller or per process.
HARD_LIMITS = ("memory", "pids", "cpu", "disk")

#: Names of images with their registry and tag or digest, and of runtimes or their files.
_OCI_NAME = re.compile(r"[A-Za-z0-9/][A-Za-z0-9_./:@+-]{0,254}\Z")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


@dataclass(frozen=True, slots=True)
class Policy:
    """What code may use and reach. The operator sets it; nothing that code says can change it."""

    floor: Boundary | None = None  # no caller goes below it
    limits: Limits = field(default_factory=Limits)
    artifacts: ArtifactLimits = field(default_factory=ArtifactLimits)
    overflow: str = "truncate"  # past output_bytes: "truncate" drops the rest, "stop" kills (Outcome.OUTPUT)
    hard: tuple[str, ...] = ()  # of HARD_LIMITS: refuse where the host can only hold them as best effort
    env: Mapping[str, str] = field(default_factory=dict)  # given to the program; nothing is inherited
    environment: str | None = None  # name of a built environment of packages, see `fumehood env`
    preload: tuple[str, ...] = ()  # modules of it imported before the program starts
    mounts: tuple[Mount, ...] = ()
    egress: tuple[str, ...] = ()  # hosts that may be reached; ("*",) opens the network
    terminals: bool = False  # whether commands may run on pseudo-terminals (Command.pty)
    image: str | None = None  # the root file system of a tier that has images, see `fumehood image`
    runtime: str | None = None  # the OCI runtime of a container engine; the boundary follows from it

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        if self.floor is not None:
            set_(self, "floor", Boundary.parse(self.floor))
        _instance("limits", self.limits, Limits)
        _instance("artifacts", self.artifacts, ArtifactLimits)
        _instance("terminals", self.terminals, bool)
        if self.overflow not in ("truncate", "stop"):
            raise PolicyError(f'overflow must be "truncate" or "stop", not {self.overflow!r}')
        for name in ("hard", "preload", "egress"):
            set_(self, name, _strings(name, getattr(self, name)))
        for item in self.hard:
            if item not in HARD_LIMITS:
                raise PolicyError(f"hard: {item!r} is not one of {', '.join(HARD_LIMITS)}")
        for module in self.preload:
            if not all(part.isidentifier() for part in module.split(".")):
                raise PolicyError(f"preload: {module!r} is not a module name")
        if not isinstance(self.env, Mapping):
            raise PolicyError(f"env must map names to values, not {self.env!r}")
        _check_env(self.env)
        set_(self, "env", MappingProxyType(dict(self.env)))
        if self.environment is not None and (not isinstance(self.environment, str) or not self.environment):
            raise PolicyError(f"environment must be the name of an environment, not {self.environment!r}")
        for name in ("image", "runtime"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not _OCI_NAME.match(value)):
                raise PolicyError(f"{name} must be a name, not {value!r}")
        if isinstance(self.mounts, (str, bytes)) or not isinstance(self.mounts, (tuple, list)):
            raise PolicyError(f"mounts must be a list of mounts, not {self.mounts!r}")
        set_(self, "mounts", tuple(self.mounts))
        for mount in self.mounts:
            _instance("mounts", mount, Mount)

    def __hash__(self) -> int:
        return hash(self.digest())

    def to_dict(self) -> dict[str, Any]:
        """The policy as plain values, the form that a policy file has."""
        out: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        out["floor"] = self.floor.value if self.floor else None
        out["limits"] = asdict(self.limits)
        out["artifacts"] = asdict(self.artifacts)
        out["env"] = dict(self.env)
        out["mounts"] = [asdict(m) for m in self.mounts]
        for name in ("hard", "preload", "egress"):
            out[name] = list(getattr(self, name))
        return out

    def digest(self) -> str:
        """SHA-256 of the policy, for logs and caches; equal policies have equal digests."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()


def _check_env(env: Mapping[str, str]) -> None:
    for key, value in env.items():
        if not isinstance(key, str) or not _ENV_NAME.match(key):
            raise PolicyError(f"env: {key!r} is not a name of an environment variable")
        if not isinstance(value, str) or "\0" in value or not _is_utf8(value):
            raise PolicyError(f"env.{key} must be a string of UTF-8 without NUL")


def _is_utf8(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)


def _instance(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise PolicyError(f"{name} must be {kind.__name__}, not {value!r}")


def _strings(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, (tuple, list)) or not all(isinstance(v, str) for v in value):
        raise PolicyError(f"{name} must be a list of strings, not {value!r}")
    return tuple(value)


#: What tracebacks call a program that has no name.
DEFAULT_NAME = "<agent>"


@dataclass(frozen=True, slots=True)
class Code:
    """A Python program. Text is sent as UTF-8; bytes are sent as they are and may carry a coding cookie."""

    source: str | bytes
    #: Shown in tracebacks. In a live sandbox the default becomes ``<agent-1>``, ``<agent-2>``, … by exec, so that a
    #: traceback through several of them shows the right lines.
    name: str = DEFAULT_NAME
    #: In a live sandbox: the namespace to run in, made when it is first named; "" is the sandbox's own. All share one
    #: interpreter, its modules and the files.
    context: str = ""
    #: Whether the value of the last expression, ``display()`` and figures come as Result.displays and ``await`` is
    #: allowed outside functions. None: in a live sandbox yes, in a single run no, because it costs a few milliseconds.
    displays: bool | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.context, str) or len(self.context) > 64 or not _is_utf8(self.context):
            raise PolicyError(f"context must be a string of at most 64 characters, not {self.context!r:.100}")
        if not isinstance(self.source, (str, bytes)):
            raise PolicyError(f"code must be str or bytes, not {type(self.source).__name__}")
        # A character takes at most four bytes.
        if 4 * len(self.source) > CODE_BYTES_MAX and len(self.data) > CODE_BYTES_MAX:
            raise PolicyError(f"code is longer than {CODE_BYTES_MAX} bytes")

    @property
    def data(self) -> bytes:
        """The bytes that the interpreter compiles; a lone surrogate becomes a syntax error there, not here."""
        if isinstance(self.source, bytes):
            return self.source
        return self.source.encode("utf-8", "surrogatepass")


@dataclass(frozen=True, slots=True)
class Command:
    """A program by its argument vector, for tiers whose features include ``commands``."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict, hash=False)  # on top of the policy's
    cwd: str = ""  # the folder to run in, relative to the work folder or absolute inside; "": the work folder
    #: Rows and columns of a pseudo-terminal to run on; stderr is stdout then. For tiers whose features include ``pty``,
    #: under a policy with ``terminals``.
    pty: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "argv", _strings("argv", self.argv))
        if not self.argv or any("\0" in a for a in self.argv):
            raise PolicyError("argv must hold at least one string, none with NUL")
        if not isinstance(self.env, Mapping):
            raise PolicyError(f"env must map names to values, not {self.env!r}")
        _check_env(self.env)
        object.__setattr__(self, "env", MappingProxyType(dict(self.env)))
        if not isinstance(self.cwd, str) or "\0" in self.cwd or not _is_utf8(self.cwd) or len(self.cwd) > 4095:
            raise PolicyError(f"cwd must be the path of a folder, not {self.cwd!r:.200}")
        if self.pty is not None:
            check_terminal_size(self.pty)


def check_terminal_size(size: object) -> tuple[int, int]:
    """``size`` as rows and columns of a terminal, each 1 to 65535. Raises PolicyError."""
    if isinstance(size, (tuple, list)) and len(size) == 2:
        rows, columns = size
        if type(rows) is int and type(columns) is int and min(size) >= 1 and max(size) <= 0xFFFF:
            return rows, columns
    raise PolicyError(f"pty must be rows and columns, each from 1 to 65535, not {size!r:.100}")


Program = Code | Command


@dataclass(frozen=True, slots=True)
class Usage:
    """What was used, as the kernel or engine counted it; None where nothing outside the sandbox counts it."""

    cpu_s: float | None = None
    memory_peak_bytes: int | None = None
    stdout_bytes: int = 0  # printed, dropped bytes included
    stderr_bytes: int = 0


class Held(enum.Enum):
    """How firmly a control is held."""

    HARD = "hard"  # by the kernel or engine, exactly
    BEST_EFFORT = "best effort"  # per process, by a poller, or by a claim that was not verified
    OFF = "off"  # not held; only where the policy asked for that


@dataclass(frozen=True, slots=True)
class Control:
    """One thing that was enforced: its name, how firmly, by what mechanism, and the value read back."""

    name: str
    held: Held
    mechanism: str
    value: str = ""


@dataclass(frozen=True, slots=True)
class Receipt:
    """What was really enforced on a sandbox, read back from the kernel or engine, not repeated from the request."""

    tier: str
    boundary: Boundary
    controls: tuple[Control, ...]
    host: str = ""  # kernel or engine release that enforced it
    claimed: bool = False  # the boundary is a provider's word, not verified here
    notes: tuple[str, ...] = ()

    def control(self, name: str) -> Control | None:
        """The control called ``name``, or None if the tier has none of that name."""
        return next((c for c in self.controls if c.name == name), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "tier": self.tier,
            "boundary": self.boundary.value,
            "claimed": self.claimed,
            "host": self.host,
            "controls": [
                {"name": c.name, "held": c.held.value, "mechanism": c.mechanism, "value": c.value}
                for c in self.controls
            ],
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True)
class Artifact:
    """A file that the program left in its work folder: saved on the host, or skipped with the reason."""

    path: str  # relative, as the program named it
    size_bytes: int
    saved: Path | None = None
    skipped: str | None = None


@dataclass(frozen=True, slots=True)
class Display:
    """Something that a program showed, in one or more forms. Hostile like output: see :mod:`fumehood.displays`.

    ``data`` maps each of :data:`MIME_TYPES` that there is to its bytes, which begin as that type does and are not
    looked at further; ``metadata`` is what the program said beside them, plain values of JSON; ``dropped`` names the
    forms that were not passed on, each with the reason.
    """

    data: Mapping[str, bytes]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; binary data in base64, as in a notebook's file."""
        data = {
            mime: base64.b64encode(form).decode() if mime in BINARY_MIME_TYPES else form.decode("utf-8", "replace")
            for mime, form in self.data.items()
        }
        return {"data": data, "metadata": dict(self.metadata), "dropped": list(self.dropped)}


@dataclass(frozen=True, slots=True)
class Result:
    """How one exec ended. Output is hostile: bounded, and to be escaped wherever it is shown."""

    outcome: Outcome
    exit_code: int | None  # 0..255, or -N for signal N; None when Fumehood ended it
    stdout_data: bytes
    stderr_data: bytes
    seconds: float  # from handing over the program to the end of its output
    usage: Usage
    receipt: Receipt
    artifacts: tuple[Artifact, ...] = ()
    unsupported: str | None = None  # what the program needs and the tier's Python lacks, e.g. "import numpy"
    displays: tuple[Display, ...] = ()
    displays_truncated: bool = False  # there was more than Limits.display_bytes, or what came was no display
    interpreter_lost: bool = False  # in a live sandbox: the interpreter is gone, and with it all variables

    @property
    def stdout(self) -> str:
        """What the program printed; bytes that are not UTF-8 become U+FFFD."""
        return self.stdout_data.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        """What the program printed to stderr; bytes that are not UTF-8 become U+FFFD."""
        return self.stderr_data.decode("utf-8", "replace")

    @property
    def ok(self) -> bool:
        """Whether the program exited by itself with code 0."""
        return self.outcome is Outcome.EXITED and self.exit_code == 0

    @property
    def timed_out(self) -> bool:
        """Whether the wall clock or the CPU limit ended it."""
        return self.outcome in (Outcome.WALL, Outcome.CPU)

    @property
    def truncated(self) -> bool:
        """Whether output was dropped."""
        return self.usage.stdout_bytes > len(self.stdout_data) or self.usage.stderr_bytes > len(self.stderr_data)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; output as text."""
        return {
            "outcome": self.outcome.value,
            "exit_code": self.exit_code,
            "timed_out": self.timed_out,
            "unsupported": self.unsupported,
            "truncated": self.truncated,
            "displays": [d.to_dict() for d in self.displays],
            "displays_truncated": self.displays_truncated,
            "interpreter_lost": self.interpreter_lost,
            "seconds": round(self.seconds, 6),
            "stdout": self.stdout,
            "stderr": self.stderr,
            "usage": asdict(self.usage),
            "artifacts": [
                {
                    "path": a.path,
                    "size_bytes": a.size_bytes,
                    "saved": str(a.saved) if a.saved else None,
                    "skipped": a.skipped,
                }
                for a in self.artifacts
            ],
            "receipt": self.receipt.to_dict(),
        }


def check_path(path: str) -> str:
    """``path`` as a clean relative path inside the work folder; PolicyError if it is not one.

    Refused: absolute, empty, ``..``, NUL, a component over 255 bytes, a path over 4095 bytes.
    """
    if not isinstance(path, str) or not path or "\0" in path or path.startswith("/"):
        raise PolicyError(f"{path!r:.200} is not a relative path inside the work folder")
    try:
        raw = path.encode()
    except UnicodeEncodeError:
        raise PolicyError(f"{path!r:.200} is not UTF-8") from None
    parts = [p for p in raw.split(b"/") if p not in (b"", b".")]
    if not parts or b".." in parts:
        raise PolicyError(f"{path!r:.200} is not a relative path inside the work folder")
    if len(raw) > 4095 or any(len(p) > 255 for p in parts):
        raise PolicyError(f"{path!r:.200} is longer than a path can be")
    return b"/".join(parts).decode()
