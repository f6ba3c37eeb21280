"""A sandbox of gVisor's for one program: no agent is in it, and nothing of its promises is lost by that."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from asked import need

from fumehood import Runner
from fumehood.errors import OutcomeUnknownError, UnsupportedError
from fumehood.linux import process
from fumehood.model import Code, Command, Limits, MiB, Mount, Outcome, Policy
from fumehood.tier import Single
from fumehood.tiers.gvisor import runsc
from fumehood.tiers.gvisor import tier as module
from fumehood.tiers.gvisor.single import GvisorSingle
from fumehood.tiers.gvisor.tier import GvisorTier

POLICY = Policy()

#: What a program can see of its process and its interpreter.
SEEN = """
import builtins, gc, json, os, resource, signal, sys
umask = os.umask(0)
print(json.dumps([
    sorted(os.listdir("/proc/self/fd")), os.getcwd(), umask, dict(os.environ), sys.argv, sys.orig_argv, sys.path,
    sorted(globals()), sorted(vars(builtins)), [type(finder).__name__ for finder in sys.meta_path], gc.isenabled(),
    [str(signal.getsignal(n)) for n in range(1, 32)], sys.stdin.read(), os.listdir("."),
    [[f.name, f.mode, f.encoding, f.errors, f.line_buffering, f.isatty()] for f in (sys.stdin, sys.stdout, sys.stderr)],
    {n: resource.getrlimit(getattr(resource, n)) for n in dir(resource) if n.startswith("RLIMIT") and n[7:] != "NPROC"},
    [name for name in sys.modules if "fumehood" in name], __name__, os.getpgrp() == os.getsid(0) == os.getpid(),
]))
"""


#: What runsc writes where the Sentry was gone when it asked how the container ended.
LATE = (
    b'W1201 x.go:957] Wait RPC to container "x" failed: EOF. Will try waiting on the sandbox process instead.\nI1201 '
)


def lives(steps: Callable[[GvisorTier], Awaitable[Any]]) -> Any:
    """Take steps with a tier from its beginning to its end; what they return."""
    need("gvisor")

    async def main() -> Any:
        tier = GvisorTier()
        try:
            return await steps(tier)
        finally:
            await tier.close()

    return asyncio.run(main())


@pytest.fixture(scope="module")
def gvisor() -> Any:
    """A runner of the tier, shared by the tests here."""
    need("gvisor")
    with Runner(tier="gvisor") as runner:
        yield runner


def test_it_is_the_first_process_and_sees_what_it_sees_beside_an_agent() -> None:
    async def steps(tier: GvisorTier) -> list[str]:
        assert isinstance(tier, Single)
        seen = []
        for make in (tier.create, tier.create_single):
            sandbox = await make(POLICY)
            seen.append((await sandbox.exec(Code(SEEN), last=True)).stdout)
            await sandbox.close()
        sandbox = await tier.create_single(POLICY)
        assert isinstance(sandbox, GvisorSingle)
        assert (await sandbox.exec(Code("import os; print(os.getpid())"), last=True)).stdout == "1\n"
        await sandbox.close()
        return seen

    agent, single = map(json.loads, lives(steps))
    assert single == agent


@pytest.mark.parametrize(
    ("program", "outcome", "exit_code"),
    [
        ("pass", Outcome.EXITED, 0),
        ("import sys; sys.exit(200)", Outcome.EXITED, 200),
        ("import os; os._exit(128 + 9)", Outcome.EXITED, 137),
        ("import os; os.kill(os.getpid(), 9)", Outcome.SIGNALED, -9),
        ("import os; os.abort()", Outcome.SIGNALED, -signal.SIGABRT),
        ("import os; os.execvp('sh', ['sh', '-c', 'exit 130'])", Outcome.EXITED, 130),
        ("import os, time\nif os.fork() == 0: time.sleep(60)\nos._exit(2)", Outcome.EXITED, 2),
    ],
)
def test_its_end_is_told_exactly(gvisor: Runner, program: str, outcome: Outcome, exit_code: int) -> None:
    """runsc's own exit status is 128 and the signal's number."""
    result = gvisor.run(program)
    assert (result.outcome, result.exit_code) == (outcome, exit_code)


def test_a_write_that_one_pipe_holds_is_whole(gvisor: Runner) -> None:
    """gVisor cuts it at what a pipe of the host's has room for; other pipes of this user's may leave it less."""
    for _ in range(5):
        result = gvisor.run("import os; print(os.write(2, bytes(256 << 10)))")
        assert result.stdout == f"{result.usage.stderr_bytes}\n"
        if result.usage.stderr_bytes == 256 << 10:
            return
    pytest.fail(f"only {result.usage.stderr_bytes} bytes were written")


def test_a_flood_is_counted_and_cut(gvisor: Runner) -> None:
    result = gvisor.run("print('x' * (5 << 20))")
    assert result.ok and len(result.stdout) == POLICY.limits.output_bytes
    assert result.usage.stdout_bytes == (5 << 20) + 1


def test_the_memory_limit_ends_it(gvisor: Runner) -> None:
    with Runner(tier="gvisor", policy=Policy(limits=Limits(memory_bytes=96 * MiB))) as runner:
        assert runner.run("x = [bytearray(1 << 20) for _ in range(1000)]").outcome is Outcome.MEMORY


def test_a_sentry_that_dies_is_no_end_of_the_program() -> None:
    async def steps(tier: GvisorTier) -> None:
        sandbox = await tier.create_single(POLICY)
        (enclosure,) = tier._live
        run = asyncio.ensure_future(sandbox.exec(Code("import time; time.sleep(60)"), last=True))
        await asyncio.sleep(0.5)
        (sentry,) = (
            pid
            for pid in process.descendants(enclosure.pid)
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"runsc-sandbox")
        )
        os.kill(sentry, signal.SIGKILL)
        with pytest.raises(OutcomeUnknownError):
            await run
        await sandbox.close()

    lives(steps)


def test_what_only_an_agent_can_do_is_refused_and_costs_nothing() -> None:
    async def steps(tier: GvisorTier) -> None:
        sandbox = await tier.create_single(POLICY)
        for attempt in (
            lambda: sandbox.exec(Command(("true",))),
            lambda: sandbox.exec(Code("pass"), stdin=b"x"),
            lambda: sandbox.write_file("a", b""),
        ):
            with pytest.raises(UnsupportedError):
                await attempt()
        assert (await sandbox.exec(Code("print(1)"), last=True)).stdout == "1\n"
        await sandbox.close()

    lives(steps)


def test_an_interrupt_ends_it() -> None:
    async def steps(tier: GvisorTier) -> None:
        sandbox = await tier.create_single(POLICY)
        run = asyncio.ensure_future(sandbox.exec(Code("import time; print(1, flush=True); time.sleep(60)"), last=True))
        await asyncio.sleep(0.5)
        await sandbox.interrupt()
        result = await run
        assert result.outcome is Outcome.CANCELLED and result.stdout == "1\n"
        await sandbox.close()

    lives(steps)


def test_a_warm_one_has_an_agent_that_answers_before_gvisor_has_ended() -> None:
    async def steps(tier: GvisorTier) -> None:
        sandbox = await tier.create_single(POLICY, warm=True)
        assert not isinstance(sandbox, GvisorSingle)
        await sandbox.close()

    lives(steps)


def test_what_was_made_ahead_for_one_kind_is_not_used_for_the_other() -> None:
    async def steps(tier: GvisorTier) -> None:
        for make in (tier.create_single, tier.create, tier.create_single):
            before = tier._ahead
            sandbox = await make(POLICY)
            assert before is None or before.enclosure not in tier._used
            result = await sandbox.exec(Code("import os; print(os.getppid())"), last=True)
            assert (result.stdout == "0\n") == isinstance(sandbox, GvisorSingle)
            await sandbox.close()
            for _ in range(200):
                if tier._ahead is not None:
                    break
                await asyncio.sleep(0.05)
            assert tier._ahead is not None and tier._ahead.shape.single == isinstance(sandbox, GvisorSingle)

    lives(steps)


def test_a_mounted_folder_is_read_by_a_single_program_too(tmp_path: Path) -> None:
    need("gvisor")
    os.chmod(tmp_path, 0o711)
    (tmp_path / "told").write_text("here")
    with Runner(tier="gvisor", policy=Policy(mounts=(Mount(str(tmp_path), "/mnt/host"),))) as runner:
        assert runner.run("print(open('/mnt/host/told').read())").stdout == "here\n"


def test_an_error_is_shown_as_by_an_agent(gvisor: Runner) -> None:
    program = "def f():\n    return 1 / 0\nf()\n"
    with gvisor.open() as sandbox:
        by_agent = sandbox.exec(Code(program, displays=False))
    alone = gvisor.run(program)
    assert alone.stderr == by_agent.stderr.replace("<agent-1>", "<agent>")
    assert "ZeroDivisionError" in alone.stderr and alone.exit_code == 1


def test_only_the_log_of_the_process_that_no_guest_reaches_is_kept() -> None:
    async def steps(tier: GvisorTier) -> None:
        sandbox = await tier.create_single(POLICY)
        (enclosure,) = tier._live
        run = asyncio.ensure_future(sandbox.exec(Code("import time; time.sleep(0.5)"), last=True))
        await asyncio.sleep(0.3)
        logs = {path.name: path for path in Path(enclosure.folder).glob("log.*")}
        assert logs.keys() == {"log.run", "log.boot", "log.gofer"}
        assert [os.readlink(logs[name]) for name in ("log.boot", "log.gofer")] == ["/dev/null"] * 2
        assert logs["log.run"].stat().st_size < 16 << 10
        assert (await run).ok
        await sandbox.close()

    lives(steps)


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (b"I1201 main.go:266] Exiting with status: 9\n", 9),
        (b"I1201 main.go:216] ***\nI1201 main.go:266] Exiting with status: 51200\n", 51200),
        (LATE + b"Exiting with status: 9\n", None),
        (LATE + b"Exiting with status: 512\n", None),
        (LATE + b"Exiting with status: 35072\n", None),
        (LATE + b"Exiting with status: 256\n", 256),
        (LATE + b"Exiting with status: 0\n", 0),
        (b"I1201 main.go:266] Exiting with status: 0\nsomething after it\n", None),
        (b"W1201 main.go:271] Failure to execute command, err: 1\n", None),
        (b"", None),
    ],
)
def test_a_status_is_what_the_sentry_told_runsc(tmp_path: Path, text: bytes, status: int | None) -> None:
    (tmp_path / "log.run").write_bytes(text)
    assert runsc.ended(str(tmp_path)) == status


def test_without_a_log_there_is_no_status(tmp_path: Path) -> None:
    assert runsc.ended(str(tmp_path)) is None


def test_where_runsc_does_not_tell_how_it_ended_there_is_an_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    need("gvisor")
    monkeypatch.setattr(runsc, "ended", lambda folder: None)
    monkeypatch.setattr(module._Host, "_probes", {})
    monkeypatch.setattr(module._Host, "tells_ends", True)

    async def steps(tier: GvisorTier) -> None:
        sandbox = await tier.create_single(POLICY)
        assert not isinstance(sandbox, GvisorSingle)
        assert (await sandbox.exec(Code("print(1)"), last=True)).stdout == "1\n"
        await sandbox.close()

    assert GvisorTier().probe().available
    lives(steps)


def test_a_probe_starts_the_launcher_of_its_own_tier_and_leaves_nothing() -> None:
    need("gvisor")
    before = process.descendants(os.getpid())
    tier = GvisorTier()
    for _ in range(2):
        assert tier.probe().available
        (launcher,) = set(process.descendants(os.getpid())) - set(before)
        assert b"gvisor/launcher.py" in Path(f"/proc/{launcher}/cmdline").read_bytes()
    del tier
    assert not set(process.descendants(os.getpid())) - set(before)
