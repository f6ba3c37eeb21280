"""What a sandbox for a single program promises: the program's true end and output, and a host that it cannot hold up.

Most tests run as root and as an ordinary user alike; :mod:`test_jail_posture` looks at the sandbox from outside.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from support import posture
from support.needs import need_tier
from support.residue import settled

from fumehood.errors import ClosedError, OutcomeUnknownError, StartError, UnsupportedError
from fumehood.linux import process
from fumehood.linux.cgroup import Cgroup
from fumehood.model import Code, Command, Limits, MiB, Outcome, Policy, Result
from fumehood.runner import AsyncRunner, Runner
from fumehood.tiers.jail import client, runtime, single
from fumehood.tiers.jail.client import Zygote
from fumehood.tiers.jail.tier import JailTier, _found

POLICY = Policy(limits=Limits(wall_s=20, memory_bytes=128 * MiB, pids=40, output_bytes=4 * MiB))

MODES = pytest.mark.parametrize("cgroups", [True, False], ids=["cgroups", "no-cgroups"])


@asynccontextmanager
async def a_single(policy: Policy = POLICY, *, cgroups: bool = True) -> AsyncIterator[single.SingleSandbox]:
    """A sandbox for one program; when it is closed nothing of it is left."""
    need_tier("jail")
    tier = JailTier(cgroups=cgroups)
    sandbox = await tier.create_single(policy)
    assert isinstance(sandbox, single.SingleSandbox)
    before = len(os.listdir("/proc/self/fd"))
    try:
        yield sandbox
        await sandbox.close()
        await settled(tier)
        assert len(os.listdir("/proc/self/fd")) < before
        assert tier._live == 0
        assert not next(iter(tier._zygotes.values())).lost
    finally:
        await tier.close()


def run(code: str | bytes, *, policy: Policy = POLICY, cgroups: bool = True) -> Result:
    """One program in a sandbox of its own."""

    async def main() -> Result:
        async with a_single(policy, cgroups=cgroups) as sandbox:
            return await asyncio.wait_for(sandbox.exec(Code(code), last=True), policy.limits.wall_s + 5)

    return asyncio.run(main())


# --- its end

RAW_EXIT = "import ctypes, os, threading, time\nlibc = ctypes.CDLL(None)\n"
RAW_EXIT += "number = {'x86_64': (60, 231), 'aarch64': (93, 94)}[os.uname().machine]\n"

ENDS: dict[str, tuple[str, int]] = {
    "exit": ("import sys; sys.exit(7)", 7),
    "more than eight bits": ("import sys; sys.exit(256 + 7)", 7),
    "our own code for a lost sandbox": ("import os; os._exit(70)", 70),
    "signal": ("import os; os.kill(os.getpid(), 9)", -9),
    "crash": ("import ctypes; ctypes.string_at(0)", -11),
    "its process group": ("import os; os.killpg(0, 15)", -15),
    "a thread's exit_group": (
        RAW_EXIT + "threading.Thread(target=lambda: libc.syscall(number[1], 6)).start()\ntime.sleep(60)",
        6,
    ),
    "a thread after the main thread": (
        RAW_EXIT
        + "threading.Thread(target=lambda: (time.sleep(0.1), os._exit(8))).start()\nlibc.syscall(number[0], 6)",
        8,
    ),
    "stopped and continued": (
        "import os, time\nme = os.getpid()\nif os.fork() == 0:\n    time.sleep(0.1)\n    os.kill(me, 18)\n"
        "    os._exit(0)\n"
        "os.kill(me, 19)\nos._exit(4)",
        4,
    ),
    "without descriptors": ("import os\nfor fd in range(3): os.close(fd)\nos._exit(5)", 5),
}


@pytest.mark.parametrize("end", ENDS)
def test_the_end_is_the_main_process_own(end: str) -> None:
    code, status = ENDS[end]
    result = run(code)
    assert (result.outcome, result.exit_code) == (Outcome.EXITED if status >= 0 else Outcome.SIGNALED, status)


# --- its end, told before its process is dead (docs/decisions/0013)

MARK = "import os, signal, threading, time\ndef mark(status=3):\n    os.fchmod(2, 0o1000 | status)\n    os.close(2)\n"


@dataclass
class Told:
    """What a run's result was, and whether it was told before its process was dead."""

    result: Result
    early: bool
    seconds: float


def tell(code: str, *, policy: Policy = POLICY) -> Told:
    """One program, whose processes are watched: when it is told none of them runs, and soon none is there."""
    need_group()

    async def main() -> Told:
        async with a_single(policy) as sandbox:
            around = sandbox._around
            pid = around._program
            started = time.monotonic()
            result = await asyncio.wait_for(sandbox.exec(Code(code), last=True), policy.limits.wall_s + 5)
            seconds = time.monotonic() - started
            assert dies(pid)
            assert around.over or around.doomed
            assert around._group is not None and around._group.tasks() in (0, 1)
            return Told(result, around.doomed, seconds)

    return asyncio.run(main())


