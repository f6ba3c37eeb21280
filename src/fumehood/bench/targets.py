"""What the tiers promise of their speed, as numbers that a report is held against."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fumehood.bench.figures import Spread, TierFigures
from fumehood.model import MiB


@dataclass(frozen=True, slots=True)
class Target:
    """One promise: ``read`` takes the value out of the figures, None if it was not measured."""

    title: str
    unit: str
    bound: float
    at_most: bool
    read: Callable[[TierFigures], float | None]

    def met(self, value: float) -> bool:
        """Whether the value keeps the promise."""
        return value <= self.bound if self.at_most else value >= self.bound


@dataclass(frozen=True, slots=True)
class Verdict:
    """A promise and what was measured."""

    target: Target
    value: float | None

    @property
    def met(self) -> bool | None:
        """None if it was not measured."""
        return None if self.value is None else self.target.met(self.value)


def _of(spread: Spread | None, quantile: str) -> float | None:
    return None if spread is None else getattr(spread, quantile)


def _throughput(callers: str) -> Callable[[TierFigures], float | None]:
    return lambda f: f.throughput_ratio.get(callers)


JAIL = (
    Target("cold, median", "x", 0.30, True, lambda f: _of(f.cold, "p50")),
    Target("on demand, median", "x", 0.35, True, lambda f: _of(f.on_demand, "p50")),
    Target("warm, 50 a second open loop, median", "x", 0.05, True, lambda f: _of(f.open_loop.get("50"), "p50")),
    Target("warm, 50 a second open loop, p99", "x", 0.30, True, lambda f: _of(f.open_loop.get("50"), "p99")),
    Target("throughput, 1 caller", "x", 3.5, False, _throughput("1")),
    Target("throughput, 8 callers", "x", 3.5, False, _throughput("8")),
    Target(
        "preloaded, warm, against a process that imports the same, median",
        "x",
        0.005,
        True,
        lambda f: f.preload["warm"].p50 if f.preload else None,
    ),
    Target("from the deadline to all dead and reaped, median", "x", 0.10, True, lambda f: _of(f.kill, "p50")),
    Target("memory of a warm sandbox", "MiB", 2.0, True, lambda f: f.warm_bytes and f.warm_bytes / MiB),
    Target(
        "memory of a warm sandbox, preloaded",
        "MiB",
        4.0,
        True,
        lambda f: f.preload["warm_bytes"] / MiB if f.preload and f.preload["warm_bytes"] else None,
    ),
)

#: The tiers that somebody could replace by a command of an engine's or of runsc's.
CONTAINERS = ("docker", "podman", "gvisor")
TO_COMMAND = (
    Target("cold, against the plain command, median", "x", 1.1, True, lambda f: _of(f.cold_to_command, "p50")),
    Target(
        "on demand, against the plain command, median", "x", 1.1, True, lambda f: _of(f.on_demand_to_command, "p50")
    ),
    Target("warm, against the plain command, median", "x", 0.2, True, lambda f: _of(f.warm_to_command, "p50")),
)

#: What a language runtime promises: a warm run against a plain process.
RUNTIMES = {
    "interpreter": (Target("warm, median", "x", 0.05, True, lambda f: _of(f.warm, "p50")),),
    "wasm": (Target("warm, median", "x", 4.0, True, lambda f: _of(f.warm, "p50")),),
}

#: What a machine of its own promises where its processor is emulated; for KVM there is no figure yet.
MICROVM = (
    Target("cold, emulated, median", "x", 15.0, True, lambda f: _of(f.cold, "p50")),
    Target("warm, emulated, median", "x", 1.0, True, lambda f: _of(f.warm, "p50")),
)

#: For every tier with the guest: a program's output is with its caller this soon, in milliseconds.
FIRST_BYTE_MS = 50.0


def judge(figures: TierFigures) -> list[Verdict]:
    """The tier's promises against what was measured; of those that have none of their own the first byte."""
    first_byte = Target(
        "first byte after it was printed, median",
        "ms",
        FIRST_BYTE_MS,
        True,
        # From the start on, where the guest's clock is another, it is not what is promised.
        lambda f: _of(f.first_byte, "p50_ms") if f.first_byte_from == "printed" else None,
    )
    own = {"jail": JAIL, **dict.fromkeys(CONTAINERS, TO_COMMAND), **RUNTIMES, "microvm": MICROVM}.get(figures.tier, ())
    targets = (*own, first_byte)
    return [Verdict(target, target.read(figures)) for target in targets]
