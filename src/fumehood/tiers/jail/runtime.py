"""What of the host the jail's root shows: the Python that runs this process, the system's libraries and tools.

Everything is read-only. A Python outside /usr appears at /opt/python, so that no host path can be read off it.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from fumehood.linux.mounts import MS_NODEV, MS_NOEXEC, MS_NOSUID, MS_RDONLY

PYTHON_HOME = "/opt/python"
ENVIRONMENT_HOME = "/opt/env"
PYTHON = f"{ENVIRONMENT_HOME}/bin/python3"
#: Where the modules that run inside are copied to.
CODE_HOME = "/opt/fumehood"

#: Where each sandbox mounts what is its own.
MOUNT_POINTS = ("/work", "/tmp", "/proc", "/dev/shm", "/dev/pts")

_SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32", "libexec", "share")
_DEVICES = ("null", "zero", "full", "random", "urandom")
#: Files of /etc that decide how the runtime behaves and hold nothing about the host's people.
_ETC_COPIED = ("ld.so.cache", "localtime", "mime.types")
_READ_ONLY = MS_RDONLY | MS_NOSUID | MS_NODEV
#: A device on a read-only mount can be opened for writing all the same; what cannot be written is the node.
DEVICE_FLAGS = MS_RDONLY | MS_NOSUID | MS_NOEXEC

#: Modules that run inside the root, relative to the package.
INSIDE = (
    "__init__.py",
    "guest/__init__.py",
    "guest/agent.py",
    "linux/__init__.py",
    "linux/capabilities.py",
    "linux/forks.py",
    "linux/landlock.py",
    "linux/libc.py",
    "linux/mounts.py",
    "linux/namespaces.py",
    "linux/seccomp.py",
    "linux/steps.py",
    "linux/syscalls.py",
    "tiers/__init__.py",
    "tiers/jail/__init__.py",
    "tiers/jail/controls.py",
    "tiers/jail/program.py",
    "tiers/jail/zygote.py",
)


@dataclass(frozen=True, slots=True)
class Root:
    """The recipe of a root: what is bound, linked, copied and written. Plain values, sent to the launcher."""

    binds: list[tuple[str, str, int]]  # source, target, flags
    links: list[tuple[str, str]]  # target, path
    folders: list[str]
    files: dict[str, str]  # path -> text
    copies: list[tuple[str, str]]  # source, path


def base_python() -> str:
    """The real path of the interpreter behind this process, outside any virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def library_env() -> dict[str, str]:
    """What this Python needs to start inside, if it needs anything.

    A shared libpython is found by an absolute run path, which does not exist inside when the prefix was moved.
    """
    moved = not (os.path.realpath(sys.base_prefix) + "/").startswith("/usr/")
    if moved and sysconfig.get_config_var("Py_ENABLE_SHARED"):
        return {"LD_LIBRARY_PATH": f"{PYTHON_HOME}/lib"}
    return {}


def program_env() -> dict[str, str]:
    """The environment of every program, below the policy's own: its Python first on the path."""
    return {"PATH": f"{ENVIRONMENT_HOME}/bin:/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", **library_env()}


def describe_root(*, site_packages: str | None, mounts: list[tuple[str, str]], read_only: bool = True) -> Root:
    """The root for sandboxes of this process's Python.

    ``site_packages`` is the host folder of an environment's packages, ``mounts`` the operator's (source, target) pairs.
    """
    flags = _READ_ONLY if read_only else MS_NOSUID | MS_NODEV
    binds: list[tuple[str, str, int]] = []
    links: list[tuple[str, str]] = [("/proc/self/fd", "/dev/fd"), ("pts/ptmx", "/dev/ptmx")]
    links += [(f"/proc/self/fd/{n}", f"/dev/{name}") for n, name in enumerate(("stdin", "stdout", "stderr"))]
    for name in _SYSTEM:
        path = Path("/", name)
        if Path("/usr", name).is_dir():
            binds.append((f"/usr/{name}", f"/usr/{name}", flags))
        if path.is_symlink():
            links.append((os.readlink(path), f"/{name}"))
        elif path.is_dir() and name != "share":
            binds.append((f"/{name}", f"/{name}", flags))
    if Path("/etc/alternatives").is_dir():
        binds.append(("/etc/alternatives", "/etc/alternatives", flags))

    python = base_python()
    prefix = os.path.realpath(sys.base_prefix)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    if prefix == "/usr":
        inside = python
    elif prefix.startswith("/usr/"):
        binds.append((prefix, prefix, flags))
        inside = python
    else:
        binds.append((prefix, PYTHON_HOME, flags))
        inside = PYTHON_HOME + python.removeprefix(prefix)

    binds += [(f"/dev/{name}", f"/dev/{name}", DEVICE_FLAGS) for name in _DEVICES]
    packages = f"{ENVIRONMENT_HOME}/lib/{version}/site-packages"
    if site_packages is not None:
        binds.append((site_packages, packages, flags))
    binds += [(source, target, _READ_ONLY) for source, target in mounts]
    links += [(inside, f"{ENVIRONMENT_HOME}/bin/{name}") for name in ("python3", "python", version)]
    return Root(
        binds=binds,
        links=links,
        folders=[*MOUNT_POINTS, packages],
        files={
            "/etc/passwd": "sandbox:x:1000:1000::/tmp:/bin/sh\n",
            "/etc/group": "sandbox:x:1000:\n",
            "/etc/hosts": "127.0.0.1 localhost\n::1 localhost\n",
            "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
            "/etc/host.conf": "multi on\n",
            f"{ENVIRONMENT_HOME}/pyvenv.cfg": (
                f"home = {os.path.dirname(inside)}\ninclude-system-site-packages = false\n"
            ),
        },
        copies=[(f"/etc/{name}", f"/etc/{name}") for name in _ETC_COPIED if Path("/etc", name).is_file()],
    )
