"""Fumehood runs code that an AI agent wrote, behind one interface, at the isolation that the operator chose.

    import fumehood
    result = fumehood.run("print(sum(range(10)))")

Names are imported when first used, so that ``import fumehood`` costs next to nothing.
"""

# ruff: noqa: F401 - the names below are for type checkers; __getattr__ imports them when they are used
from __future__ import annotations

TYPE_CHECKING = False  # typing.TYPE_CHECKING without the import: this package is loaded inside sandboxes too

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fumehood.errors import (
        AuditError,
        ClosedError,
        FileError,
        FumehoodError,
        ModelError,
        OutcomeUnknownError,
        PolicyError,
        PoolTimeoutError,
        QuotaError,
        StartError,
        UnavailableError,
        UnsupportedError,
    )
    from fumehood.mapping import Job, Mapped
    from fumehood.model import (
        Artifact,
        ArtifactLimits,
        Boundary,
        Code,
        Command,
        Control,
        Display,
        GiB,
        KiB,
        Limits,
        MiB,
        Mount,
        Outcome,
        Policy,
        Receipt,
        Result,
        Usage,
    )
    from fumehood.pool import Pool
    from fumehood.runner import AsyncRunner, LiveProgram, LiveSandbox, Runner, run

_HOME = {
    "fumehood.errors": (
        "AuditError ClosedError FileError FumehoodError ModelError OutcomeUnknownError PolicyError PoolTimeoutError "
        "QuotaError StartError UnavailableError UnsupportedError"
    ),
    "fumehood.mapping": "Job Mapped",
    "fumehood.model": (
        "Artifact ArtifactLimits Boundary Code Command Control Display GiB KiB Limits MiB Mount Outcome Policy "
        "Receipt Result Usage"
    ),
    "fumehood.pool": "Pool",
    "fumehood.runner": "AsyncRunner LiveProgram LiveSandbox Runner run",
}
_WHERE = {name: module for module, names in _HOME.items() for name in names.split()}

__all__ = [*_WHERE, "__version__"]  # noqa: PLE0604 - the names are strings, drawn from the table above


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module 'fumehood' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value
