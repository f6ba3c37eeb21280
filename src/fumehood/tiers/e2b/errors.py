"""Every error of the vendor's SDK as one of ours: what it means depends on what was under way.

``create``: nothing of the program ran. ``exec``: it may have run, unless the service says that it refused the call.
``file``: one file operation failed, and the sandbox may live on. A test walks all that the SDK exports.
"""

from __future__ import annotations

from typing import Literal

import e2b
import e2b_code_interpreter
import httpx
from connectrpc.errors import ConnectError

from fumehood.errors import (
    ClosedError,
    FileError,
    FumehoodError,
    OutcomeUnknownError,
    StartError,
    UnavailableError,
)

Phase = Literal["create", "exec", "file"]
_Kinds = tuple[type[FumehoodError], type[FumehoodError], type[FumehoodError]]

_REFUSED: _Kinds = (StartError, StartError, FileError)  # the service did nothing
_GONE: _Kinds = (StartError, OutcomeUnknownError, ClosedError)
_LOST: _Kinds = (StartError, OutcomeUnknownError, FileError)
_KEY: _Kinds = (UnavailableError, StartError, FileError)

#: Exception of the SDK -> ours while creating, executing, and at a file. The nearest class decides.
KINDS: dict[type[BaseException], _Kinds] = {
    e2b.SandboxException: _LOST,
    e2b.TimeoutException: _LOST,
    e2b.InvalidArgumentException: _REFUSED,
    e2b.NotEnoughSpaceException: _LOST,
    e2b.NotFoundException: (UnavailableError, OutcomeUnknownError, FileError),
    e2b.FileNotFoundException: _LOST,
    e2b.SandboxNotFoundException: _GONE,
    e2b.SandboxNotRunningException: _GONE,
    e2b.SandboxUnreachableException: _LOST,
    e2b.AuthenticationException: _KEY,
    e2b.GitAuthException: _KEY,
    e2b.GitUpstreamException: _LOST,
    e2b.TemplateException: (UnavailableError, OutcomeUnknownError, FileError),
    e2b.RateLimitException: _REFUSED,
    e2b.GuestUnresponsiveException: _GONE,
    e2b.ServiceBusyException: _REFUSED,
    e2b.BuildException: (UnavailableError, OutcomeUnknownError, FileError),
    e2b.FileUploadException: _LOST,
    e2b.VolumeException: _LOST,
    e2b.VolumeNotFoundException: _LOST,
    e2b.VolumePathNotFoundException: _LOST,
    e2b.SecretException: _LOST,
    e2b.SecretNotFoundException: _LOST,
    e2b.CommandExitException: _LOST,
    e2b.DockerfileSyntaxError: (UnavailableError, OutcomeUnknownError, FileError),
    httpx.HTTPError: _LOST,
    httpx.InvalidURL: (UnavailableError, OutcomeUnknownError, FileError),
    httpx.StreamError: _LOST,
    ConnectError: _LOST,
    OSError: _LOST,
    ValueError: _LOST,  # an answer that is not the protocol's
    KeyError: _LOST,
    TypeError: _LOST,
    Exception: _LOST,
}

_REMEDIES: dict[type[BaseException], str] = {
    e2b.AuthenticationException: "set E2B_API_KEY to a valid key",
    e2b.RateLimitException: "wait, or ask the provider for a higher limit",
    e2b.ServiceBusyException: "try again later",
    e2b.TemplateException: "rebuild the template",
}

_MESSAGE_MAX = 500


def translate(error: BaseException, phase: Phase, *, secret: str = "") -> FumehoodError:
    """Our error for ``error``, to be raised from None. ``secret`` is blotted out wherever the message repeats it."""
    kinds = next(KINDS[kind] for kind in type(error).__mro__ if kind in KINDS)
    remedy = next((_REMEDIES[kind] for kind in type(error).__mro__ if kind in _REMEDIES), None)
    text = f"{type(error).__name__}: {error}"
    if secret:
        text = text.replace(secret, "***")
    kind = kinds[("create", "exec", "file").index(phase)]
    return kind(text[:_MESSAGE_MAX], tier="e2b", remedy=remedy)


def exported() -> set[type[BaseException]]:
    """Every exception that the SDK's two packages export."""
    found = set()
    for module in (e2b, e2b_code_interpreter):
        for name in dir(module):
            value = getattr(module, name)
            if isinstance(value, type) and issubclass(value, BaseException):
                found.add(value)
    return found
