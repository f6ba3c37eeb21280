"""What an attack is, and what came of it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fumehood.model import ArtifactLimits, Boundary, Limits, Policy

if TYPE_CHECKING:
    from fumehood.attacks.observe import Run


class Verdict(enum.Enum):
    """The end of one attack on one tier."""

    HELD = "held"
    BROKEN = "broken"
    NOT_APPLICABLE = "n/a"
    INCONCLUSIVE = "inconclusive"  # the set-up failed, so nothing is proven: counts as a failure


@dataclass(frozen=True, slots=True)
class Watch:
    """What the host looks at, and how it decides. Never the payload's word: see :mod:`fumehood.attacks.watch`.

    ``judge`` returns what was seen if the attack succeeded, else None. It is asked several times while the program
    runs, and once more when the sandbox is closed. ``marked`` says that it reads a process which the program marks,
    so that a run in which the host never saw the mark proves nothing.
    """

    sees: str
    judge: Callable[[Run], str | None]
    marked: bool = False


@dataclass(frozen=True, slots=True)
class Attack:
    """One attack: data, a short program, and the host's witness.

    ``program`` is Python behind :data:`fumehood.attacks.prelude.PRELUDE`. ``second`` is a second program in a sandbox
    of its own: started ``beside`` the first, once that one is done with its work, or ``after`` it is destroyed.
    """

    id: str
    group: str
    title: str
    program: str
    watch: Watch
    source: str = "catalogue"  # where it comes from: a CVE, a paper, a project's own test
    holds_from: Boundary = Boundary.KERNEL  # this boundary and every stronger one must hold it
    #: The one tier that is required to hold it: it states that tier's own way to hold something. Another tier reaches
    #: the aim in another way, or its documentation says that it does not; what it does here is reported as it is.
    only: str = ""
    proves: tuple[str, ...] = ()  # controls of the jail without which it must succeed
    needs: tuple[str, ...] = ()  # host properties, see fumehood.attacks.needs
    features: tuple[str, ...] = ()  # of fumehood.tier.Features
    limit: str | None = None  # one of HARD_LIMITS: where the host cannot hold it hard, the row is best effort
    limits: Mapping[str, float] = field(default_factory=dict)  # never looser than the policy's own
    artifacts: Mapping[str, int] = field(default_factory=dict)
    stdin_bytes: int = 0
    uploads: Mapping[str, bytes] = field(default_factory=dict)  # before the program
    reuploads: Mapping[str, bytes] = field(default_factory=dict)  # after the program, into the same sandbox
    downloads: tuple[str, ...] = ()  # read after the program
    collect: bool = False  # save artifacts
    second: str = ""
    second_when: str = "after"
    throwaway: bool = False  # success would change the host: the control runs in mount and UTS namespaces of its own
    alone: bool = False  # measures what a neighbour would disturb
    pty: bool = False  # under a policy that lets commands have pseudo-terminals
    terminal: bool = False  # needs a controlling terminal of the supervisor
    runtimes_only: bool = False  # on a language runtime: a tier whose programs are processes does not face it
    orphan: bool = False  # the supervisor itself is killed in mid-run

    def must_hold(self, tier: str, boundary: Boundary) -> bool:
        """Whether the tier of that name and ``boundary`` is required to hold this attack."""
        return self.only in ("", tier) and boundary.meets(self.holds_from)

    @property
    def required_of(self) -> str:
        """Who must hold it, for people."""
        return f"{self.holds_from.value}, only {self.only}" if self.only else self.holds_from.value

    def policy(self, base: Policy) -> Policy:
        """``base`` with this attack's limits, of which each is the stricter of the two."""
        from dataclasses import replace

        def strict(owner: Any, wanted: Mapping[str, float]) -> dict[str, Any]:
            return {name: min(getattr(owner, name), value) for name, value in wanted.items()}

        limits: Limits = replace(base.limits, **strict(base.limits, {**_LIMITS, **self.limits}))
        artifacts: ArtifactLimits = replace(base.artifacts, **strict(base.artifacts, self.artifacts))
        return replace(base, limits=limits, artifacts=artifacts, terminals=base.terminals or self.pty)


#: Small enough that an attack that is held ends soon.
_LIMITS: dict[str, float] = {"wall_s": 8.0}


@dataclass(frozen=True, slots=True)
class Finding:
    """One cell of the matrix."""

    attack: str
    tier: str
    verdict: Verdict
    seen: str  # the evidence, or the reason
    seconds: float
    required: bool = True  # this tier's boundary must hold it
    best_effort: bool = False  # this host cannot hold the limit exactly
    residue: tuple[str, ...] = ()
    receipt: Mapping[str, Any] | None = None

    @property
    def failed(self) -> bool:
        """Whether the suite's exit code must not be zero because of this."""
        allowed = not self.required or self.best_effort
        if self.verdict is Verdict.BROKEN and allowed:
            return False
        return self.verdict in (Verdict.BROKEN, Verdict.INCONCLUSIVE) or bool(self.residue)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "attack": self.attack,
            "tier": self.tier,
            "verdict": self.verdict.value,
            "seen": self.seen,
            "seconds": round(self.seconds, 2),
            "required": self.required,
            "best_effort": self.best_effort,
            "residue": list(self.residue),
            "receipt": dict(self.receipt) if self.receipt is not None else None,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Finding:
        """The reverse of :meth:`to_dict`."""
        return cls(**{**data, "verdict": Verdict(data["verdict"]), "residue": tuple(data["residue"])})
