"""Floods and clingers: what a program prints or leaves running costs the supervisor neither memory nor time."""

# ruff: noqa: E501 - a program of one line stays on one line

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from support.needs import RunnerFactory

from fumehood.model import Limits, MiB, Outcome, Policy

pytestmark = pytest.mark.usefixtures("full_python", "native_speed")

#: The promise (SPECIFICATION.md): how much a flood of any size grows the supervisor, beyond the output that it keeps.
GROWTH_BYTES = 32 * MiB


@pytest.fixture
def native_speed(tier_name: str) -> None:
    """A gigabyte is printed only where code runs at the host's speed; the bound is the supervisor's, the same for all."""
    if tier_name not in ("jail", "subprocess"):
        pytest.skip("covered by the tiers that run at the host's speed: the bound is in the code that all share")


#: A supervisor of its own, so that its peak is that of this run only.
SUPERVISOR = """
import re, sys
sys.path[:0] = {path!r}
from fumehood import Limits, Policy, Runner
tier, overflow, program = sys.argv[1:]
def peak():  # not ru_maxrss, which an exec takes over from the parent
    return int(re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1])
policy = Policy(limits=Limits(wall_s=200, cpu_s=200, cpus=2), overflow=overflow)
with Runner(tier=tier, policy=policy) as runner:
    runner.run("print(1)")
    before = peak()
    result = runner.run(program)
    grown = (peak() - before) * 1024
print(result.outcome.value, result.exit_code, len(result.stdout_data), result.usage.stdout_bytes, grown)
"""

GIGABYTE = "import os\nb = b'x' * 999_999 + b'\\n'\nfor i in range(1000):\n n = 0\n while n < 1000000: n += os.write(1, b[n:])\n"
LINE = "import os\nb = b'x' * 1_000_000\nfor i in range(500):\n n = 0\n while n < 1000000: n += os.write(1, b[n:])\n"


@pytest.mark.parametrize(("program", "size"), [(GIGABYTE, 10**9), (LINE, 5 * 10**8)], ids=["gigabyte", "line"])
@pytest.mark.parametrize("overflow", ["truncate", "stop"])
def test_output_without_end(tier_name: str, program: str, size: int, overflow: str) -> None:
    code = SUPERVISOR.format(path=[p for p in sys.path if p])
    done = subprocess.run(
        [sys.executable, "-c", code, tier_name, overflow, program], capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr
    outcome, exit_code, kept, printed, grown = done.stdout.split()
    print(f"{tier_name} {overflow}: grew by {int(grown) / MiB:.1f} MiB")
    assert int(grown) < GROWTH_BYTES
    assert int(kept) == Limits().output_bytes
    if overflow == "truncate":
        assert (outcome, exit_code, int(printed)) == ("exited", "0", size)
    else:
        assert (outcome, exit_code) == ("output", "None") and int(printed) <= size


CLINGERS = {
    "grandchild": "import os, time\nif os.fork() == 0:\n os.setsid()\n if os.fork() == 0: time.sleep(600)\n os._exit(0)\n",
    "writer": "import os\nif os.fork() == 0:\n os.setsid()\n while True: os.write(1, b'x' * 4096)\n",
    "stopped": "import os, signal\nif os.fork() == 0:\n os.setsid(); os.kill(os.getpid(), signal.SIGSTOP)\n",
    "stubborn": "import os, signal, time\nif os.fork() == 0:\n os.setsid()\n for n in range(1, 65):\n  try: signal.signal(n, signal.SIG_IGN)\n"
    "  except (OSError, ValueError): pass\n while True: time.sleep(1)\n",
}


@pytest.mark.parametrize("name", CLINGERS)
@pytest.mark.parametrize("end", ["exits", "is killed"])
def test_a_process_that_holds_stdout_delays_nothing(runner_factory: RunnerFactory, name: str, end: str) -> None:
    """At most the deadline and half a second. A busy machine may miss it once."""
    wall_s = 1.0 if end == "is killed" else 30.0
    runner = runner_factory(Policy(limits=Limits(wall_s=wall_s, cpu_s=60)))
    runner.run("pass")
    program = CLINGERS[name] + ("while True: pass\n" if end == "is killed" else "print('main', flush=True)\n")
    seen = []
    for _ in range(3):
        result = runner.run(program)
        if end == "is killed":
            assert result.outcome is Outcome.WALL
        else:
            assert result.ok and ("main" in result.stdout or result.truncated)
        seen.append(result.seconds)
        if result.seconds <= (wall_s + 0.5 if end == "is killed" else 1.5):
            return
    pytest.fail(f"took {seen} s")


def test_a_fork_bomb_ends_at_its_deadline(runner_factory: RunnerFactory) -> None:
    runner = runner_factory(Policy(limits=Limits(wall_s=2.0, cpu_s=60, pids=50)))
    started = time.monotonic()
    result = runner.run("import os\nwhile True:\n try: os.fork()\n except OSError: pass\n")
    # Fifty interpreters may reach the limit of memory first, where a page that they share counts for each.
    assert result.outcome in (Outcome.WALL, Outcome.MEMORY) and time.monotonic() - started < 30
    assert runner.run("print('next')").stdout == "next\n"


def test_zombies_and_orphans_are_reaped(runner_factory: RunnerFactory) -> None:
    """600 orphans under a limit of 40 processes: each must be reaped for the next to be forked."""
    runner = runner_factory(Policy(limits=Limits(wall_s=120, cpu_s=120, pids=40)))
    result = runner.run(
        "import os, time\nmade = 0\nwhile made < 600:\n"
        "    try: pid = os.fork()\n    except OSError: time.sleep(0.001); continue\n"
        "    if pid == 0:\n"
        "        try: os.fork()\n        except OSError: pass\n"
        "        os._exit(0)\n"
        "    os.waitpid(pid, 0); made += 1\nprint(made)\n"
    )
    assert result.stdout == "600\n", result
