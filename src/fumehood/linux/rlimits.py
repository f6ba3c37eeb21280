"""Limits of each process, setrlimit(2), seen from the process that hands them on."""

from __future__ import annotations

import resource
from collections.abc import Mapping

from fumehood.errors import UnsupportedError

#: Which limit of a policy stands behind which rlimit.
_FIELDS = {"NOFILE": "open_files", "NPROC": "pids", "FSIZE": "disk_bytes", "CPU": "cpu_s", "DATA": "memory_bytes"}


def refuse_higher(wanted: Mapping[str, int], *, tier: str) -> None:
    """Refuse what is above this process's own hard limits: a sandbox has no privilege to raise them.

    ``wanted`` has names without their prefix, such as NOFILE. Raises UnsupportedError with every one.
    """
    own = {name: resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[1] for name in wanted}
    higher = [name for name, most in own.items() if most != resource.RLIM_INFINITY and wanted[name] > most]
    if not higher:
        return
    unmet = tuple(f"limits.{_FIELDS[name]}" if name in _FIELDS else f"RLIMIT_{name}" for name in higher)
    facts = (
        f"{what} (RLIMIT_{name} would be {wanted[name]}, and this process may have {own[name]})"
        for what, name in zip(unmet, higher, strict=True)
    )
    raise UnsupportedError(
        f"cannot hold: {', '.join(facts)}",
        unmet=unmet,
        tier=tier,
        remedy="ask for less, or raise this process's hard limit (ulimit -H in its shell, Limit…= in its systemd unit)",
    )
