"""The interpreter tier's side in the supervisor."""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Mapping
from functools import lru_cache

from fumehood.errors import PolicyError, UnavailableError
from fumehood.model import Boundary, Control, Held, Policy
from fumehood.tier import Features, Probe, require
from fumehood.tiers import worker
from fumehood.tiers.worker import Recipe, Tool, WorkerHost, WorkerSandbox

_REMEDY = "pip install 'fumehood[interpreter]'"

#: Calls of host functions and sleeps, per sandbox: far above any honest program, and Monty's default is 1,000.
_SUSPENSIONS = 100_000

#: Of a worker that waits for its program: so many take some 2 ms, and save each run a twentieth.
_REHEARSALS_WARM = 12

_MiB = 1 << 20

FEATURES = Features(
    boundary=Boundary.INTERPRETER,
    summary="a subset of Python in an interpreter without I/O (Monty); the fastest start",
    live=True,
    full_python=False,
    note="a language runtime, not a kernel or hardware boundary; no files, no packages, a subset of Python",
)


class InterpreterTier:
    """Tier ``interpreter``.

    ``tools`` are host functions that programs may call by name; they run in this process, arguments and results are
    JSON values, and of an error the program learns its type only. A function is as trusted as this process: hand in
    narrow ones. ``jailed=False`` keeps the worker out of the jail, for tests of hosts that have none.
    """

    name = "interpreter"
    features = FEATURES

    def __init__(self, *, tools: Mapping[str, Tool] | None = None, jailed: bool | None = None) -> None:
        self._tools = dict(tools or {})
        for name, tool in self._tools.items():
            if not name.isidentifier() or not callable(tool):
                raise PolicyError(f"tools must map names to functions, not {name!r} to {tool!r:.100}")
        self._jailed = jailed
        self._host: WorkerHost | None = None

    def probe(self) -> Probe:
        """Whether pydantic-monty and its binary are installed."""
        try:
            binary = _binary()
        except UnavailableError as error:
            return Probe(False, error.message, _REMEDY)
        return Probe(True, hard=("memory", "pids", "disk"), details=(("monty", binary),))

    async def create(self, policy: Policy) -> WorkerSandbox:
        """A worker with a Monty session. Raises UnsupportedError, UnavailableError, StartError."""
        return await self._create(policy, rehearsals=1)

    async def create_warm(self, policy: Policy) -> WorkerSandbox:
        """As :meth:`create`, see :class:`fumehood.pool.Warming`."""
        return await self._create(policy, rehearsals=_REHEARSALS_WARM)

    async def _create(self, policy: Policy, *, rehearsals: int) -> WorkerSandbox:
        require(self, policy)
        if self._host is None:
            self._host = WorkerHost(_recipe(), jailed=self._jailed)
        limits = policy.limits
        return await self._host.create(
            policy,
            configure={
                "memory_bytes": limits.memory_bytes,
                "suspensions": _SUSPENSIONS,
                "tools": sorted(self._tools),
            },
            controls=(
                Control("language", Held.HARD, "no operation of the interpreter reaches the host", "Monty"),
                Control("memory", Held.HARD, "the interpreter's allocation limit", str(limits.memory_bytes)),
                Control("pids", Held.HARD, "the interpreter starts no process and no thread", "0"),
                Control("disk", Held.HARD, "the interpreter has no files", "0"),
                Control("files", Held.HARD, "the interpreter has no files", "0"),
                Control("tools", Held.HARD, "host functions by name", " ".join(sorted(self._tools)) or "none"),
            ),
            notes=(FEATURES.note,),
            tools=self._tools,
            rehearsals=rehearsals,
        )

    async def close(self) -> None:
        """Release the jail's template. Idempotent."""
        if self._host is not None:
            await self._host.close()


def _recipe() -> Recipe:
    return Recipe(
        tier="interpreter",
        boundary=Boundary.INTERPRETER,
        entry="fumehood.tiers.interpreter.worker:serve",
        modules=(
            "tiers/worker_guest.py",
            "tiers/interpreter/__init__.py",
            "tiers/interpreter/worker.py",
            "tiers/interpreter/unsupported.py",
        ),
        packages=("pydantic_monty", "typing_extensions"),
        files={"monty": _binary()},
        memory_overhead_bytes=96 * _MiB,
        pids_overhead=16,
    )


@lru_cache(maxsize=1)
def _binary() -> str:
    """The ``monty`` program, where its wheel puts it. Raises UnavailableError."""
    for package in ("pydantic_monty", "typing_extensions"):
        if not worker.installed(package):
            raise UnavailableError(f"the package {package} is not installed", tier="interpreter", remedy=_REMEDY)
    beside = os.path.join(sysconfig.get_path("scripts"), "monty")
    found = beside if os.access(beside, os.X_OK) else shutil.which("monty")
    if found is None:
        raise UnavailableError("the program monty is not installed", tier="interpreter", remedy=_REMEDY)
    return os.path.realpath(found)
