"""Why a host refuses the jail, and what its operator can do: settings that forbid what the launcher asks for."""

from __future__ import annotations

import os
from pathlib import Path

#: Setting -> value that forbids unprivileged user namespaces, and the remedy.
_SETTINGS = (
    (
        "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "AppArmor keeps user namespaces from ordinary programs: allow them to this Python by an AppArmor profile with "
        "`userns,`, or set sysctl kernel.apparmor_restrict_unprivileged_userns=0, or run as root",
    ),
    (
        "/proc/sys/kernel/unprivileged_userns_clone",
        "0",
        "set sysctl kernel.unprivileged_userns_clone=1, or run as root",
    ),
    ("/proc/sys/user/max_user_namespaces", "0", "set sysctl user.max_user_namespaces to more than 0"),
)
_CONTAINER_MARKS = ("/.dockerenv", "/run/.containerenv")


def remedy_for(reason: str) -> str:
    """What to do about ``reason``, by what this host's settings say; a sentence, never empty."""
    for path, forbidding, remedy in _SETTINGS:
        if _setting(path) == forbidding and (os.geteuid() != 0 or "max_user" in path):
            return remedy
    if any(os.path.exists(mark) for mark in _CONTAINER_MARKS):
        return (
            "a container's own profile forbids it: start the container with `--security-opt seccomp=unconfined "
            "--security-opt apparmor=unconfined --security-opt systempaths=unconfined`, or choose tier subprocess"
        )
    if "mount_setattr" in reason or "clone3" in reason:
        return "needs Linux 5.12 or newer with user namespaces"
    return "needs Linux 5.12 or newer with namespaces and seccomp; see `fumehood doctor`"


def _setting(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None
