"""The guest agent, driven over a socketpair as a plain process: every point of its protocol, and hostile programs."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fumehood.guest.agent as agent_module

AGENT = agent_module.__file__
FRAME = struct.Struct("!II")
TIMEOUT_S = 60.0  # a test that reaches it has failed; nothing else depends on it
ENV = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            text = Path(f"/proc/{pid}/task/{task}/children").read_text()
            for child in map(int, text.split()):
                found += [child, *descendants(child)]
    return found


class Done:
    def __init__(self, header: dict[str, Any], out: bytes, err: bytes) -> None:
        self.header = header
        self.status = header.get("status")
        self.lost = header.get("lost")
        self.out = out
        self.err = err


class Guest:
    """One agent and its stream."""

    def __init__(self, workdir: Path, *options: str) -> None:
        self.sock, theirs = socket.socketpair()
        self.sock.settimeout(TIMEOUT_S)
        with theirs:
            command = [sys.executable, "-I", "-S", AGENT, "--fd", str(theirs.fileno()), "--workdir", str(workdir)]
            self.process = subprocess.Popen(
                [*command, *options], pass_fds=[theirs.fileno()], env={}, stdin=subprocess.DEVNULL
            )
        self.buffer = b""
        self.ident = 0
        assert self.receive()[0]["op"] == "ready"

    def close(self) -> None:
        family = descendants(self.process.pid)
        self.sock.close()
        try:
            self.process.wait(TIMEOUT_S)
        finally:
            self.process.kill()
            for pid in family:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def send(self, header: dict[str, Any], body: bytes = b"") -> None:
        head = json.dumps(header).encode()
        self.sock.sendall(FRAME.pack(len(head), len(body)) + head + body)

    def receive(self) -> tuple[dict[str, Any], bytes]:
        while True:
            if len(self.buffer) >= 8:
                head, body = FRAME.unpack_from(self.buffer)
                if len(self.buffer) >= 8 + head + body:
                    frame = self.buffer[8 : 8 + head + body]
                    self.buffer = self.buffer[8 + head + body :]
                    return json.loads(frame[:head]), frame[head:]
            data = self.sock.recv(1 << 20)
            if not data:
                raise EOFError
            self.buffer += data

    def begin(self, program: bytes | str | list[str], **fields: Any) -> None:
        self.ident += 1
        env = b"".join(f"{k}={v}\0".encode() for k, v in fields.pop("env", ENV).items())
        if isinstance(program, list):
            kind, rest = "command", b"".join(os.fsencode(a) + b"\0" for a in program)
        else:
            kind, rest = "code", program.encode() if isinstance(program, str) else program
        header = {
            "op": "exec", "id": self.ident, "kind": kind, "name": "<agent>", "last": False, "output_bytes": 1 << 20,
            "overflow": "truncate", "stdin": False, "env_bytes": len(env), "size": len(env) + len(rest), **fields,
        }  # fmt: skip
        payload = env + rest
        while True:
            piece, payload = payload[: 1 << 20], payload[1 << 20 :]
            self.send({**header, "more": bool(payload)}, piece)
            if not payload:
                return
            header = {"op": "more", "id": self.ident}

    def end(self, stdin: bytes = b"", until: bytes | None = None) -> Done:
        """Collect the exec's frames up to "done", or until its stdout ends with ``until``."""
        pieces = {"out": bytearray(), "err": bytearray()}
        while True:
            header, body = self.receive()
            assert header.get("id") == self.ident
            if header["op"] in pieces:
                assert 0 < len(body) <= 64 << 10
                pieces[header["op"]] += body
                if until is not None and pieces["out"].endswith(until):
                    return Done({}, bytes(pieces["out"]), bytes(pieces["err"]))
            elif header["op"] == "stdin":
                piece, stdin = stdin[:65536], stdin[65536:]
                self.send({"op": "stdin", "id": self.ident, "more": bool(stdin)}, piece)
            else:
                assert header["op"] in ("done", "failed")
                return Done(header, bytes(pieces["out"]), bytes(pieces["err"]))

    def run(self, program: bytes | str | list[str], stdin: bytes = b"", **fields: Any) -> Done:
        self.begin(program, stdin=bool(stdin), **fields)
        return self.end(stdin)

    def ask(self, operation: str, path: bytes | None = None, data: bytes = b"", **fields: int) -> tuple[Any, bytes]:
        self.ident += 1
        extra = {} if path is None else {"path_bytes": len(path)}
        self.send({"op": operation, "id": self.ident, **extra, **fields}, (path or b"") + data)
        body = b""
        while True:
            header, piece = self.receive()
            assert (header["op"], header["id"]) == ("reply", self.ident)
            body += piece
            if not header.get("more"):
                return header, body


