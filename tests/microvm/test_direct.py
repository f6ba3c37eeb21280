"""Single runs by the shortest way: the machine's agent as a process of this host, without a machine.

What is tried is what the way leaves out: the agent is told of the end before the interpreter exits, by way of stderr,
so programs that close it, have it elsewhere or leave it to others must end as they do elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fumehood.guest.agent import FRAME
from fumehood.linux import process
from fumehood.tiers.microvm.direct import ENVIRONMENT, HEAD

AGENT = """
import sys
sys.path.insert(0, sys.argv[1])
from fumehood.guest import agent
from fumehood.tiers.microvm import guest_agent
fd, *spent = map(int, sys.argv[3:])
guest_agent.GuestAgent.spent = tuple(spent)
guest_agent.install()
agent.serve(fd, fd, sys.argv[2], touch=True)
"""
SOURCES = str(Path(sys.modules["fumehood"].__path__[0]).parent)
PATIENCE_S = 20.0


class Guest:
    """The host's ends of an agent."""

    def __init__(self, folder: Path) -> None:
        (folder / "work").mkdir()
        (folder / "peak").write_text("4096\n")
        (folder / "events").write_text("low 0\noom_kill 3\n")
        self.end, its_end = socket.socketpair()
        self.control, its_control = socket.socketpair()
        files = [os.open(folder / name, os.O_RDONLY) for name in ("peak", "events")]
        with its_end, its_control:
            fds = [its_end.fileno(), its_control.fileno(), *files]
            command = [sys.executable, "-I", "-S", "-B", "-c", AGENT, SOURCES, str(folder / "work"), *map(str, fds)]
            self.process = subprocess.Popen(command, pass_fds=fds, start_new_session=True)
        for fd in files:
            os.close(fd)
        self.end.settimeout(PATIENCE_S)
        self.control.settimeout(PATIENCE_S)
        self.data = b""
        assert self.frame()[0]["op"] == "ready"

    def run(self, code: bytes | str, *, env: bytes = b"", output_bytes: int = 1 << 20, stop: bool = False) -> None:
        """Hand a single run over."""
        self.end.sendall(direct(code, env=env, output_bytes=output_bytes, stop=stop))

    def ended(self) -> tuple[dict[str, Any], bytes, bytes]:
        """The end of what runs: the frame that tells it, and its output and errors."""
        came = {"out": b"", "err": b""}
        while True:
            header, body = self.frame()
            if header["op"] == "done":
                return header, came["out"], came["err"]
            came[header["op"]] += body

    def frame(self) -> tuple[dict[str, Any], bytes]:
        """The next one."""
        while True:
            if len(self.data) >= FRAME.size:
                header_bytes, body_bytes = FRAME.unpack_from(self.data)
                end = FRAME.size + header_bytes + body_bytes
                if len(self.data) >= end:
                    frame, self.data = self.data[:end], self.data[end:]
                    return json.loads(frame[FRAME.size : FRAME.size + header_bytes]), frame[end - body_bytes :]
            piece = self.end.recv(1 << 16)
            assert piece, "the agent ended"
            self.data += piece

    def close(self) -> None:
        """Let go: the agent ends when its stream does."""
        left = []
        for pid in process.descendants(self.process.pid):  # which do not end with it: it is no PID 1 here
            with contextlib.suppress(ProcessLookupError):
                left.append(process.pidfd_open(pid))
        self.end.close()
        self.control.close()
        self.process.wait(PATIENCE_S)
        for pidfd in left:
            with contextlib.suppress(ProcessLookupError):
                process.kill_pidfd(pidfd)
            os.close(pidfd)


def direct(
    code: bytes | str, *, env: bytes = b"", output_bytes: int = 1 << 20, stop: bool = False, ident: int = 7
) -> bytes:
    """A single run as a frame."""
    source = code.encode() if isinstance(code, str) else code
    body = HEAD.pack(ident, output_bytes, stop, len("<agent>"), len(env)) + b"<agent>" + env + source
    return FRAME.pack(2, len(body)) + b"{}" + body


@pytest.fixture
def guest(tmp_path: Path) -> Iterator[Guest]:
    made = Guest(tmp_path)
    try:
        yield made
    finally:
        made.close()


def test_it_runs_in_a_fresh_main_with_the_tiers_environment(guest: Guest) -> None:
    guest.run("import os, sys\nprint(__name__, dict(os.environ), sys.stdin.read())\nprint('e', file=sys.stderr)")
    done, out, err = guest.ended()
    assert (done["id"], done["status"], done["out_bytes"]) == (7, 0, len(out))
    assert out.decode() == f"__main__ {ENVIRONMENT} \n" and err == b"e\n"
    assert guest.control.recv(100) == b'{"op":"spent","memory_peak_bytes":4096,"oom_kills":0}\n'


def test_another_environment_is_set(guest: Guest) -> None:
    guest.run("import os, time; print(os.environ['A'], time.tzname[0])", env=b"A=b\0TZ=UTC\0")
    assert guest.ended()[1] == b"b UTC\n"


