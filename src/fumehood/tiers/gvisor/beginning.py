"""A sandbox up to the moment at which its guest would start, which is as far as it can be made ahead of a call.

What is made ahead ends with a runsc that has its control group, its namespaces, its scratch, a gofer and a Sentry that
has loaded nothing, and waits: a hook, which runsc runs before it has the container's program started, reads a line from
a FIFO. No program is known then, and nothing of the guest exists. What is made on demand has no hook.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fumehood.enclosure import PidfdEnclosure, handshake
from fumehood.errors import FumehoodError, StartError
from fumehood.folders import remove_tree
from fumehood.images.store import Image
from fumehood.linux.cgroup import Cgroup, Hierarchy
from fumehood.model import Limits
from fumehood.threads import in_thread
from fumehood.tiers.gvisor import bundle, leftovers, runsc
from fumehood.tiers.gvisor.python import Start
from fumehood.tiers.gvisor.runsc import Runsc
from fumehood.tiers.gvisor.spawning import Launcher, Spawned

#: Threads of gofer and Sentry, which are processes of Go, beside what the guest's processes need.
_RUNSC_TASKS = 256
_TASKS_MAX = 16384
_GATE = "gate"
_NAMES = itertools.count(1)


class GvisorEnclosure(PidfdEnclosure):
    """A sandbox's processes, whoever waits for the first of them, and the bundle, which ``forget`` has to remove."""

    def __init__(
        self, first: Spawned, group: Cgroup | None, folder: str, forget: Callable[[GvisorEnclosure], object]
    ) -> None:
        super().__init__(first.pid, first.pidfd, group, cpu_after_death=first.used, forget=lambda: forget(self))
        self.group = group
        self.folder = folder
        self._first = first
        self._cleaned = False
        self.gate = -1  # the FIFO; it holds what was written as long as it is open
        self.stderr = -1

    def let_go_on(self) -> None:
        """End the wait, if it waits or will. Raises OSError."""
        if self.gate >= 0:
            os.write(self.gate, b"\n")

    def lost_reason(self) -> str:
        """What runsc wrote, or that it died."""
        said = os.pread(self.stderr, 4096, 0).decode("utf-8", "replace").strip() if self.stderr >= 0 else ""
        return f"runsc said: {said[-400:]}" if said else "runsc ended"

    async def release(self) -> None:
        """Let go of what is the bundle's as well."""
        if self._cleaned:
            return
        self._cleaned = True
        await super().release()
        self._first.close()
        for fd in (self.gate, self.stderr):
            if fd >= 0:
                os.close(fd)
        self.gate = self.stderr = -1


@dataclass(frozen=True, slots=True)
class Shape:
    """All of a policy that a sandbox needs before its guest starts. What was made for one is never used for another."""

    limits: Limits
    rlimits: dict[str, int]
    image: Image
    binds: tuple[tuple[str, str], ...]
    start: Start


@dataclass(frozen=True, slots=True)
class Begun:
    """A sandbox that starts its guest, or will after :meth:`GvisorEnclosure.let_go_on`, with the channel to it."""

    shape: Shape
    enclosure: GvisorEnclosure
    channel: socket.socket

    async def discard(self) -> None:
        """It is not wanted."""
        self.channel.close()
        await self.enclosure.discard()


