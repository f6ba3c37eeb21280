"""GuestSandbox over a plain agent process, with an enclosure that holds nothing but the process tree."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import fumehood.guest.agent as agent_module
import fumehood.session as session_module
from fumehood import tar
from fumehood.errors import ClosedError, FileError, OutcomeUnknownError, PolicyError, StartError, UnsupportedError
from fumehood.model import Boundary, Code, Command, Display, Limits, Outcome, Policy, Receipt
from fumehood.session import Ending, GuestSandbox, decide
from fumehood.wire import Channel, encode

RECEIPT = Receipt(tier="test", boundary=Boundary.NONE, controls=())
LONG = Limits(wall_s=60, cpu_s=600)
LOOP = "print('on', flush=True)\nwhile True: pass"


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            for child in map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split()):
                found += [child, *descendants(child)]
    return found


class TreeEnclosure:
    """Kills by walking the tree; usage and memory are whatever a test says."""

    def __init__(self, process: subprocess.Popen[bytes] | None, workdir: Path) -> None:
        self.process = process
        self.used: tuple[float | None, int | None] = (0.5, 1000)
        self.oom = False
        self.reason = ""
        self.kills = 0
        self.released = 0
        self.fd = os.open(workdir, os.O_RDONLY | os.O_DIRECTORY)

    def alive(self) -> bool:
        return self.process is None or self.process.poll() is None

    def kill(self) -> None:
        self.kills += 1
        if self.process is not None:
            family = descendants(self.process.pid)
            self.process.kill()
            for pid in family:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    async def wait_dead(self) -> None:
        while self.process is not None and self.process.poll() is None:
            await asyncio.sleep(0.005)

    def usage(self) -> tuple[float | None, int | None]:
        assert not self.released
        return self.used

    def memory_killed(self) -> bool:
        return self.oom

    def lost_reason(self) -> str:
        return self.reason

    def workdir_fd(self) -> int | None:
        return self.fd

    async def release(self) -> None:
        if not self.released:
            os.close(self.fd)
        self.released += 1


Open = Callable[..., tuple[GuestSandbox, TreeEnclosure]]


@contextlib.asynccontextmanager
async def opener(workdir: Path) -> AsyncIterator[Open]:
    opened: list[tuple[GuestSandbox, TreeEnclosure]] = []

    def open_one(policy: Policy | None = None) -> tuple[GuestSandbox, TreeEnclosure]:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-I", "-S", agent_module.__file__, "--fd", str(theirs.fileno())]
            process = subprocess.Popen(
                [*command, "--workdir", str(workdir)], pass_fds=[theirs.fileno()], env={}, stdin=subprocess.DEVNULL
            )
        fd = ours.detach()
        enclosure = TreeEnclosure(process, workdir)
        sandbox = GuestSandbox(Channel(fd, fd), enclosure, policy or Policy(limits=LONG), RECEIPT)
        opened.append((sandbox, enclosure))
        return opened[-1]

    try:
        yield open_one
    finally:
        for sandbox, enclosure in opened:
            await sandbox.close()
            assert enclosure.released == 1
            assert enclosure.process is not None
            assert enclosure.process.wait() is not None


def with_sandboxes(body: Callable[[Open], Awaitable[None]], workdir: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))

    async def main() -> None:
        async with opener(workdir) as open_one:
            await body(open_one)

    asyncio.run(main())
    assert set(os.listdir("/proc/self/fd")) == before, "descriptors are left"


# --- the decision ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ending", "expected"),
    [
        (Ending(0), (Outcome.EXITED, 0)),
        (Ending(3), (Outcome.EXITED, 3)),
        (Ending(-11), (Outcome.SIGNALED, -11)),
        (Ending(-9), (Outcome.SIGNALED, -9)),
        (Ending(-9, memory_killed=True), (Outcome.MEMORY, None)),
        (Ending(1, memory_killed=True), (Outcome.EXITED, 1)),
        (Ending(-11, memory_killed=True), (Outcome.SIGNALED, -11)),
        (Ending(None, memory_killed=True), (Outcome.MEMORY, None)),
        (Ending(-9, cpu_spent=True), (Outcome.CPU, None)),
        (Ending(-24, cpu_spent=True), (Outcome.CPU, None)),
        (Ending(-24), (Outcome.SIGNALED, -24)),
        (Ending(0, cpu_spent=True), (Outcome.EXITED, 0)),
        (Ending(None, cpu_spent=True), (Outcome.CPU, None)),
        (Ending(-9, memory_killed=True, cpu_spent=True), (Outcome.MEMORY, None)),
        (Ending(-9, overflow=True), (Outcome.OUTPUT, None)),
        (Ending(None, imposed=Outcome.WALL), (Outcome.WALL, None)),
        (Ending(0, imposed=Outcome.WALL), (Outcome.WALL, None)),
        (Ending(-9, imposed=Outcome.CPU, memory_killed=True), (Outcome.CPU, None)),
        (Ending(130, interrupted=True), (Outcome.CANCELLED, None)),
        (Ending(-2, interrupted=True), (Outcome.CANCELLED, None)),
        (Ending(0, interrupted=True), (Outcome.EXITED, 0)),
        (Ending(130), (Outcome.EXITED, 130)),
        (Ending(None), None),
        (Ending(None, interrupted=True), None),
    ],
)
def test_decide(ending: Ending, expected: tuple[Outcome, int | None] | None) -> None:
    assert decide(ending) == expected


# --- execs -----------------------------------------------------------------------------------------------------------


def test_single_use(tmp_path: Path) -> None:
    async def body(open_one: Open) -> None:
        sandbox, enclosure = open_one(Policy(limits=LONG, env={"MINE": "yes"}))
        code = "import os, sys; print(os.environ['MINE'], os.environ['LANG']); sys.stderr.write('e'); sys.exit(3)"
        result = await sandbox.exec(Code(code), last=True)
        assert (result.outcome, result.exit_code) == (Outcome.EXITED, 3)
        assert (result.stdout, result.stderr) == ("yes C.UTF-8\n", "e")
        assert (result.usage.cpu_s, result.usage.memory_peak_bytes) == (0.5, 1000)
        assert (result.usage.stdout_bytes, result.usage.stderr_bytes) == (12, 1)
        assert result.receipt is RECEIPT
        assert enclosure.process is not None
        assert enclosure.process.poll() is not None, "usage was read before all were dead"
        with pytest.raises(ClosedError):
            await sandbox.exec(Code("1"))

    with_sandboxes(body, tmp_path)


def test_live(tmp_path: Path) -> None:
    async def body(open_one: Open) -> None:
        sandbox, enclosure = open_one()
        await sandbox.ready(30)
        await sandbox.exec(Code("x = 20"))
        enclosure.used = (0.75, 1000)
        result = await sandbox.exec(Code("print(x + 1)"))
        assert (result.stdout, result.usage.cpu_s, sandbox.interpreter_lost) == ("21\n", 0.25, False)
        result = await sandbox.exec(Command(("sh", "-c", "cat; exit 2")), stdin=b"in")
        assert (result.stdout, result.exit_code) == ("in", 2)
        assert (await sandbox.exec(Code("import os; os._exit(1)"))).exit_code == 1
        assert sandbox.interpreter_lost is True
        assert (await sandbox.exec(Code("print('fresh')"))).stdout == "fresh\n"

    with_sandboxes(body, tmp_path)


def test_one_exec_at_a_time(tmp_path: Path) -> None:
    async def body(open_one: Open) -> None:
        sandbox, _ = open_one()
        first = asyncio.ensure_future(sandbox.exec(Code("print('a')")))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="running"):
            await sandbox.exec(Code("print('b')"))
        assert (await first).stdout == "a\n"

    with_sandboxes(body, tmp_path)


def test_large_code_and_stdin(tmp_path: Path) -> None:
    async def body(open_one: Open) -> None:
        sandbox, _ = open_one()
        code = "#" * (10 << 20) + "\nimport sys; print(len(sys.stdin.buffer.read()))"
        assert (await sandbox.exec(Code(code), stdin=b"x" * 5_000_000)).stdout == "5000000\n"
        assert (await sandbox.exec(Code("pass"), stdin=b"x" * 5_000_000)).exit_code == 0

    with_sandboxes(body, tmp_path)


def test_wall(tmp_path: Path) -> None:
    async def body(open_one: Open) -> None:
        sandbox, enclosure = open_one(Policy(limits=Limits(wall_s=2.0, cpu_s=600)))
        await sandbox.ready(30)
        code = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(30)\n" + LOOP
        result = await sandbox.exec(Code(code), last=True)
        assert (result.outcome, result.exit_code, result.timed_out) == (Outcome.WALL, None, True)
        assert result.stdout == "on\n"
        assert 2.0 <= result.seconds < 20
        assert enclosure.process is not None
        assert enclosure.process.poll() is not None
        with pytest.raises(ClosedError, match="wall"):
            await sandbox.exec(Code("1"))

    with_sandboxes(body, tmp_path)


def test_wall_of_a_program_that_stops_itself(tmp_path: Path) -> None:
    async def body(open_one: Open) -> None:
        sandbox, _ = open_one(Policy(limits=Limits(wall_s=2.0, cpu_s=600)))
        await sandbox.ready(30)
        code = "import os, signal; print('on', flush=True); os.killpg(0, signal.SIGSTOP)"
        assert (await sandbox.exec(Code(code))).outcome is Outcome.WALL

    with_sandboxes(body, tmp_path)


def test_cpu_is_watched_from_outside(tmp_path: Path) -> None:
    async def body(open_one: Open) -> None:
        sandbox, enclosure = open_one(Policy(limits=Limits(wall_s=60, cpu_s=0.2, cpus=2)))
        await sandbox.ready(30)
        begun = time.monotonic()
        enclosure.usage = lambda: (time.monotonic() - begun, None)  # type: ignore[method-assign]
        result = await sandbox.exec(Code(LOOP))
        assert (result.outcome, result.exit_code) == (Outcome.CPU, None)
        assert result.seconds < 30

    with_sandboxes(body, tmp_path)


def test_cpu_is_counted_over_all_execs(tmp_path: Path) -> None:
    async def body(open_one: Open) -> None:
        sandbox, enclosure = open_one(Policy(limits=Limits(wall_s=60, cpu_s=1.0, cpus=1)))
        enclosure.used = (0.9, None)
        assert (await sandbox.exec(Code("pass"))).outcome is Outcome.EXITED
        enclosure.used = (1.1, None)
        assert (await sandbox.exec(Code(LOOP))).outcome is Outcome.CPU

    with_sandboxes(body, tmp_path)


def test_rlimit_cpu(tmp_path: Path) -> None:
    async def body(open_one: Open) -> None:
        for used in ((10.0, None), (None, None)):
            sandbox, enclosure = open_one(Policy(limits=Limits(wall_s=60, cpu_s=600)))
            enclosure.used = (600.0, None) if used[0] else used
            code = "import os, signal; os.kill(os.getpid(), signal.SIGXCPU)"
            assert (await sandbox.exec(Code(code), last=True)).outcome is Outcome.CPU

    with_sandboxes(body, tmp_path)


def test_memory(tmp_path: Path) -> None:
    async def body(open_one: Open) -> None:
        for victim in ("os.getpid()", "os.getppid()"):
            sandbox, enclosure = open_one()
            enclosure.oom = True
            result = await sandbox.exec(Code(f"import os; os.kill({victim}, 9)"), last=True)
            assert (result.outcome, result.exit_code) == (Outcome.MEMORY, None)

    with_sandboxes(body, tmp_path)


def test_lost_guest_is_an_error(tmp_path: Path) -> None:
    async def body(open_one: Open) -> None:
        sandbox, enclosure = open_one()
        enclosure.reason = "the cat did it"
        with pytest.raises(OutcomeUnknownError, match="the cat did it"):
            await sandbox.exec(Code("import os; os.kill(os.getppid(), 9)"))
        with pytest.raises(ClosedError):
            await sandbox.exec(Code("1"))
        sandbox, enclosure = open_one()
        await sandbox.ready(30)
        assert enclosure.process is not None
        enclosure.process.kill()
        enclosure.process.wait()
        with pytest.raises((StartError, ClosedError, OutcomeUnknownError)):
            await sandbox.exec(Code("1"))

    with_sandboxes(body, tmp_path)


def test_output_is_bounded(tmp_path: Path) -> None:
    async def body(open_one: Open) -> None:
        limits = Limits(wall_s=60, cpu_s=600, output_bytes=1000)
        flood = "import sys\nfor _ in range(50): sys.stdout.write('x' * (1 << 20))"
        sandbox, _ = open_one(Policy(limits=limits))
        result = await sandbox.exec(Code(flood))
        assert (result.outcome, len(result.stdout_data), result.truncated) == (Outcome.EXITED, 1000, True)
        assert result.usage.stdout_bytes == 50 << 20
        sandbox, _ = open_one(Policy(limits=limits, overflow="stop"))
        result = await sandbox.exec(Code(flood))
        assert (result.outcome, result.exit_code, len(result.stdout_data)) == (Outcome.OUTPUT, None, 1000)
        sandbox, _ = open_one(Policy(limits=Limits(wall_s=60, cpu_s=600, output_bytes=0)))
        assert (await sandbox.exec(Code("print(1)"))).usage.stdout_bytes == 2

    with_sandboxes(body, tmp_path)


def test_sink_sees_output_as_it_comes(tmp_path: Path) -> None:
    async def body(open_one: Open) -> None:
        sandbox, _ = open_one()
        seen: list[tuple[str, bytes]] = []
        first = asyncio.Event()

        def sink(stream: str, data: bytes) -> None:
            seen.append((stream, data))
            first.set()

        running = asyncio.ensure_future(sandbox.exec(Code(LOOP), sink=sink))
        await asyncio.wait_for(first.wait(), 30)
        assert (seen, running.done()) == ([("stdout", b"on\n")], False)
        await sandbox.interrupt()
        result = await running
        assert (result.outcome, result.exit_code) == (Outcome.CANCELLED, None)
        assert (await sandbox.exec(Code("print('kept')"))).stdout == "kept\n"

    with_sandboxes(body, tmp_path)


def test_sink_that_raises_kills_the_sandbox(tmp_path: Path) -> None:
    async def body(open_one: Open) -> None:
        sandbox, enclosure = open_one()

        def sink(stream: str, data: bytes) -> None:
            raise LookupError("sink")

        with pytest.raises(LookupError, match="sink"):
            await sandbox.exec(Code(LOOP), sink=sink)
        assert enclosure.kills
        with pytest.raises(ClosedError):
            await sandbox.exec(Code("1"))

    with_sandboxes(body, tmp_path)


@pytest.mark.parametrize("delay_s", [0, 0.0005, 0.02, 0.3])
@pytest.mark.parametrize("last", [True, False])
def test_cancellation_at_any_stage(tmp_path: Path, delay_s: float, last: bool) -> None:
    async def body(open_one: Open) -> None:
        sandbox, enclosure = open_one()
        running = asyncio.ensure_future(sandbox.exec(Code(LOOP), last=last))
        await asyncio.sleep(delay_s)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        if delay_s:
            assert enclosure.kills
        closing = asyncio.ensure_future(sandbox.close())
        await asyncio.sleep(0)
        closing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await closing

    with_sandboxes(body, tmp_path)


def test_close_during_an_exec(tmp_path: Path) -> None:
    async def body(open_one: Open) -> None:
        sandbox, _ = open_one()
        running = asyncio.ensure_future(sandbox.exec(Code(LOOP)))
        await sandbox.ready(30)
        await sandbox.close()
        with pytest.raises(OutcomeUnknownError):
            await running

    with_sandboxes(body, tmp_path)


def test_lone_surrogates_are_refused_before_anything_runs(tmp_path: Path) -> None:
    async def body(open_one: Open) -> None:
        sandbox, _ = open_one()
        with pytest.raises(PolicyError):
            await sandbox.exec(Command(("echo", "\ud800")))
        assert (await sandbox.exec(Code("print('\ud800')"))).exit_code == 1
        assert (await sandbox.exec(Code("print(1)"))).stdout == "1\n"

    with_sandboxes(body, tmp_path)


# --- files -----------------------------------------------------------------------------------------------------------


def test_files(tmp_path: Path) -> None:
    async def body(open_one: Open) -> None:
        sandbox, _ = open_one()
        big = os.urandom(3_000_000)
        await sandbox.write_file("data/big.bin", big)
        await sandbox.write_file("empty", b"")
        assert await sandbox.read_file("data/big.bin") == big
        assert await sandbox.read_file("empty") == b""
        listed = [(f.path, f.kind, f.size_bytes) for f in await sandbox.list_files() if f.kind == "file"]
        assert listed == [("data/big.bin", "file", 3_000_000), ("empty", "file", 0)]
        with pytest.raises(FileError, match="larger"):
            await sandbox.read_file("data/big.bin", max_bytes=2_999_999)
        with pytest.raises(FileError) as missing:
            await sandbox.read_file("nothing")
        assert missing.value.errno == 2
        with pytest.raises(PolicyError):
            await sandbox.read_file("../x")
        await sandbox.remove("data")
        assert [f.path for f in await sandbox.list_files()] == ["empty"]
        running = asyncio.ensure_future(sandbox.exec(Code("import time; time.sleep(0.3); print(open('late').read())")))
        await sandbox.write_file("late", b"in time")
        assert (await running).stdout == "in time\n"

    with_sandboxes(body, tmp_path)


def test_artifacts_are_what_the_program_left(tmp_path: Path) -> None:
    work, out = tmp_path / "work", tmp_path / "out"
    work.mkdir()

    async def body(open_one: Open) -> None:
        sandbox, _ = open_one()
        await sandbox.write_file("input.csv", b"1,2")
        await sandbox.write_file("changed.csv", b"1,2")
        code = "open('changed.csv', 'a').write('x')\nopen('chart.png', 'wb').write(b'png')"
        await sandbox.exec(Code(code), last=True)
        artifacts = await sandbox.close(out=out)
        assert [(a.path, a.saved) for a in artifacts] == [
            ("changed.csv", out / "changed.csv"),
            ("chart.png", out / "chart.png"),
        ]
        assert await sandbox.close() == artifacts
        with pytest.raises(ClosedError):
            await sandbox.read_file("input.csv")

    with_sandboxes(body, work)
    assert (out / "changed.csv").read_bytes() == b"1,2x"


# --- a guest that lies -----------------------------------------------------------------------------------------------


def lying(
    tmp_path: Path, body: Callable[[GuestSandbox, TreeEnclosure, socket.socket], Awaitable[None]], wall_s: float = 60
) -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        fd = ours.detach()
        enclosure = TreeEnclosure(None, tmp_path)
        sandbox = GuestSandbox(Channel(fd, fd), enclosure, Policy(limits=Limits(wall_s=wall_s, cpu_s=600)), RECEIPT)
        with theirs:
            theirs.setblocking(False)
            await body(sandbox, enclosure, theirs)
            await sandbox.close()

    asyncio.run(main())


def say(header: dict[str, Any], body: bytes = b"") -> bytes:
    return encode(header, len(body)) + body


READY = say({"op": "ready"})
DONE: dict[str, Any] = {"op": "done", "id": 1, "status": 0, "out_bytes": 0, "err_bytes": 0}


@pytest.mark.parametrize(
    "lie",
    [
        struct.pack("!II", 1 << 31, 0),
        b"\xff" * 64,
        say({**DONE, "status": 256}),
        say({**DONE, "status": True}),
        say({**DONE, "status": None}),
        say({**DONE, "out_bytes": -1}),
        say({**DONE, "err_bytes": 1 << 70}),
        say({"op": "surprise"}),
        b"",
    ],
)
def test_lies_are_a_lost_guest(tmp_path: Path, lie: bytes) -> None:
    async def body(sandbox: GuestSandbox, enclosure: TreeEnclosure, guest: socket.socket) -> None:
        running = asyncio.ensure_future(sandbox.exec(Code("1")))
        await asyncio.sleep(0)
        guest.sendall(READY + lie)
        if not lie:
            guest.shutdown(socket.SHUT_WR)
        with pytest.raises(OutcomeUnknownError):
            await running
        assert enclosure.kills

    lying(tmp_path, body)


def test_guest_that_never_was_ready_is_safe_to_retry(tmp_path: Path) -> None:
    async def body(sandbox: GuestSandbox, enclosure: TreeEnclosure, guest: socket.socket) -> None:
        enclosure.reason = "no memory"
        running = asyncio.ensure_future(sandbox.exec(Code("1")))
        await asyncio.sleep(0)
        guest.shutdown(socket.SHUT_RDWR)
        with pytest.raises(StartError, match="no memory"):
            await running
        with pytest.raises(StartError):
            await sandbox.ready(1)

    lying(tmp_path, body)


def test_guest_that_cannot_start_the_program(tmp_path: Path) -> None:
    async def body(sandbox: GuestSandbox, enclosure: TreeEnclosure, guest: socket.socket) -> None:
        running = asyncio.ensure_future(sandbox.exec(Code("1")))
        await asyncio.sleep(0)
        guest.sendall(READY + say({"op": "failed", "id": 1, "error": 11, "message": "fork"}))
        with pytest.raises(StartError, match="fork"):
            await running

    lying(tmp_path, body)


def test_guest_that_breaks_the_output_bound(tmp_path: Path) -> None:
    async def body(sandbox: GuestSandbox, enclosure: TreeEnclosure, guest: socket.socket) -> None:
        running = asyncio.ensure_future(sandbox.exec(Code("1")))
        await asyncio.sleep(0)
        guest.sendall(READY)
        loop = asyncio.get_running_loop()
        for _ in range(5):
            await loop.sock_sendall(guest, say({"op": "out", "id": 1}, b"x" * 1_000_000))
        await loop.sock_sendall(guest, say({"op": "out", "id": 7}, b"y") + say(DONE))
        result = await running
        assert len(result.stdout_data) == 1 << 20
        assert result.usage.stdout_bytes == 5_000_000

    lying(tmp_path, body)


def test_guest_that_asks_for_stdin_without_listening(tmp_path: Path) -> None:
    async def body(sandbox: GuestSandbox, enclosure: TreeEnclosure, guest: socket.socket) -> None:
        running = asyncio.ensure_future(sandbox.exec(Code("1"), stdin=b"x" * 50_000_000))
        await asyncio.sleep(0)
        await asyncio.get_running_loop().sock_sendall(guest, READY + say({"op": "stdin", "id": 1}) * 200)
        with pytest.raises(OutcomeUnknownError, match="without listening"):
            await running

    lying(tmp_path, body)


def test_file_operation_of_a_silent_guest_ends_at_the_deadline(tmp_path: Path) -> None:
    async def body(sandbox: GuestSandbox, enclosure: TreeEnclosure, guest: socket.socket) -> None:
        guest.sendall(READY)
        with pytest.raises(ClosedError, match="deadline"):
            await sandbox.read_file("x")
        assert enclosure.kills

    lying(tmp_path, body, wall_s=0.2)


def display(body: bytes, ident: int = 1) -> bytes:
    return say({"op": "display", "id": ident}, body)


def test_guest_that_floods_with_displays(tmp_path: Path) -> None:
    async def body(sandbox: GuestSandbox, enclosure: TreeEnclosure, guest: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        running = asyncio.ensure_future(sandbox.exec(Code("1")))
        await asyncio.sleep(0)
        whole = struct.pack("!II", 32, 500_000) + b'{"types":[["text/html",500000]]}' + b"x" * 500_000
        await loop.sock_sendall(guest, READY + display(whole, ident=7))
        for _ in range(40):
            await loop.sock_sendall(guest, display(whole))
        await loop.sock_sendall(guest, say(DONE))
        result = await running
        held = sum(len(form) for d in result.displays for form in d.data.values())
        assert 0 < held <= Limits().display_bytes and result.displays_truncated
        assert result.outcome is Outcome.EXITED

    lying(tmp_path, body)


def test_displays_that_nobody_asked_for_are_dropped(tmp_path: Path) -> None:
    async def body(sandbox: GuestSandbox, enclosure: TreeEnclosure, guest: socket.socket) -> None:
        running = asyncio.ensure_future(sandbox.exec(Code("1", displays=False)))
        await asyncio.sleep(0)
        item = struct.pack("!II", 27, 1) + b'{"types":[["text/html",1]]}x'
        guest.sendall(READY + display(item) + say(DONE))
        result = await running
        assert (result.displays, result.displays_truncated) == ((), False)

    lying(tmp_path, body)


def test_guest_that_reports_no_end_is_killed_after_the_deadline(tmp_path: Path) -> None:
    async def body(sandbox: GuestSandbox, enclosure: TreeEnclosure, guest: socket.socket) -> None:
        guest.sendall(READY)
        result = await sandbox.exec(Code("1"))
        assert result.outcome is Outcome.WALL and enclosure.kills
        assert result.seconds >= 0.2 + 2 * session_module.GRACE_S
        with pytest.raises(ClosedError):
            await sandbox.exec(Code("1"))

    lying(tmp_path, body, wall_s=0.2)


def test_a_display_sink_that_raises_kills_the_sandbox(tmp_path: Path) -> None:
    class Sink:
        def __call__(self, stream: str, data: bytes) -> None: ...

        def display(self, display: Display) -> None:
            raise LookupError("sink")

    async def body(open_one: Open) -> None:
        sandbox, enclosure = open_one()
        with pytest.raises(LookupError, match="sink"):
            await sandbox.exec(Code("display(1)\nwhile True: pass"), sink=Sink())
        assert enclosure.kills

    with_sandboxes(body, tmp_path)


def test_another_guest_than_the_agent_is_asked_for_nothing_more(tmp_path: Path) -> None:
    async def body(open_one: Open) -> None:
        sandbox, _ = open_one()
        sandbox.guest_is_agent = False
        assert (await sandbox.exec(Code("1"))).displays == ()
        for program in (Code("1", displays=True), Code("1", context="b"), Command(("true",), cwd="x")):
            with pytest.raises(UnsupportedError):
                await sandbox.exec(program)
        with pytest.raises(UnsupportedError):
            await sandbox.start(Code("1"))

    with_sandboxes(body, tmp_path)


def test_an_import_names_what_it_refuses(tmp_path: Path) -> None:
    async def body(open_one: Open) -> None:
        sandbox, _ = open_one()
        with pytest.raises(FileError, match="tar header"):
            await sandbox.import_tar([b"no tar" * 200])
        with pytest.raises(FileError, match="relative path"):
            await sandbox.import_tar([tar.file("../out", 0)])
        with pytest.raises(FileError, match="ends within"):
            await sandbox.import_tar([tar.file("ok", 0) + tar.file("cut", 5) + b"12"])
        assert [f.path for f in await sandbox.list_files()] == ["ok"]

    with_sandboxes(body, tmp_path)


@pytest.mark.parametrize("turns", range(4))  # of the event loop, since the guest was ready
def test_a_cancellation_that_comes_when_the_guest_gets_ready_is_not_lost(turns: int, tmp_path: Path) -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        fd = ours.detach()
        sandbox = GuestSandbox(Channel(fd, fd), TreeEnclosure(None, tmp_path), Policy(limits=LONG), RECEIPT)
        waiting = asyncio.create_task(sandbox.ready(10))
        await asyncio.sleep(0.01)
        sandbox._ready.set_result(None)
        for _ in range(turns):
            await asyncio.sleep(0)
        heard = waiting.done()
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled() != heard
        theirs.close()
        await sandbox.close()

    asyncio.run(main())