def dies(pid: int) -> bool:
    """Whether a process is dead, or has a signal that it cannot refuse."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii") as file:
            fields = {name: value.strip() for name, _, value in (line.partition(":") for line in file)}
    except (FileNotFoundError, ProcessLookupError):
        return True
    killed = (int(fields["ShdPnd"], 16) | int(fields["SigPnd"], 16)) & 1 << 8
    return bool(killed) or fields["State"][0] in "ZX" or "VmSize" not in fields


def need_group() -> None:
    """Skip where no cgroup of this user's counts tasks: the end is waited for there, as the tests above have it."""
    if "pids" not in _found().hard:
        pytest.skip("no cgroup here counts tasks")


#: Programs that end by themselves, and their exit codes.
ORDINARY = {
    "pass": ("pass", 0),
    "a number": ("raise SystemExit(77)", 77),
    "an error": ("1 / 0", 1),
    "output": ("print('x' * 1_000_000)\nimport sys\nprint('y' * 300_000, file=sys.stderr)", 0),
    "at exit": ("import atexit\natexit.register(print, 'last')\nprint('first')", 0),
    "a thread that is over": ("import threading\nt = threading.Thread(target=print)\nt.start()\nt.join()", 0),
    "a child that was waited for": ("import os\nos.fork() or os._exit(0)\nos.wait()", 0),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_a_program_that_ends_by_itself_is_told_as_it_ended(name: str) -> None:
    code, status = ORDINARY[name]
    told = tell(code)
    assert (told.result.outcome, told.result.exit_code) == (Outcome.EXITED, status)
    usage = told.result.usage
    assert usage.cpu_s is not None and usage.cpu_s > 0 and usage.memory_peak_bytes
    if name == "output":
        assert told.result.stdout == "x" * 1_000_000 + "\n" and told.result.stderr == "y" * 300_000 + "\n"
    elif name == "at exit":
        assert told.result.stdout == "first\nlast\n"


def test_most_ends_are_told_before_the_process_is_dead() -> None:
    """Unless the host comes to look so late that it is dead by then."""
    assert sum(tell("pass").early for _ in range(20)) >= 5


def test_whoever_says_that_it_ends_has_ended() -> None:
    """A program that does what ours does at its end, and goes on, is killed; it says no more."""
    told = tell(MARK + "os.write(1, b'before')\nmark()\nwhile True:\n    os.write(1, b'.')")
    assert (told.result.outcome, told.result.exit_code) == (Outcome.EXITED, 3)
    assert told.result.stdout.rstrip(".") == "before" and told.seconds < POLICY.limits.wall_s / 2


def test_whoever_says_that_it_ends_while_it_forks_without_end_leaves_nobody() -> None:
    policy = replace(POLICY, limits=replace(POLICY.limits, wall_s=3))
    code = MARK + "mark()\nwhile True:\n    try:\n        pid = os.fork()\n    except OSError:\n        continue\n"
    code += "    if pid:\n        os._exit(0)"
    for _ in range(10):
        told = tell(code, policy=policy)
        assert told.result.outcome in (Outcome.EXITED, Outcome.SIGNALED, Outcome.WALL)


#: What keeps a sandbox alive beside the process that says that it ends.
BESIDE = {
    "a child": "if os.fork() == 0:\n    time.sleep(60)\n",
    "a dead child": "if os.fork() == 0:\n    os._exit(0)\ntime.sleep(0.1)\n",
    "a grandchild in a session of its own": (
        "if os.fork() == 0:\n    os.setsid()\n    os.fork() and os._exit(0)\n    time.sleep(60)\nos.wait()\n"
    ),
    "a thread": "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n",
}


@pytest.mark.parametrize("beside", BESIDE)
def test_while_anything_else_is_left_the_true_end_is_waited_for(beside: str) -> None:
    code = MARK + BESIDE[beside].replace("fork() == 0:\n", "fork() == 0:\n    os.close(2)\n", 1)
    told = tell(code + "mark(9)\ntime.sleep(0.3)\nos._exit(5)")
    assert not told.early and told.seconds >= 0.3
    assert (told.result.outcome, told.result.exit_code) == (Outcome.EXITED, 5)


def test_an_honest_end_is_not_our_kill_whatever_holds_the_host_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that says that it ends is killed; until the host looks again the zygote may have waited for it."""
    kill = process.kill_pidfd

    def slow(fd: int, sig: int = 9) -> bool:
        done = kill(fd, sig)
        if sig == signal.SIGKILL:
            time.sleep(0.01)
        return done

    monkeypatch.setattr(process, "kill_pidfd", slow)
    for _ in range(30):
        told = tell("raise SystemExit(7)")
        assert (told.result.outcome, told.result.exit_code) == (Outcome.EXITED, 7)


#: What a program may do to what its own end needs.
SPOILT = {
    "taken away": "import os\nfor name in 'fstat fchmod close getpid _exit'.split(): delattr(os, name)\n",
    "doubles": "import os\nfor name in 'fstat fchmod close getpid _exit'.split(): setattr(os, name, lambda *a: None)\n",
}


@pytest.mark.parametrize("what", SPOILT)
def test_what_a_program_has_spoilt_does_not_change_its_exit_status(what: str) -> None:
    assert run(SPOILT[what] + "raise SystemExit(3)").exit_code == 3


def test_output_to_a_stream_that_was_replaced_is_not_lost() -> None:
    assert run("import io, sys\nprint('a')\nsys.stdout = io.StringIO()\nprint('b')").stdout == "a\n"


def test_a_limit_that_kills_is_not_hidden_by_a_word_said_before() -> None:
    told = tell(MARK + "os.fchmod(2, 0o1000)\nb = []\nwhile True: b.append(bytearray(4 << 20))")
    assert told.result.outcome is Outcome.MEMORY and not told.early


def test_a_program_without_stderr_ends_as_it_does() -> None:
    told = tell(MARK + "os.close(2)\ntime.sleep(0.3)\nraise SystemExit(5)")
    assert not told.early and told.seconds >= 0.3 and told.result.exit_code == 5
    told = tell(MARK + "os.fchmod(2, 0o777)\nos.close(2)\ntime.sleep(0.3)\nos._exit(6)")
    assert not told.early and told.seconds >= 0.3 and told.result.exit_code == 6


def test_stderr_that_another_holds_does_not_tell() -> None:
    told = tell(MARK + "if os.fork() == 0:\n    time.sleep(60)\nraise SystemExit(5)")
    assert not told.early and told.result.exit_code == 5
    told = tell(MARK + "os.dup(2)\nmark()\ntime.sleep(0.3)\nos._exit(6)")  # then it has said two things
    assert told.seconds >= 0.3 and told.result.exit_code in (3, 6)


@pytest.mark.parametrize("end", ["os._exit(7)", "os.kill(os.getpid(), 15)", "raise SystemExit(7)"])
def test_a_forked_child_that_comes_to_our_end_says_nothing(end: str) -> None:
    told = tell(MARK + f"if os.fork() == 0:\n    raise SystemExit(4)\nos.wait()\n{end}")
    assert told.result.exit_code == (-15 if "kill" in end else 7)


def test_a_file_in_the_place_of_stderr_is_left_alone(tmp_path: Path) -> None:
    """Its mode is the program's own: as an ordinary user, one that does not let it be read would lose the artifact."""
    need_tier("jail")
    code = "import os, sys\nfd = os.open('log', os.O_CREAT | os.O_WRONLY, 0o640)\nos.dup2(fd, 2)\nos.close(fd)\n"
    with Runner(tier="jail") as runner:
        result = runner.run(code + "print('told', file=sys.stderr)", out=tmp_path)
    assert result.ok and [a.path for a in result.artifacts] == ["log"] and not result.artifacts[0].skipped
    assert (tmp_path / "log").read_text() == "told\n"


def test_groups_are_removed_by_one_thread_and_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    need_tier("jail")
    need_group()
    at_once, removed = [0, 0], []
    remove = Cgroup.remove

    def slow(group: Cgroup, **options: float) -> bool:
        at_once[0] += 1
        at_once[1] = max(at_once)
        time.sleep(0.01)
        removed.append(group.name)
        at_once[0] -= 1
        return remove(group, **options)

    monkeypatch.setattr(Cgroup, "remove", slow)

    async def main() -> None:
        for _ in range(10):
            async with AsyncRunner(tier=JailTier(), policy=POLICY) as runner:
                await asyncio.gather(*(runner.run("pass") for _ in range(3)))
            assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())
    assert at_once == [0, 1] and len(removed) == len(set(removed)) >= 30


