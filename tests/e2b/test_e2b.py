"""The e2b tier: the vendor's SDK against the endpoint of this package, which runs the programs for real in the jail."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from support.human_eval import problems, program
from support.needs import need_tier

from fumehood import errors as ours
from fumehood.model import Boundary, Code, Command, Held, Limits, MiB, Outcome, Policy
from fumehood.runner import AsyncRunner, Runner
from fumehood.tiers.e2b.tier import E2BTier

e2b = pytest.importorskip("e2b", reason="pip install 'fumehood[e2b]'")
pytest.importorskip("e2b_code_interpreter", reason="pip install 'fumehood[e2b]'")

from e2b_code_interpreter import Sandbox as RemoteSandbox  # noqa: E402

from fumehood.tiers.e2b import errors  # noqa: E402
from fumehood.tiers.e2b.sandbox import _heeding  # noqa: E402

KEY = "e2b_a-key-that-nobody-may-see"


class Endpoint:
    """The server as a process, and how to reach it."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "fumehood.e2b_server", "--tier", "jail"],
            env={**os.environ, "FUMEHOOD_E2B_KEY": KEY},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        assert self.url.startswith("http://127.0.0.1:"), "the endpoint did not start"

    def tier(self, **changes: Any) -> E2BTier:
        options = {"api_key": KEY, "api_url": self.url, "sandbox_url": self.url, "http_version": "1.1", **changes}
        return E2BTier(**options)

    def living(self) -> set[str]:
        """Names of the sandboxes that the service has."""
        pages = RemoteSandbox.list(api_key=KEY, api_url=self.url, http_version="1.1")
        return {item.sandbox_id for item in pages.next_items()}

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(20)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    need_tier("jail")
    made = Endpoint()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def runner(endpoint: Endpoint) -> Iterator[Runner]:
    policy = Policy(limits=Limits(wall_s=60), env={"GREETING": "hello"})
    with Runner(tier=endpoint.tier(), policy=policy) as made:
        yield made


def test_a_program_runs_and_the_receipt_marks_the_claim(runner: Runner) -> None:
    result = runner.run("import os\nprint(os.environ['GREETING'], os.path.basename(os.getcwd()), __name__)")
    assert (result.outcome, result.exit_code, result.stdout) == (Outcome.EXITED, 0, "hello work __main__\n")
    receipt = result.receipt
    assert (receipt.tier, receipt.boundary, receipt.claimed) == ("e2b", Boundary.HARDWARE, True)
    claimed = receipt.control("microvm")
    assert claimed is not None and claimed.held is Held.BEST_EFFORT
    assert any("provider's claim" in note for note in receipt.notes)


def test_it_ends_as_a_program_does(runner: Runner) -> None:
    assert runner.run("import sys\nsys.exit(7)").exit_code == 7
    assert runner.run("import sys\nprint(sys.stdin.read())", stdin=b"given").stdout == "given\n"
    raised = runner.run("1 / 0")
    assert raised.exit_code == 1 and raised.stderr.endswith("ZeroDivisionError: division by zero\n")
    killed = runner.run("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)")
    assert (killed.outcome, killed.exit_code) == (Outcome.SIGNALED, -11)
    assert runner.run("x = = 1").exit_code == 1


def test_commands(runner: Runner) -> None:
    assert runner.run(Command(("sh", "-c", 'echo "$0 $1"', "a b", "$HOME"))).stdout == "a b $HOME\n"
    assert runner.run(Command(("sh", "-c", "echo $X; pwd"), env={"X": "1"}, cwd="/")).stdout == "1\n/\n"
    assert runner.run(Command(("no-such-program",))).exit_code == 127


def test_files_in_and_artifacts_out(runner: Runner, tmp_path: Path) -> None:
    program = "import os\nopen('out', 'w').write(open('in/a').read() * 2)\nos.symlink('/etc/passwd', 'link')"
    result = runner.run(program, files={"in/a": b"ab", "untouched": b""}, out=tmp_path)
    assert result.ok, result.stderr
    assert {a.path: a.skipped is None for a in result.artifacts} == {"link": False, "out": True}
    assert (tmp_path / "out").read_bytes() == b"abab" and not (tmp_path / "untouched").exists()


