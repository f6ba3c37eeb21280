"""The OCI bundle of a sandbox: the configuration that a policy becomes. Plain values.

Format: https://github.com/opencontainers/runtime-spec/blob/main/config.md.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from fumehood.model import Limits
from fumehood.tiers.container import profile, spec
from fumehood.tiers.container.spec import ENV, HOSTNAME, SHM, TMP, WORK

#: Folders of the scratch and where they are seen; the work folder first.
FOLDERS = {"work": WORK, "tmp": TMP, "shm": SHM}
_UID = 1000
_SHELL = "/bin/sh"  # of this host


def guest_uid() -> int:
    """An ordinary user can map no id but its own, which runsc makes 0; it has no capabilities inside either way."""
    return _UID if os.geteuid() == 0 else 0


def rlimits(limits: Limits, hard: tuple[str, ...], *, single: bool = False) -> dict[str, int]:
    """Limits of each process inside, where processes are counted by user. Beside a ``single`` program is no agent."""
    return spec.rlimits(limits, hard) | {"NPROC": limits.pids + (not single)}


def _seccomp() -> dict[str, Any]:
    """Our list as runsc takes it. What these calls can ask for, they ask of the Sentry.

    clone3 is allowed: runsc passes over ``errnoRet``, and told EPERM instead of ENOSYS no thread would start. pselect6
    goes by gVisor's own name too (pkg/sentry/syscalls/linux/linux64.go): runsc passes over names that it does not know,
    and select(2) of the C library would be refused.
    """
    made = profile.profile(os.uname().machine)
    rules = [rule | {"names": [name for name in rule["names"] if name != "clone3"]} for rule in made["syscalls"]]
    return made | {"syscalls": [*rules, {"names": ["clone3", "pselect"], "action": "SCMP_ACT_ALLOW"}]}


def _wait_at(gate: str) -> dict[str, Any]:
    """runsc goes on when this has ended."""
    return {"path": _SHELL, "args": ["sh", "-c", 'read _ <"$1"', "sh", gate]}


def config(
    rootfs: str,
    scratch: str,
    binds: Sequence[tuple[str, str]],
    rlimits: dict[str, int],
    uid: int,
    arguments: Sequence[str] = (),
    env: Sequence[str] = (),
    gate: str = "",
) -> dict[str, Any]:
    """``config.json``: no capability, no network, nothing writable but the scratch.

    ``gate`` is a FIFO of this host: ``arguments`` are not started before somebody has written a line to it.
    """
    writable = ["rbind", "rw", "nosuid", "nodev"]
    return {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": False,
            "user": {"uid": uid, "gid": uid},
            "args": list(arguments),
            "env": [*(f"{name}={value}" for name, value in ENV.items()), *env],
            "cwd": WORK,
            "capabilities": {kind: [] for kind in ("bounding", "effective", "inheritable", "permitted", "ambient")},
            "rlimits": [{"type": f"RLIMIT_{n}", "soft": value, "hard": value} for n, value in rlimits.items()],
            "noNewPrivileges": True,
        },
        "root": {"path": rootfs, "readonly": True},
        "hostname": HOSTNAME,
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc", "options": ["nosuid", "nodev", "noexec"]},
            *(
                {"destination": target, "type": "bind", "source": f"{scratch}/{name}", "options": writable}
                for name, target in FOLDERS.items()
            ),
            *(
                {"destination": target, "type": "bind", "source": source, "options": ["rbind", "ro", "nosuid", "nodev"]}
                for source, target in binds
            ),
        ],
        "linux": {
            "namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")],
            "seccomp": _seccomp(),
        },
        **({"hooks": {"prestart": [_wait_at(gate)]}} if gate else {}),
    }
