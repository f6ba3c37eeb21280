"""One attack on one tier, in a process of its own: ``python -m fumehood.attacks.worker SPEC``.

The finding is one JSON line on stdout. End of file on stdin means that the suite is gone: everything is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

from fumehood import registry
from fumehood.attacks import dialects, guard, procfs
from fumehood.attacks.catalogue import by_id
from fumehood.attacks.engine import face, make_control
from fumehood.attacks.model import Attack, Finding
from fumehood.attacks.orphan import HEARD, face_orphan
from fumehood.attacks.prelude import ARMED, compose
from fumehood.attacks.stage import Stage, python, remove_all
from fumehood.model import Code, Policy
from fumehood.tier import Tier

#: The suite gives up on a worker after this long.
WORKER_S = 75.0


@dataclass(frozen=True, slots=True)
class Spec:
    """What a worker is told. ``disabled`` is the mutation's: it goes to the jail's constructor and nowhere else."""

    attack: str
    tier: str  # "none" is the control
    disabled: tuple[str, ...] = ()
    inner: bool = False  # the supervisor that attack G6 kills


def main(text: str) -> int:
    """Carry out the attack of the spec, JSON, and print the finding."""
    told = json.loads(text)
    spec = Spec(told["attack"], told["tier"], tuple(told["disabled"]), told.get("inner", False))
    procfs.become_subreaper()
    threading.Thread(target=_lifeline, daemon=True).start()
    answer = os.dup(1)
    os.dup2(2, 1)
    finding = carry_out(spec)
    os.write(answer, json.dumps(finding.to_dict()).encode() + b"\n")
    guard.kill_all()
    return 0


def carry_out(spec: Spec) -> Finding:
    """The finding of one attack on one tier, with this process as the supervisor."""
    attack = by_id(spec.attack)
    assert attack is not None, spec.attack
    if attack.orphan and not spec.inner:
        return face_orphan(attack, spec)
    if attack.orphan:
        _only_run(attack, spec)

    def make(attack: Attack, stage: Stage) -> Tier:
        return make_tier(spec, attack, stage)

    finding = asyncio.run(face(attack, make, Policy(), own_session=True))
    return replace(finding, tier=spec.tier)


def make_tier(spec: Spec, attack: Attack, stage: Stage) -> Tier:
    """The tier of the spec."""
    if spec.tier == "none":
        return make_control(attack, stage)
    if spec.disabled:
        from fumehood.tiers.jail.tier import JailTier

        return JailTier(disabled=frozenset(spec.disabled))
    return registry.make(spec.tier)


def _only_run(attack: Attack, spec: Spec) -> None:
    """Run the program and wait to be killed. On the control without its guard, which would die with its supervisor."""
    plain = spec.tier == "none"
    text = compose(attack.program, {})
    if not plain:
        tier = registry.make(spec.tier)
        text = dialects.compose(attack.program, {}, tier.features)
    said = bytearray()

    def hear(_stream: str, data: bytes) -> None:
        said.extend(data[:4096])
        if ARMED in said:
            elsewhere = [str(pid) for pid in getattr(tier, "first_processes", list)()]
            Path("/proc/self/comm").write_text(HEARD + "".join(elsewhere[:1]))

    async def run() -> None:
        sandbox = await tier.create(Policy())
        await sandbox.exec(Code(text), last=True, sink=hear)

    if plain:
        subprocess.run([python(), "-c", text], check=False)
    else:
        asyncio.run(run())
    time.sleep(60)


def _lifeline() -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 1):
            pass
    guard.kill_all()
    remove_all()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
