"""Capabilities: giving all of them up, in every set and for ever (capabilities(7))."""

from __future__ import annotations

import struct

from fumehood.linux.libc import prctl, syscall
from fumehood.linux.syscalls import numbers

_PR_CAPBSET_DROP = 24
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_PR_SET_NO_NEW_PRIVS = 38
_VERSION_3 = 0x20080522
_CAPSET = numbers()["capset"]
_HEADER = struct.pack("=Ii", _VERSION_3, 0)
_NONE = bytes(24)


def last() -> int:
    """The highest capability that this kernel knows. Raises OSError where /proc does not say."""
    with open("/proc/sys/kernel/cap_last_cap", "rb") as file:
        return int(file.read())


def drop_bounding(highest: int) -> None:
    """Empty the bounding set, so that no program that is executed can gain a capability."""
    for capability in range(highest + 1):
        prctl("PR_CAPBSET_DROP", _PR_CAPBSET_DROP, capability)


def drop_all(highest: int) -> None:
    """Empty the bounding, ambient, effective, permitted and inheritable sets up to capability ``highest``."""
    drop_bounding(highest)
    prctl("PR_CAP_AMBIENT", _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    syscall("capset", _CAPSET, _HEADER, _NONE)


def no_new_privs() -> None:
    """No exec from here on gives more than this process has. Cannot be undone."""
    prctl("PR_SET_NO_NEW_PRIVS", _PR_SET_NO_NEW_PRIVS, 1)
