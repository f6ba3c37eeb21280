"""Exit codes of the command line.

The program's own code passes through, and 128+N stands for its death by signal N, as in a shell. What Fumehood has to
say lies in 240..253, where ordinary programs, shells (126..165) and sysexits.h (64..78) do not tread.
"""

from __future__ import annotations

import enum
import signal

from fumehood.errors import (
    AuditError,
    ClosedError,
    FileError,
    FumehoodError,
    ModelError,
    OutcomeUnknownError,
    PolicyError,
    QuotaError,
    StartError,
    UnavailableError,
    UnsupportedError,
)
from fumehood.model import Outcome, Result


class ExitCode(enum.IntEnum):
    """Codes that are not the program's; ``meaning`` is the line of the table in the help."""

    meaning: str

    def __new__(cls, value: int, meaning: str) -> ExitCode:
        member = int.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member

    REQUEST = 240, "nothing started: an option, the policy or an input file is wrong"
    UNSUPPORTED = 241, "nothing started: the tier cannot hold what was asked"
    UNAVAILABLE = 242, "nothing started: this host has no such tier, or none that meets the floor"
    START = 243, "nothing ran: the sandbox could not be started; a retry is safe"
    UNKNOWN = 244, "the sandbox was lost while the program may have been running"
    WALL = 245, "limit: it ran longer than --wall"
    CPU = 246, "limit: it used more CPU time than --cpu"
    MEMORY = 247, "limit: it was killed for using more than --memory"
    OUTPUT = 248, 'limit: it printed more than --output, and the policy says overflow = "stop"'
    DENIED = 249, "approval was refused; nothing ran"
    FAULT = 250, "the host failed (an output could not be written), or Fumehood has a fault"
    QUOTA = 251, "nothing started: a quota is used up"
    AUDIT = 252, "the audit log cannot be written or is not whole; nothing started, or the result is withheld"
    MODEL = 253, "an agent's model could not be asked"
    INTERRUPTED = 128 + signal.SIGINT, "interrupted by Ctrl-C; the sandbox is dead"
    BROKEN_PIPE = 128 + signal.SIGPIPE, "whoever read the output went away; the sandbox is dead"
    TERMINATED = 128 + signal.SIGTERM, "ended by SIGTERM; the sandbox is dead"


_OF_OUTCOME = {
    Outcome.WALL: ExitCode.WALL,
    Outcome.CPU: ExitCode.CPU,
    Outcome.MEMORY: ExitCode.MEMORY,
    Outcome.OUTPUT: ExitCode.OUTPUT,
    Outcome.DENIED: ExitCode.DENIED,
    Outcome.CANCELLED: ExitCode.INTERRUPTED,
}

# In the order in which they are tried: a subclass before its base.
_OF_ERROR: tuple[tuple[type[FumehoodError], ExitCode], ...] = (
    (UnsupportedError, ExitCode.UNSUPPORTED),
    (PolicyError, ExitCode.REQUEST),
    (UnavailableError, ExitCode.UNAVAILABLE),
    (StartError, ExitCode.START),
    (OutcomeUnknownError, ExitCode.UNKNOWN),
    (FileError, ExitCode.START),  # in a single-use run, files are put in before anything runs
    (ClosedError, ExitCode.FAULT),
    (QuotaError, ExitCode.QUOTA),
    (AuditError, ExitCode.AUDIT),
    (ModelError, ExitCode.MODEL),
)


def of_result(result: Result) -> int:
    """The exit code for how a program ended."""
    if result.outcome in _OF_OUTCOME:
        return _OF_OUTCOME[result.outcome]
    if result.exit_code is None:
        return ExitCode.UNKNOWN
    return 128 - result.exit_code if result.exit_code < 0 else result.exit_code


def of_error(error: FumehoodError) -> ExitCode:
    """The exit code for a failure of the request, the host or the sandbox."""
    return next((code for kind, code in _OF_ERROR if isinstance(error, kind)), ExitCode.FAULT)


def table() -> str:
    """The codes as lines of text, for help and documentation."""
    lines = ["  0-255  the program's own exit code", "  128+N  the program died of signal N"]
    lines += [f"  {code.value:<5}  {code.meaning}" for code in ExitCode]
    return "\n".join(lines)
