"""The container that a policy becomes: what the engine is asked to create. Plain values, no I/O but the paths' look-up.

Never here: ``Privileged``, an added capability, a namespace of the host's, a device, a restart, the engine's socket.
"""

from __future__ import annotations

import json
import math
import os
import resource
from dataclasses import dataclass
from typing import Any

from fumehood.errors import PolicyError, UnsupportedError
from fumehood.images.engine import socket_paths
from fumehood.model import Boundary, Limits, Policy
from fumehood.tiers.container import payload, profile
from fumehood.tiers.container.owners import LABEL

WORK, TMP, SHM = "/work", "/tmp", "/dev/shm"
ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": TMP}
HOSTNAME = "sandbox"
PACKAGES = "/opt/env/lib/python{}/site-packages"

#: An engine gives each tmpfs a size of its own, so the limit is divided: this part for each of /tmp and /dev/shm.
SIDE_SHARE = 8
_PAGE = 4096

#: Hidden beside what engines hide by default: what tells of the host's kernel, memory and devices.
_MASKED = (
    "/proc/asound",
    "/proc/acpi",
    "/proc/cmdline",
    "/proc/config.gz",
    "/proc/iomem",
    "/proc/interrupts",
    "/proc/ioports",
    "/proc/kallsyms",
    "/proc/kcore",
    "/proc/keys",
    "/proc/kmsg",
    "/proc/latency_stats",
    "/proc/modules",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/sys/kernel/random/boot_id",
    "/proc/slabinfo",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/vmallocinfo",
    "/sys",
)
#: Where pseudo-terminals are made; the kernel bounds them for all of the host together (proc_sys_kernel(5), pty.max).
_TERMINALS = "/dev/pts"
_READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")

#: Sockets that give the host away, wherever engines put them.
_SOCKETS = (
    "/run/docker.sock",
    "/run/podman/podman.sock",
    "/run/containerd/containerd.sock",
    "/run/crio/crio.sock",
    "/run/docker/containerd/containerd.sock",
)

_COMMAND = ["python3", "-I", "-c"]

_BOUNDARIES = {"runsc": Boundary.USER_KERNEL, "kata": Boundary.HARDWARE}