@pytest.fixture
def workdir(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


@pytest.fixture
def guest(workdir: Path) -> Iterator[Guest]:
    guest = Guest(workdir)
    yield guest
    guest.close()


last_or_live = pytest.mark.parametrize("last", [True, False], ids=["last", "live"])

# --- ordinary programs -----------------------------------------------------------------------------------------------


@last_or_live
def test_output_streams_and_status(guest: Guest, last: bool) -> None:
    done = guest.run("import sys; print('é'); print('warn', file=sys.stderr)", last=last)
    assert (done.status, done.out, done.err) == (0, "é\n".encode(), b"warn\n")
    assert (done.header["out_bytes"], done.header["err_bytes"], done.header["overflow"]) == (3, 5, False)
    assert done.lost is last


def test_output_comes_before_the_end(guest: Guest) -> None:
    guest.begin("print('early', flush=True); input()", stdin=True)
    assert guest.receive()[0]["op"] == "stdin"
    assert guest.end(until=b"early\n").out == b"early\n"
    guest.send({"op": "stdin", "id": guest.ident, "more": False}, b"go\n")
    assert guest.end().status == 0


@last_or_live
@pytest.mark.parametrize(
    ("statement", "status", "err"),
    [
        ("raise SystemExit", 0, b""),
        ("import sys; sys.exit(3)", 3, b""),
        ("import sys; sys.exit(-1)", 255, b""),
        ("import sys; sys.exit(256 + 7)", 7, b""),
        ("import sys; sys.exit(1 << 80)", 255, b""),
        ("import sys; sys.exit('no')", 1, b"no\n"),
        ("import sys; sys.exit(True)", 1, b""),
        ("exit(4)", 4, b""),
        ("import os; os._exit(9)", 9, b""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, b""),
        ("import ctypes; ctypes.string_at(8)", -signal.SIGSEGV, b""),
        ("import os; os.abort()", -signal.SIGABRT, b""),
        ("", 0, b""),
        ("input()", 1, b"EOFError: EOF when reading a line\n"),
        ("x = ", 1, b"SyntaxError: invalid syntax\n"),
        (b"x = '\xff'", 1, b""),
        (b"x = 1\0", 1, b""),
    ],
)
def test_ends(guest: Guest, last: bool, statement: str | bytes, status: int, err: bytes) -> None:
    done = guest.run(statement, last=last)
    assert done.status == status
    assert done.err.endswith(err)
    after = guest.run("print('next')")
    assert (after.status, after.out) == (0, b"next\n")


def test_traceback_shows_only_the_program(guest: Guest) -> None:
    done = guest.run("def f():\n    1 / 0\nf()", last=True)
    lines = done.err.decode().splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1:3] == ['  File "<agent>", line 3, in <module>', "    f()"]
    assert lines[-1] == "ZeroDivisionError: division by zero"
    assert "agent.py" not in done.err.decode()


def test_excepthook_of_the_program(guest: Guest) -> None:
    done = guest.run("import sys\nsys.excepthook = lambda t, v, tb: print('hook', t.__name__, tb.tb_lineno)\n1/0")
    assert (done.status, done.out) == (1, b"hook ZeroDivisionError 3\n")


def test_syntax_error_shows_the_line(guest: Guest) -> None:
    done = guest.run("a = 1\nb = = 2\n", last=True)
    assert b'File "<agent>", line 2\n    b = = 2\n' in done.err


