"""Every error that Fumehood raises.

A program's failure is a :class:`~fumehood.model.Result`; a sandbox's failure is one of these::

    FumehoodError                       .tier .remedy
    ├── PolicyError(ValueError)         nothing started: the request contradicts itself or is malformed
    │   └── UnsupportedError            nothing started: this tier cannot hold the request (.unmet names every part)
    ├── UnavailableError                nothing started: this host lacks the tier
    ├── StartError                      nothing of the program ran: safe to retry
    │   └── PoolTimeoutError(TimeoutError)
    ├── OutcomeUnknownError             the program may have run: do not retry blindly
    ├── FileError(OSError)              a file operation inside a sandbox failed; the sandbox lives on
    ├── ClosedError(RuntimeError)       the sandbox or runner was closed before the call
    ├── QuotaError                      nothing started: a quota is used up (.retry_after_s)
    ├── AuditError                      the audit log cannot be written: nothing started, or a result is withheld
    └── ModelError                      an agent's model could not be asked

The last three are of the agent's side (:mod:`fumehood.agent`); no tier raises them.
"""

from __future__ import annotations


class FumehoodError(Exception):
    """Base of all errors raised on purpose.

    ``tier`` is the tier concerned, if one is; ``remedy`` is what the operator can do about it, as a sentence.
    """

    def __init__(self, message: str, *, tier: str | None = None, remedy: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.tier = tier
        self.remedy = remedy

    def __str__(self) -> str:
        where = f"{self.tier}: " if self.tier else ""
        mend = f" ({self.remedy})" if self.remedy else ""
        return f"{where}{self.message}{mend}"


class PolicyError(FumehoodError, ValueError):
    """Nothing started: the policy or the request is malformed or contradicts itself."""


class UnsupportedError(PolicyError):
    """Nothing started: the tier cannot hold what was asked; ``unmet`` names every part that it cannot."""

    def __init__(
        self, message: str, *, unmet: tuple[str, ...] = (), tier: str | None = None, remedy: str | None = None
    ) -> None:
        super().__init__(message, tier=tier, remedy=remedy)
        self.unmet = unmet


class UnavailableError(FumehoodError):
    """Nothing started: this host cannot run the tier."""


class StartError(FumehoodError):
    """The sandbox could not be started; not one byte of the program ran, so a retry is safe."""


class PoolTimeoutError(StartError, TimeoutError):
    """No sandbox became free in the time allowed."""


class OutcomeUnknownError(FumehoodError):
    """The boundary was lost while the program may have been running."""


class FileError(FumehoodError, OSError):
    """A file operation inside a live sandbox failed (missing, too large, not a regular file, no space)."""


class ClosedError(FumehoodError, RuntimeError):
    """The sandbox or the runner is closed."""


class QuotaError(FumehoodError):
    """Nothing started: a quota is used up.

    ``quota`` is the quota in words; ``retry_after_s`` is in how many seconds to try again, or None if waiting does not
    help.
    """

    def __init__(
        self,
        message: str,
        *,
        tier: str | None = None,
        remedy: str | None = None,
        quota: str = "",
        retry_after_s: float | None = None,
    ) -> None:
        if remedy is None and retry_after_s is not None:
            remedy = f"try again in {retry_after_s:.0f} s"
        super().__init__(message, tier=tier, remedy=remedy)
        self.quota = quota
        self.retry_after_s = retry_after_s


class AuditError(FumehoodError):
    """The audit log cannot be read or written, or is not what its head says.

    What was to be recorded has not started, or, where the message says so, its result is withheld.
    """


class ModelError(FumehoodError):
    """An agent's model could not be asked, or its answer could not be read. What was run before stays done."""
