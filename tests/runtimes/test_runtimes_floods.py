"""A program that never ends, or prints or allocates without end, costs the supervisor no memory.

Its outcome and its time are tested for each tier in a folder of its own as well.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from support.needs import need_tier

from fumehood.model import MiB

#: As in hostile/test_floods.py, which the tiers at the host's speed go through.
GROWTH_BYTES = 32 * MiB
WALL_S = 3.0

#: A supervisor of its own, so that its peak is that of these programs only.
_SUPERVISOR = """
import json, re, sys, time
sys.path[:0] = {path!r}
from fumehood import Limits, MiB, Policy, Runner
programs = json.load(sys.stdin)
def peak():
    return int(re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1])
policy = Policy(limits=Limits(wall_s={wall_s}, cpu_s=60, memory_bytes=128 * MiB))
with Runner(tier={tier!r}, policy=policy) as runner:
    assert runner.run("print(1)").ok
    before = peak()
    rows = []
    for program in programs:
        result = runner.run(program)
        rows.append((result.outcome.value, result.seconds, result.usage.stdout_bytes + result.usage.stderr_bytes))
    with runner.open() as sandbox:
        sandbox.exec("print('x' * 1000)")
        result = sandbox.exec(programs[0])
        rows.append((result.outcome.value, result.seconds, result.usage.stdout_bytes + result.usage.stderr_bytes))
    print(json.dumps([rows, (peak() - before) * 1024]))
"""

_PROGRAMS = {
    "while True: print('x' * 100_000)": {"wall"},
    "s = 'x' * 10_000_000\nfor i in range(50): print(s, end='')": {"exited", "wall"},
    "while True: pass": {"wall"},
    "x = 7 ** 7 ** 9\nprint(x)": {"wall"},
    "raise ValueError('x' * 30_000_000)": {"exited"},
    "x = []\nwhile True: x.append('a' * 1_000_000 + str(len(x)))": {"memory", "exited"},
}


@pytest.mark.parametrize("tier", ["interpreter", "wasm"])
def test_floods_do_not_grow_the_supervisor(tier: str) -> None:
    need_tier(tier)
    code = _SUPERVISOR.format(path=[p for p in sys.path if p], tier=tier, wall_s=WALL_S)
    done = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(list(_PROGRAMS)), capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr
    rows, grown = json.loads(done.stdout)
    print(tier, [(outcome, round(seconds, 2), size) for outcome, seconds, size in rows], f"{grown / MiB:.1f} MiB")
    for (outcome, seconds, _), wanted in zip(rows, [*_PROGRAMS.values(), {"wall"}], strict=True):
        assert outcome in wanted and seconds <= WALL_S + 0.5
    assert rows[0][2] > 1_000_000  # it did flood
    assert grown < GROWTH_BYTES