def test_looks_like_a_fresh_interpreter(guest: Guest, workdir: Path) -> None:
    code = """
import json, os, signal, sys
import __main__
print(json.dumps({
    "names": sorted(n for n in vars(__main__) if not n.startswith("__")),
    "name": __name__, "argv": sys.argv, "path": sys.path[0], "cwd": os.getcwd(), "env": dict(os.environ),
    "modules": [m for m in sys.modules if m.startswith("fumehood") or m == "agent"],
    "files": [getattr(m, "__file__", None) for m in list(sys.modules.values()) if "agent.py" in str(m)],
    "sigint": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "sigpipe": signal.getsignal(signal.SIGPIPE) == signal.SIG_IGN,
    "sigchld": signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL,
    "streams": [(f.name, f.mode, f.encoding, f.errors, f.line_buffering, f.fileno())
                for f in (sys.stdin, sys.stdout, sys.stderr)],
    "leader": os.getsid(0) == os.getpid(), "umask": os.umask(0),
    "oom": open("/proc/self/oom_score_adj").read().strip(),
}))
"""
    seen = json.loads(guest.run(code, last=True, env={"A": "1", "B": "x=y"}).out)
    assert seen == {
        "names": ["json", "os", "signal", "sys"],
        "name": "__main__", "argv": [""], "path": "", "cwd": str(workdir), "env": {"A": "1", "B": "x=y"},
        "modules": [], "files": [], "sigint": True, "sigpipe": True, "sigchld": True,
        "streams": [
            ["<stdin>", "r", "utf-8", "surrogateescape", False, 0],
            ["<stdout>", "w", "utf-8", "surrogateescape", False, 1],
            ["<stderr>", "w", "utf-8", "backslashreplace", True, 2],
        ],
        "leader": True, "umask": 0o022, "oom": "1000",
    }  # fmt: skip


@last_or_live
def test_descriptors(guest: Guest, last: bool) -> None:
    code = """
import os
def is_open(fd):
    try:
        os.fstat(fd)
        return True
    except OSError:
        return False
print([fd for fd in range(1024) if is_open(fd)])
"""
    assert json.loads(guest.run(code, last=last).out) == ([0, 1, 2] if last else [0, 1, 2, 3])


def test_whole_process_finalizes_as_cpython_does(guest: Guest, workdir: Path) -> None:
    code = """
import atexit, threading, time
atexit.register(print, "atexit")
class Farewell:
    def __del__(self):
        print("del")
keep = Farewell()
left_open = open("left.txt", "w")
left_open.write("written")
threading.Thread(target=lambda: (time.sleep(0.05), print("thread"))).start()
print("end")
"""
    done = guest.run(code, last=True)
    assert (done.status, done.out, done.err) == (0, b"end\nthread\natexit\ndel\n", b"")
    assert (workdir / "left.txt").read_text() == "written"


def test_unwritable_stdout_is_120(guest: Guest) -> None:
    assert guest.run("import os; print('x'); os.close(1)", last=True).status == 120


def test_fork_that_runs_on_to_the_end(guest: Guest) -> None:
    code = "import os\npid = os.fork()\nif pid: os.waitpid(pid, 0)\nprint('end', pid == 0)"
    done = guest.run(code)
    assert (done.status, done.out) == (0, b"end True\nend False\n")
    assert guest.run("print('alive')").out == b"alive\n"


def test_state_is_kept_in_a_live_sandbox(guest: Guest) -> None:
    guest.run("import os\nx = 41\nos.environ['MINE'] = 'yes'")
    guest.run("raise SystemExit(3)")
    guest.run("1/0")
    done = guest.run("print(x + 1, os.environ['MINE'])")
    assert (done.out, done.lost) == (b"42 yes\n", False)
    assert guest.run("os._exit(5)").lost is True
    assert guest.run("print('x' in globals())").out == b"False\n"


def test_random_differs_between_interpreters(guest: Guest) -> None:
    first = guest.run("import random; print(random.random())", last=True).out
    assert first != guest.run("import random; print(random.random())", last=True).out


def test_rehearsal_leaves_nothing_behind(workdir: Path) -> None:
    guest = Guest(workdir, "--touch")
    try:
        code = "import linecache, os, sys; print(list(linecache.cache), dict(os.environ), sys.stdin.read())"
        done = guest.run(code, stdin=b"in", env={"A": "1"})
        assert done.out == b"['<agent>'] {'A': '1'} in\n"
        assert guest.run("print([n for n in dir() if n[0] != '_'])").out == b"['linecache', 'os', 'sys']\n"
    finally:
        guest.close()


def test_rehearsal_spares_the_first_run_its_page_faults(workdir: Path) -> None:
    def faults(*options: str) -> int:
        guest = Guest(workdir, *options)

        def so_far() -> int:
            return int(Path(f"/proc/{guest.process.pid}/stat").read_text().rpartition(")")[2].split()[7])

        try:
            before = so_far()
            guest.run("print(1)")
            return so_far() - before
        finally:
            guest.close()

    assert faults("--touch") * 2 < faults()


