"""System calls prepared ahead, and forks without what only threads need."""

from __future__ import annotations

import errno
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from fumehood.linux import steps as steps_module
from fumehood.linux.steps import AT_FDCWD, Result, Steps, at_once

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="system calls of Linux")


def test_a_result_is_there_for_a_later_call(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 7)
    fd = Result(-1)
    steps = Steps()
    steps.call("openat", AT_FDCWD, os.fsencode(tmp_path / "file"), os.O_RDWR | os.O_CLOEXEC, 0, to=fd)
    steps.call("ftruncate", fd, 3)
    steps.call("close", fd)
    before = os.listdir("/proc/self/fd")
    for _ in range(2):
        steps.run()
    assert (tmp_path / "file").stat().st_size == 3
    assert os.listdir("/proc/self/fd") == before


def test_the_first_that_fails_is_named_and_ends_it(tmp_path: Path) -> None:
    steps = Steps()
    steps.purpose = "disk"
    for name in (b"a", b"b", b"a", b"c"):
        steps.call("mkdirat", AT_FDCWD, os.fsencode(tmp_path) + b"/" + name, 0o700)
    with pytest.raises(FileExistsError, match=r"disk: mkdirat /\S+/a: File exists"):
        steps.run()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_a_call_that_this_machine_lacks_is_refused_when_it_is_added() -> None:
    with pytest.raises(OSError, match="no_such_call") as caught:
        Steps().call("no_such_call")
    assert caught.value.errno == errno.ENOSYS


def test_arguments_of_64_bits_arrive_whole(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        at_once(lambda steps: steps.call("ftruncate", fd, (5 << 32) + 1))
        assert os.fstat(fd).st_size == (5 << 32) + 1
        with pytest.raises(OSError, match="ftruncate"):
            at_once(lambda steps: steps.call("ftruncate", fd, -1))
    finally:
        os.close(fd)


def test_a_structure_is_passed_by_its_address() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    try:
        # The kernel's signal sets are of 64 bits and not the C library's 1024.
        at_once(lambda steps: steps.call("rt_sigprocmask", 0, struct.pack("=Q", 1 << signal.SIGUSR1 - 1), None, 8))
        assert {signal.SIGUSR1, signal.SIGUSR2} <= signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_HOME = str(Path(steps_module.__file__).parents[2])

#: In an interpreter of its own, which has one thread.
FORKS = """
import os, sys
assert "random" not in sys.modules and "threading" not in sys.modules
from fumehood.linux.forks import Forks
from fumehood.linux.namespaces import WAIT_ALL
forks = Forks()
end = forks.listen()
import random, threading
told = []
os.register_at_fork(before=lambda: told.append("before 1"), after_in_parent=lambda: told.append("parent 1"),
                    after_in_child=lambda: told.append("child 1"))
os.register_at_fork(before=lambda: told.append("before 2"), after_in_parent=lambda: told.append("parent 2"),
                    after_in_child=lambda: told.append("child 2"))
end()
os.register_at_fork(after_in_child=lambda: told.append("later"))
def say():
    return f"{told} {random.random()} {threading.active_count()}"
def child(pid):
    read, write = os.pipe()
    if fork() == 0:
        worker = threading.Thread(target=lambda: told.append("thread")); worker.start(); worker.join()
        os.write(write, say().encode()); os._exit(0)
    os.close(write)
    print(os.read(read, 4096).decode(), flush=True)
    os.waitpid(-1, WAIT_ALL)
for fork in (lambda: forks.clone3(0, exit_signal=17)[0], lambda: forks.clone3(0, exit_signal=17)[0], os.fork):
    told.clear(); child(fork); print(told, flush=True)
"""


def test_what_modules_asked_for_is_done_around_a_fork() -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-c", FORKS], env={"PYTHONPATH": _HOME}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    children = [line.rsplit(" ", 2) for line in lines[0::2]]
    for (told, _, count), later in zip(children, ("", "", ", 'later'"), strict=True):
        assert told == f"['before 2', 'before 1', 'child 1', 'child 2'{later}, 'thread']"
        assert count == "1"
    assert len({value for _, value, _ in children}) == 3  # each seeded anew
    assert set(lines[1::2]) == {"['before 2', 'before 1', 'parent 1', 'parent 2']"}


HOOKS = """
import os
from fumehood.linux.forks import Forks
forks = Forks()
end = forks.listen()
def fail(): raise SystemExit("a hook of somebody's")
os.register_at_fork(before=fail, after_in_parent=fail, after_in_child=fail)
end()
pid, _ = forks.clone3(0, exit_signal=17)
if pid == 0:
    os._exit(7)
print(os.waitpid(pid, 0)[1] >> 8)
"""


def test_a_hook_that_raises_takes_nobody_out_of_the_way() -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-c", HOOKS], env={"PYTHONPATH": _HOME}, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "7\n"), done.stderr
