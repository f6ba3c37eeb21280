"""Programs under way: standard input as it comes, commands in the background, signals, pseudo-terminals, lifetimes."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable

import pytest
from support.needs import RunnerFactory

from fumehood.errors import ClosedError, PolicyError, StartError, UnsupportedError
from fumehood.model import Code, Command, Limits, Outcome, Policy
from fumehood.runner import AsyncRunner, Runner
from fumehood.tier import Features, FullSandbox

pytestmark = pytest.mark.usefixtures("with_handles")

AsyncRunnerFactory = Callable[..., AsyncRunner]
LONG = Policy(limits=Limits(wall_s=60, cpu_s=60))


@pytest.fixture
def with_handles(features: Features) -> None:
    if not features.background:
        pytest.skip("the tier promises no handles; test_refused.py sees them refused")


@contextlib.asynccontextmanager
async def opened(factory: AsyncRunnerFactory, policy: Policy = LONG) -> AsyncIterator[FullSandbox]:
    async with factory(policy) as runner, runner.open() as sandbox:
        yield sandbox


class Watcher:
    """A sink that lets a test wait until a text was printed."""

    def __init__(self) -> None:
        self.data = b""
        self.changed = asyncio.Event()

    def __call__(self, stream: str, data: bytes) -> None:
        self.data += data
        self.changed.set()

    async def saw(self, text: bytes) -> None:
        while text not in self.data:
            self.changed.clear()
            await self.changed.wait()


@pytest.mark.parametrize(
    "program",
    [
        Code("import sys\nfor line in sys.stdin: print('got', line, end='', flush=True)\nprint('end')"),
        Command(("sh", "-c", 'while read line; do echo "got $line"; done; echo end')),
    ],
    ids=["code", "command"],
)
def test_a_dialogue(async_runner_factory: AsyncRunnerFactory, program: Code | Command) -> None:
    async def main() -> None:
        async with opened(async_runner_factory) as sandbox:
            watcher = Watcher()
            running = await sandbox.start(program, stdin=True, sink=watcher)
            for word in (b"one", b"two"):
                await running.write(word + b"\n")
                await watcher.saw(b"got " + word + b"\n")
                assert not running.done
            assert running.stdout_data == b"got one\ngot two\n"
            with pytest.raises(RuntimeError, match="running"):
                await sandbox.exec(Code("1"))
            await running.close_stdin()
            result = await running.wait()
            assert result.ok and result.stdout == "got one\ngot two\nend\n"
            with pytest.raises(ClosedError):
                await running.write(b"late")
            await running.kill()
            assert (await sandbox.exec(Code("print('next')"))).stdout == "next\n"

    asyncio.run(main())


def test_standard_input_is_bounded(async_runner_factory: AsyncRunnerFactory) -> None:
    async def main() -> None:
        async with opened(async_runner_factory) as sandbox:
            watcher = Watcher()
            running = await sandbox.start(
                Code("import sys\nprint(input(), flush=True)\nprint(len(sys.stdin.read()))"), stdin=True, sink=watcher
            )
            await running.write(b"go\n")
            await watcher.saw(b"go\n")
            writing = asyncio.create_task(running.write(b"x" * 5_000_000))
            await writing
            await running.close_stdin()
            assert (await running.wait()).stdout == "go\n5000000\n"
            unread = await sandbox.start(Code("print('on', flush=True)\nimport time\ntime.sleep(600)"), stdin=True)
            writing = asyncio.create_task(unread.write(b"x" * 5_000_000))
            await asyncio.wait({writing}, timeout=0.3)
            assert not writing.done(), "what nobody reads was taken"
            await unread.kill()
            await unread.wait()
            await writing

    asyncio.run(main())


def test_the_first_byte_comes_while_the_program_sleeps(async_runner_factory: AsyncRunnerFactory) -> None:
    async def main() -> None:
        async with opened(async_runner_factory) as sandbox:
            for program in (
                Code("print('early', flush=True)\nimport time\ntime.sleep(600)"),
                Command(("sh", "-c", "echo early; exec sleep 600")),
            ):
                watcher = Watcher()
                running = await sandbox.start(program, sink=watcher)
                await watcher.saw(b"early\n")
                assert not running.done
                await running.signal(signal.SIGINT)
                result = await running.wait()
                assert result.stdout == "early\n"

    asyncio.run(main())


def test_commands_in_the_background(async_runner_factory: AsyncRunnerFactory) -> None:
    async def main() -> None:
        async with opened(async_runner_factory) as sandbox:
            watcher = Watcher()
            server = await sandbox.start(
                Command(("sh", "-c", "while read l; do echo $l $X; done"), env={"X": "x"}),
                stdin=True,
                sink=watcher,
                background=True,
            )
            sleeper = await sandbox.start(Command(("sleep", "600")), background=True)
            assert (await sandbox.exec(Code("print(1)"))).stdout == "1\n"
            assert (await sandbox.exec(Command(("echo", "2")))).stdout == "2\n"
            await server.write(b"a\n")
            await watcher.saw(b"a x\n")
            assert not server.done and not sleeper.done and server.stdout_data == b"a x\n"
            await sleeper.signal(signal.SIGTERM)
            result = await sleeper.wait()
            assert (result.outcome, result.exit_code) == (Outcome.SIGNALED, -signal.SIGTERM)
            await server.close_stdin()
            assert (await server.wait()).exit_code == 0
            killed = await sandbox.start(Command(("sleep", "600")), background=True)
            await killed.kill()
            assert (await killed.wait()).exit_code == -signal.SIGKILL
            flood = await sandbox.start(Command(("sh", "-c", "yes | head -c 5000000")), background=True)
            result = await flood.wait()
            assert result.truncated and len(result.stdout_data) == LONG.limits.output_bytes
            with pytest.raises(PolicyError):
                await sandbox.start(Code("1"), background=True)
            left = await sandbox.start(Command(("sleep", "600")), background=True)
        assert (await left.wait()).outcome is Outcome.CANCELLED  # close() ends what is left

    asyncio.run(main())


def test_the_background_has_room_for_so_many(async_runner_factory: AsyncRunnerFactory) -> None:
    async def main() -> None:
        async with opened(async_runner_factory) as sandbox:
            running = [await sandbox.start(Command(("sleep", "600")), background=True) for _ in range(33)]
            with pytest.raises(StartError, match="in the background"):
                await running[-1].wait()
            assert not any(r.done for r in running[:-1])
            assert (await sandbox.exec(Command(("echo", "room")))).stdout == "room\n"

    asyncio.run(main())


def test_the_background_counts_towards_the_cpu_limit(async_runner_factory: AsyncRunnerFactory) -> None:
    async def main() -> None:
        policy = Policy(limits=Limits(wall_s=60, cpu_s=1))
        async with opened(async_runner_factory, policy) as sandbox:
            burner = await sandbox.start(Command(("sh", "-c", "while :; do :; done")), background=True)
            result = await burner.wait()
            assert result.outcome is Outcome.CPU
            with pytest.raises(ClosedError):
                await sandbox.exec(Code("1"))

    asyncio.run(main())


def test_environment_folder_and_input_of_a_command(runner_factory: RunnerFactory) -> None:
    runner = runner_factory(Policy(env={"A": "policy", "B": "policy"}))
    with runner.open() as sandbox:
        sandbox.make_folder("sub/deep")
        show = Command(("sh", "-c", "echo $A $B; pwd; cat"), env={"B": "own"}, cwd="sub/deep")
        lines = sandbox.exec(show, stdin=b"in").stdout.splitlines()
        assert lines[0] == "policy own" and lines[1].endswith("/sub/deep") and lines[2] == "in"
        assert sandbox.exec(Command(("pwd",), cwd="/tmp")).stdout == "/tmp\n"
        result = sandbox.exec(Command(("pwd",), cwd="missing"))
        assert result.exit_code == 126 and "missing" in result.stderr


def test_a_pseudo_terminal(runner_factory: RunnerFactory, features: Features) -> None:
    runner = runner_factory(Policy(terminals=True))
    command = Command(
        ("sh", "-c", 'test -t 0 && test -t 1 && test -t 2 && echo tty; stty size; read x; echo "<$x>"'), pty=(30, 90)
    )
    with runner.open() as sandbox:
        if not features.pty:
            with pytest.raises(UnsupportedError) as refused:
                sandbox.exec(command)
            assert refused.value.unmet == ("pty",)
            assert sandbox.exec("print('on')").stdout == "on\n"
            with pytest.raises(UnsupportedError):
                runner.run(command)
            return
        running = sandbox.start(command, stdin=True)
        running.write(b"typed\n")
        result = running.wait()
        # The terminal's echo of what was typed may come at any place.
        assert sorted(result.stdout.split("\r\n")) == sorted(["tty", "30 90", "typed", "<typed>", ""])
        over = Command(("sh", "-c", "cat; echo over"), pty=(24, 80))
        assert sandbox.exec(over, stdin=b"x\n").stdout.endswith("over\r\n")
        running = sandbox.start(
            Command(("sh", "-c", "trap 'stty size; exit' WINCH; echo on; while :; do sleep 0.05; done"), pty=(24, 80)),
            background=True,
        )
        while "on" not in running.stdout:
            assert not running.done
        running.resize(50, 100)
        assert "50 100" in running.wait().stdout
        interrupted = sandbox.start(Command(("cat",), pty=(24, 80)), stdin=True)
        interrupted.write(b"on\n")
        while interrupted.stdout.count("on") < 2:  # the terminal's echo, and then cat's word
            assert not interrupted.done
        interrupted.write(b"\x03")  # the terminal itself sends SIGINT to its foreground group
        assert interrupted.wait().exit_code in (-signal.SIGINT, 130)


def test_a_terminal_that_the_operator_did_not_give(runner: Runner, features: Features) -> None:
    if not features.pty:
        pytest.skip("no terminals in this tier")
    command = Command(("echo", "ran"), pty=(24, 80))
    with runner.open() as sandbox:
        for start in (sandbox.exec, sandbox.start, runner.run):
            with pytest.raises(UnsupportedError, match="terminals = true"):
                start(command)
        assert sandbox.exec(Command(("echo", "on"))).stdout == "on\n"


def test_lifetimes(runner: Runner) -> None:
    with runner.open(idle_s=0.4) as sandbox:
        assert sandbox.exec("import time\ntime.sleep(0.8)\nprint('busy is not idle')").ok
        program = sandbox.start(Command(("sleep", "0.8")), background=True)
        assert program.wait().ok
        with pytest.raises(ClosedError, match="idle time"):
            for _ in range(2000):
                sandbox._portal.call(asyncio.sleep(0.01))
                if sandbox._sandbox._killed:  # type: ignore[attr-defined]
                    sandbox.exec("1")
    with runner.open(lifetime_s=1.5) as sandbox:
        sandbox.exec("open('f', 'w').write('x')")
        result = sandbox.exec("import time\ntime.sleep(600)")
        assert result.outcome is Outcome.WALL
        with pytest.raises(ClosedError, match="lifetime"):
            sandbox.list_files()
    for wrong in ({"idle_s": 0}, {"lifetime_s": -1}, {"lifetime_s": float("nan")}):
        with pytest.raises(PolicyError), runner.open(**wrong):
            pass
