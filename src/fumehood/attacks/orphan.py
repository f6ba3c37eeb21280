"""The attack in which the supervisor itself is killed: a second worker is started, and killed in mid-run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from fumehood import registry
from fumehood.attacks import dialects, procfs
from fumehood.attacks.engine import OTHER_KERNEL
from fumehood.attacks.model import Attack, Finding, Verdict
from fumehood.attacks.prelude import DONE
from fumehood.model import Boundary

if TYPE_CHECKING:
    from fumehood.attacks.worker import Spec

#: A sandbox is dead within a second of its supervisor; twice that is the noise of a shared machine.
DEAD_S = 2.0

#: The name that the supervisor gives itself when it has heard of the program, whose own mark another kernel keeps, and
#: behind it the pid of a first process that is no descendant of the supervisor.
HEARD = "fh-heard"


def face_orphan(attack: Attack, spec: Spec) -> Finding:
    """Start a worker that runs the attack's program, kill it with SIGKILL, and see who is alive ``DEAD_S`` later."""
    began = time.monotonic()
    boundary = registry.make(spec.tier).features.boundary if spec.tier != "none" else Boundary.NONE
    required = spec.tier != "none" and attack.must_hold(spec.tier, boundary)
    mark = HEARD if boundary in (*OTHER_KERNEL, *dialects.RUNTIMES) else DONE

    def end(verdict: Verdict, seen: str, residue: tuple[str, ...] = ()) -> Finding:
        return Finding(attack.id, spec.tier, verdict, seen, time.monotonic() - began, required, False, residue)

    supervisor = subprocess.Popen(
        [sys.executable, "-m", "fumehood.attacks.worker", json.dumps(asdict(spec) | {"inner": True})],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    assert supervisor.stdin is not None
    try:
        seen = _wait_for((mark, HEARD), 30 if boundary is Boundary.EMULATED else 10)
        if not seen:
            return end(Verdict.INCONCLUSIVE, "the program was not seen to run")
        others = [int(seen.removeprefix(HEARD))] if seen.removeprefix(HEARD).isdigit() else []
        sandbox = {(p.pid, p.started) for p in procfs.descendants(supervisor.pid, others=others).values()}
        # The bystander is the stage's and outlives its supervisor: it is not of the sandbox.
        sandbox = {key for key in sandbox if procfs.process(key[0]) and not _is_bystander(key[0])}
        os.kill(supervisor.pid, signal.SIGKILL)
        supervisor.wait()
        deadline = time.monotonic() + DEAD_S
        alive = list(sandbox)
        while alive and time.monotonic() < deadline:
            time.sleep(0.02)
            alive = [key for key in alive if (p := procfs.process(key[0])) and p.alive and p.started == key[1]]
        if alive:
            names = [p.comm for key in alive if (p := procfs.process(key[0]))]
            return end(Verdict.BROKEN, f"alive {DEAD_S:g} s after the supervisor's death: {', '.join(names)}")
        return end(Verdict.HELD, f"dead {time.monotonic() - deadline + DEAD_S:.2f} s after the supervisor's death")
    finally:
        supervisor.kill()
        supervisor.wait()
        supervisor.stdin.close()


def _wait_for(marks: tuple[str, str], seconds: float) -> str:
    """The first name among our descendants that is the one mark, or begins with the other; "" if there is none."""
    one, other = marks
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for p in procfs.descendants().values():
            if p.comm == one or p.comm.startswith(other):
                return p.comm
        time.sleep(0.02)
    return ""


def _is_bystander(pid: int) -> bool:
    return "sigwaitinfo" in procfs.read_text(f"/proc/{pid}/cmdline")
