"""Questions that the suite asks of the host itself."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from fumehood.linux import libc

_CLONE_NEWUSER, _CLONE_NEWUTS = 0x10000000, 0x04000000  # linux/sched.h

CGROUP_ROOT = Path("/sys/fs/cgroup")


def port_of(key: int) -> int:
    """A port outside the ephemeral range that both sides derive from the run's key."""
    return 20000 + key % 10000


def mqueue_exists(name: str) -> bool:
    """Whether the POSIX message queue ``name`` is in this IPC namespace."""
    library = ctypes.CDLL("librt.so.1", use_errno=True)
    queue: int = library.mq_open(name.encode(), os.O_RDONLY)
    if queue < 0:
        return False
    os.close(queue)
    return True


def mqueue_remove(name: str) -> None:
    """Remove a message queue that an attack which succeeded has left."""
    ctypes.CDLL("librt.so.1").mq_unlink(name.encode())


def keys_remove(description: str) -> None:
    """Remove from this user's keyring a key that an attack which succeeded has left."""
    keyctl, unlink, user_keyring = {"x86_64": 250}.get(os.uname().machine, 219), 9, -4
    for line in Path("/proc/keys").read_text(errors="replace").splitlines():
        if description in line:
            with contextlib.suppress(OSError):
                libc.syscall("keyctl", keyctl, unlink, int(line.split()[0], 16), user_keyring)


def cgroup_folders() -> Iterator[Path]:
    """Every cgroup of the host, of all hierarchies."""
    for folder, _, _ in os.walk(CGROUP_ROOT):
        yield Path(folder)


#: Files that hold a limit: (version 1, version 2).
_LIMIT_FILES = {
    "memory": ("memory.limit_in_bytes", "memory.max"),
    "pids": ("pids.max", "pids.max"),
    "cpu": ("cpu.cfs_quota_us", "cpu.max"),
}
_UNLIMITED_BYTES = 1 << 62


def cgroup_value(cgroup: str, controller: str, names: tuple[str, str]) -> str | None:
    """A file of the cgroup that /proc/PID/cgroup (``cgroup``) names for ``controller``, or None."""
    for line in cgroup.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller in controllers.split(","):
            folder, name = CGROUP_ROOT / controllers, names[0]
            if not folder.exists():
                folder = CGROUP_ROOT / controller
        elif not controllers:
            folder, name = CGROUP_ROOT, names[1]
        else:
            continue
        try:
            return (folder / path.lstrip("/") / name).read_text().strip()
        except OSError:
            continue
    return None


def cgroup_limit(cgroup: str, controller: str) -> str | None:
    """The limit of ``controller`` on a cgroup: "max" if there is none, None if there is no such cgroup."""
    value = cgroup_value(cgroup, controller, _LIMIT_FILES[controller])
    if value is None:
        return None
    first = value.split()[0]
    if first == "-1" or (first.isdigit() and int(first) >= _UNLIMITED_BYTES):
        return "max"
    return first


def hostname_of(pid: int) -> str | None:
    """The host name that ``pid`` sees, asked by a short child that enters its UTS namespace."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            for kind, flag in (("user", _CLONE_NEWUSER), ("uts", _CLONE_NEWUTS)):
                with contextlib.suppress(OSError):
                    libc.setns(os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY), flag)
            os.write(write_end, socket.gethostname().encode())
        finally:
            os._exit(0)
    os.close(write_end)
    name = os.read(read_end, 256).decode(errors="replace")
    os.close(read_end)
    os.waitpid(child, 0)
    return name or None


def is_locked(path: str) -> bool:
    """Whether someone else holds an flock on ``path``."""
    with open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(file, fcntl.LOCK_UN)
        return False
