"""Nothing outlives the supervisor: killed by SIGKILL at any moment, it takes launcher, zygote and sandboxes along.

Each supervisor is a child of the test, which adopts orphans, so that whatever is left is seen.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support import posture, programs
from support.needs import need_tier

#: The promise (SPECIFICATION.md). A busy machine may miss it; then the same is tried again.
PROMISE_S = 1.0
PATIENCE_S = 20.0
TRIES = 3

START = """
import sys, time
sys.path[:0] = {path!r}
from fumehood import Limits, Policy, Runner
policy = Policy(limits=Limits(wall_s=600, cpu_s=600, pids=20))
def told(*_): print("ready", flush=True)
"""

RUNNING = (
    START
    + """
with Runner(tier={tier!r}, policy=policy) as runner:
    runner.run({program!r}, sink=told)
"""
)

LIVE = (
    START
    + """
with Runner(tier={tier!r}, policy=policy) as runner, runner.open() as one, runner.open() as two:
    one.exec("pass"); two.exec("import subprocess; p = subprocess.Popen(['sleep', '600'])")
    told()
    time.sleep(600)
"""
)

#: Hangs where a sandbox's first process waits for the word to seal itself, or has just been given it.
SEALING = (
    START
    + """
import asyncio, socket
import fumehood.tiers.{tier}.tier as tier
async def hang(channel, *_, **__):
    if {given!r} and tier.handshake:
        channel.setblocking(True)
        channel.send(b"G")
    told()
    await asyncio.sleep(600)
tier.handshake, tier.sealed = (hang, None) if hasattr(tier, "handshake") else (None, hang)
if not {given!r}:
    tier.let_go = lambda *_, **__: None
with Runner(tier={tier!r}, policy=policy) as runner:
    runner.run("while True: pass")
"""
)

STARTING = (
    START
    + """
with Runner(tier={tier!r}, policy=policy) as runner:
    told()
    runner.run("while True: pass")
"""
)


@pytest.fixture(params=["jail", "subprocess"])
def tier(request: pytest.FixtureRequest) -> str:
    need_tier(request.param)
    name: str = request.param
    return name


@pytest.fixture(autouse=True)
def sight() -> Iterator[None]:
    with posture.adopting_orphans():
        yield


@contextmanager
def supervisor(code: str, **words: object) -> Iterator[subprocess.Popen[str]]:
    """A supervisor that has said "ready"; whatever of it is left at the end is killed."""
    text = code.format(path=[p for p in sys.path if p], **words)
    child = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == "ready\n"
        yield child
    finally:
        below = posture.children(child.pid)
        child.kill()
        child.wait()
        child.stdout.close()
        posture.kill_hard(below)


def seconds_until_gone(child: subprocess.Popen[str], below: list[int]) -> float:
    """Kill the supervisor; how long what was below it goes on. Fails if something stays."""
    child.kill()
    gone = posture.seconds_until_gone(below, PATIENCE_S)
    child.wait()
    if gone is None:
        left = [(pid, posture.command(pid)) for pid in below if os.path.exists(f"/proc/{pid}")]
        posture.kill_hard(below)
        pytest.fail(f"outlived the supervisor by {PATIENCE_S} s: {left}")
    return gone


@pytest.mark.parametrize("program", ["FOREVER", "SLEEP", "STUBBORN", "DAEMONS"])
def test_running(tier: str, program: str) -> None:
    source = {
        "FOREVER": "print(flush=True)\n" + programs.FOREVER,
        "SLEEP": "print(flush=True)\n" + programs.SLEEP,
        "STUBBORN": programs.STUBBORN,
        "DAEMONS": programs.DAEMON + "\ntime.sleep(600)",
    }[program]
    times = []
    for _ in range(TRIES):
        with supervisor(RUNNING, tier=tier, program=source) as child:
            below = posture.children(child.pid)
            assert len(below) >= 3
            times.append(seconds_until_gone(child, below))
        if times[-1] <= PROMISE_S:
            return
    pytest.fail(f"took {times} s")


def test_live(tier: str) -> None:
    times = []
    for _ in range(TRIES):
        with supervisor(LIVE, tier=tier) as child:
            below = posture.children(child.pid)
            assert len(below) >= 6
            times.append(seconds_until_gone(child, below))
        if times[-1] <= PROMISE_S:
            return
    pytest.fail(f"took {times} s")


@pytest.mark.parametrize("given", [False, True], ids=["waiting", "told"])
def test_sealing(tier: str, given: bool) -> None:
    times = []
    for _ in range(TRIES):
        with supervisor(SEALING, tier=tier, given=given) as child:
            below = posture.children(child.pid)
            assert len(below) >= 2
            times.append(seconds_until_gone(child, below))
        if times[-1] <= PROMISE_S:
            return
    pytest.fail(f"took {times} s")


def test_starting(tier: str) -> None:
    """Killed at twelve moments of the first 0.35 s of a first run, among them the launcher's and the zygote's start."""
    ours = set(posture.children(os.getpid()))
    for step in range(12):
        with supervisor(STARTING, tier=tier) as child:
            time.sleep(step * 0.03)
            below = posture.children(child.pid)
            child.kill()
            child.wait()
            # What it had started meanwhile is ours by now, wherever it stood.
            everything = list({*below, *posture.children(os.getpid())} - ours - {child.pid})
            gone = posture.seconds_until_gone(everything, PATIENCE_S)
            left = [(pid, posture.command(pid)) for pid in everything if os.path.exists(f"/proc/{pid}")]
            if gone is None:
                posture.kill_hard(everything)
            assert gone is not None, f"killed after {step * 30} ms, and something stays: {left}"


@pytest.mark.parametrize("stopped", [signal.SIGSTOP])
def test_a_template_that_does_not_listen_dies_too(stopped: int) -> None:
    """A zygote in the middle of an import reads nothing: like one that is stopped."""
    need_tier("jail")
    with supervisor(LIVE, tier="jail") as child:
        (launcher, *_) = [
            pid for pid in posture.children(child.pid) if any("launcher.py" in w for w in posture.command(pid))
        ]
        zygote = posture.children(launcher)[0]
        below = posture.children(child.pid)
        os.kill(zygote, stopped)
        assert seconds_until_gone(child, below) <= PATIENCE_S


def test_the_death_of_the_launcher_ends_its_sandboxes() -> None:
    need_tier("jail")
    with supervisor(LIVE, tier="jail") as child:
        (launcher, *_) = [
            pid for pid in posture.children(child.pid) if any("launcher.py" in w for w in posture.command(pid))
        ]
        below = posture.children(launcher)
        os.kill(launcher, signal.SIGKILL)
        gone = posture.seconds_until_gone(below, PATIENCE_S)
        assert gone is not None
