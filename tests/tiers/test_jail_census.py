"""What the kernel still does for a program in the jail: every system call, socket family and folder is tried there."""

# ruff: noqa: E501 - a program of one line stays on one line

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest
from support.needs import need_tier

from fumehood.linux import seccomp, syscalls
from fumehood.model import Limits, MiB, Policy
from fumehood.runner import Runner

#: The promise (SPECIFICATION.md): of the numbers 0 to 379 and those of today's kernels above 423.
REACHABLE_MAX = 200
NUMBERS = [*range(380), *range(424, 472)]

#: Arguments for calls that are looked at: such that the call is let through and does nothing.
ARGUMENTS = {
    "ioctl": (0, 0x5421, 1),  # FIONBIO, from a bad address
    "socket": (1, 1, 0),
    "socketpair": (1, 1, 0, 1),
    "personality": (0xFFFFFFFF,),
    "prctl": (3,),
    "clone": (17,),  # SIGCHLD: a fork
}

#: Each call in a child of its own. Its errno is the child's exit code; a child that hangs or dies has reached it.
CENSUS = """
import ctypes, errno, json, os, signal, sys, time
numbers, arguments = json.loads(sys.stdin.read())
libc = ctypes.CDLL(None, use_errno=True)
DONE, KILLED = 201, -signal.SIGSYS
found = {}
for number in numbers:
    words = [ctypes.c_long(a) for a in (arguments.get(str(number), []) + [0] * 6)[:6]]
    pid = os.fork()
    if pid == 0:
        os.setsid()
        result = libc.syscall(ctypes.c_long(number), *words)
        os._exit(ctypes.get_errno() if result == -1 else DONE)
    deadline = time.monotonic() + 0.5
    while True:
        got, status = os.waitpid(pid, os.WNOHANG)
        if got:
            found[number] = os.waitstatus_to_exitcode(status)
            break
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            found[number] = "hangs"
            break
        time.sleep(0.0002)
print(json.dumps(found))
"""

#: The same numbers by the gates of 32-bit code: ``int 0x80`` and the x32 bit.
GATES = """
import ctypes, json, mmap, os, signal, sys
numbers = json.loads(sys.stdin.read())
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(b"\\x53\\x89\\xf8\\x31\\xdb\\x31\\xc9\\x31\\xd2\\x31\\xf6\\xcd\\x80\\x5b\\xc3")  # push rbx; eax = edi; int 0x80; ret
gate = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
libc = ctypes.CDLL(None)
ended = {}
for how, numbers in (("int 0x80", numbers), ("x32", [n | 0x40000000 for n in numbers])):
    for number in numbers:
        pid = os.fork()
        if pid == 0:
            os.setsid()
            gate(number) if how == "int 0x80" else libc.syscall(ctypes.c_long(number), 0, 0, 0, 0, 0, 0)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        ended.setdefault(how, {}).setdefault(str(code), []).append(number)
print(json.dumps(ended))
"""

SOCKETS = """
import errno, json, os, socket
opened, refused = {}, set()
for family in range(0, 64):
    for kind in (1, 2, 3, 4, 5, 6, 10):
        for protocol in (0, 1, 6, 17, 58, 132, 255, 262):
            try:
                s = socket.socket(family, kind, protocol)
            except OSError as e:
                refused.add(errno.errorcode[e.errno])
            else:
                opened.setdefault(family, set()).add((kind, protocol))
                s.close()
print(json.dumps({f: sorted(k) for f, k in opened.items()}))
"""


@pytest.fixture(scope="module")
def jail() -> Iterator[Runner]:
    need_tier("jail")
    limits = Limits(wall_s=240, cpu_s=240, cpus=2, pids=64, memory_bytes=512 * MiB)
    with Runner(tier="jail", policy=Policy(limits=limits)) as runner:
        yield runner