def test_ten_megabytes_of_code(guest: Guest) -> None:
    done = guest.run(b"#" * (10 << 20) + b"\nprint('long')", last=True)
    assert (done.status, done.out) == (0, b"long\n")


def test_commands(guest: Guest, workdir: Path) -> None:
    done = guest.run(["sh", "-c", "echo $A; pwd; ls /proc/self/fd | wc -l; echo e >&2; exit 3"], env={**ENV, "A": "b"})
    assert (done.status, done.out, done.err) == (3, f"b\n{workdir}\n4\n".encode(), b"e\n")
    assert guest.run(["/no/such"]).status == 127
    assert guest.run(["no-such"]).err == b"no-such: No such file or directory\n"
    (workdir / "plain").write_text("x")
    assert guest.run(["./plain"]).status == 126
    assert guest.run(["sh", "-c", "kill -9 $$"]).status == -9
    assert guest.run(["cat"], stdin=b"through").out == b"through"


def test_a_command_keeps_the_interpreter(guest: Guest) -> None:
    guest.run("x = 1")
    guest.run(["true"])
    assert guest.run("print(x)").out == b"1\n"


# --- stdin -----------------------------------------------------------------------------------------------------------


def test_stdin_per_exec(guest: Guest) -> None:
    count = "import sys; print(len(sys.stdin.buffer.read()))"
    assert guest.run(count).out == b"0\n"
    assert guest.run(count, stdin=b"x" * 500_000).out == b"500000\n"
    assert guest.run("print(input())", stdin=b"line one\nrest").out == b"line one\n"
    assert guest.run("import sys; print(repr(sys.stdin.read()))").out == b"''\n"
    assert guest.run(count, stdin=b"y" * 7, last=True).out == b"7\n"


@last_or_live
def test_stdin_that_nobody_reads(guest: Guest, last: bool) -> None:
    assert guest.run("print('done')", stdin=b"z" * 10_000_000, last=last).out == b"done\n"
    assert guest.run("print(1)").out == b"1\n"


# --- interrupt -------------------------------------------------------------------------------------------------------


def test_interrupt_keeps_the_state(guest: Guest) -> None:
    guest.begin("x = 5\nprint('on', flush=True)\nwhile True: pass")
    guest.end(until=b"on\n")
    guest.send({"op": "interrupt"})
    done = guest.end()
    assert (done.status, done.lost) == (130, False)
    assert done.err.endswith(b"KeyboardInterrupt\n")
    guest.send({"op": "interrupt"})  # nothing runs: nothing happens
    assert guest.run("print(x)").out == b"5\n"


# --- output bounds ---------------------------------------------------------------------------------------------------


@last_or_live
def test_output_beyond_the_bound_is_counted(guest: Guest, last: bool) -> None:
    code = "import sys\nfor _ in range(50): sys.stdout.write('x' * (1 << 20))\nsys.stderr.write('e')"
    done = guest.run(code, last=last, output_bytes=1000)
    assert (done.status, len(done.out)) == (0, 1000)
    assert (done.header["out_bytes"], done.header["err_bytes"]) == (50 << 20, 1)
    assert done.header["overflow"] is True


def test_overflow_stop_kills_the_program(guest: Guest) -> None:
    done = guest.run("while True: print('x' * 1000)", overflow="stop", output_bytes=5000)
    assert (done.status, len(done.out), done.header["overflow"]) == (-9, 5000, True)


def test_host_that_does_not_read_does_not_grow_the_agent(guest: Guest) -> None:
    guest.begin("import os\nfor _ in range(1600): os.write(1, b'x' * 65536)", output_bytes=1 << 30)
    size = 0
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        pages = int(Path(f"/proc/{guest.process.pid}/statm").read_text().split()[1])
        size = max(size, pages * os.sysconf("SC_PAGESIZE"))
        time.sleep(0.05)
    assert size < 64 << 20
    assert guest.end().header["out_bytes"] == 1600 * 65536


# --- hostile programs ------------------------------------------------------------------------------------------------


