"""Properties that an attack may need of the host, each a question with an answer found by trying."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import resource
import socket
from collections.abc import Callable, Iterable
from pathlib import Path

from fumehood.attacks.procfs import read_text
from fumehood.attacks.stage import host_address

_X32_BIT = 0x40000000
_GETPID_X86_64 = 39


def _socket_opens(family: int, kind: int, protocol: int = 0) -> bool:
    try:
        socket.socket(family, kind, protocol).close()
    except OSError:
        return False
    return True


def _ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def _x32() -> bool:
    if platform.machine() != "x86_64":
        return False
    answer: int = ctypes.CDLL(None).syscall(_X32_BIT | _GETPID_X86_64)
    return answer == os.getpid()


def _ia32() -> bool:
    # The entry is compiled in where the kernel shows this knob; `ia32_emulation=0` on its command line turns it off.
    return (
        platform.machine() == "x86_64"
        and Path("/proc/sys/abi/vsyscall32").exists()
        and "ia32_emulation=0" not in read_text("/proc/cmdline")
    )


def _user_namespaces() -> bool:
    if os.geteuid() == 0:
        return True
    allowed = read_text("/proc/sys/user/max_user_namespaces").strip() not in ("", "0")
    return (
        allowed
        and read_text("/proc/sys/kernel/unprivileged_userns_clone").strip() != "0"
        and read_text("/proc/sys/kernel/apparmor_restrict_unprivileged_userns").strip() != "1"
    )


def _capability(bit: int) -> bool:
    for line in read_text("/proc/self/status").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> bit & 1)
    return False


def _opens(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True


def _devices() -> bool:
    names = ("kvm", "fuse", "net/tun", "loop-control", "mem", "vda", "sda", "nvme0n1", "kmsg")
    return any(_opens(f"/dev/{name}") for name in names)


NEEDS: dict[str, tuple[str, Callable[[], bool]]] = {
    "root": ("the suite run as root", lambda: os.geteuid() == 0),
    "sys_admin": ("CAP_SYS_ADMIN on the host", lambda: _capability(21)),
    "net_raw": ("CAP_NET_RAW on the host", lambda: _capability(13)),
    "sys_nice": ("CAP_SYS_NICE on the host", lambda: _capability(23)),
    "mknod": ("CAP_MKNOD on the host", lambda: _capability(27)),
    "dac_read_search": ("CAP_DAC_READ_SEARCH on the host", lambda: _capability(2)),
    "user_namespaces": ("user namespaces for this user", _user_namespaces),
    "ipv6": ("IPv6 on loopback", _ipv6),
    "host_address": ("an IPv4 address besides loopback", lambda: host_address() is not None),
    "ia32": ("32-bit emulation in the kernel", _ia32),
    "x32": ("the x32 interface in the kernel", _x32),
    "tiocsti": (
        "TIOCSTI allowed (dev.tty.legacy_tiocsti=1)",
        lambda: read_text("/proc/sys/dev/tty/legacy_tiocsti").strip() in ("1", ""),
    ),
    "af_alg": ("AF_ALG sockets", lambda: _socket_opens(socket.AF_ALG, socket.SOCK_SEQPACKET)),
    "af_vsock": ("AF_VSOCK sockets", lambda: _socket_opens(40, socket.SOCK_STREAM)),
    "af_netlink": ("AF_NETLINK sockets", lambda: _socket_opens(socket.AF_NETLINK, socket.SOCK_RAW)),
    "af_xdp": ("AF_XDP sockets", lambda: _socket_opens(44, socket.SOCK_RAW)),
    "io_uring": (
        "io_uring for this user",
        lambda: (
            read_text("/proc/sys/kernel/io_uring_disabled").strip() in (("0", "") if os.geteuid() else ("0", "1", ""))
        ),
    ),
    "bpf": (
        "bpf() for this user",
        lambda: _capability(39) or read_text("/proc/sys/kernel/unprivileged_bpf_disabled").strip() == "0",
    ),
    "perf": (
        "perf_event_open for this user",
        lambda: _capability(38) or read_text("/proc/sys/kernel/perf_event_paranoid").strip() in ("-1", "0", "1", "2"),
    ),
    "devices": ("a device of the host that this user may open", _devices),
    "sysv_ipc": ("System V objects in the kernel", lambda: Path("/proc/sysvipc/shm").exists()),
    "mqueue": ("POSIX message queues in the kernel", lambda: Path("/proc/sys/fs/mqueue").exists()),
    "machine_id": ("a machine-id", lambda: len(read_text("/etc/machine-id").strip()) == 32),
    "cgroup_root": (
        "a writable cgroup",
        lambda: os.access("/sys/fs/cgroup/pids", os.W_OK) or os.access("/sys/fs/cgroup/cgroup.procs", os.W_OK),
    ),
    "rtprio": ("a real-time priority for this user", lambda: resource.getrlimit(resource.RLIMIT_RTPRIO)[1] != 0),
    "keys": ("kernel keyrings", lambda: Path("/proc/keys").exists()),
}


@functools.cache
def missing(need: str) -> str | None:
    """What this host lacks for ``need``, or None if it is there."""
    text, test = NEEDS[need]
    return None if test() else text


def unmet(needs: Iterable[str]) -> str | None:
    """The first missing property as a reason, or None."""
    return next((f"needs {text}" for text in map(missing, needs) if text), None)
