"""Capabilities: giving all of them up, in every set and for ever (capabilities(7)).

Each function adds the steps that do it, see :mod:`fumehood.linux.steps`.
"""

from __future__ import annotations

import struct

from fumehood.linux.steps import Steps

_PR_CAPBSET_DROP = 24
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_PR_SET_NO_NEW_PRIVS = 38
_VERSION_3 = 0x20080522
_HEADER = struct.pack("=Ii", _VERSION_3, 0)
_NONE = bytes(24)


def last() -> int:
    """The highest capability that this kernel knows. Raises OSError where /proc does not say."""
    with open("/proc/sys/kernel/cap_last_cap", "rb") as file:
        return int(file.read())


def drop_bounding(steps: Steps, highest: int) -> None:
    """Empty the bounding set, so that no program that is executed can gain a capability."""
    for capability in range(highest + 1):
        steps.call("prctl", _PR_CAPBSET_DROP, capability, 0, 0, 0)


def drop_all(steps: Steps, highest: int) -> None:
    """Empty the bounding, ambient, effective, permitted and inheritable sets up to capability ``highest``."""
    drop_bounding(steps, highest)
    steps.call("prctl", _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    steps.call("capset", _HEADER, _NONE)


def no_new_privs(steps: Steps) -> None:
    """No exec from here on gives more than this process has. Cannot be undone."""
    steps.call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