@last_or_live
def test_grandchild_holding_stdout_delays_nothing(guest: Guest, last: bool) -> None:
    code = """
import os, time
if os.fork() == 0:
    os.setsid()
    time.sleep(30)
    os._exit(0)
print("gone")
"""
    begun = time.monotonic()
    done = guest.run(code, last=last)
    assert (done.status, done.out) == (0, b"gone\n")
    assert time.monotonic() - begun < 15


def test_grandchild_that_keeps_printing_delays_nothing(guest: Guest) -> None:
    code = """
import os, time
if os.fork() == 0:
    os.setsid()
    end = time.time() + 30
    while time.time() < end: os.write(1, b"y" * 65536)
    os._exit(0)
"""
    begun = time.monotonic()
    assert guest.run(code, last=True, output_bytes=10).status == 0
    assert time.monotonic() - begun < 15


def test_orphans_are_reaped_while_a_program_runs(guest: Guest) -> None:
    code = """
import os, time
for _ in range(50):
    if os.fork() == 0:
        if os.fork() == 0: os._exit(0)
        os._exit(0)
    os.wait()
print("made", flush=True)
time.sleep(60)
"""
    guest.begin(code)
    guest.end(until=b"made\n")
    deadline = time.monotonic() + TIMEOUT_S
    while len(descendants(guest.process.pid)) > 1:
        assert time.monotonic() < deadline, "zombies are left"
        time.sleep(0.01)


@last_or_live
def test_closing_the_standard_descriptors(guest: Guest, last: bool) -> None:
    done = guest.run("import os\nfor fd in (0, 1, 2): os.close(fd)", last=last)
    assert done.status == 0
    assert guest.run("x = 1").status == 0


def test_closing_everything_loses_the_interpreter(guest: Guest) -> None:
    done = guest.run("import os, time\nos.closerange(0, 100)\ntime.sleep(30)")
    assert (done.status, done.lost) == (-9, True)
    assert guest.run("print('fresh')").out == b"fresh\n"


@pytest.mark.parametrize(
    "forgery",
    [b"garbage", b"fh", b"fh\x00\x09\x00\x00", b"fh\x00\x01\xff\xff", b"fh\x00\x01\x00\x00fh", b"\x00" * 65536],
)
def test_garbage_on_the_private_socket(guest: Guest, forgery: bytes) -> None:
    code = """
import os, time
for name in os.listdir("/proc/self/fd"):
    try:
        if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"): os.write(int(name), FORGERY)
    except OSError: pass
time.sleep(30)
""".replace("FORGERY", repr(forgery))
    done = guest.run(code)
    assert (done.status, done.lost) == (-9, True)
    assert guest.run("print('fresh')").out == b"fresh\n"


def test_garbage_between_execs(guest: Guest) -> None:
    code = "import os, threading, time\n"
    code += "threading.Thread(target=lambda: (time.sleep(0.1), os.write(3, b'junk')), daemon=True).start()"
    assert guest.run(code).status == 0
    deadline = time.monotonic() + TIMEOUT_S
    while descendants(guest.process.pid):
        assert time.monotonic() < deadline, "the interpreter lives on"
        time.sleep(0.02)
    assert guest.run("print('os' in globals())").out == b"False\n"


def test_forged_frames_on_stdout_are_output(guest: Guest) -> None:
    header = b'{"op":"done","id":1,"status":0,"out_bytes":0,"err_bytes":0}'
    frame = FRAME.pack(len(header), 0) + header
    done = guest.run(f"import os\nos.write(1, {frame!r})\nraise SystemExit(3)", last=True)
    assert (done.status, done.out) == (3, frame)


def test_a_stopped_program_leaves_the_agent_responsive(guest: Guest) -> None:
    guest.begin("import os, signal\nprint('on', flush=True)\nos.killpg(0, signal.SIGSTOP)", last=True)
    guest.end(until=b"on\n")
    guest.ident += 1
    guest.send({"op": "list", "id": guest.ident, "count": 10})
    assert guest.receive()[0]["op"] == "reply"


def test_traced_program_that_stops_is_not_taken_for_dead(guest: Guest) -> None:
    code = "import ctypes, os, signal\nctypes.CDLL(None).ptrace(0, 0, 0, 0)\nprint('on', flush=True)\n"
    guest.begin(code + "os.kill(os.getpid(), signal.SIGUSR1)", last=True)
    guest.end(until=b"on\n")
    guest.ident += 1
    guest.send({"op": "list", "id": guest.ident, "count": 10})
    assert guest.receive()[0]["op"] == "reply"


