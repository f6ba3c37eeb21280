"""Each control of the jail switched off in turn: at least one attack must succeed then, or the control is unproven.

The list of controls is the jail's own (``fumehood.tiers.jail.controls.NAMES``), the switch an argument of its
constructor, which no policy, name or option of the command line reaches.
"""

from __future__ import annotations

from dataclasses import dataclass

from fumehood.attacks.catalogue import ATTACKS
from fumehood.attacks.model import Attack, Finding, Verdict
from fumehood.attacks.suite import Suite
from fumehood.attacks.worker import Spec

TIER = "jail"


#: Controls that cannot be applied without another one, and go with it: a mount needs the capabilities of a user
#: namespace that owns the mount namespace, a filter needs no_new_privs where there is no capability.
TOGETHER: dict[str, tuple[str, ...]] = {
    "user_ns": ("cgroup_ns", "uid", "mount_ns", "pid_ns", "ipc_ns", "uts_ns", "disk", "proc", "hostname"),
    "mount_ns": ("disk", "proc"),
    "pid_ns": ("proc",),
    "uid": ("disk", "proc"),
    "no_new_privs": ("landlock", "seccomp"),
}


def off(control: str) -> tuple[str, ...]:
    """What is switched off to do without ``control``."""
    return (control, *TOGETHER.get(control, ()))


@dataclass(frozen=True, slots=True)
class Mutant:
    """One control switched off, and what the attacks that probe it did then."""

    control: str
    mechanism: str
    findings: tuple[Finding, ...]

    @property
    def red(self) -> tuple[str, ...]:
        """Attacks that succeeded without the control."""
        return tuple(f.attack for f in self.findings if f.verdict is Verdict.BROKEN)

    @property
    def not_here(self) -> bool:
        """Whether this host has nothing to switch off: no attack on the control applies."""
        return all(f.verdict is Verdict.NOT_APPLICABLE for f in self.findings) and bool(self.findings)


def plan() -> dict[str, tuple[Attack, ...]]:
    """Control -> the attacks that probe it."""
    from fumehood.tiers.jail.controls import NAMES

    return {name: tuple(a for a in ATTACKS if name in a.proves) for name in NAMES}


def mutate(suite: Suite, *, lacks: tuple[str, ...] = ()) -> list[Mutant]:
    """Run every mutant. ``lacks`` names limits that this host holds as best effort, so that nothing is switched off."""
    from fumehood.tiers.jail.controls import MECHANISMS

    probes = plan()
    specs = [
        Spec(a.id, TIER, off(control)) for control, attacks in probes.items() for a in attacks if control not in lacks
    ]
    findings = suite.run(specs, {a.id: a for a in ATTACKS})
    mutants = []
    for control, attacks in probes.items():
        found = tuple(
            findings.get(Spec(a.id, TIER, off(control)))
            or Finding(a.id, TIER, Verdict.NOT_APPLICABLE, f"this host holds {control} as best effort", 0.0)
            for a in attacks
        )
        mutants.append(Mutant(control, MECHANISMS.get(control, ""), found))
    return mutants


def text_table(mutants: list[Mutant]) -> str:
    """The table for a terminal."""
    width = max(len(m.control) for m in mutants)
    lines = [f"{'switched off':<{width}}  attacks that succeed then"]
    for mutant in mutants:
        what = ", ".join(mutant.red) or ("not on this host" if mutant.not_here else "NONE: unproven")
        lines.append(f"{mutant.control:<{width}}  {what}")
    return "\n".join(lines)


def markdown(mutants: list[Mutant]) -> str:
    """docs/mutation.md."""
    titles = {a.id: a.title for a in ATTACKS}
    lines = [
        "# What each control of the jail is there for",
        "",
        "Written by `fumehood verify --mutate --docs docs`: each control is switched off alone, and these attacks, "
        "which the whole jail holds, succeed. A control without such an attack would be unproven.",
        "",
        "| control | mechanism | without it, these succeed |",
        "|---|---|---|",
    ]
    for mutant in mutants:
        red = "<br>".join(f"{ident} {titles[ident]}" for ident in mutant.red) or "**none: unproven**"
        lines.append(f"| {mutant.control} | {mutant.mechanism} | {red} |")
    return "\n".join(lines) + "\n"


def unproven(mutants: list[Mutant]) -> list[str]:
    """Controls without which nothing went red, though this host has them."""
    return [m.control for m in mutants if not m.red and not m.not_here]


def worst(mutants: list[Mutant]) -> list[Finding]:
    """Findings that say nothing, because the mutant could not be set up."""
    return [f for m in mutants for f in m.findings if f.verdict is Verdict.INCONCLUSIVE]