def test_system_calls(jail: Runner) -> None:
    known = syscalls.numbers()
    names = {number: name for name, number in known.items()}
    arguments = {known[name]: words for name, words in ARGUMENTS.items()}
    result = jail.run(CENSUS, stdin=json.dumps([NUMBERS, arguments]).encode())
    assert result.ok, result.stderr
    found = {int(number): end for number, end in json.loads(result.stdout).items()}
    assert set(found) == set(NUMBERS)
    refused = {number for number, end in found.items() if end in (1, 38, 95, -31)}  # EPERM ENOSYS EOPNOTSUPP SIGSYS
    reachable = {names.get(number, str(number)) for number in found if number not in refused}
    print(f"{len(reachable)} of {len(NUMBERS)} system calls reachable in the jail")
    assert len(reachable) <= REACHABLE_MAX
    allowed = set(seccomp.allowed())
    assert len(allowed) <= REACHABLE_MAX
    # The kernel lets these two past any filter; outside of a probe's trampoline they are SIGILL and ENXIO.
    probes = {name for name in ("uretprobe", "uprobe") if name in reachable}
    assert all(found[known[name]] in (-4, 6) for name in probes)
    # The leader of a session is refused both by the kernel itself.
    leader = {"setsid", "setpgid"}
    assert reachable - probes - leader == {name for name in allowed if known[name] in found} - leader


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the gates of another architecture are x86's")
def test_no_other_gate(jail: Runner) -> None:
    result = jail.run(GATES, stdin=json.dumps(list(range(472))).encode())
    assert result.ok, result.stderr
    for how, ended in json.loads(result.stdout).items():
        assert set(ended) == {"-31"}, f"{how}: not killed by SIGSYS: { {k: v for k, v in ended.items() if k != '-31'} }"


def test_socket_families(jail: Runner) -> None:
    result = jail.run(SOCKETS)
    assert result.ok, result.stderr
    opened = {int(family): kinds for family, kinds in json.loads(result.stdout).items()}
    assert set(opened) == {1, 2, 10}  # AF_UNIX AF_INET AF_INET6
    for family in (2, 10):
        assert {tuple(k) for k in opened[family]} == {(1, 0), (1, 6), (2, 0), (2, 17)}


def test_the_network_is_not_there(jail: Runner) -> None:
    result = jail.run(
        "import socket, errno\n"
        "for address in (('127.0.0.1', 80), ('::1', 80), ('1.1.1.1', 53), ('169.254.169.254', 80)):\n"
        "    s = socket.socket(socket.AF_INET6 if ':' in address[0] else socket.AF_INET)\n"
        "    s.settimeout(3)\n"
        "    try: s.connect(address); print('connected', address)\n"
        "    except OSError as e: print(errno.errorcode.get(e.errno, e))\n"
        "for i in range(1, 10):\n"
        "    try: print('device', socket.if_indextoname(i))\n"
        "    except OSError: pass\n"
        "try: socket.getaddrinfo('example.org', 80); print('resolved')\nexcept OSError: pass\n"
        "for name in ('\\0x', '/run/x', '/var/run/docker.sock'):\n"
        "    s = socket.socket(socket.AF_UNIX)\n"
        "    try: s.connect(name); print('connected', name)\n    except OSError: pass\n"
    )
    # Landlock refuses to connect, or the namespace has no route.
    assert set(result.stdout.split("\n")[:4]) <= {"EACCES", "ENETUNREACH"}
    assert "connected" not in result.stdout and "resolved" not in result.stdout
    assert [line for line in result.stdout.splitlines() if "device" in line] in ([], ["device lo"])


def test_capabilities_and_descriptors_from_inside(jail: Runner) -> None:
    result = jail.run(
        "import os\n"
        "for line in open('/proc/self/status'):\n"
        "    if line.startswith(('Cap', 'NoNewPrivs', 'Seccomp:')): print(line.split()[1].lstrip('0') or 0)\n"
        "print(sorted(os.listdir('/proc/self/fd'))[:-1])\n"
        "print(os.getuid(), os.getgid(), os.getgroups(), os.getpid() != 1)\n"
    )
    *caps, fds, ids = result.stdout.splitlines()
    assert caps == ["0"] * 5 + ["1", "2"]
    assert fds == "['0', '1', '2']"
    assert ids == "1000 1000 [] True"