def test_a_tier_that_closes_waits_for_what_is_dying() -> None:
    async def main() -> None:
        need_tier("jail")
        need_group()
        tier = JailTier()
        pids = []
        for _ in range(10):
            sandbox = await tier.create_single(POLICY)
            assert isinstance(sandbox, single.SingleSandbox)
            pids.append(sandbox._around._program)
            await sandbox.exec(Code("x = bytearray(50 << 20)"), last=True)
            await sandbox.close()
            await sandbox.close()
        await tier.close()
        assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)

    asyncio.run(main())


def test_no_more_than_a_few_are_left_to_die(monkeypatch: pytest.MonkeyPatch) -> None:
    need_group()
    monkeypatch.setattr("fumehood.tiers.jail.tier._LEFT_MAX", 0)

    async def main() -> None:
        async with a_single() as sandbox:
            await sandbox.exec(Code("pass"), last=True)
            await sandbox.close()
            assert not os.path.exists(f"/proc/{sandbox._around._program}")

    asyncio.run(main())


@pytest.mark.parametrize("noticed", [False, True])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_zygote_that_dies_or_stops_meanwhile_holds_up_nobody(how: signal.Signals, noticed: bool) -> None:
    async def main() -> None:
        need_tier("jail")
        need_group()
        tier = JailTier()
        sandbox = await tier.create_single(POLICY)
        assert isinstance(sandbox, single.SingleSandbox)
        (zygote,) = tier._zygotes.values()
        pids = [zygote.pid, *process.descendants(zygote.pid)]
        await sandbox.exec(Code("x = bytearray(50 << 20)"), last=True)
        for pid in pids:
            if pid not in (sandbox._around.pid, sandbox._around._program):
                os.kill(pid, how)
        if noticed:  # by the event loop, before close() is called
            await asyncio.sleep(0.1)
        await asyncio.wait_for(sandbox.close(), 20)
        await asyncio.wait_for(tier.close(), 20)
        assert not tier._leaving and tier._live == 0
        async with asyncio.timeout(20):  # until the kernel has had them waited for
            while any(os.path.exists(f"/proc/{pid}") for pid in (sandbox._around.pid, sandbox._around._program)):
                await asyncio.sleep(0.01)

    asyncio.run(main())