def test_the_agent_is_out_of_reach(guest: Guest) -> None:
    code = f"""
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
pid = os.getppid()
def blocked(name, call):
    try:
        call()
        print(name, "OPEN")
    except OSError as error:
        print(name, "denied")
if os.getuid() == 0:  # root has capabilities here, which no tier leaves it
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
assert pid == {guest.process.pid}
blocked("fd", lambda: os.listdir(f"/proc/{{pid}}/fd"))
blocked("mem", lambda: open(f"/proc/{{pid}}/mem", "rb"))
blocked("environ", lambda: open(f"/proc/{{pid}}/environ", "rb"))
def attach():
    if libc.ptrace(16, pid, 0, 0) != 0: raise OSError
def steal():
    pidfd = libc.syscall(434, pid, 0)
    if libc.syscall(438, pidfd, {guest.sock.fileno()}, 0) < 0: raise OSError
blocked("ptrace", attach)
blocked("pidfd", steal)
"""
    done = guest.run(code, last=True)
    assert done.err == b""
    assert done.out.decode().split("\n")[:-1] == [
        "fd denied", "mem denied", "environ denied", "ptrace denied", "pidfd denied",
    ]  # fmt: skip
    assert dumpable_owner(guest.process.pid)


def dumpable_owner(pid: int) -> bool:
    """Whether /proc/PID belongs to root, as proc(5) says of a process that is not dumpable."""
    return os.stat(f"/proc/{pid}/fd").st_uid == 0


def test_signal_handlers_of_the_agent(guest: Guest) -> None:
    status = dict(
        line.split(":\t", 1)
        for line in Path(f"/proc/{guest.process.pid}/status").read_text().splitlines()
        if ":\t" in line
    )
    assert int(status["SigCgt"], 16) == 1 << (signal.SIGCHLD - 1)


# --- the stream ------------------------------------------------------------------------------------------------------


def test_end_of_stream_ends_agent_and_program(guest: Guest) -> None:
    guest.begin("import time\nprint('on', flush=True)\ntime.sleep(60)", last=True)
    guest.end(until=b"on\n")
    family = descendants(guest.process.pid)
    assert family
    guest.sock.shutdown(socket.SHUT_RDWR)
    assert guest.process.wait(TIMEOUT_S) == 0
    deadline = time.monotonic() + TIMEOUT_S
    while any(alive(pid) for pid in family):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    "frame",
    [
        FRAME.pack(20_000, 0),
        FRAME.pack(2, (1 << 20) + 1) + b"{}",
        FRAME.pack(3, 0) + b"{x}",
        FRAME.pack(2, 0) + b"[]",
        FRAME.pack(2, 0) + b"{}",
        FRAME.pack(14, 0) + b'{"op":"exec" }',
        FRAME.pack(13, 0) + b'{"op":"more"}',
    ],
    ids=["header", "body", "json", "array", "no-op", "fields", "more"],
)
def test_malformed_frame_ends_the_agent(guest: Guest, frame: bytes) -> None:
    guest.sock.sendall(frame)
    assert guest.receive()[0]["op"] == "fatal"
    with pytest.raises(EOFError):
        guest.receive()
    assert guest.process.wait(TIMEOUT_S) == 70


def test_headers_are_written_and_read_as_json() -> None:
    header = {
        "op": "reply",
        "id": 7,
        "message": 'a "quote", \\, é, \x00, \U0001f600, \udc80',
        "error": None,
        "more": True,
    }
    assert json.loads(agent_module._dumps(header)) == header == agent_module._loads(agent_module._dumps(header))
    text = json.dumps({"a": [1, -2.5, {"b": None}], "c": False, "d": "\u2028"}).encode()
    assert agent_module._loads(text) == json.loads(text)
    for bad in (b"", b"{", b"{} x", b'{"a":1,}', b"nul", b'"\n"'):
        with pytest.raises((agent_module.ProtocolError, ValueError)):
            agent_module._loads(bad)


def test_a_second_exec_ends_the_agent(guest: Guest) -> None:
    guest.begin("import time; time.sleep(60)")
    guest.begin("pass")
    with pytest.raises(EOFError):
        while True:
            guest.receive()


