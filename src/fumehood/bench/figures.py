"""What is measured, as plain values: a distribution, a tier's figures, a report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Spread:
    """Quantiles of times, in milliseconds, and as ratios to the median of what was measured among them."""

    count: int
    p50_ms: float
    p90_ms: float
    p99_ms: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, times_s: Sequence[float], plain_s: Sequence[float]) -> Spread:
        """From seconds. ``plain_s`` were measured in the same minutes, taking turns with ``times_s``."""
        unit = quantile(plain_s, 0.5)
        found = [quantile(times_s, q) for q in (0.5, 0.9, 0.99)]
        return cls(len(times_s), *(round(t * 1e3, 3) for t in found), *(round(t / unit, 4) for t in found))


def quantile(values: Sequence[float], share: float) -> float:
    """The least value that ``share`` of all do not exceed (the nearest-rank method)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


@dataclass(slots=True)
class TierFigures:
    """One tier. None or absent where this host or the tier cannot say."""

    tier: str
    note: str = ""
    plain: Spread | None = None  # the plain process itself, whose p50 is 1
    cold: Spread | None = None  # run(): create, exec, close
    on_demand: Spread | None = None  # the same where ``cold`` finds a sandbox made ahead and this does not
    warm: Spread | None = None  # the same from a full pool, callers that pause
    command: Spread | None = None  # the plain command of a container tier, as ratio to the plain process
    command_title: str = ""  # and what it is
    cold_to_command: Spread | None = None  # the cold run again, as ratio to that command, measured in turn with it
    on_demand_to_command: Spread | None = None
    warm_to_command: Spread | None = None
    jail: dict[str, Spread] = field(default_factory=dict)  # beside a tier with a command: the jail, cold and warm
    open_loop: dict[str, Spread] = field(default_factory=dict)  # by arrivals a second, warm; from the arrival's time
    cold_starts: dict[str, float] = field(default_factory=dict)  # the share of those that found no warm one
    throughput: dict[str, float] = field(default_factory=dict)  # by callers: runs a second
    throughput_ratio: dict[str, float] = field(default_factory=dict)  # to plain processes, the same callers
    cpu: dict[str, float] = field(default_factory=dict)  # of one run, all processes, as ratio to the plain one's
    warm_bytes: int | None = None  # memory of one warm sandbox
    warm_bytes_by: str = ""  # who counted it
    first_byte: Spread | None = None  # from printed to the sink
    first_byte_from: str = "printed"  # or "started", where the guest's clock is another
    kill: Spread | None = None  # from the deadline to the whole tree dead and reaped
    preload: dict[str, Any] = field(default_factory=dict)  # modules, warm, and the plain process that imports them
    skipped: dict[str, str] = field(default_factory=dict)  # figure -> why it was not measured

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


@dataclass(slots=True)
class Report:
    """All tiers of one run on one machine."""

    machine: dict[str, str]
    taken: str  # date
    version: str
    quick: bool
    tiers: list[TierFigures]
    absent: dict[str, str]  # tier -> why not

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "version": self.version,
            "taken": self.taken,
            "quick": self.quick,
            "machine": self.machine,
            "tiers": [tier.to_dict() for tier in self.tiers],
            "absent": self.absent,
        }
