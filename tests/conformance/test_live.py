"""Live sandboxes: state and files last, what loses the state does not lose the sandbox, and closed means closed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from support.needs import RunnerFactory
from support.programs import BURN, STUBBORN

from fumehood.errors import ClosedError, FileError, PolicyError
from fumehood.model import Boundary, Code, Command, Limits, Outcome, Policy
from fumehood.runner import AsyncRunner, Runner
from fumehood.tier import Features, FileInfo

pytestmark = pytest.mark.usefixtures("full_python", "live")


@pytest.fixture
def live(features: Features) -> None:
    if not features.live:
        pytest.skip("the tier promises no live sandbox; test_refusals.py sees it refused")


def test_state_and_files_last(runner: Runner) -> None:
    with runner.open() as sandbox:
        assert sandbox.exec("import math\nx = 41\ndef f(): return x + 1\nopen('f', 'w').write('hi')").ok
        assert sandbox.exec("print(f(), math.pi > 3, open('f').read())").stdout == "42 True hi\n"
        assert sandbox.exec("x = 1\nprint(f())").stdout == "2\n"


def test_an_error_costs_nothing_but_the_rest_of_its_exec(runner: Runner) -> None:
    with runner.open() as sandbox:
        sandbox.exec("x = 5")
        for program, code in (
            ("1/0", 1),
            ("this is not python", 1),
            ("raise SystemExit(3)", 3),
            ("import nothing_", 1),
        ):
            assert sandbox.exec(program).exit_code == code
        assert sandbox.exec("print(x)").stdout == "5\n"


@pytest.mark.parametrize("end", ["os._exit(9)", "os.kill(os.getpid(), 9)", "import ctypes; ctypes.string_at(0)"])
def test_the_death_of_the_interpreter_loses_the_state_but_not_the_sandbox(runner: Runner, end: str) -> None:
    with runner.open() as sandbox:
        sandbox.exec("x = 5\nopen('f', 'w').write('kept')")
        assert not sandbox.exec(f"import os\n{end}").ok
        assert "NameError" in sandbox.exec("print(x)").stderr
        assert sandbox.exec("print(open('f').read())").stdout == "kept\n"


def test_output_and_stdin_belong_to_their_exec(runner: Runner) -> None:
    with runner.open() as sandbox:
        assert sandbox.exec("print(input())", stdin=b"one\ntwo\n").stdout == "one\n"
        assert sandbox.exec("print(input())", stdin=b"three\n").stdout == "three\n"
        assert "EOFError" in sandbox.exec("input()").stderr
        assert sandbox.exec("print('z', end='')").stdout == "z"
        assert sandbox.exec("").stdout == ""


def test_usage_is_of_one_exec(runner_factory: RunnerFactory) -> None:
    with runner_factory(Policy(limits=Limits(wall_s=60, cpu_s=60))).open() as sandbox:
        burnt = sandbox.exec(BURN).usage.cpu_s
        after = sandbox.exec("pass").usage.cpu_s
        assert burnt is None or after is None or (burnt >= 0.45 and after < 0.75 * burnt)  # and not the sum


def test_the_output_budget_is_per_exec(runner_factory: RunnerFactory) -> None:
    with runner_factory(Policy(limits=Limits(output_bytes=1000))).open() as sandbox:
        for _ in range(3):
            result = sandbox.exec("print('x' * 5000)")
            assert len(result.stdout_data) == 1000 and result.usage.stdout_bytes == 5001 and result.truncated


@pytest.mark.parametrize(
    "program", ["while True: pass", "import time\ntime.sleep(600)", STUBBORN], ids=["loop", "sleep", "stubborn"]
)
def test_the_deadline_ends_the_exec(runner_factory: RunnerFactory, features: Features, program: str) -> None:
    """The program is interrupted, then killed, at last with its sandbox: what is left of that works or is closed."""
    wall_s = 5 if features.boundary is Boundary.EMULATED else 0.7  # there the first exec takes 0.4 s of the processor
    limits = Limits(wall_s=wall_s, cpu_s=60) if "cpu_s" in features.limits else Limits(wall_s=wall_s)
    with runner_factory(Policy(limits=limits)).open() as sandbox:
        assert sandbox.exec("x = 1\nopen('f', 'w').write('kept')").ok
        result = sandbox.exec(program)
        assert (result.outcome, result.exit_code) == (Outcome.WALL, None)
        try:
            assert sandbox.exec("print(open('f').read())").stdout == "kept\n"
        except ClosedError:
            assert program == STUBBORN


def test_files_of_the_host(runner: Runner) -> None:
    with runner.open() as sandbox:
        sandbox.write_file("d/e/f.bin", b"\0\1" * 1_000_000)
        sandbox.write_file("g", b"")
        assert sandbox.exec("import os\nprint(os.path.getsize('d/e/f.bin'))").stdout == "2000000\n"
        assert sandbox.read_file("d/e/f.bin") == b"\0\1" * 1_000_000
        assert sandbox.list_files() == (
            FileInfo("d", "folder", sandbox.list_files()[0].size_bytes),
            FileInfo("d/e", "folder", sandbox.list_files()[1].size_bytes),
            FileInfo("d/e/f.bin", "file", 2_000_000),
            FileInfo("g", "file", 0),
        )
        sandbox.remove("d")
        assert [f.path for f in sandbox.list_files()] == ["g"]
        with pytest.raises(FileError):
            sandbox.read_file("d/e/f.bin")
        with pytest.raises(FileError, match="larger"):
            sandbox.write_file("h", b"12345")
            sandbox.read_file("h", max_bytes=4)
        assert sandbox.read_file("h", max_bytes=5) == b"12345"
        for path in ("/etc/passwd", "../x", ""):
            with pytest.raises(PolicyError):
                sandbox.read_file(path)


def test_files_of_the_host_follow_no_link_and_block_on_nothing(runner: Runner) -> None:
    with runner.open() as sandbox:
        sandbox.exec(
            "import os\nos.symlink('/etc', 'd')\nos.symlink('/etc/passwd', 'l')\nos.mkfifo('p')\nos.mkdir('q')"
        )
        for path in ("d/passwd", "l", "p", "q"):
            with pytest.raises(FileError):
                sandbox.read_file(path)
        for path in ("d/x", "q"):
            with pytest.raises(FileError):
                sandbox.write_file(path, b"x")
        for path in ("l", "p"):  # a file takes the place of what had its name
            sandbox.write_file(path, b"x")
        kinds = {f.path: f.kind for f in sandbox.list_files()}
        assert kinds == {"d": "other", "l": "file", "p": "file", "q": "folder"}
        for path in kinds:
            sandbox.remove(path)
        assert sandbox.list_files() == () and sandbox.exec("print(len(open('/etc/passwd').read()) > 1)").ok


def test_a_file_that_does_not_fit_is_an_error_and_the_sandbox_lives(runner_factory: RunnerFactory) -> None:
    with runner_factory(Policy(limits=Limits(disk_bytes=1 << 20))).open() as sandbox:
        with pytest.raises(FileError):
            sandbox.write_file("big", b"x" * (4 << 20))
        assert sandbox.exec("print(1)").stdout == "1\n"


def test_closed_means_closed(runner: Runner, tmp_path: Path) -> None:
    with runner.open() as sandbox:
        sandbox.exec("open('f', 'w').write('x')")
        assert [a.path for a in sandbox.close(out=tmp_path)] == ["f"]
        assert [a.path for a in sandbox.close()] == ["f"]  # idempotent: the same answer
        for call in (
            lambda: sandbox.exec("print(1)"),
            lambda: sandbox.write_file("f", b""),
            lambda: sandbox.read_file("f"),
            sandbox.list_files,
            lambda: sandbox.remove("f"),
        ):
            with pytest.raises(ClosedError):
                call()
        sandbox.interrupt()


def test_background_threads_and_children_do_not_outlive_the_sandbox(runner: Runner) -> None:
    with runner.open() as sandbox:
        result = sandbox.exec(
            "import subprocess, threading, time\n"
            "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
            "p = subprocess.Popen(['sleep', '600'])\nprint('on')"
        )
        assert result.stdout == "on\n"
        assert sandbox.exec("print(p.poll(), threading.active_count())").stdout == "None 2\n"


def test_a_second_exec_at_the_same_time_is_refused(async_runner_factory: Callable[..., AsyncRunner]) -> None:
    async def main() -> None:
        async with async_runner_factory() as runner, runner.open() as sandbox:
            first = asyncio.create_task(sandbox.exec(Code("import time\ntime.sleep(1)\nprint('first')")))
            await asyncio.sleep(0.2)
            with pytest.raises(RuntimeError, match="running"):
                await sandbox.exec(Code("print(2)"))
            assert (await first).stdout == "first\n"
            assert (await sandbox.exec(Code("print(3)"))).stdout == "3\n"

    asyncio.run(main())


def test_interrupt_ends_the_exec_and_nothing_else(async_runner_factory: Callable[..., AsyncRunner]) -> None:
    async def main() -> None:
        async with async_runner_factory() as runner, runner.open() as sandbox:
            await sandbox.interrupt()  # nothing runs: nothing happens
            await sandbox.exec(Code("x = 7"))
            seen = asyncio.Event()
            running = asyncio.create_task(
                sandbox.exec(Code("print('on', flush=True)\nwhile True: pass"), sink=lambda *_: seen.set())
            )
            await seen.wait()
            await sandbox.interrupt()
            result = await running
            assert result.outcome is Outcome.CANCELLED and "KeyboardInterrupt" in result.stderr
            assert (await sandbox.exec(Code("print(x)"))).stdout == "7\n"

    asyncio.run(main())


class TestCommands:
    @pytest.fixture(autouse=True)
    def commands(self, features: Features) -> None:
        if not features.commands:
            pytest.skip("the tier promises no commands; test_refusals.py sees them refused")

    def test_commands_share_the_files_of_the_sandbox(self, runner: Runner) -> None:
        with runner.open() as sandbox:
            sandbox.exec("open('f', 'w').write('x y')")
            assert sandbox.exec(Command(("cat", "f"))).stdout == "x y"
            assert sandbox.exec(Command(("sh", "-c", "echo out; echo err >&2; exit 3"))).exit_code == 3
            assert sandbox.exec(Command(("cat",)), stdin=b"given").stdout == "given"

    def test_exit_codes(self, runner: Runner) -> None:
        assert runner.run(Command(("true",))).exit_code == 0
        assert runner.run(Command(("no-such-program",))).exit_code == 127
        assert runner.run(Command(("/etc/passwd",))).exit_code == 126
        assert runner.run(Command(("sh", "-c", "kill -9 $$"))).exit_code == -9
        assert runner.run(Command(("printf", "%s", "a b\n☃"))).stdout == "a b\n☃"

    def test_a_command_has_the_environment_and_the_deadline(self, runner_factory: RunnerFactory) -> None:
        assert "A=1" in runner_factory(Policy(env={"A": "1"})).run(Command(("env",))).stdout.split()
        short = runner_factory(Policy(limits=Limits(wall_s=0.5)))
        assert short.run(Command(("sleep", "600"))).outcome is Outcome.WALL
