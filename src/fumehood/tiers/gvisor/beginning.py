"""A sandbox up to the moment at which its guest would start, which is as far as it can be made ahead of a call.

What is made ahead ends with a runsc that has its control group, its namespaces, its scratch, a gofer and a Sentry that
has loaded nothing, and waits: a hook, which runsc runs before it has the container's program started, reads a line from
a FIFO. No program is known then, and nothing of the guest exists. What is made on demand has no hook.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import json
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fumehood.enclosure import PidfdEnclosure, let_go, sealed
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
#: gVisor cuts one write(2) to a pipe of the host's at what the pipe has room for, also where the writer would wait, so
#: it has room for more than usual. All of a user's pipes may hold 64 MiB (/proc/sys/fs/pipe-user-pages-soft).
_PIPE_BYTES = 256 << 10
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

    def on_death(self, tell: Callable[[], object]) -> None:
        """Call ``tell`` when the last process is dead, from the event loop."""
        self._death.add_done_callback(lambda _: tell())

    def duplicate(self) -> int:
        """A pidfd of the first process, the caller's own. Raises OSError."""
        return os.dup(self._pidfd)

    def let_go_on(self) -> None:
        """End the wait, if it waits or will. Raises OSError."""
        if self.gate >= 0:
            os.write(self.gate, b"\n")

    def lost_reason(self) -> str:
        """What runsc wrote, or that it died."""
        return _said(os.pread(self.stderr, 4096, 0) if self.stderr >= 0 else b"") or "runsc ended"

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
    single: bool = False  # it is for a single program, which has no agent


@dataclass(frozen=True, slots=True)
class Begun:
    """A sandbox that starts its guest, or will after :meth:`GvisorEnclosure.let_go_on`, with the channel to it."""

    shape: Shape
    enclosure: GvisorEnclosure
    channel: socket.socket
    output: tuple[int, ...] = ()  # where a single program's stdout and stderr are read

    def lost_reason(self) -> str:
        """What runsc wrote, or that it died."""
        said = b""
        if self.output:
            os.set_blocking(self.output[1], False)
            with contextlib.suppress(OSError):
                said = os.read(self.output[1], 4096)
        return _said(said) or self.enclosure.lost_reason()

    async def discard(self) -> None:
        """It is not wanted."""
        self.channel.close()
        for fd in self.output:
            os.close(fd)
        await self.enclosure.discard()


def _said(data: bytes) -> str:
    said = data.decode("utf-8", "replace").strip()
    return f"runsc said: {said[-400:]}" if said else ""


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
    undo = contextlib.ExitStack()  # closes what has no other owner yet
    try:
        with contextlib.ExitStack() as given:  # closes what the sandbox has a copy of
            ours, standard, output = _standard(shape.single, undo, given)
            answers = launcher.ask(_plan(folder, shape, program, platform), standard)
            undo.callback(answers.close)
            # While the launcher works on it:
            gate = f"{folder}/{_GATE}" if ahead else ""
            if gate:
                os.mkfifo(gate, 0o600)
            _configure(shape, folder, gate)
            group = _group(tree, shape.limits)
            entries = group.entries() if group is not None else []
            for entry in entries:
                given.callback(os.close, entry)
            first = await launcher.spawned(answers)
            enclosure = GvisorEnclosure(first, group, folder, forget)
            if gate:
                enclosure.gate = os.open(gate, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            if not output:
                enclosure.stderr = os.dup(standard[2])
            if group is not None and not entries:
                await in_thread(group.add, first.pid)  # it may wait for a grace period of the kernel's
            let_go(ours, tier="gvisor", entries=entries)
        (enclosure.work_fd,) = await sealed(ours, tier="gvisor")
        if group is not None and not group.holds(first.pid):
            raise StartError("the sandbox is not in its cgroup", tier="gvisor")
        undo.pop_all()
        return Begun(shape, enclosure, ours, output)
    except BaseException as error:
        undo.close()  # P1 ends with the channel, where it is not known here yet
        if enclosure is not None:
            await asyncio.shield(enclosure.discard())
        else:
            if group is not None:
                group.remove()
            remove_tree(folder)
        if isinstance(error, OSError) and not isinstance(error, FumehoodError):
            raise StartError(f"the sandbox could not be set up: {error}", tier="gvisor") from None
        raise


def _standard(
    single: bool, undo: contextlib.ExitStack, given: contextlib.ExitStack
) -> tuple[socket.socket, list[int], tuple[int, ...]]:
    """The channel, descriptors 0 to 2 of runsc, and where a single program's output is read. Raises OSError."""
    ours, theirs = socket.socketpair()
    undo.callback(ours.close)
    given.callback(theirs.close)
    if not single:
        stderr = os.memfd_create("runsc", os.MFD_CLOEXEC)
        given.callback(os.close, stderr)
        return ours, [theirs.fileno(), theirs.fileno(), stderr], ()
    standard, output = [theirs.fileno()], []
    for _ in ("stdout", "stderr"):
        reading, writing = os.pipe()
        undo.callback(os.close, reading)
        given.callback(os.close, writing)
        with contextlib.suppress(OSError):  # a user's share of pipe memory may be used up
            fcntl.fcntl(reading, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        standard.append(writing)
        output.append(reading)
    return ours, standard, tuple(output)


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


def _plan(folder: str, shape: Shape, program: Runsc, platform: str) -> dict[str, Any]:
    """Make the bundle's folders, and say what the launcher has to do."""
    limits = shape.limits
    scratch = f"{folder}/scratch"
    os.mkdir(scratch)
    os.mkdir(f"{folder}/state")
    log = None
    if shape.single:
        runsc.make_log(folder)
        log = f"{folder}/{runsc.LOG}"
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