def test_a_live_sandbox_keeps_state_and_shows_displays(runner: Runner) -> None:
    with runner.open() as sandbox:
        sandbox.write_file("a", b"1")
        assert sandbox.exec("x = int(open('a').read())\nprint(x)").stdout == "1\n"
        value = sandbox.exec("x + 1")
        assert [d.data.get("text/plain") for d in value.displays] == [b"2"]
        assert sandbox.exec(Code("x + 1", displays=False)).displays == ()
        raised = sandbox.exec("def f():\n    return 1 / 0\nf()")
        assert raised.exit_code == 1 and "ZeroDivisionError: division by zero" in raised.stderr
        assert sandbox.exec("import sys\nsys.exit(3)").exit_code == 3
        assert [f.path for f in sandbox.list_files()] == ["a"]
        assert sandbox.read_file("a") == b"1"
        with pytest.raises(ours.FileError):
            sandbox.read_file("missing")
        sandbox.remove("a")
        assert sandbox.list_files() == ()
        with pytest.raises(ours.PolicyError):
            sandbox.exec("input()", stdin=b"x")


def test_interrupt(runner: Runner) -> None:
    with runner.open() as sandbox:
        sandbox.exec("kept = 1")
        timer = threading.Timer(1.0, sandbox.interrupt)
        timer.start()
        result = sandbox.exec("import time\nwhile True: time.sleep(0.01)")
        timer.join()
        assert result.outcome is Outcome.CANCELLED
        assert sandbox.exec("print(kept)").stdout == "1\n"


@pytest.mark.parametrize("text", ["while True: pass", "import time\ntime.sleep(100)", "while True: print('x' * 1000)"])
def test_the_deadline(endpoint: Endpoint, text: str) -> None:
    with Runner(tier=endpoint.tier(), policy=Policy(limits=Limits(wall_s=2))) as short:
        before = endpoint.living()
        result = short.run(text)
        assert (result.outcome, result.exit_code) == (Outcome.WALL, None)
        assert 2 <= result.seconds <= 2.5 and len(result.stdout_data) <= Limits().output_bytes
        assert endpoint.living() <= before


def test_output_is_bounded(endpoint: Endpoint, runner: Runner) -> None:
    result = runner.run("for i in range(40): print('x' * 100000)")
    assert result.ok and result.truncated and len(result.stdout_data) == runner.policy.limits.output_bytes
    assert result.usage.stdout_bytes == 40 * 100001
    stopping = Policy(limits=Limits(wall_s=60), overflow="stop")
    with Runner(tier=endpoint.tier(), policy=stopping) as strict, strict.open() as sandbox:
        assert sandbox.exec("while True: print('x' * 1000)").outcome is Outcome.OUTPUT
        with pytest.raises(ours.ClosedError):
            sandbox.exec("1")


def test_a_cell_that_floods_is_ended_even_if_the_policy_truncates(runner: Runner) -> None:
    with runner.open() as sandbox:
        assert sandbox.exec("while True: print('x' * 10000)").outcome is Outcome.OUTPUT


def test_every_path_destroys_the_sandbox(endpoint: Endpoint) -> None:
    async def main() -> None:
        async with AsyncRunner(tier=endpoint.tier(), policy=Policy(limits=Limits(wall_s=60))) as runner:
            for delay in (0.0, 0.02, 0.1, 0.5):  # while it is being made, and while the program runs
                task = asyncio.create_task(runner.run("while True: pass"))
                await asyncio.sleep(delay)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task

            def failing(stream: str, data: bytes) -> None:
                raise RuntimeError("the sink failed")

            with pytest.raises(RuntimeError, match="the sink failed"):
                await runner.run("print(1, flush=True)\nwhile True: pass", sink=failing)
            deadline = time.monotonic() + 20
            while left := await asyncio.to_thread(endpoint.living):
                assert time.monotonic() < deadline, left
                await asyncio.sleep(0.1)

    before = endpoint.living()
    assert before == set()
    asyncio.run(main())


