"""Group C: the host's kernel, reached by calls that a program has no business with. Reachability only, no exploit."""

from __future__ import annotations

import signal

from fumehood.attacks import watch
from fumehood.attacks.model import Attack
from fumehood.attacks.stage import python
from fumehood.model import Boundary

_G = "kernel"

_HOLD_FD = """
keep = []
with trying:
    keep.append({call})
hold()
"""


def _unshares(ident: str, kind: str, flag: int, *needs: str) -> Attack:
    return Attack(
        ident, _G, f"unshare: a {kind} namespace of its own",
        f"""
with trying:
    call("unshare", {flag:#x})
hold()
""",
        watch.left_namespace(kind), "CVE-2022-0185", needs=needs, proves=("seccomp",) if kind == "user" else (),
        throwaway=kind == "mnt",
    )  # fmt: skip


def _holds(
    ident: str, title: str, call: str, link: str, source: str, *needs: str, proves: tuple[str, ...] = ()
) -> Attack:
    return Attack(
        ident, _G, title, _HOLD_FD.format(call=call), watch.holds_open(link), source, needs=needs, proves=proves,
    )  # fmt: skip


def _family(ident: str, name: str, number: int, kind: int, protocol: int, source: str, *needs: str) -> Attack:
    return Attack(
        ident, _G, f"a socket of the family {name}",
        _HOLD_FD.format(call=f"socket.socket({number}, {kind}, {protocol})"),
        watch.holds_socket(number), source, needs=needs, proves=("seccomp",),
    )  # fmt: skip


# Machine code: eax = 172 (prctl of i386), ebx = PR_SET_NAME, ecx = a pointer in the low 4 GiB; int 0x80.
_IA32 = """
area = libc.mmap
area.restype = ctypes.c_void_p
low = area(None, 4096, 7, 0x62, -1, 0)  # private, anonymous, MAP_32BIT; readable, writable, executable
if low in (None, ctypes.c_void_p(-1).value):
    raise SystemExit("no low memory")
ctypes.memmove(low + 256, b"fh-ia32\\0", 8)
code = b"\\x53\\xb8\\xac\\0\\0\\0\\xbb\\x0f\\0\\0\\0\\xb9" + struct.pack("=I", low + 256) + b"\\xcd\\x80\\x5b\\xc3"
ctypes.memmove(low, code, len(code))
ctypes.CFUNCTYPE(None)(low)()
time.sleep(1)
"""