@dataclass(frozen=True, slots=True)
class Scratch:
    """How the writable bytes and files are divided."""

    work_bytes: int
    side_bytes: int  # of /tmp, and the same again of /dev/shm
    work_files: int
    side_files: int

    @classmethod
    def of(cls, limits: Limits) -> Scratch:
        """All three together are at most the limit; whole pages, as tmpfs rounds up."""
        side = max(limits.disk_bytes // SIDE_SHARE // _PAGE, 1) * _PAGE
        side_files = max(limits.files // SIDE_SHARE, 2)
        return cls(
            max((limits.disk_bytes - 2 * side) // _PAGE, 1) * _PAGE,
            side,
            max(limits.files - 2 * side_files, 2),
            side_files,
        )

    def mounts(self, user: int) -> dict[str, list[str]]:
        """Folder -> options of its tmpfs, which belongs to ``user``: a mode would be the image's folder's with runc.

        The bounds are one option: Podman looks at what is before the first "=" and knows no ``nr_inodes``
        (pkg/util/mountOpts.go), while the kernel reads all of it. The receipt shows what came of it.
        """
        owner = f"uid={user},gid={user}"
        common = ["rw", "nosuid", "nodev", "mode=0755"]
        side = f"size={self.side_bytes},nr_inodes={self.side_files},{owner}"
        return {
            WORK: [*common, "exec", f"size={self.work_bytes},nr_inodes={self.work_files},{owner}"],
            TMP: [*common, "exec", side],
            SHM: [*common, "noexec", side],
        }


def seccomp_text() -> str:
    """The seccomp profile for this machine, as JSON."""
    return json.dumps(profile.profile(os.uname().machine))


def boundary_of(runtime: str) -> Boundary:
    """What code must break to leave a container of this OCI runtime; an unknown one counts as the kernel's own."""
    name = os.path.basename(runtime).lower()
    for word, boundary in _BOUNDARIES.items():
        if word in name:
            return boundary
    return Boundary.KERNEL


def rlimits(limits: Limits, hard: tuple[str, ...]) -> dict[str, int]:
    """Limits of each process, set by the bootstrap on itself; a backstop where a cgroup holds the whole."""
    values = {
        "CORE": 0,
        "NOFILE": limits.open_files,
        "MEMLOCK": 0,
        "MSGQUEUE": 0,
        "FSIZE": limits.disk_bytes,
        "CPU": math.ceil(limits.cpu_s) + 1,
        "SIGPENDING": 1024,
    }
    if "memory" not in hard:
        values["DATA"] = limits.memory_bytes
    if "pids" not in hard:
        values["NPROC"] = limits.pids + 1
    return values


@dataclass(frozen=True, slots=True)
class Container:
    """Everything that decides about one container; each engine spells it its own way."""

    name: str  # ours, so that it can be removed though the engine never answered
    policy: Policy
    image: str
    user: int  # 0 only where a rootless engine maps no other: it is this user outside, without capabilities
    held: tuple[str, ...]  # the limits that the engine's control groups can hold
    owner: str
    runtime: str | None  # the engine's default if None
    binds: tuple[tuple[str, str], ...]  # host folder, folder inside: read-only
    seccomp: str  # the profile: its text for Docker, the path of a file for Podman, whose API takes nothing else


def _masked(policy: Policy) -> list[str]:
    return list(_MASKED) if policy.terminals else [*_MASKED, _TERMINALS]


def docker_body(wanted: Container) -> dict[str, Any]:
    """The body of Docker's ``POST /containers/create``, which takes the name in its query."""
    limits = wanted.policy.limits
    host = {
        "NetworkMode": "none",
        "ReadonlyRootfs": True,
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges", f"seccomp={wanted.seccomp}"],
        "IpcMode": "private",
        "CgroupnsMode": "private",
        "Memory": limits.memory_bytes,
        "MemorySwap": limits.memory_bytes,  # memory and swap together: no swap
        "NanoCpus": int(limits.cpus * 1e9),
        "PidsLimit": limits.pids + 1,  # the agent is one
        "Tmpfs": {path: ",".join(options) for path, options in Scratch.of(limits).mounts(wanted.user).items()},
        "Ulimits": [{"Name": name, "Soft": value, "Hard": value} for name, value in _ulimits(limits)],
        "LogConfig": {"Type": "none"},
        "MaskedPaths": _masked(wanted.policy),
        "ReadonlyPaths": list(_READ_ONLY),
        "Mounts": [
            {
                "Type": "bind",
                "Source": source,
                "Target": target,
                "ReadOnly": True,
                # What is mounted below would stay writable: engines before 25.0 make the top read-only alone.
                "BindOptions": {"Propagation": "rprivate", "NonRecursive": True},
            }
            for source, target in wanted.binds
        ],
        "RestartPolicy": {"Name": "no"},
    }
    if wanted.runtime is not None:
        host["Runtime"] = wanted.runtime
    return {
        "Image": wanted.image,
        "Entrypoint": _COMMAND,
        "Cmd": [payload.bootstrap()],
        "User": f"{wanted.user}:{wanted.user}",
        "WorkingDir": WORK,
        "Hostname": HOSTNAME,
        "Env": [f"{name}={value}" for name, value in ENV.items()],
        "OpenStdin": True,
        "StdinOnce": True,  # when the supervisor is gone the agent reads end of file, and ends
        "AttachStdin": True,
        "AttachStdout": True,
        "AttachStderr": True,
        "Tty": False,
        "NetworkDisabled": True,
        "Labels": {LABEL: wanted.owner},
        "HostConfig": host,
    }


def podman_body(wanted: Container) -> dict[str, Any]:
    """The body of Podman's ``POST /v4.0.0/libpod/containers/create``.

    Podman serves Docker's API too, but passes over the cgroup namespace, the masked paths and the inodes of a tmpfs
    there (pkg/api/handlers/compat/containers_create.go).
    """
    limits = wanted.policy.limits
    period_us = 100_000
    groups = {
        "memory": {"limit": limits.memory_bytes, "swap": limits.memory_bytes},
        "cpu": {"quota": max(int(limits.cpus * period_us), 1000), "period": period_us},
        "pids": {"limit": limits.pids + 1},
    }
    return {
        "name": wanted.name,
        "image": wanted.image,
        "entrypoint": _COMMAND,
        "command": [payload.bootstrap()],
        "user": f"{wanted.user}:{wanted.user}",
        "work_dir": WORK,
        "hostname": HOSTNAME,
        "env": ENV,
        "unsetenvall": True,
        "stdin": True,
        "terminal": False,
        "labels": {LABEL: wanted.owner},
        "netns": {"nsmode": "none"},
        "cgroupns": {"nsmode": "private"},
        "ipcns": {"nsmode": "private"},
        "pidns": {"nsmode": "private"},
        "utsns": {"nsmode": "private"},
        "read_only_filesystem": True,
        "cap_drop": ["ALL"],
        "no_new_privileges": True,
        "seccomp_profile_path": wanted.seccomp,
        "mask": _masked(wanted.policy),
        "mounts": [
            *(
                {"type": "tmpfs", "source": "tmpfs", "destination": path, "options": options}
                for path, options in Scratch.of(limits).mounts(wanted.user).items()
            ),
            *(
                {"type": "bind", "source": source, "destination": target, "options": ["bind", "ro", "rprivate"]}
                for source, target in wanted.binds
            ),
        ],
        "resource_limits": {name: value for name, value in groups.items() if name in wanted.held},
        "r_limits": [{"type": name.upper(), "soft": v, "hard": v} for name, v in _ulimits(limits)],
        "log_configuration": {"driver": "none"},
        **({"oci_runtime": wanted.runtime} if wanted.runtime is not None else {}),
    }


def _ulimits(limits: Limits) -> list[tuple[str, int]]:
    """What the runtime sets.

    ``nproc`` is no limit here (it counts by user, and the cgroup holds the pids), but left out Podman would raise it,
    for which it may lack the right; and Podman lowers its own to the largest pid (cmd/podman/early_init_linux.go).
    """
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    with open("/proc/sys/kernel/pid_max") as file:
        nproc = int(file.read())
    if hard != resource.RLIM_INFINITY:
        nproc = min(nproc, hard)
    return [("nofile", limits.open_files), ("core", 0), ("memlock", 0), ("msgqueue", 0), ("nproc", nproc)]


def require_own(policy: Policy, *, tier: str, image: str | None, runtime: str | None) -> None:
    """Refuse a policy for another image or runtime than the tier was made with. Raises UnsupportedError.

    :func:`fumehood.registry.choose` makes a tier with those of the policy; this is for a tier that was made by hand.
    """
    pairs = (("image", policy.image, image), ("runtime", policy.runtime, runtime))
    unmet = tuple(name for name, wanted, own in pairs if wanted not in (None, own))
    if unmet:
        raise UnsupportedError(
            f"cannot hold: another {' and '.join(unmet)} than it was made with",
            unmet=unmet,
            tier=tier,
            remedy="give the tier's name, not a tier, with the policy",
        )


def refuse_sockets(source: str) -> None:
    """Raises PolicyError if a mount of ``source`` would show the socket of a container engine: that is the host."""
    real = os.path.realpath(source)
    known = {os.path.realpath(path) for path in _SOCKETS}
    known |= {os.path.realpath(path) for path in (*socket_paths("docker")[0], *socket_paths("podman")[0])}
    for path in known:
        if path == real or path.startswith(real.rstrip("/") + "/"):
            raise PolicyError(
                f"the mount of {source!r} would show a container engine's socket ({path}), and with it the whole host",
                remedy="mount a folder that holds the data alone",
            )