def test_more_payload_than_announced_ends_the_agent(guest: Guest) -> None:
    guest.begin("print(1)", size=3)
    assert guest.receive()[0]["op"] == "fatal"


# --- files -----------------------------------------------------------------------------------------------------------


def test_files(guest: Guest, workdir: Path) -> None:
    assert "error" not in guest.ask("write", b"a/b/c.bin", b"abc", offset=0)[0]
    assert "error" not in guest.ask("write", b"a/b/c.bin", b"def", offset=3)[0]
    assert (workdir / "a/b/c.bin").read_bytes() == b"abcdef"
    header, data = guest.ask("read", b"a/b/c.bin", offset=2, length=3)
    assert (header["size"], data) == (6, b"cde")
    _, listing = guest.ask("list", count=100)
    assert sorted(listing.split(b"\0")[:-1])[-1] == b"f6 a/b/c.bin"
    assert len(listing.split(b"\0")) == 4
    header, listing = guest.ask("list", count=2)
    assert header["truncated"] is True
    assert listing.count(b"\0") == 2
    assert "error" not in guest.ask("remove", b"a")[0]
    assert list(workdir.iterdir()) == []


def test_write_replaces_a_planted_link_and_not_its_target(guest: Guest, workdir: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("mine")
    (workdir / "link").symlink_to(outside)
    (workdir / "folder").symlink_to(tmp_path)
    guest.ask("write", b"link", b"new", offset=0)
    assert outside.read_text() == "mine"
    assert (workdir / "link").read_text() == "new"
    assert guest.ask("write", b"folder/outside", b"new", offset=0)[0]["error"] in (errno.ENOTDIR, errno.ELOOP)
    assert guest.ask("read", b"folder/outside", offset=0, length=9)[0]["error"] in (errno.ENOTDIR, errno.ELOOP)
    assert outside.read_text() == "mine"


def test_read_refuses_what_is_not_regular(guest: Guest, workdir: Path) -> None:
    os.mkfifo(workdir / "fifo")
    (workdir / "link").symlink_to("/etc/passwd")
    (workdir / "folder").mkdir()
    for name, code in (
        (b"fifo", errno.EINVAL),
        (b"link", errno.ELOOP),
        (b"folder", errno.EINVAL),
        (b"no", errno.ENOENT),
    ):
        assert guest.ask("read", name, offset=0, length=9)[0]["error"] == code
    assert guest.ask("write", b"fifo", b"x", offset=1)[0]["error"] in (errno.ENXIO, errno.EINVAL)
    assert guest.ask("write", b"folder", b"x", offset=0)[0]["error"] == errno.EISDIR


@pytest.mark.parametrize("path", [b"/etc/passwd", b"../x", b"a/../../x", b"a//b", b".", b"", b"a\0b"])
def test_paths_that_are_refused(guest: Guest, path: bytes) -> None:
    for operation, fields in (("read", {"offset": 0, "length": 9}), ("write", {"offset": 0}), ("remove", {})):
        assert guest.ask(operation, path, **fields)[0]["error"] == errno.EINVAL


def test_remove_takes_a_tree_deeper_than_any_path(guest: Guest, workdir: Path) -> None:
    code = "import os\nos.mkdir('deep'); os.chdir('deep')\n"
    code += "for _ in range(70):\n    os.mkdir('d' * 100); open('f', 'w').close(); os.chdir('d' * 100)\n"
    assert guest.run(code, last=True).status == 0
    header, _ = guest.ask("list", count=100_000)
    assert header["truncated"] is True
    assert "error" not in guest.ask("remove", b"deep")[0]
    assert list(workdir.iterdir()) == []


def test_remove_follows_no_link(guest: Guest, workdir: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("x")
    (workdir / "tree").mkdir()
    (workdir / "tree/link").symlink_to(outside)
    assert "error" not in guest.ask("remove", b"tree")[0]
    assert (outside / "kept").exists()


# --- displays, the background, terminals -----------------------------------------------------------------------------

HELPER = Path(AGENT).with_name("displays.py").read_bytes()


def rich(guest: Guest, code: str, **fields: Any) -> tuple[Done, bytes]:
    """Run code that may display; its end, and what came over the pipe of displays."""
    guest.ident += 1
    env, body = b"A=1\0", code.encode()
    fields = {"display_bytes": 1 << 20, "last": False, **fields}
    header = {
        "op": "exec", "id": guest.ident, "kind": "code", "name": f"<{guest.ident}>", "output_bytes": 1 << 20,
        "overflow": "truncate", "stdin": False, "env_bytes": len(env), "helper_bytes": len(HELPER), "more": False,
        "size": len(env) + len(HELPER) + len(body), **fields,
    }  # fmt: skip
    guest.send(header, env + HELPER + body)
    pieces = {"out": b"", "err": b"", "display": b""}
    while True:
        header, piece = guest.receive()
        assert header["id"] == guest.ident
        if header["op"] == "done":
            return Done(header, pieces["out"], pieces["err"]), pieces["display"]
        pieces[header["op"]] += piece


@last_or_live
def test_displays_come_over_a_pipe_of_their_own(guest: Guest, last: bool) -> None:
    done, shown = rich(guest, "print('out')\n'value'", last=last)
    assert (done.status, done.out) == (0, b"out\n")
    head, body = FRAME.unpack_from(shown)
    assert json.loads(shown[8 : 8 + head])["types"] == [["text/plain", 7]] and shown[8 + head :] == b"'value'"
    assert len(shown) == 8 + head + body
    done, shown = rich(guest, "import os\nprint([f for f in os.listdir('/proc/self/fd') if int(f) > 4])")
    assert shown == b"" and done.status == 0


def test_displays_are_cut_at_their_budget(guest: Guest) -> None:
    code = "import os\nfds = [int(f) for f in os.listdir('/proc/self/fd') if int(f) > 3]\nend = None\n"
    code += "for fd in fds:\n    try:\n        while True: os.write(fd, b'x' * 65536)\n"
    code += "    except OSError as error: end = error.errno\nprint(end)"
    done, shown = rich(guest, code, display_bytes=300_000)
    assert len(shown) == 300_000 and done.status == 0
    assert rich(guest, "1")[1].endswith(b"1")


def test_plain_execs_know_nothing_of_displays(guest: Guest) -> None:
    assert guest.run("import os\nprint(len(os.listdir('/proc/self/fd')))\n1").out == b"5\n"  # 0 to 3 and the listing
    assert guest.run("display(1)").status == 1


def test_a_command_in_the_background(guest: Guest) -> None:
    guest.begin(["sh", "-c", "echo on; read x; echo $x"], background=True, stdin=True)
    first = guest.ident
    seen = b""
    while seen != b"on\n":
        header, body = guest.receive()
        assert header["id"] == first and header["op"] in ("out", "stdin")
        seen += body
    assert guest.run("print('beside')").out == b"beside\n"
    guest.send({"op": "stdin", "id": first, "more": False}, b"word\n")
    ends = [guest.receive() for _ in range(2)]
    assert ends[0] == ({"op": "out", "id": first}, b"word\n") and ends[1][0]["status"] == 0
    guest.begin(["sleep", "600"], background=True)
    guest.send({"op": "signal", "id": guest.ident, "number": signal.SIGKILL})
    guest.send({"op": "signal", "id": 12345, "number": signal.SIGKILL})
    assert guest.end().status == -signal.SIGKILL


def test_the_folder_of_a_command(guest: Guest, workdir: Path) -> None:
    (workdir / "sub").mkdir()
    guest.ident += 1
    env, folder, arguments = b"A=1\0", b"sub", b"pwd\0"
    header = {
        "op": "exec", "id": guest.ident, "kind": "command", "output_bytes": 1 << 20, "stdin": False, "more": False,
        "env_bytes": len(env), "cwd_bytes": len(folder), "size": len(env + folder + arguments),
    }  # fmt: skip
    guest.send(header, env + folder + arguments)
    assert guest.end().out.endswith(b"/work/sub\n")


@pytest.mark.parametrize(
    "header",
    [
        {"helper_bytes": 100},
        {"helper_bytes": -1},
        {"rows": 24},
        {"rows": 24, "columns": "80"},
        {"helper_bytes": 1, "display_bytes": None},
    ],
)
def test_fields_that_do_not_fit_end_the_agent(guest: Guest, header: dict[str, Any]) -> None:
    fields = {"op": "exec", "id": 1, "kind": "code", "output_bytes": 1, "env_bytes": 0, "size": 5, "more": False}
    guest.send({**fields, **header}, b"12345")
    assert guest.receive()[0]["op"] == "fatal"
