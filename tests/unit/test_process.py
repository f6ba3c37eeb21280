"""What /proc and pidfds say, checked on children of the test."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from fumehood.linux import process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")

MiB = 1 << 20
GONE = 1 << 22  # one more than the greatest pid (PID_MAX_LIMIT)


@contextlib.contextmanager
def child(code: str) -> Iterator[tuple[int, list[str]]]:
    """A Python that runs ``code``, prints one line and waits; its pid and the words of that line."""
    argv = [sys.executable, "-I", "-S", "-c", f"import os, sys, time\n{code}\nsys.stdin.read()"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as running:
        assert running.stdout
        try:
            yield running.pid, running.stdout.readline().decode().split()
        finally:
            running.kill()


READY = "print('ready', flush=True)"


def test_a_process_is_named_by_pid_and_start_time() -> None:
    with child(READY) as (pid, _):
        start = process.start_time(pid)
        assert start >= process.start_time(os.getpid())
        assert process.alive(pid, start)
        assert not process.alive(pid, start + 1)
    assert not process.alive(pid, start)
    with pytest.raises(ProcessLookupError):
        process.start_time(GONE)


def test_a_zombie_is_not_alive_and_a_strange_name_does_not_confuse() -> None:
    with child("open('/proc/self/comm', 'w').write(') R 1 ('); print('ready', flush=True)") as (pid, _):
        start = process.start_time(pid)
        assert process.alive(pid, start)
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert process.start_time(pid) == start and not process.alive(pid, start)


FAMILY = """
import threading
r, w = os.pipe()
def parent():
    pid = os.fork()
    if pid == 0:
        os.write(w, b'%d ' % os.getpid())
        if os.fork() == 0:
            os.write(w, b'%d ' % os.getpid())
        time.sleep(600)
def single():
    if os.fork() == 0:
        os.write(w, b'%d ' % os.getpid())
        time.sleep(600)
parent()
words = os.read(r, 99)
while len(words.split()) < 2: words += os.read(r, 99)
def forking():
    single()
    time.sleep(600)
threading.Thread(target=forking, daemon=True).start()
print((words + os.read(r, 99)).decode(), flush=True)
"""


@pytest.mark.parametrize("by_scan", [False, True])
def test_descendants_of_every_thread_and_generation(monkeypatch: pytest.MonkeyPatch, by_scan: bool) -> None:
    if by_scan:
        monkeypatch.setattr(process, "_has_children_files", lambda: False)
    elif not process._has_children_files():
        pytest.skip("a kernel without CONFIG_PROC_CHILDREN")
    with child(FAMILY) as (pid, words):
        family = list(map(int, words))
        try:
            found = process.descendants(pid)
            assert sorted(found) == sorted(family) and len(found) == 3
            assert found.index(family[0]) < found.index(family[1])  # a parent before its child
            usage = process.tree_usage(pid)
            assert (usage.count, usage.threads) == (4, 5)
        finally:
            for member in family:
                os.kill(member, signal.SIGKILL)
    assert process.descendants(GONE) == []


def test_tree_usage_adds_up_time_and_memory_of_children_dead_and_alive() -> None:
    code = """
def burn(seconds):
    while time.process_time() < seconds: pass
pid = os.fork()
if pid == 0:
    burn(0.3); os._exit(0)
os.waitpid(pid, 0)
pid = os.fork()
if pid == 0:
    data = bytearray(os.urandom(1)) * (40 << 20)
    print(os.getpid(), flush=True)
    time.sleep(600)
"""
    with child(code) as (pid, words):
        usage = process.tree_usage(pid)
        os.kill(int(words[0]), signal.SIGKILL)
    assert usage.count == 2
    assert 0.25 < usage.cpu_s < 10
    assert 40 * MiB < usage.resident_bytes < 100 * MiB


def test_a_cpu_clock_counts_what_is_less_than_a_tick_and_threads_that_have_ended() -> None:
    code = """
import threading
def burn():
    end = time.thread_time() + 0.004
    while time.thread_time() < end: pass
thread = threading.Thread(target=burn); thread.start(); thread.join()
print(time.process_time_ns(), flush=True)
"""
    with child(code) as (pid, words):
        assert 0.004 < int(words[0]) / 1e9 <= process.cpu_clock(pid) < int(words[0]) / 1e9 + 1
        assert process.cpu_clock(pid) <= process.tree_usage(pid).cpu_s


def test_tree_usage_counts_shared_memory_and_threads() -> None:
    code = """
import mmap, threading
shared = mmap.mmap(-1, 30 << 20)
for at in range(0, len(shared), 4096): shared[at] = 1
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
print('ready', flush=True)
"""
    with child(code) as (pid, _):
        usage = process.tree_usage(pid)
    assert usage.resident_bytes > 30 * MiB
    assert (usage.count, usage.threads) == (1, 2)


def test_nothing_is_left_of_a_dead_tree() -> None:
    assert process.tree_usage(GONE) == process.TreeUsage(0.0, 0, 0, 0)
    with child(READY) as (pid, _):
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert process.tree_usage(pid).count == 0  # a zombie runs nothing


def test_a_pidfd_knows_its_process_until_it_is_reaped() -> None:
    with child(READY) as (pid, _):
        fd = process.pidfd_open(pid)
        try:
            assert not os.get_inheritable(fd)
            assert process.pid_of_pidfd(fd) == pid
            assert process.kill_pidfd(fd, 0)
            assert process.kill_pidfd(fd)
            assert os.waitpid(pid, 0) == (pid, signal.SIGKILL)
            assert not process.kill_pidfd(fd)
            with pytest.raises(ProcessLookupError):
                process.pid_of_pidfd(fd)
        finally:
            os.close(fd)
    with pytest.raises(OSError):
        process.pidfd_open(GONE)
    with open(os.devnull) as other, pytest.raises(OSError) as caught:
        process.pid_of_pidfd(other.fileno())
    assert caught.value.errno == errno.EINVAL


def test_status_shows_identity_and_what_was_dropped() -> None:
    me = process.status(os.getpid())
    assert me["Uid"][:3] == os.getresuid() and me["Gid"][:3] == os.getresgid()
    assert set(me["Groups"]) == set(os.getgroups())
    assert me["NSpid"][-1] == os.getpid()
    assert me["Threads"] >= 1
    code = """
