"""Tiers by name, imported on demand, and the choice of one.

A caller names a tier, a floor, or neither. Naming a tier makes that tier's boundary the floor of the call; naming a
floor picks the lightest tier on this host that meets it and holds the whole policy; naming neither means the floor
``kernel``. Nothing here ever picks a boundary below what was asked.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from fumehood.errors import PolicyError, UnavailableError, UnsupportedError
from fumehood.model import Boundary, Policy, Program
from fumehood.tier import Probe, Tier, require

#: Name -> "module:class", lightest first: the order in which a floor is served.
_TIERS = {
    "subprocess": "fumehood.tiers.subprocess.tier:SubprocessTier",
    "interpreter": "fumehood.tiers.interpreter.tier:InterpreterTier",
    "jail": "fumehood.tiers.jail.tier:JailTier",
    "docker": "fumehood.tiers.container.tier:DockerTier",
    "podman": "fumehood.tiers.container.tier:PodmanTier",
    "wasm": "fumehood.tiers.wasm.tier:WasmTier",
    "gvisor": "fumehood.tiers.gvisor.tier:GvisorTier",
    "microvm": "fumehood.tiers.microvm.tier:MicrovmTier",
    "e2b": "fumehood.tiers.e2b.tier:E2BTier",
}

DEFAULT_FLOOR = Boundary.KERNEL


def names() -> tuple[str, ...]:
    """Every tier's name, lightest first."""
    return tuple(_TIERS)


def make(name: str, policy: Policy | None = None) -> Tier:
    """A new instance of the tier called ``name``. Raises PolicyError for an unknown name.

    It is made with the image and the runtime that ``policy`` names, where the tier has such (:class:`Features`). The
    instance belongs to the caller, who closes it.
    """
    try:
        module, _, attribute = _TIERS[name].partition(":")
    except KeyError:
        raise PolicyError(f"unknown tier {name!r}; tiers are {', '.join(_TIERS)}") from None
    kind: Callable[..., Tier] = getattr(importlib.import_module(module), attribute)
    tier = kind()
    if policy is None:
        return tier
    taken = {"image": tier.features.images, "runtime": tier.features.runtimes}
    options = {name: value for name, takes in taken.items() if takes and (value := getattr(policy, name)) is not None}
    return kind(**options) if options else tier


@dataclass(frozen=True, slots=True)
class Standing:
    """How one tier stands on this host."""

    tier: Tier
    probe: Probe


def survey() -> tuple[Standing, ...]:
    """Every tier with its probe, lightest first."""
    found = []
    for name in _TIERS:
        tier = make(name)
        found.append(Standing(tier, tier.probe()))
    return tuple(found)


def choose(
    *, tier: str | None = None, floor: Boundary | str | None = None, policy: Policy, program: Program | None = None
) -> Tier:
    """The tier for a call, available here and able to hold all of ``policy``.

    Raises PolicyError (unknown name), UnsupportedError (named, but cannot hold it), UnavailableError (named, but not
    on this host; or nothing qualifies, and then every tier is listed with its reason and remedy).
    """
    wanted = Boundary.parse(floor) if floor is not None else None
    if tier is not None:
        named = make(tier, policy)
        require(named, policy, floor=wanted, program=program)
        probe = named.probe()
        if not probe.available:
            raise UnavailableError(
                f"not available on this host: {probe.reason}", tier=tier, remedy=probe.remedy or None
            )
        return named
    if wanted is None:
        wanted = DEFAULT_FLOOR
    reasons = []
    for name in _TIERS:
        candidate = make(name, policy)
        try:
            require(candidate, policy, floor=wanted, program=program)
        except UnsupportedError as error:
            reasons.append(f"  {name}: {error.message}")
            continue
        probe = candidate.probe()
        if probe.available and candidate.features.full_python and not candidate.features.claimed:
            return candidate
        why = probe.reason or "name it to choose it: it runs a subset of Python, or elsewhere on a provider's word"
        reasons.append(f"  {name}: {why}" + (f"; {probe.remedy}" if probe.remedy else ""))
    raise UnavailableError(f"no tier on this host meets the floor {wanted.value!r}:\n" + "\n".join(reasons))