def test_what_executed_another_program_and_ended_while_others_began_has_its_status(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The zygote cannot wait for what ends while a PID 1 is born (see spawn_single); then the kernel is asked."""
    need_tier("jail")
    if tuple(map(int, os.uname().release.split(".")[:2])) < (6, 15):
        pytest.skip("needs PIDFD_GET_INFO of Linux 6.15")
    asked: list[int | None] = []
    kept = process.exit_status
    monkeypatch.setattr(process, "exit_status", lambda fd: asked.append(kept(fd)) or asked[-1])
    take = Zygote._take

    def forgetful(self: Zygote, data: bytes, fds: list[int], *, cut: bool) -> None:
        kind, ident, _, cpu_s = client.ANSWER.unpack_from(data)
        take(self, client.ANSWER.pack(kind, ident, -1, cpu_s) if kind == client.EXITED else data, fds, cut=cut)

    monkeypatch.setattr(Zygote, "_take", forgetful)
    with Runner(tier=JailTier()) as runner:
        for status in (0, 7):
            assert runner.run(f"import os\nos.execv('/bin/sh', ['sh', '-c', 'exit {status}'])").exit_code == status
        assert runner.run("import os\nos.kill(os.getpid(), 9)").exit_code == -9
    assert asked == [0, 7 << 8, 9]


@MODES
@pytest.mark.parametrize("executes", ["main", "thread"])
def test_a_program_that_executes_another_ends_as_that_does_and_harms_no_other_sandbox(
    cgroups: bool, executes: str
) -> None:
    need_tier("jail")
    start = "threading.Thread(target=other).start(); time.sleep(60)" if executes == "thread" else "other()"
    code = "import os, threading, time\n"
    code += f"def other(): os.execv('/bin/sh', ['sh', '-c', 'echo executed; exit 7'])\n{start}"

    async def main() -> None:
        async with AsyncRunner(tier=JailTier(cgroups=cgroups), policy=POLICY) as runner, runner.open() as live:
            await live.exec(Code("x = 5"))
            result = await runner.run(code)
            assert (result.outcome, result.exit_code, result.stdout) == (Outcome.EXITED, 7, "executed\n")
            assert (await live.exec(Code("print(x)"))).stdout == "5\n"

    asyncio.run(main())


HOLDERS = {
    "daemon": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(60)\n    os._exit(0)\n"
    ),
    "in flight": (
        "import array, os, socket\na, b = socket.socketpair()\n"
        "a.sendmsg([b'x'], [(1, 1, array.array('i', [1, 2, a.fileno(), b.fileno()]))])\n"
    ),
    "flood": "import os\nif os.fork() == 0:\n    while True: os.write(1, b'z' * 65536)\n",
    "reader": "import os\nreader = os.open('/proc/self/fd/1', os.O_RDWR)\nif os.fork() == 0: os.read(reader, 1)\n",
}


@MODES
@pytest.mark.parametrize("holder", HOLDERS)
def test_whoever_else_holds_its_output_does_not_hold_up_its_end(cgroups: bool, holder: str) -> None:
    result = run(HOLDERS[holder] + "os.write(2, b'said')\nos._exit(9)", cgroups=cgroups)
    assert (result.outcome, result.exit_code) == (Outcome.EXITED, 9)
    assert result.stderr == "said" and result.seconds < 5


def test_a_program_that_stops_itself_has_its_deadline() -> None:
    limits = Limits(wall_s=0.5)
    result = run("import os\nprint(1, flush=True)\nos.kill(os.getpid(), 19)", policy=Policy(limits=limits))
    assert (result.outcome, result.stdout) == (Outcome.WALL, "1\n") and result.seconds < 3


# --- its output


@MODES
def test_what_is_left_in_enlarged_pipes_is_all_collected(cgroups: bool) -> None:
    code = """
import fcntl, os
sizes = []
for fd in (1, 2):
    try:
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, 1 << 20)
    except OSError:
        pass  # this user's share of pipe memory is used up
    size = fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ)
    for _ in range(size // 4096):
        os.write(fd, b"%d" % fd * 4096)
    sizes.append(size)
os._exit(0)
"""
    result = run(code, cgroups=cgroups)
    for data, fill in ((result.stdout_data, b"1"), (result.stderr_data, b"2")):
        assert len(data) in (1 << 20, 64 << 10) and data == fill * len(data)


def test_packets_and_stolen_output() -> None:
    """A pipe in packet mode gives one write at a time; what the program reads back itself is not its output."""
    code = """
import fcntl, os
reader = os.open("/proc/self/fd/1", os.O_RDONLY | os.O_NONBLOCK)
fcntl.fcntl(1, fcntl.F_SETFL, fcntl.fcntl(1, fcntl.F_GETFL) | os.O_DIRECT)
for _ in range(500):
    os.write(1, b"ab")
    try:
        os.read(reader, 1)  # a packet's rest is dropped
    except BlockingIOError:
        pass
os._exit(0)
"""
    result = run(code)
    assert result.exit_code == 0 and set(result.stdout) <= {"a", "b"} and len(result.stdout) <= 1000


@MODES
def test_a_flood_is_counted_and_takes_little_of_the_host(monkeypatch: pytest.MonkeyPatch, cgroups: bool) -> None:
    monkeypatch.setattr(single, "_LONG_FLOOD_LOOKS", 10)
    looks = itertools.count()
    splice = os.splice
    monkeypatch.setattr(os, "splice", lambda *args, **named: (next(looks), splice(*args, **named))[1])
    code = """
import os, threading
piece = b"x" * 65536
def flood(fd):
    for _ in range(60 << 4):
        os.write(fd, piece)
other = threading.Thread(target=flood, args=(2,))
other.start()
flood(1)
"""
    limits = Limits(wall_s=20, cpu_s=20, output_bytes=1000)
    began = time.monotonic()
    result = run(code, policy=Policy(limits=limits), cgroups=cgroups)
    took = time.monotonic() - began
    assert result.outcome is Outcome.EXITED
    assert len(result.stdout) + len(result.stderr) == 1000
    assert (result.usage.stdout_bytes, result.usage.stderr_bytes) == (60 * MiB, 60 * MiB)
    assert next(looks) <= 10 + 2 * took / single._LONG_FLOOD_PACE_S


# --- its way in


@pytest.mark.parametrize("size", [1, 200_000, 10_000_000, (16 << 20) - 80])
def test_code_of_any_size(size: int) -> None:
    result = run("#" + "x" * size + "\nprint(len(open('/proc/self/cmdline').read()) > 0)")
    assert result.stdout == "True\n"


@MODES
def test_a_program_too_large_for_its_memory_ends(cgroups: bool) -> None:
    """The process dies while it receives. This hung for ever: there was nobody to take the rest."""
    policy = Policy(limits=Limits(wall_s=5, memory_bytes=16 * MiB))
    try:
        result = run("#" + "x" * (15 << 20) + "\nprint(1)", policy=policy, cgroups=cgroups)
    except StartError as error:
        assert "before it had the program" in str(error)
    else:
        assert result.outcome is not Outcome.WALL and result.stdout == ""


@pytest.mark.parametrize("mebibytes", [2, 3, 4, 6])
def test_no_memory_for_the_program_is_no_exit_of_the_program(mebibytes: int) -> None:
    """Without cgroups the process fails by itself, in the midst of receiving or when all has come."""
    policy = Policy(limits=Limits(wall_s=5, memory_bytes=16 * MiB))
    with pytest.raises(StartError, match="before it had the program"):
        run("#" + "x" * (mebibytes << 20), policy=policy, cgroups=False)


@pytest.mark.parametrize("size", [1, 15 << 20])
@pytest.mark.parametrize("turns", [0, 1, 3, 10])
def test_a_process_that_is_killed_while_it_is_sent_its_program_never_ran(turns: int, size: int) -> None:
    async def main() -> None:
        async with a_single() as sandbox:
            program = sandbox._enclosure._program  # type: ignore[attr-defined]
            os.kill(program, 19)  # so that it does not end by itself
            running = asyncio.ensure_future(sandbox.exec(Code("#" + "x" * size), last=True))
            for _ in range(turns):
                await asyncio.sleep(0)
            os.kill(program, 9)
            with pytest.raises((StartError, ClosedError)):
                await asyncio.wait_for(running, 10)

    asyncio.run(main())


NAMES = ["<agent>", "", "a\0b", "a\nb", "ä😀" * 200, "a\udc80b"]


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_a_name_is_shown_as_by_an_agent(name: str) -> None:
    async def main() -> None:
        need_tier("jail")
        need_group()
        tier = JailTier()
        shown = []
        for create in (tier.create, tier.create_single):
            sandbox = await create(POLICY)
            shown.append(await sandbox.exec(Code("1 / 0", name=name), last=True))
            await sandbox.close()
        await tier.close()
        assert shown[0].stderr == shown[1].stderr and "ZeroDivisionError" in shown[0].stderr

    asyncio.run(main())


# --- what it cannot do


def test_what_only_an_agent_can_do_is_refused_and_costs_nothing() -> None:
    async def main() -> None:
        async with a_single() as sandbox:
            refused: list[Any] = [
                sandbox.exec(Command(("true",)), last=True),
                sandbox.exec(Code("input()"), stdin=b"x", last=True),
                sandbox.exec(Code("1", displays=True), last=True),
                sandbox.exec(Code("1", context="a"), last=True),
                sandbox.start(Code("1")),
            ]
            for refusal in refused:
                with pytest.raises(UnsupportedError):
                    await refusal
            assert (await sandbox.exec(Code("print(1)"))).stdout == "1\n"
            with pytest.raises((UnsupportedError, ClosedError)):
                await sandbox.exec(Code("print(2)"), last=True)

    asyncio.run(main())


@pytest.mark.parametrize("ignored", [False, True])
def test_an_interrupt_ends_it(monkeypatch: pytest.MonkeyPatch, ignored: bool) -> None:
    async def main() -> None:
        async with a_single() as sandbox:
            on = asyncio.Event()
            code = "import signal, time\n" + "signal.signal(2, signal.SIG_IGN)\n" * ignored
            run = sandbox.exec(Code(code + "print(1, flush=True)\ntime.sleep(60)"), sink=lambda *_: on.set(), last=True)
            running = asyncio.ensure_future(run)
            await asyncio.wait_for(on.wait(), 10)
            await sandbox.interrupt(grace_s=0.2)
            result = await asyncio.wait_for(running, 10)
            assert result.outcome is Outcome.CANCELLED
            assert ("KeyboardInterrupt" in result.stderr) == (not ignored)

    asyncio.run(main())


# --- beside an agent

#: What a program can see of how it was started. os.getppid() is what differs: PID 1 is not its parent.
SEEN = """
import fcntl, gc, json, os, resource, signal, stat, subprocess, sys, threading
umask = os.umask(0)
os.umask(umask)
status = dict(line.rstrip().split(":", 1) for line in open("/proc/self/status"))
try:
    terminal = os.open("/dev/tty", os.O_RDWR)
except OSError as error:
    terminal = error.errno
child = subprocess.run(["sh", "-c", "grep Sig /proc/self/status; umask; id; ls /proc/self/fd; cat /proc/self/cgroup"],
                       capture_output=True, text=True)
print(json.dumps({
    "ids": [os.getpid(), os.getpgrp(), os.getsid(0), os.getuid(), os.getgroups()],
    "modules": sorted(sys.modules), "main": sorted(sys.modules["__main__"].__dict__), "name": __name__,
    "argv": [sys.argv, sys.orig_argv, sys.path, repr(sys.flags)],
    "environment": dict(os.environ), "folder": os.getcwd(), "files": os.listdir(), "umask": umask,
    "handlers": [str(signal.getsignal(number)) for number in range(1, signal.NSIG)],
    "status": [status[name] for name in status
               if name.startswith(("Sig", "Shd", "Cap", "Seccomp", "NoNew", "Uid", "Gid"))],
    "descriptors": [[fd, stat.S_ISFIFO(os.fstat(int(fd)).st_mode), fcntl.fcntl(int(fd), fcntl.F_GETFL),
                     fcntl.fcntl(int(fd), fcntl.F_GETFD)] for fd in os.listdir("/proc/self/fd") if int(fd) < 3],
    "others": [fd for fd in os.listdir("/proc/self/fd") if int(fd) > 3],
    "streams": [repr(stream) for stream in (sys.stdin, sys.stdout, sys.stderr)], "input": sys.stdin.read(),
    "terminal": terminal, "threads": [thread.name for thread in threading.enumerate()], "gc": gc.isenabled(),
    "nice": os.nice(0), "oom": open("/proc/self/oom_score_adj").read(), "child": child.stdout,
    "limits": [resource.getrlimit(getattr(resource, name)) for name in dir(resource)
               if name.startswith("RLIMIT") and name != "RLIMIT_NPROC"],
    "processes": [name for name in os.listdir("/proc") if name.isdigit()],
    "cgroup": open("/proc/self/cgroup").read(), "parent": os.getppid(),
}))
"""


@MODES
def test_a_program_finds_what_it_finds_beside_an_agent(cgroups: bool) -> None:
    need_tier("jail")

    async def main() -> None:
        policy = Policy(env={"NAME": "wörth", "TZ": "Asia/Tokyo"})
        tier = JailTier(cgroups=cgroups)
        seen = []
        for sandbox in (
            await tier.create(policy),
            await tier.create_single(policy),
            await tier.create_single(policy, warm=True),
        ):
            result = await sandbox.exec(Code(SEEN), last=True)
            await sandbox.close()
            assert result.exit_code == 0, result.stderr
            seen.append(json.loads(result.stdout))
        await tier.close()
        assert [found.pop("parent") for found in seen] == [1, 0, 0]
        assert seen[0] == seen[1] == seen[2]

    asyncio.run(main())


# --- PID 1

REACH = """
import ctypes, json, os, struct
libc = ctypes.CDLL(None, use_errno=True)
numbers = {"x86_64": dict(ptrace=101, prlimit64=302, process_vm_readv=310, process_vm_writev=311, kcmp=312, setns=308,
                          ioprio_set=251, sched_setscheduler=144, migrate_pages=256, move_pages=279,
                          rt_tgsigqueueinfo=297, rt_sigqueueinfo=129, get_robust_list=274, setpriority=141),
           "aarch64": dict(ptrace=117, prlimit64=261, process_vm_readv=270, process_vm_writev=271, kcmp=272, setns=268,
                           ioprio_set=30, sched_setscheduler=119, migrate_pages=238, move_pages=239,
                           rt_tgsigqueueinfo=240, rt_sigqueueinfo=138, get_robust_list=100, setpriority=140),
           }[os.uname().machine] | dict(pidfd_getfd=438, process_madvise=440, process_mrelease=448)
pidfd = os.pidfd_open(1)
room = ctypes.create_string_buffer(128)
there = ctypes.create_string_buffer(struct.pack("QQ", ctypes.addressof(room), 8))
number = ctypes.create_string_buffer(struct.pack("QQ", 0, 0))
tries = dict(
    ptrace=(0x4206, 1, 0, 0), prlimit64=(1, 7, number, room), process_vm_readv=(1, there, 1, there, 1, 0),
    process_vm_writev=(1, there, 1, there, 1, 0), kcmp=(os.getpid(), 1, 1, 0, 0), setns=(pidfd, 0x10000000),
    ioprio_set=(1, 1, 3 << 13), sched_setscheduler=(1, 5, number), migrate_pages=(1, 1, room, room),
    move_pages=(1, 0, 0, 0, 0, 0), rt_tgsigqueueinfo=(1, 1, 34, room), rt_sigqueueinfo=(1, 34, room),
    get_robust_list=(1, room, room), setpriority=(0, 1, 19), pidfd_getfd=(pidfd, 3, 0),
    process_madvise=(pidfd, there, 1, 4, 0), process_mrelease=(pidfd, 0))
reached = [name for name, arguments in tries.items()
           if libc.syscall(numbers[name], *(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments)) != -1]
for signal in (9, 19, 15, 32, 33, 34, 64):
    try:
        os.kill(1, signal)
    except PermissionError:
        pass
try:
    os.sched_setaffinity(1, {0})
    reached.append("sched_setaffinity")
except OSError:
    pass
print(json.dumps([reached, os.path.exists("/proc/1"), [name for name in os.listdir("/proc") if name.isdigit()]]))
"""


@MODES
def test_a_program_does_not_reach_an_idle_first_process(cgroups: bool) -> None:
    """As an ordinary user both have one id for the host; Landlock decides whether signals are sent at all."""

    async def main() -> None:
        async with a_single(cgroups=cgroups) as sandbox:
            init = sandbox._enclosure.pid  # type: ignore[attr-defined]
            before = posture.limits(init), os.sched_getaffinity(init)
            said: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
            run = sandbox.exec(
                Code(REACH + "import time, sys\nsys.stdout.flush()\ntime.sleep(60)"),
                sink=lambda _, data: said.set_result(data),
                last=True,
            )
            running = asyncio.ensure_future(run)
            output = await asyncio.wait_for(said, 10)
            assert json.loads(output) == [[], False, ["2"]]
            assert (posture.limits(init), os.sched_getaffinity(init)) == before
            async with asyncio.timeout(10):  # on a busy machine it has not had its first turn yet
                while not posture.fields(f"/proc/{init}/status")["State"].startswith("S"):
                    await asyncio.sleep(0.01)
            await sandbox.close()
            with pytest.raises(Exception, match=r"close\(\)"):
                await running

    asyncio.run(main())


# --- without cgroups

ORPHAN = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        {}
    os._exit(0)
os.wait()
x = bytearray(60 << 20)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("inside", "outcome"),
    [
        ("while True: pass", Outcome.CPU),
        ("x = [bytearray(20 << 20) for _ in range(4)]; time.sleep(60)", Outcome.MEMORY),
    ],
)
def test_what_an_orphan_uses_is_seen_without_cgroups(inside: str, outcome: Outcome) -> None:
    """It is a child of PID 1 and no descendant of the program, which holds half of what is allowed itself."""
    policy = Policy(limits=Limits(wall_s=20, cpu_s=0.5, memory_bytes=128 * MiB))
    result = run(ORPHAN.format(inside), policy=policy, cgroups=False)
    assert result.outcome is outcome and result.seconds < 10


@pytest.mark.parametrize("seconds", [0, 0.1])
def test_output_that_nobody_wants_as_it_comes_is_left_in_the_pipes(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short program's is read when it has ended; a long one's is not left there until a pipe is full."""
    need_tier("jail")
    listened: list[int] = []
    listen = single.SingleChannel._listen

    def note(self: single.SingleChannel, fd: int) -> None:
        if self._pipes[fd] == "out":  # the other's end is the program's
            listened.append(fd)
        listen(self, fd)

    monkeypatch.setattr(single.SingleChannel, "_listen", note)
    monkeypatch.setattr(single, "_PATIENCE_S", 0.05 if seconds else 60.0)
    monkeypatch.setattr(single, "_LITTLE_BYTES", 1 << 20)
    program = f"import sys, time\nprint('out' * 9)\ntime.sleep({seconds})\nprint('err', file=sys.stderr)\n"
    size = 300_000 if seconds else 60_000
    with Runner(tier=JailTier()) as runner:
        result = runner.run(program + f"print('x' * {size})")
        assert (result.stdout, result.stderr) == ("out" * 9 + "\n" + "x" * size + "\n", "err\n")
        before = len(listened)
        assert before == (1 if seconds else 0)
        came: list[str] = []
        runner.run("print(1)", sink=lambda stream, data: came.append(stream))
        assert came and len(listened) > before  # who wants it as it comes has it so


def test_every_program_has_the_same_environment_below_the_policys() -> None:
    need_tier("jail")
    look = "import json, os\nprint(json.dumps(dict(os.environ)))"
    expected = runtime.program_env()
    assert {"PATH", "LANG"} <= set(expected)
    for given in ({}, {"A": "1"}, {"LANG": "C", "PATH": "/bin"}):
        with Runner(tier=JailTier(), policy=Policy(env=given)) as runner:
            for stdin in (b"", b"x"):  # without an agent, and with one
                assert json.loads(runner.run(look, stdin=stdin).stdout) == expected | given
            with runner.open() as sandbox:
                assert json.loads(sandbox.exec(look).stdout) == expected | given


def test_a_program_sees_nothing_of_the_zygotes_practice() -> None:
    """What was gone through before it was forked is not to be told from an interpreter that has just started."""
    need_tier("jail")
    look = (
        "import sys, os, gc, signal, linecache, atexit, random, warnings\n"
        "print(sorted(globals()), sorted(linecache.cache), gc.isenabled(), gc.get_threshold(), atexit._ncallbacks())\n"
        "print([signal.getsignal(n) for n in (2, 13, 15, 17, 25)], signal.pthread_sigmask(0, ()), os.umask(0))\n"
        "print(random._inst.gauss_next, sys.argv, sys.flags, sys.exc_info(), len(warnings.filters))"
    )
    with Runner(tier=JailTier()) as runner, Runner(tier=JailTier()) as other:
        first, later = runner.run(look), [other.run(look) for _ in range(3)][-1]
        assert first.ok and first.stdout == later.stdout
        assert "rehearsal" not in first.stdout and "True (700, 10, 10) 0" in first.stdout
        seen = {runner.run("import random, os, uuid; print(random.random(), uuid.uuid4())").stdout for _ in range(5)}
        assert len(seen) == 5


@pytest.mark.parametrize("blind", [5, 10_000])
def test_memory_that_cannot_be_looked_at_for_a_moment_is_held_all_the_same(
    blind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a cgroup the supervisor looks; where it cannot for a second, nothing runs on."""
    need_tier("jail")
    looks: list[int] = []
    look = process.tree_usage

    def sometimes(*args: Any, **named: Any) -> process.TreeUsage:
        looks.append(1)
        if len(looks) <= blind:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return look(*args, **named)

    monkeypatch.setattr(process, "tree_usage", sometimes)
    program = "import os, time\nos.fork()\nheld = bytearray(90_000_000)\ntime.sleep(60)"
    policy = Policy(limits=Limits(wall_s=30, memory_bytes=128 * MiB))
    with Runner(tier=JailTier(cgroups=False), policy=policy) as runner:
        if blind == 5:
            assert runner.run(program).outcome is Outcome.MEMORY
        else:
            assert runner.run(program).outcome is Outcome.SIGNALED  # by us
            with pytest.raises(OutcomeUnknownError, match="could not be looked at"):
                runner.run(program, stdin=b"with an agent")
