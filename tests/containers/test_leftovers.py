"""What a supervisor that was killed leaves dies with it, and is removed by the next one and by `fumehood prune`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from asked import labelled

from fumehood import Runner
from fumehood.images.engine import Word
from fumehood.linux import process
from fumehood.tiers.container import owners

_SUPERVISOR = """
import sys
from fumehood import Runner, Policy, Limits
from fumehood.tiers.container import owners
print(owners.ours(), flush=True)
with Runner(tier=sys.argv[1], policy=Policy(limits=Limits(wall_s=600))) as runner:
    runner.run("import time\\nprint('on', flush=True)\\ntime.sleep(600)", sink=lambda s, d: print('on', flush=True))
"""


def supervisor(tier: str, folder: Path) -> tuple[subprocess.Popen[str], str]:
    """One that has a program running, and its name as an owner."""
    child = subprocess.Popen(
        [sys.executable, "-c", _SUPERVISOR, tier],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    assert child.stdout is not None
    owner = child.stdout.readline().strip()
    assert child.stdout.readline().strip() == "on"
    return child, owner


def test_a_killed_supervisors_sandbox_dies_and_is_pruned(container_tier: str, tmp_path: Path) -> None:
    child, owner = supervisor(container_tier, tmp_path)
    below = {pid: process.start_time(pid) for pid in process.descendants(child.pid)}
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()
    assert owners.is_gone(owner)
    deadline = time.monotonic() + 60
    if container_tier == "gvisor":
        while any(process.alive(pid, start) for pid, start in below.items()):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert list(tmp_path.glob("fumehood-gvisor-*"))
    else:
        word: Word = container_tier  # type: ignore[assignment]
        while any(c["State"] == "running" for c in labelled(word, owner)):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    pruned = subprocess.run(
        [sys.executable, "-m", "fumehood", "prune", "--json"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    removed = json.loads(pruned.stdout)["removed"]
    if container_tier == "gvisor":
        assert len(removed["bundles"]) == 1 and not list(tmp_path.glob("fumehood-gvisor-*"))
    else:
        assert labelled(word, owner) == []


def test_a_living_supervisors_sandbox_is_not_pruned(container_tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(tempfile.mkdtemp(prefix="fumehood-test-"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    try:
        with Runner(tier=container_tier) as runner, runner.open() as sandbox:
            env = {**os.environ, "TMPDIR": str(folder)}
            subprocess.run([sys.executable, "-m", "fumehood", "prune"], check=True, capture_output=True, env=env)
            assert sandbox.exec("print(1)").stdout == "1\n"
        assert list(folder.iterdir()) == []
    finally:
        folder.rmdir()


def test_an_owner_of_another_kind_is_never_gone() -> None:
    assert not owners.is_gone(owners.ours())
    assert not owners.is_gone("") and not owners.is_gone("x-y") and not owners.is_gone("1-2-3")
    pid, start, namespace, boot = owners.ours().split("-")
    assert owners.is_gone(f"{pid}-{int(start) + 1}-{namespace}-{boot}")
    assert not owners.is_gone(f"{pid}-{int(start) + 1}-{int(namespace) + 1}-{boot}")
    assert owners.is_gone(f"{pid}-{start}-{namespace}-{'0' * 32}")