def test_a_cancellation_that_the_sdk_loses_is_heeded() -> None:
    async def losing(answer: int | Exception) -> int:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            if isinstance(answer, Exception):
                raise answer from None
        return 1

    async def main() -> None:
        for answer in (1, e2b.SandboxException("cancelled")):
            task = asyncio.create_task(_heeding(losing(answer)))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())


def test_connections_are_used_again(endpoint: Endpoint) -> None:
    """The SDK keeps them for the process: after many runs there are no more than after a few."""
    port = f":{urlsplit(endpoint.url).port:04X}"

    def connections() -> int:
        rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
        ours = {os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()}
        return sum(1 for row in rows if row[2].endswith(port) and f"socket:[{row[9]}]" in ours)

    with Runner(tier=endpoint.tier()) as runner:
        for _ in range(3):
            runner.run("print(1)")
        few = connections()
        for _ in range(12):
            runner.run("print(1)")
        assert connections() <= few + 2


def test_a_live_sandbox_ends_by_itself(endpoint: Endpoint) -> None:
    with Runner(tier=endpoint.tier(), policy=Policy(limits=Limits(wall_s=60))) as runner:
        with runner.open(lifetime_s=1.5) as sandbox:
            assert sandbox.exec("while True: pass").outcome is Outcome.WALL
            with pytest.raises(ours.ClosedError, match="lifetime"):
                sandbox.exec("1")
        with runner.open(idle_s=1.0) as sandbox:
            assert sandbox.exec("import time\ntime.sleep(1.5)\nprint(1)").stdout == "1\n"  # an exec is no idleness
            deadline = time.monotonic() + 20
            while endpoint.living():
                assert time.monotonic() < deadline
                time.sleep(0.1)
            with pytest.raises(ours.ClosedError, match="idle"):
                sandbox.write_file("f", b"")


def test_after_a_crash_of_ours_the_service_ends_the_sandbox(endpoint: Endpoint) -> None:
    """The sandbox is made with a life of its own, which nothing of ours need end."""
    remote = RemoteSandbox.create(
        api_key=KEY, api_url=endpoint.url, sandbox_url=endpoint.url, http_version="1.1", timeout=1
    )
    deadline = time.monotonic() + 20
    while remote.sandbox_id in endpoint.living():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    with pytest.raises(e2b.SandboxNotRunningException):
        remote.commands.run("true")


def test_what_the_service_cannot_hold_is_refused(endpoint: Endpoint) -> None:
    tier = endpoint.tier()
    for policy, part in (
        (Policy(limits=Limits(memory_bytes=64 * MiB)), "limits.memory_bytes"),
        (Policy(limits=Limits(pids=3)), "limits.pids"),
        (Policy(hard=("memory",)), "a hard limit on memory"),
        (Policy(egress=("example.org",)), "egress by an allow-list"),
        (Policy(environment="x"), "environment"),
    ):
        with pytest.raises(ours.UnsupportedError) as caught:
            Runner(tier=tier, policy=policy)
        assert part in caught.value.unmet
    with Runner(tier=tier) as runner, pytest.raises(ours.UnsupportedError, match="pty"):
        runner.run(Command(("true",), pty=(24, 80)))


