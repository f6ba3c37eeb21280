"""The half of a sandbox's start that needs no more of a policy than its limits, so that it can be made ahead.

It ends with a runsc that has its control group, its namespaces and its scratch, and waits: the file that it opens for
its log, before it reads the bundle's configuration, is a FIFO, and who opens one for writing waits for a reader
(fifo(7)). Nothing of a guest exists then, no program is known, and what waits is a process of some 10 MiB.
"""

from __future__ import annotations

import asyncio
import contextlib
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
from fumehood.linux.cgroup import Cgroup, Hierarchy
from fumehood.model import Limits
from fumehood.tiers.gvisor import bundle, leftovers, runsc
from fumehood.tiers.gvisor.runsc import Runsc
from fumehood.tiers.gvisor.spawning import Launcher, Spawned

#: Threads of gofer and Sentry, which are processes of Go, beside what the guest's processes need.
_RUNSC_TASKS = 256
_TASKS_MAX = 16384
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
        self._log = -1
        self.stderr = -1

    def let_go_on(self) -> None:
        """End runsc's wait. What it logs from here on is read and thrown away. Raises OSError."""
        self._log = os.open(f"{self.folder}/log", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._loop.add_reader(self._log, self._throw_away)

    def _throw_away(self) -> None:
        with contextlib.suppress(OSError):
            if not os.read(self._log, 1 << 16):
                self._loop.remove_reader(self._log)

    def lost_reason(self) -> str:
        """What runsc wrote, or that it died."""
        said = os.pread(self.stderr, 4096, 0).decode("utf-8", "replace").strip() if self.stderr >= 0 else ""
        return f"runsc said: {said[-400:]}" if said else "runsc ended"

    async def release(self) -> None:
        """Let go of what is the bundle's as well."""
        if self._cleaned:
            return
        self._cleaned = True
        if self._log >= 0:
            self._loop.remove_reader(self._log)
            os.close(self._log)
        await super().release()
        self._first.close()
        os.close(self.stderr)
        self.stderr = -1


@dataclass(frozen=True, slots=True)
class Begun:
    """What waits for :meth:`GvisorEnclosure.let_go_on`, its configuration written, with the channel to it."""

    limits: Limits
    enclosure: GvisorEnclosure
    channel: socket.socket

    async def discard(self) -> None:
        """It is not wanted."""
        self.channel.close()
        await self.enclosure.discard()


async def begin(
    limits: Limits,
    program: Runsc,
    platform: str,
    tree: Hierarchy | None,
    forget: Callable[[GvisorEnclosure], object],
    launcher: Launcher,
) -> Begun:
    """A runsc that waits. Raises StartError; nothing is left then."""
    group: Cgroup | None = None
    enclosure: GvisorEnclosure | None = None
    folder = leftovers.make()
    ours, theirs = socket.socketpair()
    stderr = os.memfd_create("runsc", os.MFD_CLOEXEC)
    try:
        plan = _plan(folder, limits, program, platform)
        group = _group(tree, limits)
        entries = group.entries() if group is not None else []
        try:
            first = await launcher.spawn(plan, [theirs.fileno(), stderr, *entries])
        finally:
            theirs.close()
            for entry in entries:
                os.close(entry)
        enclosure = GvisorEnclosure(first, group, folder, forget)
        enclosure.stderr = os.dup(stderr)
        if group is not None and not entries:
            group.add(first.pid)
        await handshake(ours, enclosure, tier="gvisor")
        if group is not None and not group.holds(first.pid):
            raise StartError("the sandbox is not in its cgroup", tier="gvisor")
        return Begun(limits, enclosure, ours)
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
        os.close(stderr)
        theirs.close()


def configure(begun: Begun, rootfs: str, binds: list[tuple[str, str]], rlimits: dict[str, int]) -> None:
    """Write the bundle's configuration. Raises OSError."""
    folder = begun.enclosure.folder
    text = bundle.config(rootfs, f"{folder}/scratch", binds, rlimits, bundle.guest_uid())
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
    scratch, log = f"{folder}/scratch", f"{folder}/log"
    os.mkdir(scratch)
    os.mkdir(f"{folder}/state")
    os.mkfifo(log, 0o600)
    ident = f"fumehood-{secrets.token_hex(8)}"
    return {
        "root": os.geteuid() == 0,
        "folder": folder,
        "scratch": scratch,
        "folders": list(bundle.FOLDERS),
        "uid": bundle.guest_uid(),
        "disk_bytes": limits.disk_bytes,
        "files": limits.files + len(bundle.FOLDERS) + 1,
        "argv": runsc.command(program, platform, state="state", bundle=folder, ident=ident, log=log),
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