ATTACKS = (
    Attack(
        "C2", _G, "a call by the 32-bit entry, which another table of numbers serves", _IA32,
        watch.named("fh-ia32"), "CVE-2009-0835", proves=("seccomp",), needs=("ia32",),
    ),
    Attack(
        "C2b", _G, "a call by its x32 number",
        """
libc.syscall(ctypes.c_long(0x40000000 | 157), 15, ctypes.c_char_p(b"fh-x32"), 0, 0, 0)
time.sleep(1)
""",
        watch.named("fh-x32"), "seccomp(2), NOTES", proves=("seccomp",), needs=("x32",),
    ),
    _unshares("C3", "user", 0x10000000, "user_namespaces"),
    _unshares("C3b", "net", 0x40000000, "sys_admin"),
    _unshares("C3c", "mnt", 0x00020000, "sys_admin"),
    _unshares("C3d", "ipc", 0x08000000, "sys_admin"),
    _unshares("C3e", "cgroup", 0x02000000, "sys_admin"),
    Attack(
        "C3f", _G, "clone with a user namespace of its own",
        """
pid = -1
with trying:
    pid = syscall("clone", 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0)
if pid > 0:
    os.waitpid(pid, 0)
hold()
""",
        watch.left_namespace("user"), "CVE-2022-0185", needs=("user_namespaces",), proves=("seccomp",),
    ),
    Attack(
        "C3g", _G, "clone3 with a user namespace of its own",
        """
arguments = ctypes.create_string_buffer(struct.pack("=11Q", 0x10000000, 0, 0, 0, signal.SIGCHLD, *[0] * 6))
pid = -1
with trying:
    pid = syscall("clone3", arguments, 88)
if pid > 0:
    os.waitpid(pid, 0)
hold()
""",
        watch.left_namespace("user"), "moby issue 42680 (clone3 and flags)", needs=("user_namespaces",),
        proves=("seccomp",),
    ),
    Attack(
        "C3h", _G, "setns into the namespaces of another process of the host",
        """
with trying:
    call("unshare", 0x08000000)  # so that there is another IPC namespace to come back from
for path in ("/proc/%d/ns/ipc" % T.bystander, "/proc/1/ns/ipc"):
    with trying:
        call("setns", os.open(path, os.O_RDONLY), 0)
        mark("fh-entered")
        time.sleep(1)
        break
""",
        watch.named("fh-entered"), "CVE-2024-21626", needs=("sys_admin",),
    ),
    _holds(
        "C5", "bpf", 'syscall("bpf", 0, ctypes.create_string_buffer(struct.pack("=4I", 2, 4, 4, 1), 128), 128)',
        "bpf-map", "CVE-2021-3490", "bpf", proves=("seccomp",),
    ),
    _holds(
        "C5b", "perf_event_open",
        'syscall("perf", ctypes.create_string_buffer(struct.pack("=2IQ", 1, 112, 0) + bytes(24) + '
        'struct.pack("=Q", 0x61), 112), 0, -1, -1, 0)',
        r"\[perf_event\]", "CVE-2013-2094", "perf", proves=("seccomp",),
    ),
    _holds("C5c", "userfaultfd", 'syscall("userfaultfd", 1)', "userfaultfd", "CVE-2021-22555 technique",
         proves=("seccomp",)),
    _holds(
        "C5d", "io_uring_setup", 'syscall("io_uring_setup", 8, ctypes.create_string_buffer(120))', "io_uring",
        "CVE-2022-29582", "io_uring", proves=("seccomp",),
    ),
    _holds("C5e", "fanotify_init", 'libc.fanotify_init(0x8, 0) if libc.fanotify_init(0x8, 0) > 0 else None', "fanotify",
           "docker default profile", "sys_admin"),
    Attack(
        "C6", _G, "ptrace on another process of the host",
        """
with trying:
    syscall("ptrace", 0x4206, T.bystander, 0, 0)  # PTRACE_SEIZE: does not stop it
hold()
""",
        watch.traced_bystander(), "docker default profile",
    ),
    Attack(
        "C6b", _G, "ptrace between the program's own processes",
        """
child = os.fork()
if child == 0:
    time.sleep(8)
    os._exit(0)
with trying:
    syscall("ptrace", 0x4206, child, 0, 0)
hold()
""",
        watch.traced_own(), "CVE-2019-13272", proves=("seccomp",),
    ),
    Attack(
        "C6c", _G, "the memory of the process that started the program, opened for writing",
        """
keep = []
for pid in [os.getppid(), *others()]:
    with trying:
        keep.append(os.open("/proc/%d/mem" % pid, os.O_RDWR))
hold()
""",
        watch.holds_open(r"^/proc/\d+/mem"), "CVE-2012-0056",
    ),
    Attack(
        "C6e", _G, "the memory of the process that started the program, opened for reading",
        """
keep = []
for pid in [os.getppid(), *others()]:
    with trying:
        keep.append(os.open("/proc/%d/mem" % pid, os.O_RDONLY))
hold()
""",
        watch.holds_open(r"^/proc/\d+/mem"), "CVE-2012-0056", proves=("undumpable",),
    ),
    Attack(
        "C7", _G, "the host's name changed",
        """
name = T.token.encode()
with trying:
    call("sethostname", name, len(name))
hold()
""",
        watch.hostname_is_token(), needs=("sys_admin",), throwaway=True,
    ),
    Attack(
        "C7b", _G, "a real-time scheduling policy",
        """
with trying:
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
hold()
""",
        watch.realtime(), needs=("sys_nice",),
    ),
    Attack(
        "C7c", _G, "a better priority than the supervisor's",
        """
with trying:
    os.setpriority(os.PRIO_PROCESS, 0, -10)
hold()
""",
        watch.favoured(), needs=("sys_nice",),
    ),
    _family("C8", "AF_ALG", 38, 5, 0, "CVE-2026-31431 class (af_alg)", "af_alg"),
    _family("C8b", "AF_VSOCK", 40, 1, 0, "CVE-2021-26708", "af_vsock"),
    _family("C8c", "AF_PACKET", 17, 3, 0, "CVE-2020-14386", "net_raw"),
    _family("C8d", "AF_NETLINK", 16, 3, 0, "CVE-2022-34918", "af_netlink"),
    _family("C8e", "AF_XDP", 44, 3, 0, "docker default profile", "af_xdp"),
    Attack(
        "C10", _G, "keys typed into the supervisor's terminal (TIOCSTI)",
        """
with trying:
    terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)
    for letter in T.token[:4]:
        fcntl.ioctl(terminal, 0x5412, letter.encode())
hold()
""",
        watch.typed(), "CVE-2017-5226", Boundary.LIMITS, needs=("tiocsti",), terminal=True,
    ),
    Attack(
        "C12", _G, "the limits of another process of the host changed",
        """
with trying:
    resource.prlimit(T.bystander, resource.RLIMIT_NOFILE, (64, 64))
""",
        watch.bystander_changed(),
    ),
    Attack(
        "C13", _G, "a signal to a process of the host, by its number",
        """
with trying:
    os.kill(T.bystander, signal.SIGUSR1)
time.sleep(0.1)
""",
        watch.signalled(signal.SIGUSR1), proves=("pid_ns",),
    ),
    Attack(
        "C13b", _G, "a signal to the whole process group, kill(0)",
        """
with trying:
    os.kill(0, signal.SIGWINCH)
time.sleep(0.1)
""",
        watch.signalled(signal.SIGWINCH), "setsid(2)", Boundary.LIMITS,
    ),
    Attack(
        "C13c", _G, "a signal to every process that there is, kill(-1)",
        """
with trying:
    os.kill(-1, signal.SIGURG)
time.sleep(0.1)
""",
        watch.signalled(signal.SIGURG), alone=True,
    ),
    Attack(
        "C13d", _G, "a signal to a process of the host, through a pidfd",
        """
with trying:
    syscall("pidfd_send_signal", syscall("pidfd_open", T.bystander, 0), signal.SIGUSR1, None, 0)
time.sleep(0.1)
""",
        watch.signalled(signal.SIGUSR1),
    ),
    Attack(
        "C16", _G, "a setting of the process that the kernel keeps, changed through /proc",
        """
for pid in [os.getppid(), os.getpid()]:
    with trying, open("/proc/%d/oom_score_adj" % pid, "w") as file:
        file.write("777")
hold()
""",
        watch.oom_score("777"), only="jail", proves=("landlock",),
    ),
    Attack(
        "C18", _G, "personality: memory that is readable becomes executable",
        """
with trying:
    call("personality", 0x0400000)
hold()
""",
        watch.personality(), "docker default profile", proves=("seccomp",),
    ),
    Attack(
        "C20", _G, "memory locked, so that it can never be swapped out",
        """
with trying:
    call("mlock", ctypes.create_string_buffer(8192), 4096)
hold()
""",
        watch.locked_memory(), proves=(),
    ),
    Attack(
        "C22", _G, "a key left in the user's keyring, which outlives the run",
        """
with trying:
    syscall("add_key", ctypes.c_char_p(b"user"), ctypes.c_char_p(T.token.encode()), ctypes.c_char_p(b"x"), 1, -4)
time.sleep(0.1)
""",
        watch.key_left(), "CVE-2016-0728", needs=("keys",),
    ),
    Attack(
        "C24", _G, "a lock on a file of the runtime, seen by whoever shares the file",
        f"""
file = open(os.path.realpath({python()!r}), "rb")
with trying:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
hold()
""",
        watch.lock_seen(python), "covert channel; every tier that shares files of the host has it",
        Boundary.USER_KERNEL,
    ),
)  # fmt: skip