def test_the_key_is_never_shown_and_never_sent_in(
    endpoint: Endpoint, runner: Runner, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    result = runner.run("import os\nprint(dict(os.environ))\nimport subprocess\nprint(subprocess.getoutput('env'))")
    assert KEY not in result.stdout + str(result.to_dict()) + repr(runner.tier)
    with (
        pytest.raises(ours.PolicyError) as caught,
        Runner(tier=endpoint.tier(), policy=Policy(env={"K": f"Bearer {KEY}"})) as leaking,
    ):
        leaking.run("1")
    assert KEY not in str(caught.value)
    with pytest.raises(ours.UnavailableError) as wrong, Runner(tier=endpoint.tier(api_key=KEY + "x")) as refused:
        refused.run("1")
    assert KEY not in str(wrong.value) and "E2B_API_KEY" in (wrong.value.remedy or "")
    assert KEY not in caplog.text
    assert KEY not in str(errors.translate(e2b.SandboxException(f"bad {KEY}"), "exec", secret=KEY))


def test_a_service_that_is_not_there(endpoint: Endpoint) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(ours.StartError), Runner(tier=endpoint.tier(api_url=url, sandbox_url=url)) as runner:
        runner.run("1")


def test_the_sandbox_dies_under_a_program(endpoint: Endpoint, runner: Runner) -> None:
    def kill() -> None:
        for ident in endpoint.living():
            RemoteSandbox.kill(ident, api_key=KEY, api_url=endpoint.url, http_version="1.1")

    timer = threading.Timer(1.5, kill)
    timer.start()
    with pytest.raises(ours.OutcomeUnknownError):
        runner.run("while True: pass")
    timer.join()


class TestErrors:
    """Every exception of the SDK is one of ours, by what was under way."""

    @pytest.mark.parametrize("kind", sorted(errors.exported(), key=lambda kind: kind.__name__))
    def test_every_exported_exception_is_mapped_by_itself(self, kind: type[BaseException]) -> None:
        assert kind in errors.KINDS, f"{kind.__name__} has no entry of its own"

    @pytest.mark.parametrize("kind", sorted(errors.KINDS, key=lambda kind: kind.__name__))
    def test_each_becomes_one_of_ours_in_every_phase(self, kind: type[BaseException]) -> None:
        if kind is e2b.CommandExitException:
            error: BaseException = e2b.CommandExitException(stdout="", stderr="", exit_code=1, error=None)
        else:
            error = kind.__new__(kind)
            error.args = ("words of the service",)
        create, running, file = (errors.translate(error, phase) for phase in ("create", "exec", "file"))
        assert isinstance(create, (ours.StartError, ours.UnavailableError))
        assert isinstance(running, (ours.StartError, ours.OutcomeUnknownError))
        assert isinstance(file, (ours.FileError, ours.ClosedError))
        assert {create.tier, running.tier, file.tier} == {"e2b"}

    def test_an_error_that_nobody_knows_is_not_taken_for_success(self) -> None:
        class Novel(e2b.SandboxException):
            pass

        assert isinstance(errors.translate(Novel("x"), "exec"), ours.OutcomeUnknownError)
        assert isinstance(errors.translate(RuntimeError("x"), "exec"), ours.OutcomeUnknownError)


def test_without_key_or_package_the_probe_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    from fumehood.tiers.e2b import tier as module

    monkeypatch.delenv("E2B_API_KEY", raising=False)
    probe = E2BTier().probe()
    assert not probe.available and "E2B_API_KEY" in probe.remedy
    monkeypatch.setattr(module, "installed", lambda package: package != "e2b")
    assert E2BTier(api_key="x").probe().remedy == "pip install 'fumehood[e2b]'"


def test_it_is_never_chosen_by_a_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("E2B_API_KEY", KEY)
    try:
        with Runner(floor="hardware") as runner:
            assert runner.tier.name != "e2b"
    except ours.UnavailableError as error:
        assert "e2b" in str(error)


def test_human_eval_all_164_pass(endpoint: Endpoint) -> None:
    failed: dict[str, str] = {}

    async def main() -> None:
        slots = asyncio.Semaphore(2)
        async with AsyncRunner(tier=endpoint.tier(), policy=Policy(limits=Limits(wall_s=120))) as runner:

            async def one(problem: dict[str, Any]) -> None:
                async with slots:
                    result = await runner.run(program(problem))
                if not result.ok or result.stdout != "passed\n":
                    failed[problem["task_id"]] = f"{result.outcome.value} {result.exit_code}: {result.stderr[-300:]}"

            await asyncio.gather(*(one(problem) for problem in problems()))

    asyncio.run(main())
    assert not failed, failed