import ctypes
prctl = ctypes.CDLL(None).prctl
print(prctl(38, 1, 0, 0, 0), flush=True)  # PR_SET_NO_NEW_PRIVS
"""
    with child(code) as (pid, words):
        assert words == ["0"]
        sealed = process.status(pid)
    assert (sealed["NoNewPrivs"], sealed["Threads"]) == (1, 1)
    same = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "Seccomp", "Seccomp_filters", "Uid", "Gid", "Groups")
    assert [sealed[name] for name in same] == [me[name] for name in same]  # type: ignore[literal-required]
    with pytest.raises(ProcessLookupError):
        process.status(GONE)


def test_status_parses_masks_and_old_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        b"Name:\tx\nUid:\t1\t2\t3\t4\nGid:\t5\t6\t7\t8\nGroups:\t \nNSpid:\t90\t1\nThreads:\t2\n"
        b"CapInh:\t0000000000000000\nCapPrm:\t00000000a80425fb\nCapEff:\t00000000a80425fb\n"
        b"CapBnd:\t000001ffffffffff\nCapAmb:\t0000000000000001\nNoNewPrivs:\t1\nSeccomp:\t2\n"
    )
    monkeypatch.setattr(process, "_read", lambda path: text)
    status = process.status(1)
    assert status["Uid"] == (1, 2, 3, 4) and status["Groups"] == () and status["NSpid"] == (90, 1)
    assert (status["CapEff"], status["CapBnd"], status["CapAmb"]) == (0xA80425FB, (1 << 41) - 1, 1)
    assert (status["Seccomp"], status["Seccomp_filters"]) == (2, None)


def test_namespaces_tell_what_a_child_left() -> None:
    code = """
import ctypes
print(ctypes.CDLL(None, use_errno=True).unshare(0x10000000 | 0x04000000), flush=True)  # CLONE_NEWUSER | CLONE_NEWUTS
"""
    mine = process.namespaces(os.getpid())
    assert mine["pid"] == os.stat("/proc/self/ns/pid").st_ino
    with child(code) as (pid, words):
        if words != ["0"]:
            pytest.skip("user namespaces are not allowed here")
        theirs = process.namespaces(pid)
    assert {kind for kind in mine if mine[kind] != theirs[kind]} == {"user", "uts"}
    with pytest.raises(ProcessLookupError):
        process.namespaces(GONE)


def test_namespaces_without_a_pid_1_yet_are_left_out() -> None:
    code = """
import ctypes
print(ctypes.CDLL(None, use_errno=True).unshare(0x10000000 | 0x20000000), flush=True)  # CLONE_NEWUSER | CLONE_NEWPID
"""
    with child(code) as (pid, words):
        if words != ["0"]:
            pytest.skip("user namespaces are not allowed here")
        theirs = process.namespaces(pid)
    assert "pid" in theirs and "pid_for_children" not in theirs


def test_limits_are_those_of_getrlimit() -> None:
    named = process.limits(os.getpid())
    assert len(named) == 16
    for name in ("cpu", "fsize", "data", "stack", "core", "rss", "nproc", "nofile", "memlock", "as", "msgqueue"):
        assert named[name] == resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}")), name
    code = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (33, 44)); print(1, flush=True)"
    with child(code) as (pid, _):
        assert process.limits(pid)["nofile"] == (33, 44)
    with pytest.raises(ProcessLookupError):
        process.limits(GONE)


def test_mounts_are_parsed_with_their_escapes() -> None:
    text = (
        rb"36 35 98:0 /a\040b /mnt/x\011y\134z rw,noatime shared:1 master:2 - tmpfs my\040tmpfs rw,size=4k" + b"\n"
        b"37 35 0:3 / /proc rw - proc proc rw\n"
        b"broken line\n"
    )
    first, second = process.parse_mountinfo(text)
    assert first == process.MountInfo("/a b", "/mnt/x\ty\\z", ("rw", "noatime"), "tmpfs", "my tmpfs", ("rw", "size=4k"))
    assert (second.mount_point, second.fs_type, second.options) == ("/proc", "proc", ("rw",))


def test_mounts_of_a_live_process() -> None:
    assert any(mount.mount_point == "/proc" and mount.fs_type == "proc" for mount in process.mounts(os.getpid()))
    with pytest.raises(ProcessLookupError):
        process.mounts(GONE)
    with child(READY) as (pid, _):
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(ProcessLookupError):
            process.mounts(pid)


@pytest.mark.parametrize(
    "function",
    [
        process.start_time,
        lambda pid: process.alive(pid, 1),
        process.descendants,
        process.cpu_clock,
        process.tree_usage,
        process.pidfd_open,
        process.pid_of_pidfd,
        lambda fd: process.kill_pidfd(fd, 0),
        process.status,
        process.namespaces,
        process.limits,
        process.mounts,
    ],
)
def test_elsewhere_every_function_says_that_the_system_lacks_it(
    monkeypatch: pytest.MonkeyPatch, function: Callable[[int], object]
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(OSError) as caught:
        function(os.getpid())
    assert caught.value.errno == errno.ENOSYS