#: Program -> its status and output, however it treats what it is heard on.
ENDS = {
    "exit code": ("import sys; sys.exit(3)", 3, b""),
    "exception": ("1 / 0", 1, b""),
    "at the end": ("import atexit; atexit.register(print, 'late'); print('first')", 0, b"first\nlate\n"),
    "objects": ("class D:\n def __del__(s): print('gone')\nd = D()", 0, b"gone\n"),
    "os._exit": ("import os; os.write(1, b'x'); os._exit(4)", 4, b"x"),
    "signal": ("import os; os.kill(os.getpid(), 9)", -9, b""),
    "threads": (
        "import threading, time\ndef f(): time.sleep(.2); print('t')\nthreading.Thread(target=f).start()",
        0,
        b"t\n",
    ),
    "all closed": ("import os; os.closerange(3, 4096); print('on')", 0, b"on\n"),
    "output closed": ("import os; os.close(1); os.close(2)", 0, b""),
    "another program": ("import os; os.execv('/bin/sh', ['sh', '-c', 'echo sh; exit 5'])", 5, b"sh\n"),
    "a fork to the end": (
        "import os\npid = os.fork()\nif pid: os.waitpid(pid, 0)\nprint(bool(pid))",
        0,
        b"False\nTrue\n",
    ),
    "a child that stays": ("import os, time\nif not os.fork(): time.sleep(600)\nprint('p')", 0, b"p\n"),
    "a child that stays, alone": (
        "import os, time\nif not os.fork():\n os.close(1); time.sleep(600)\nprint('p')",
        0,
        b"p\n",
    ),
    "stderr closed": ("import os, time; os.close(2); time.sleep(.2); print('on'); raise SystemExit(3)", 3, b"on\n"),
    "stderr elsewhere": (
        "import os; os.dup2(os.open('/dev/null', 1), 2); print('on'); raise SystemExit(4)",
        4,
        b"on\n",
    ),
    "stderr twice": ("import os; os.dup(2); print('on'); raise SystemExit(5)", 5, b"on\n"),
    "not one descriptor more": ("import os; print(os.listdir('/proc/self/fd'))", 0, b"['0', '1', '2', '3']\n"),
}


@pytest.mark.parametrize("name", ENDS)
def test_however_it_ends_it_is_told(name: str, guest: Guest) -> None:
    program, status, output = ENDS[name]
    began = time.monotonic()
    guest.run(program)
    done, out, _ = guest.ended()
    assert (done["status"], out) == (status, output)
    assert time.monotonic() - began < 10


def test_output_is_bounded_and_drained(guest: Guest) -> None:
    guest.run("print('x' * 500_000)", output_bytes=1000)
    done, out, _ = guest.ended()
    assert out == b"x" * 1000 and done["out_bytes"] == 500_001 and done["overflow"]
    guest.run("import os\nwhile True: os.write(1, b'x' * 1000)", output_bytes=1000, stop=True)
    done, out, _ = guest.ended()
    assert done["status"] == -signal.SIGKILL and done["overflow"]


def test_what_was_killed_tells_how_many_for_memory(guest: Guest) -> None:
    guest.run("import os; os.kill(os.getpid(), 9)")
    guest.ended()
    assert b'"oom_kills":3' in guest.control.recv(100)


def test_a_frame_in_pieces_and_a_long_one(guest: Guest) -> None:
    frame = direct("print('pieces')")
    for start in range(0, len(frame), 7):
        guest.end.sendall(frame[start : start + 7])
        time.sleep(0.01)
    assert guest.ended()[1] == b"pieces\n"
    guest.run("# " + "x" * 900_000 + "\nprint('long')")
    assert guest.ended()[1] == b"long\n"


def test_one_after_another_and_other_programs_between(guest: Guest) -> None:
    """Each single run has an interpreter of its own; general execs find theirs as ever."""

    def general(source: bytes) -> bytes:
        header = {"op": "exec", "id": 8, "kind": "code", "name": "n", "last": False, "output_bytes": 1000}
        header |= {"overflow": "truncate", "stdin": False, "env_bytes": 0, "size": len(source)}
        head = json.dumps(header).encode()
        return FRAME.pack(len(head), len(source)) + head + source

    for number in range(3):
        guest.run(f"print({number}, 'left' in globals()); left = 1")
        assert guest.ended()[1] == f"{number} False\n".encode()
    guest.end.sendall(general(b"x = 5"))
    guest.ended()
    guest.end.sendall(general(b"print(x, 'left' in globals())"))
    assert guest.ended()[1] == b"5 False\n"
    guest.run("print(x)")  # in the same interpreter: the host does not do that, and it is no harm
    assert guest.ended()[0]["status"] in (0, 1)
    guest.end.sendall(general(b"print('x' in globals())"))
    assert guest.ended()[1] == b"False\n"


def test_a_second_program_beside_it_ends_the_agent(guest: Guest) -> None:
    guest.run("import time; time.sleep(600)")
    guest.run("print(1)")
    ready, _, _ = select.select([guest.end], [], [], PATIENCE_S)
    assert ready
    header, _ = guest.frame()
    assert header["op"] == "fatal" and "beside another" in header["message"]
