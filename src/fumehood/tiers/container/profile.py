"""The seccomp profile for container runtimes: the allow-list of :mod:`fumehood.linux.seccomp` as JSON.

Engines load it through libseccomp, after everything that needs privileges, right before the container's program is
executed, so it is the sandbox's list alone: nothing of what sets a sandbox up. It is a part of the engine's default
profile (about 340 calls) with the arguments of ioctl, socket, clone and prctl checked as the jail checks them.

Docker, Podman and the runtimes read the same form of it:
https://github.com/opencontainers/runtime-spec/blob/main/config-linux.md#seccomp.

Where libseccomp compares 64 bits, ``SCMP_CMP_MASKED_EQ`` keeps the lower 32: the kernel takes an int there, and a high
bit must neither let a value slip past nor refuse a good one.
"""

from __future__ import annotations

import errno
import itertools
from functools import lru_cache
from typing import Any

from fumehood.linux import seccomp, syscalls

_INT = 0xFFFFFFFF
_ARCHITECTURES = {"x86_64": "SCMP_ARCH_X86_64", "aarch64": "SCMP_ARCH_AARCH64"}

# <asm-generic/mman.h>; <linux/stat.h>: set in S_IFCHR and S_IFBLK, clear in S_IFIFO, S_IFSOCK, S_IFREG; <linux/net.h>.
_MAP_HUGETLB = 0x40000
_DEVICE_BIT = 0x2000
_SOCK_TYPE_MASK = 0xF
_SOCK_TYPES = (1, 2, 5)  # SOCK_STREAM SOCK_DGRAM SOCK_SEQPACKET
_SOCK_PROTOCOLS = (0, 6, 17)  # the default, IPPROTO_TCP, IPPROTO_UDP
_SOL_SOCKET, _IPPROTO_TCP = 1, 6
_SOCKET_LEVELS = (0, 41)  # IPPROTO_IP IPPROTO_IPV6
# Listed, since libseccomp cannot say "all but" on 32 bits. <asm-generic/socket.h>: REUSEADDR TYPE ERROR DONTROUTE
# BROADCAST SNDBUF RCVBUF KEEPALIVE OOBINLINE PRIORITY LINGER REUSEPORT PASSCRED RCVLOWAT SNDLOWAT RCVTIMEO SNDTIMEO
# TIMESTAMP ACCEPTCONN PROTOCOL DOMAIN INCOMING_CPU; none loads a program into the kernel.
_SOCKET_OPTIONS = (2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 13, 15, 16, 18, 19, 20, 21, 29, 30, 38, 39, 49)
# <linux/tcp.h>: NODELAY MAXSEG CORK KEEPIDLE KEEPINTVL KEEPCNT SYNCNT LINGER2 DEFER_ACCEPT WINDOW_CLAMP QUICKACK
# USER_TIMEOUT NOTSENT_LOWAT; no ULP (kernel TLS).
_TCP_OPTIONS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 18, 25)

#: What runc itself still calls between loading the filter and executing the program (libcontainer's init: it looks
#: at its descriptors and asks whether it may see /proc), and the Go runtime's threads beside it.
_RUNTIME = ("getdents64", "fstatfs", "capget", "tgkill", "epoll_create1", "epoll_ctl", "epoll_pwait", "nanosleep")


def rules(machine: str) -> list[dict[str, Any]]:
    """The list of rules: names, action and conditions. Everything else answers EPERM.

    Raises OSError (ENOTSUP) for a machine without a table of numbers.
    """
    known = syscalls.numbers(machine)
    checked = {name for group in seccomp.ARGUMENTS for name in group.split()}
    allowed = set(seccomp.allowed(machine))
    plain = sorted((allowed - checked) | (set(_RUNTIME) & set(known)))
    out = [_allow(plain)]
    out.append(_allow(["mmap"], (3, _MAP_HUGETLB, 0)))
    for first, last in seccomp.IOCTLS:
        out += [_allow(["ioctl"], (1, _INT, value)) for value in range(first, last + 1)]
    for family, kind, protocol in itertools.product(seccomp.SOCKET_FAMILIES.values(), _SOCK_TYPES, _SOCK_PROTOCOLS):
        conditions = (0, _INT, family), (1, _SOCK_TYPE_MASK, kind), (2, _INT, protocol)
        out.append(_allow(["socket", "socketpair"], *conditions))
    for level in _SOCKET_LEVELS:
        out.append(_allow(["setsockopt"], (1, _INT, level)))
    for option in _SOCKET_OPTIONS:
        out.append(_allow(["setsockopt"], (1, _INT, _SOL_SOCKET), (2, _INT, option)))
    for option in _TCP_OPTIONS:
        out.append(_allow(["setsockopt"], (1, _INT, _IPPROTO_TCP), (2, _INT, option)))
    out.append(_allow(["prlimit64"], (0, _INT, 0)))
    if "mknod" in known:
        out.append(_allow(["mknod"], (1, _DEVICE_BIT, 0)))
    out.append(_allow(["mknodat"], (2, _DEVICE_BIT, 0)))
    out += [_allow(["personality"], (0, _INT, value)) for value in (0, _INT)]
    out.append(_allow(["clone"], (0, seccomp.CLONE_REFUSED, 0)))
    for option in (*seccomp.PRCTL_OPTIONS, seccomp.PR_GET_NO_NEW_PRIVS):
        out.append(_allow(["prctl"], (0, _INT, option)))
    absent = [n for n, number in known.items() if number >= syscalls.FIRST_COMMON and n not in allowed]
    absent += [n for n in seccomp.ABSENT.split() if n in known]
    out.append(_refuse(sorted(absent), errno.ENOSYS))
    out.append(_refuse(seccomp.NO_ATTRIBUTES.split(), errno.EOPNOTSUPP))
    return out


@lru_cache(maxsize=4)
def _of(machine: str) -> tuple[dict[str, Any], ...]:
    return tuple(rules(machine))


def profile(machine: str) -> dict[str, Any]:
    """The whole profile, as ``--security-opt seccomp=`` and ``linux.seccomp`` of config.json take it."""
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "architectures": [_ARCHITECTURES[machine]],
        "syscalls": list(_of(machine)),
    }


def _allow(names: list[str], *conditions: tuple[int, int, int]) -> dict[str, Any]:
    """Allow ``names`` where for each (index, mask, value) the argument, masked, is the value."""
    args = [
        {"index": index, "value": mask, "valueTwo": value, "op": "SCMP_CMP_MASKED_EQ"}
        for index, mask, value in conditions
    ]
    return {"names": names, "action": "SCMP_ACT_ALLOW", **({"args": args} if args else {})}


def _refuse(names: list[str], number: int) -> dict[str, Any]:
    return {"names": names, "action": "SCMP_ACT_ERRNO", "errnoRet": number}
