"""Tier subprocess: its folder, packages where only root may go, and limits above what this process may hand on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.needs import need_tier
from support.residue import Look

from fumehood.model import Policy
from fumehood.runner import Runner
from fumehood.tiers.subprocess import tier as module


@pytest.fixture(autouse=True)
def there() -> None:
    need_tier("subprocess")


def test_a_work_folder_that_was_renamed_is_removed(private_tmp: Path) -> None:
    private_tmp.chmod(0o1777)
    before = Look.take(private_tmp)
    with Runner(tier="subprocess") as runner:
        moved = (
            "import os\nopen('f', 'w').write('x')\nos.rename(os.getcwd(), os.getcwd() + '-moved')\nprint(os.getcwd())"
        )
        result = runner.run(moved)
        assert result.ok and result.stdout.endswith("-moved\n")
        assert [a.path for a in runner.run(moved, out=private_tmp / "out").artifacts] == ["f"]
        (private_tmp / "out" / "f").unlink()
        (private_tmp / "out").rmdir()
    assert before.left(private_tmp) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user's sandboxes are that user")
@pytest.mark.parametrize("preload", [(), ("greeting",)], ids=["imported", "preloaded"])
def test_packages_where_only_root_may_go_are_shown_read_only(
    private_tmp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preload: tuple[str, ...]
) -> None:
    tmp_path.chmod(0o700)
    packages = tmp_path / "packages"
    packages.mkdir(mode=0o755)
    (packages / "greeting.py").write_text("text = 'hello'")
    (packages / "greeting.py").chmod(0o666)
    monkeypatch.setattr(module, "packages_of", lambda policy: str(packages))
    before = Look.take(private_tmp)
    program = (
        "import greeting, os, subprocess, sys\nprint(greeting.text)\n"
        "try: open(greeting.__file__, 'a')\nexcept OSError as error: print(error.strerror)\n"
        f"print(os.path.exists({str(packages)!r}))\n"
    )
    with Runner(tier="subprocess", policy=Policy(preload=preload)) as runner:
        assert runner.run(program).stdout == "hello\nRead-only file system\nFalse\n"
    assert before.left(private_tmp) == [] and (packages / "greeting.py").read_text() == "text = 'hello'"


@pytest.mark.parametrize("tier", ["jail", "subprocess"])
def test_a_limit_above_this_process_own_is_refused_by_name(tier: str) -> None:
    need_tier(tier)
    program = f"""
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
from fumehood import Limits, Policy, Runner, UnsupportedError
with Runner(tier={tier!r}, policy=Policy(limits=Limits(open_files=301))) as runner:
    try: runner.run("print(1)")
    except UnsupportedError as error: print(error.unmet, "300" in error.message, "ulimit" in error.remedy)
with Runner(tier={tier!r}, policy=Policy(limits=Limits(open_files=300))) as runner:
    print(runner.run("print(1)").stdout)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[:2] == ["('limits.open_files',) True True", "1"], done.stderr


#: A supervisor that is killed when its sandbox, whose program has renamed the work folder and filled it, is at work.
_KILLED = """
import os, signal, sys
sys.path[:0] = {path!r}
from fumehood.model import Policy
from fumehood.runner import Runner
from fumehood.tiers.interpreter.tier import InterpreterTier
tier = InterpreterTier(jailed=False) if {tier!r} == "interpreter" else "subprocess"
program = {program!r}
with Runner(tier=tier) as runner:
    runner.run(program, sink=lambda *_: os.kill(os.getpid(), signal.SIGKILL))
"""


@pytest.mark.parametrize("tier", ["subprocess", "interpreter"])
def test_the_work_folder_of_a_killed_supervisor_is_removed(private_tmp: Path, tier: str) -> None:
    need_tier(tier)
    private_tmp.chmod(0o1777)
    before = Look.take(private_tmp)
    filled = "import os\nos.makedirs('a/b')\nopen('a/b/f', 'w')\nos.rename(os.getcwd(), os.getcwd() + '-2')\n"
    program = (filled if tier == "subprocess" else "") + "print(1, flush=True)\nwhile True: pass"
    code = _KILLED.format(path=[p for p in sys.path if p], tier=tier, program=program)
    killed = subprocess.run([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(private_tmp)}, timeout=120)
    assert killed.returncode == -9
    assert before.left(private_tmp) == []