def test_nothing_but_its_own_folders_can_be_written(jail: Runner) -> None:
    result = jail.run(
        "import json, os\nmade, opened, seen = [], [], 0\n"
        "for folder, folders, files in os.walk('/'):\n"
        "    if folder == '/': folders.remove('proc')\n"
        "    seen += 1\n"
        "    try:\n"
        "        os.mkdir(folder + '/.new'); os.rmdir(folder + '/.new'); made.append(folder)\n"
        "    except OSError: pass\n"
        "    for name in files:\n"
        "        path = f'{folder}/{name}'\n"
        "        if folder.startswith(('/etc', '/opt', '/dev')) or name.endswith('.py'):\n"
        "            try: os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK)); opened.append(path)\n"
        "            except OSError: pass\n"
        "print(json.dumps([made, opened, seen]))\n"
    )
    assert result.ok, result.stderr
    made, opened, seen = json.loads(result.stdout)
    assert seen > 500
    assert sorted(made) == ["/dev/shm", "/tmp", "/work"]
    devices = {"null", "zero", "full", "random", "urandom", "stdin", "stdout", "stderr"}
    assert {f"/dev/{name}" for name in devices} >= set(opened) >= {"/dev/null"}


def test_proc_tells_of_nobody_else(jail: Runner) -> None:
    result = jail.run(
        "import os\nprint(sorted(p for p in os.listdir('/proc')))\n"
        "for path in ('/proc/1/mem', '/proc/1/fd', '/proc/1/environ', '/proc/sys', '/proc/kallsyms', '/proc/sysrq-trigger',"
        " '/sys', '/run', '/var', '/root', '/home', '/boot', '/proc/self/../1/status', '/dev/tty', '/dev/pts/ptmx', '/dev/kmsg'):\n"
        "    if os.path.lexists(path): print('there is', path)\n"
        "print(os.getpid())\n"
    )
    lines = result.stdout.splitlines()
    assert lines[0] == str(sorted([lines[-1], "self", "thread-self"]))
    assert len(lines) == 2, lines


def test_escapes_that_the_filter_must_stop(jail: Runner) -> None:
    """Arguments, not only numbers: new namespaces, another process's memory, ioctl with high bits, raised dumpability."""
    result = jail.run(
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\nlibc.syscall.restype = ctypes.c_long\n"
        "def call(*a):\n"
        "    r = libc.syscall(*[ctypes.c_long(x) for x in a])\n"
        "    return r if r != -1 else -ctypes.get_errno()\n"
        "for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000, 0x80):\n"
        "    assert call(272, flag) < 0, ('unshare', flag)\n"
        "    if flag != 0x80:\n"
        "        r = call(56, flag | 17, 0, 0, 0, 0)\n"
        "        if r == 0: os._exit(0)\n"
        "        assert r == -1, ('clone', flag, r)\n"
        "        r = call(56, flag | 17 | 1 << 40, 0, 0, 0, 0)\n"
        "        if r == 0: os._exit(0)\n"
        "        assert r == -1, ('clone, high bits', flag, r)\n"
        "assert call(16, 0, 0x5412, 0) == -1 and call(16, 0, 0x5412 | 1 << 32, 0) == -1\n"
        "assert call(101, 16, 1, 0, 0) == -1 and call(310, 1, 0, 0, 0, 0, 0) == -1\n"
        "assert call(157, 24, 0, 0, 0, 0) == -1  # PR_CAPBSET_DROP\n"
        "assert call(302, 1, 7, 0, 0) == -1  # prlimit of PID 1\n"
        "print('held')\n"
    ) if os.uname().machine == "x86_64" else jail.run("print('held')")  # fmt: skip
    assert result.stdout == "held\n", result.stderr
