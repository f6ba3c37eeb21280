"""Which system calls a process may make: two seccomp filters, and the small assembler that compiles them.

Theory of operation. Loading a filter costs time for every instruction, so the work is split:

- ``allow_list()`` is long and loaded once, in the template process. It still permits what building a sandbox needs.
- ``seal()`` is short and loaded by each sandbox as its last step. It takes those calls away for ever.

A filter stays with a process and all its descendants and cannot be removed; the kernel runs all of them and obeys the
strictest answer. ``seal()`` therefore says nothing about what ``allow_list()`` has already refused, and is no boundary
without it.

What a refused call answers:

======================================  ===============================================================
another architecture, an x32 number     the process is killed: nothing legitimate makes one here
no such number, or one since Linux 5.1  ENOSYS, so that the caller takes its way for older kernels
``ABSENT``                              ENOSYS for the same reason, though these calls are old
another socket family                   EAFNOSUPPORT, what a kernel without that family says
another socket protocol                 EPROTONOSUPPORT, likewise
``NO_ATTRIBUTES``                       EOPNOTSUPP, what a file system without extended attributes says
anything else                           EPERM
======================================  ===============================================================

Numbers are found by binary search. Since Linux 5.11 the kernel also remembers, per number, that a call is allowed
whatever its arguments, and then runs no filter at all: read, write and futex cost nothing, so only calls whose
arguments are looked at (``ARGUMENTS``) are worth keeping off hot paths.

A filter sees arguments as 64-bit values and never what they point to. Where the kernel itself takes an int (ioctl's
request, a socket family, prctl's option) or drops the upper half (clone's flags), exactly the lower half is compared:
comparing all 64 bits would let a request with a high bit set slip past (CVE-2019-10063).
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from fumehood.linux import syscalls
from fumehood.linux.steps import Steps

# ---------------------------------------------------------------------------------------------------------------------
# What is allowed, grouped by purpose. Names that a machine lacks (aarch64 has no open or fork) are skipped.

ALLOWED = (
    # Files by content: what open() and the descriptor gives.
    "open openat creat close close_range lseek "
    "read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2",
    # Files by content, larger steps: shutil and sqlite3 copy, grow, lock and flush. No sync and syncfs: they flush the
    # disks of the host, which is a load on others.
    "sendfile copy_file_range fcntl flock truncate ftruncate fallocate fadvise64 fsync fdatasync",
    # Files by name. No chroot and no *_by_handle_at: they leave the tree. mknod makes FIFOs and sockets, no devices.
    "stat lstat fstat newfstatat statx statfs fstatfs access faccessat faccessat2 getcwd chdir fchdir getdents64 "
    "mkdir mkdirat rmdir unlink unlinkat rename renameat renameat2 link linkat symlink symlinkat readlink readlinkat "
    "mknod mknodat",
    # Attributes of files. Extended ones are only read (shutil.copy2 and ls must be told "none", not "refused").
    "chmod fchmod fchmodat chown fchown lchown fchownat umask utime utimes utimensat "
    "getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr",
    # Descriptors and waiting on them. No inotify (its limit is per user of the host and so shared with the operator),
    # no splice, tee and vmsplice (Dirty Pipe), no io_setup and io_uring (a second way into every file operation).
    "dup dup2 dup3 pipe pipe2 poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait "
    "eventfd2 timerfd_create timerfd_settime timerfd_gettime ioctl",
    # Memory. Executable mappings stay (ctypes, libffi and compilers need them). No memfd_create: where there is no
    # memory cgroup, an unmapped memfd is memory that neither RLIMIT_AS nor the size of a tmpfs nor a poller sees.
    # No mlock (the limit is 0), mincore (tells what the host has cached), userfaultfd, mbind and move_pages.
    "mmap munmap mprotect mremap madvise msync brk",
    # Processes. clone loses its namespace flags to the seal. No ptrace, process_vm_*, kcmp and pidfd_getfd.
    "clone fork vfork execve execveat exit exit_group wait4 waitid set_tid_address arch_prctl prctl "
    "pidfd_open pidfd_send_signal",
    # Threads and scheduling. Policies are only read: real-time ones would starve the host.
    "futex set_robust_list rseq sched_yield sched_getaffinity sched_setaffinity sched_getparam sched_getscheduler "
    "sched_get_priority_max sched_get_priority_min getcpu getpriority setpriority",
    # Who and what am I. Changing identity is part of the set-up.
    "getpid getppid gettid getuid geteuid getgid getegid getresuid getresgid getgroups getpgid getpgrp getsid "
    "setpgid setsid uname sysinfo getrlimit setrlimit prlimit64 getrusage times personality getrandom",
    # Signals.
    "rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigsuspend rt_sigtimedwait sigaltstack restart_syscall "
    "kill tkill tgkill pause alarm getitimer setitimer",
    # Time is read and waited for, never set.
    "clock_gettime clock_getres clock_nanosleep nanosleep gettimeofday time",
    # Sockets: local ones and, where a namespace or a proxy lets them lead anywhere, IP.
    "socket socketpair bind connect listen accept accept4 getsockname getpeername sendto recvfrom sendmsg recvmsg "
    "sendmmsg shutdown setsockopt getsockopt",
)

# What the template process and a child on its way to being sealed still do: namespaces, mounts, identity, and the
# sealing itself. seal() takes all of it away.
SETUP = (
    "clone3 unshare setns mount umount2 pivot_root open_tree move_mount mount_setattr sethostname setdomainname "
    "setgroups setresgid setresuid capset seccomp landlock_create_ruleset landlock_add_rule landlock_restrict_self"
)

# Old calls that answer ENOSYS, because their callers then do without: coreutils' timeout warns on any other error of
# timer_create, whose timers have a long record of exploited races (CVE-2025-38352).
ABSENT = "timer_create timer_settime timer_gettime timer_getoverrun timer_delete"

# Writing extended attributes and with them ACLs. ``cp -p`` then falls back to chmod, and shutil.copy2 goes on; EPERM
# would make the first fail and ENOSYS the second.
NO_ATTRIBUTES = "setxattr lsetxattr fsetxattr removexattr lremovexattr fremovexattr"

# Calls whose arguments are looked at, by allow_list() and by seal().
ARGUMENTS = ("mmap ioctl socket socketpair setsockopt prlimit64 mknod mknodat personality", "clone prctl")

SOCKET_FAMILIES = {"AF_UNIX": 1, "AF_INET": 2, "AF_INET6": 10}

# ioctl requests of terminals, pipes and descriptors, as inclusive ranges; <asm-generic/ioctls.h>. Left out on purpose:
# TIOCSTI (0x5412) and TIOCLINUX (0x541C) type into the operator's terminal, TIOCSETD (0x5423) loads line disciplines.
IOCTLS = (
    (0x5401, 0x5404),  # TCGETS TCSETS TCSETSW TCSETSF: isatty, termios
    (0x5409, 0x5411),  # TCSBRK TCXONC TCFLSH, TIOCEXCL, TIOCSCTTY TIOCGPGRP TIOCSPGRP TIOCOUTQ: termios, job control
    (0x5413, 0x5414),  # TIOCGWINSZ TIOCSWINSZ: os.get_terminal_size
    (0x541B, 0x541B),  # FIONREAD
    (0x5421, 0x5422),  # FIONBIO: socket.setblocking; TIOCNOTTY
    (0x5429, 0x5429),  # TIOCGSID
    (0x5441, 0x5441),  # TIOCGPTPEER: openpty
    (0x5450, 0x5451),  # FIONCLEX FIOCLEX: os.set_inheritable
    (0x40045431, 0x40045431),  # TIOCSPTLCK: openpty
    (0x80045430, 0x80045430),  # TIOCGPTN: openpty
)

# prctl options below 32 that change or tell nothing beyond the caller: PR_SET_PDEATHSIG PR_GET_PDEATHSIG
# PR_GET_DUMPABLE PR_SET_DUMPABLE PR_SET_NAME PR_GET_NAME PR_GET_SECCOMP PR_CAPBSET_READ PR_GET_SECUREBITS
# PR_GET_TIMERSLACK; <linux/prctl.h>.
PRCTL_OPTIONS = (1, 2, 3, 4, 15, 16, 21, 23, 27, 30)
PR_GET_NO_NEW_PRIVS = 39

# CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET (CLONE_NEWTIME exists only for clone3 and
# unshare), and CLONE_PARENT, with which a program would give the agent children that it never made; <linux/sched.h>.
CLONE_REFUSED = 0x7E020000 | 0x00008000

# AUDIT_ARCH_* of <linux/audit.h>: the ELF machine, 64 bits, little endian.
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_NUMBERS = (0x40000000, 0x7FFFFFFF)  # __X32_SYSCALL_BIT of x86_64

_MAP_HUGETLB = 0x40000
_S_IFCHR = 0x2000  # of the file types, set in S_IFCHR and S_IFBLK, clear in S_IFIFO, S_IFSOCK and S_IFREG
_SOCK_TYPE_MASK = 0xF
_SOCK_TYPES = (1, 2, 5)  # SOCK_STREAM SOCK_DGRAM SOCK_SEQPACKET
_SOCK_PROTOCOLS = (0, 6, 17)  # the default, IPPROTO_TCP, IPPROTO_UDP; so no SCTP, MPTCP, SMC, L2TP or ICMP
_SOL_SOCKET = 1
_SO_FILTERS = (26, 50, 51, 52)  # SO_ATTACH_FILTER, _BPF, _REUSEPORT_CBPF, _REUSEPORT_EBPF: programs for the kernel
_IPPROTO_TCP = 6
_TCP_ULP = 31  # kernel TLS and other layers above TCP
_SOCKET_LEVELS = (0, 41)  # IPPROTO_IP IPPROTO_IPV6


# ---------------------------------------------------------------------------------------------------------------------
# The programs


def allow_list(machine: str | None = None, *, ioctl_types: tuple[int, ...] = ()) -> bytes:
    """The long filter: everything in ``ALLOWED`` and ``SETUP``, nothing else. Loaded once, before sandboxes are made.

    ``machine`` is as ``uname -m`` says; None is this one. ``ioctl_types`` are bytes that stand for whole drivers, of
    which every request is allowed besides :data:`IOCTLS` (_IOC_TYPE of <asm-generic/ioctl.h>). Returns the program as
    ``struct sock_filter[]``. Raises OSError (ENOTSUP) for a machine without a table of numbers.
    """
    known = syscalls.numbers(machine)
    machine = machine or os.uname().machine
    answers = dict.fromkeys(range(max(known.values()) + 1), "enosys")
    for name, number in known.items():
        if number < syscalls.FIRST_COMMON and name not in ABSENT.split():
            answers[number] = "eopnotsupp" if name in NO_ATTRIBUTES.split() else "eperm"
    for name in [*_names(ALLOWED), *SETUP.split()]:
        if name in known:
            answers[known[name]] = name if name in ARGUMENTS[0].split() else "allow"
    steps = [(number, answers[number]) for number in sorted(answers)]
    steps.append((steps[-1][0] + 1, "enosys"))
    if machine == "x86_64":
        steps += [(_X32_NUMBERS[0], "kill"), (_X32_NUMBERS[1] + 1, "enosys")]

    program = _Program()
    program.load(_ARCH)
    program.jump(_JEQ, _AUDIT_ARCH[machine], None, "kill")
    program.load(_NUMBER)
    program.search(steps)
    _check_mmap(program)
    _check_ioctl(program, ioctl_types)
    _check_socket(program)
    _check_setsockopt(program)
    _check_prlimit(program)
    if "mknod" in known:
        program.label("mknod")
        program.load(_argument(1))
        program.always("mode")
    program.label("mknodat")
    program.load(_argument(2))
    program.label("mode")
    program.jump(_JSET, _S_IFCHR, "eperm", "allow")
    program.label("personality")  # only to ask for it, or to set the ordinary one
    program.load(_argument(0))
    program.member((0, 0xFFFFFFFF), "allow", "eperm")
    return program.finish("allow", "eperm", "enosys", "eopnotsupp", "eafnosupport", "eprotonosupport", "kill")


def seal(
    machine: str | None = None, *, keep: tuple[str, ...] = (), prctl_options: tuple[int, ...] = (PR_GET_NO_NEW_PRIVS,)
) -> bytes:
    """The short filter that each sandbox loads last, on top of ``allow_list()``: no more of ``SETUP``, no namespaces
    by clone, a few harmless prctl options.

    ``keep`` names calls of ``SETUP`` that stay, and ``prctl_options`` are allowed besides ``PRCTL_OPTIONS``: both for a
    program that seals itself further. Machine, result and errors as for ``allow_list()``. The calls that
    ``allow_list()`` refuses anyway are left to whichever neighbour makes the program shorter.
    """
    known = syscalls.numbers(machine)
    answers = {known[name]: "allow" for name in _names(ALLOWED) if name in known}
    for name in SETUP.split():
        if name in keep:
            answers[known[name]] = "allow"
            continue
        answers[known[name]] = "eperm" if known[name] < syscalls.FIRST_COMMON else "enosys"
    answers.update((known[name], name) for name in ARGUMENTS[1].split())

    program = _Program()
    program.load(_NUMBER)
    program.search([(0, answers[min(answers)]), *sorted(answers.items())])
    program.label("clone")
    program.load(_argument(0))
    program.jump(_JSET, CLONE_REFUSED, "eperm", "allow")
    program.label("prctl")
    program.load(_argument(0))
    for option in prctl_options:
        program.jump(_JEQ, option, "allow", None)
    program.member_of_bits(PRCTL_OPTIONS, "allow", "eperm")
    return program.finish("allow", "eperm", "enosys")


def load(steps: Steps, program: bytes, *, tsync: bool = False) -> None:
    """Add the step that installs ``program`` on the calling thread, or with ``tsync`` on every thread of the process.

    Needs no_new_privs or CAP_SYS_ADMIN. It fails with EACCES without either, EINVAL for a program the kernel refuses,
    ESRCH when ``tsync`` finds a thread with a filter of its own, ENOMEM when the filters of a process exceed 32,768
    instructions together.
    """
    flags = _TSYNC | _TSYNC_ESRCH if tsync else 0
    steps.call("seccomp", _SET_MODE_FILTER, flags, _SockFprog(len(program) // 8, program))


def allowed(machine: str | None = None) -> tuple[str, ...]:
    """Names of the calls that this machine has and both filters together let through, some of them by argument.

    Raises OSError (ENOTSUP) for a machine without a table of numbers.
    """
    known = syscalls.numbers(machine)
    return tuple(name for name in _names(ALLOWED) if name in known)


def describe() -> str:
    """One line for a receipt: what the two filters allow on this machine. Raises OSError (ENOTSUP) like allowed()."""
    names = allowed()
    checked = sum(name in names for name in _names(ARGUMENTS))
    return (
        f"{len(names)} of {len(syscalls.numbers())} calls allowed, {checked} of them by argument; "
        f"sockets {' '.join(SOCKET_FAMILIES)}; other architectures killed"
    )


def _names(groups: tuple[str, ...]) -> list[str]:
    return " ".join(groups).split()


# ---------------------------------------------------------------------------------------------------------------------
# The checks of arguments in allow_list()


def _check_mmap(program: _Program) -> None:
    # Huge pages reserved by the host belong to no memory cgroup. All else is allowed: protections and the other flags
    # are bounded by the address space and memory limits.
    program.label("mmap")
    program.load(_argument(3))
    program.jump(_JSET, _MAP_HUGETLB, "eperm", "allow")


def _check_ioctl(program: _Program, types: tuple[int, ...]) -> None:
    program.label("ioctl")
    program.load(_argument(1))
    if types:
        program.mask(0xFF00)
        for kind in types:
            program.jump(_JEQ, kind << 8, "allow", None)
        program.load(_argument(1))
    steps = [(0, "eperm")]
    for first, last in IOCTLS:
        steps += [(first, "allow"), (last + 1, "eperm")]
    program.search(steps)


def _check_socket(program: _Program) -> None:
    program.label("socket")
    program.label("socketpair")
    program.load(_argument(0))
    program.member(tuple(SOCKET_FAMILIES.values()), "type", "eafnosupport")
    program.label("type")
    program.load(_argument(1))
    program.mask(_SOCK_TYPE_MASK)
    program.member(_SOCK_TYPES, "protocol", "eperm")
    program.label("protocol")
    program.load(_argument(2))
    program.member(_SOCK_PROTOCOLS, "allow", "eprotonosupport")


def _check_setsockopt(program: _Program) -> None:
    program.label("setsockopt")
    program.load(_argument(1))
    program.jump(_JEQ, _SOL_SOCKET, "option", None)
    program.jump(_JEQ, _IPPROTO_TCP, "option of TCP", None)
    program.member(_SOCKET_LEVELS, "allow", "eperm")
    program.label("option")
    program.load(_argument(2))
    program.member(_SO_FILTERS, "eperm", "allow")
    program.label("option of TCP")
    program.load(_argument(2))
    program.member((_TCP_ULP,), "eperm", "allow")


def _check_prlimit(program: _Program) -> None:
    # Only the caller's own limits: the agent has the same uid, and a program could otherwise choke it.
    program.label("prlimit64")
    program.load(_argument(0))
    program.member((0,), "allow", "eperm")


# ---------------------------------------------------------------------------------------------------------------------
# The assembler: classic BPF as in <linux/bpf_common.h>, answers as in <linux/seccomp.h>

_LD_ABS, _LD_IMM, _AND, _LSH_X, _RET, _TAX = 0x20, 0x00, 0x54, 0x6C, 0x06, 0x07
_JEQ, _JGE, _JSET = 0x15, 0x35, 0x45

# Stands here besides in the tables, since building those in each sandbox would take ten times as long as the call.
_SET_MODE_FILTER, _TSYNC, _TSYNC_ESRCH = 1, 1, 1 << 4

_RETURNS = {
    "allow": 0x7FFF0000,
    "kill": 0x80000000,  # the whole process
    "eperm": 0x00050000 | errno.EPERM,
    "enosys": 0x00050000 | errno.ENOSYS,
    "eopnotsupp": 0x00050000 | errno.EOPNOTSUPP,
    "eafnosupport": 0x00050000 | errno.EAFNOSUPPORT,
    "eprotonosupport": 0x00050000 | errno.EPROTONOSUPPORT,
}

_NUMBER, _ARCH = 0, 4  # offsets in struct seccomp_data


def _argument(index: int) -> int:
    """Offset in struct seccomp_data of the lower half of an argument, on a little-endian machine."""
    return 16 + 8 * index


class _SockFprog(ctypes.Structure):
    """struct sock_fprog of <linux/filter.h>."""

    _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.c_char_p))


class _Program:
    """Instructions with labels still to be placed. Jumps lead forward, at most 255 instructions, as BPF has it.

    A target is a label's name, or None for the next instruction.
    """

    def __init__(self) -> None:
        self._code: list[tuple[int, str | None, str | None, int]] = []
        self._labels: dict[str, int] = {}

    def label(self, name: str) -> None:
        self._labels[name] = len(self._code)

    def load(self, offset: int) -> None:
        self._code.append((_LD_ABS, None, None, offset))

    def mask(self, bits: int) -> None:
        self._code.append((_AND, None, None, bits))

    def jump(self, test: int, value: int, yes: str | None, no: str | None) -> None:
        self._code.append((test, yes, no, value))

    def always(self, target: str) -> None:
        self.jump(_JEQ, 0, target, target)

    def member(self, values: tuple[int, ...], yes: str, no: str) -> None:
        """Is the loaded value one of ``values``? One comparison for each."""
        for value in values[:-1]:
            self.jump(_JEQ, value, yes, None)
        self.jump(_JEQ, values[-1], yes, no)

    def member_of_bits(self, values: tuple[int, ...], yes: str, no: str) -> None:
        """The same for values below 32, in five instructions: is bit ``value`` set in a constant?"""
        self.jump(_JGE, 32, no, None)
        self._code.append((_TAX, None, None, 0))
        self._code.append((_LD_IMM, None, None, 1))
        self._code.append((_LSH_X, None, None, 0))
        self.jump(_JSET, sum(1 << value for value in values), yes, no)

    def search(self, steps: list[tuple[int, str]]) -> None:
        """Binary search of the loaded value in ``steps``: ascending (first value, target), the first one from 0 on."""
        changes = [step for i, step in enumerate(steps) if i == 0 or step[1] != steps[i - 1][1]]
        self._search(changes)

    def _search(self, steps: list[tuple[int, str]]) -> None:
        if len(steps) == 1:
            self.always(steps[0][1])
            return
        middle = len(steps) // 2
        left, right = steps[:middle], steps[middle:]
        far = f">= {right[0][0]:#x} of {len(self._code)}"
        self.jump(_JGE, right[0][0], right[0][1] if len(right) == 1 else far, left[0][1] if len(left) == 1 else None)
        if len(left) > 1:
            self._search(left)
        if len(right) > 1:
            self.label(far)
            self._search(right)

    def finish(self, *returns: str) -> bytes:
        """The program with one return for each name in ``returns`` and every jump resolved."""
        for name in returns:
            self.label(name)
            self._code.append((_RET, None, None, _RETURNS[name]))
        return b"".join(
            struct.pack("=HBBI", test, self._distance(at, yes), self._distance(at, no), value)
            for at, (test, yes, no, value) in enumerate(self._code)
        )

    def _distance(self, at: int, target: str | None) -> int:
        return 0 if target is None else self._labels[target] - at - 1