async def begin(
    shape: Shape,
    program: Runsc,
    platform: str,
    tree: Hierarchy | None,
    forget: Callable[[GvisorEnclosure], object],
    launcher: Launcher,
    *,
    ahead: bool = False,
) -> Begun:
    """A sandbox; ``ahead``: its guest waits. Raises StartError; nothing is left then."""
    group: Cgroup | None = None
    enclosure: GvisorEnclosure | None = None
    folder = leftovers.make()
    gate = -1
    ours, theirs = socket.socketpair()
    stderr = os.memfd_create("runsc", os.MFD_CLOEXEC)
    try:
        plan = _plan(folder, shape.limits, program, platform)
        if ahead:
            os.mkfifo(f"{folder}/{_GATE}", 0o600)
            gate = os.open(f"{folder}/{_GATE}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        _configure(shape, folder, f"{folder}/{_GATE}" if ahead else "")
        group = _group(tree, shape.limits)
        entries = group.entries() if group is not None else []
        try:
            first = await launcher.spawn(plan, [theirs.fileno(), stderr, *entries])
        finally:
            theirs.close()
            for entry in entries:
                os.close(entry)
        enclosure = GvisorEnclosure(first, group, folder, forget)
        enclosure.stderr = os.dup(stderr)
        enclosure.gate, gate = gate, -1
        if group is not None and not entries:
            await in_thread(group.add, first.pid)  # it may wait for a grace period of the kernel's
        await handshake(ours, enclosure, tier="gvisor")
        if group is not None and not group.holds(first.pid):
            raise StartError("the sandbox is not in its cgroup", tier="gvisor")
        return Begun(shape, enclosure, ours)
    except BaseException as error:
        ours.close()  # P1 ends with it, where it is not known here yet
        if enclosure is not None:
            await asyncio.shield(enclosure.discard())
        else:
            if group is not None:
                group.remove()
            remove_tree(folder)
        if isinstance(error, OSError) and not isinstance(error, FumehoodError):
            raise StartError(f"the sandbox could not be set up: {error}", tier="gvisor") from None
        raise
    finally:
        if gate >= 0:
            os.close(gate)
        os.close(stderr)
        theirs.close()


def _configure(shape: Shape, folder: str, gate: str) -> None:
    """Write the bundle's configuration. Raises OSError."""
    start = shape.start
    text = bundle.config(
        str(shape.image.rootfs),
        f"{folder}/scratch",
        shape.binds,
        shape.rlimits,
        bundle.guest_uid(),
        start.arguments,
        start.env,
        gate,
    )
    Path(folder, "config.json").write_text(json.dumps(text))


def overhead_tasks(limits: Limits) -> int:
    """How many tasks of the host gVisor may need beyond the guest's own, which are counted inside (RLIMIT_NPROC).

    On the platform ptrace every thread of the Sentry that runs guest code keeps a tracee of its own in every address
    space that it ever ran (pkg/sentry/platform/ptrace/subprocess.go): 32 busy processes were seen to take 1050 tasks.
    A Sentry that is refused one ends, and with it the sandbox. Each takes kernel memory, so the limit on memory
    holds them as well.
    """
    return min(_RUNSC_TASKS + limits.pids * (limits.pids + 2), _TASKS_MAX)


def _plan(folder: str, limits: Limits, program: Runsc, platform: str) -> dict[str, Any]:
    """Make the bundle's folders, and say what the launcher has to do."""
    scratch = f"{folder}/scratch"
    os.mkdir(scratch)
    os.mkdir(f"{folder}/state")
    ident = f"fumehood-{secrets.token_hex(8)}"
    return {
        "root": os.geteuid() == 0,
        "folder": folder,
        "scratch": scratch,
        "folders": list(bundle.FOLDERS),
        "uid": bundle.guest_uid(),
        "disk_bytes": limits.disk_bytes,
        "files": limits.files + len(bundle.FOLDERS) + 1,
        "argv": runsc.command(program, platform, state="state", bundle=folder, ident=ident),
        "env": {
            # No TMPDIR: the Sentry, as nobody, must reach it. It and the gofer begin with an empty environment;
            # what starts them lives for a moment or waits, and needs no garbage collected before that is much.
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": folder,
            "GOGC": "off",
            "GOMEMLIMIT": "32MiB",
        },
    }


def _group(tree: Hierarchy | None, limits: Limits) -> Cgroup | None:
    if tree is None:
        return None
    try:
        return tree.create(
            f"g{next(_NAMES)}",
            memory_bytes=limits.memory_bytes,
            pids=limits.pids + overhead_tasks(limits),
            cpus=limits.cpus,
        )
    except OSError as error:
        raise StartError(f"cannot make a cgroup: {error}", tier="gvisor") from None
