"""One attack on one tier, in a process of its own: ``python -m fumehood.attacks.worker SPEC``.

The finding is one JSON line on stdout. End of file on stdin means that the suite is gone: everything is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
from dataclasses import asdict, dataclass

from fumehood import registry
from fumehood.attacks import guard, procfs
from fumehood.attacks.catalogue import by_id
from fumehood.attacks.engine import face, make_control
from fumehood.attacks.model import Attack, Finding, Verdict
from fumehood.attacks.stage import Stage
from fumehood.model import Policy
from fumehood.tier import Tier

#: The suite gives up on a worker after this long.
WORKER_S = 75.0


@dataclass(frozen=True, slots=True)
class Spec:
    """What a worker is told. ``disabled`` is the mutation's: it goes to the jail's constructor and nowhere else."""

    attack: str
    tier: str  # "none" is the control
    disabled: tuple[str, ...] = ()


def main() -> int:
    """Carry out the attack of the spec in argv and print the finding."""
    spec = Spec(**json.loads(sys.argv[1]))
    spec = Spec(spec.attack, spec.tier, tuple(spec.disabled))
    procfs.become_subreaper()
    answer = os.dup(1)
    os.dup2(2, 1)
    threading.Thread(target=_lifeline, daemon=True).start()
    finding = carry_out(spec)
    os.write(answer, json.dumps(finding.to_dict()).encode() + b"\n")
    guard.kill_all()
    return 0


def carry_out(spec: Spec, policy: Policy | None = None) -> Finding:
    """The finding of one attack on one tier, with this process as the supervisor."""
    attack = by_id(spec.attack)
    assert attack is not None, spec.attack
    if attack.orphan:
        from fumehood.attacks.orphan import face_orphan

        return face_orphan(attack, spec)
    finding = asyncio.run(_face(attack, spec, policy or Policy()))
    return finding


async def _face(attack: Attack, spec: Spec, policy: Policy) -> Finding:
    from dataclasses import replace

    def make(attack: Attack, stage: Stage) -> Tier:
        os.environ["TMPDIR"] = str(stage.work)
        import tempfile

        tempfile.tempdir = None
        return make_tier(spec, attack, stage)

    finding = await face(attack, make, policy, terminal=attack.group == "kernel")
    return replace(finding, tier=spec.tier)


def make_tier(spec: Spec, attack: Attack, stage: Stage) -> Tier:
    """The tier of the spec."""
    if spec.tier == "none":
        return make_control(attack, stage)
    if spec.disabled:
        from fumehood.tiers.jail.tier import JailTier

        return JailTier(disabled=frozenset(spec.disabled))
    return registry.make(spec.tier)


def _lifeline() -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 1):
            pass
    guard.kill_all()
    os.kill(os.getpid(), signal.SIGKILL)


__all__ = ["Spec", "Verdict", "asdict", "carry_out", "main"]

if __name__ == "__main__":
    sys.exit(main())
