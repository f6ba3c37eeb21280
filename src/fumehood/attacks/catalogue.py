"""Every attack, the six of the article first."""

from __future__ import annotations

from fumehood.attacks import credentials, files, kernel, lifecycle, network, posture, resources, results, runtimes
from fumehood.attacks.model import Attack

#: A CPU loop, a memory grab, a flood of processes, a large file, a planted secret, a service on loopback.
FIRST = ("A1", "A7", "A14", "A20", "B1", "D1")

_MODULES = (resources, files, kernel, network, credentials, results, lifecycle, posture, runtimes)

_BY_ID: dict[str, Attack] = {attack.id: attack for module in _MODULES for attack in module.ATTACKS}

#: In the order in which the suite runs and prints them.
ATTACKS: tuple[Attack, ...] = (
    *(_BY_ID[ident] for ident in FIRST),
    *(attack for ident, attack in _BY_ID.items() if ident not in FIRST),
)

GROUPS = tuple(dict.fromkeys(attack.group for module in _MODULES for attack in module.ATTACKS))


def by_id(ident: str) -> Attack | None:
    """The attack with that id, in any case of letters, or None."""
    return next((attack for attack in ATTACKS if attack.id.lower() == ident.lower()), None)
