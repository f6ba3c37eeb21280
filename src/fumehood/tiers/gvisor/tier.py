"""The tier ``gvisor``: one bundle and one runsc per sandbox."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import secrets
import socket
import sys
import threading
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from fumehood import environments
from fumehood.enclosure import PidfdEnclosure, handshake
from fumehood.errors import (
    ClosedError,
    FumehoodError,
    PolicyError,
    StartError,
    UnavailableError,
    UnsupportedError,
)
from fumehood.folders import remove_tree
from fumehood.images import store
from fumehood.images.store import Image
from fumehood.linux.cgroup import Cgroup, Found, Hierarchy, find
from fumehood.model import Boundary, Limits, Policy, Receipt
from fumehood.session import GuestSandbox
from fumehood.threads import in_thread
from fumehood.tier import Features, Probe, require
from fumehood.tiers.container import payload, posture, spec
from fumehood.tiers.container.ending import end_all
from fumehood.tiers.gvisor import bundle, leftovers, library, runsc
from fumehood.tiers.gvisor.runsc import Runsc
from fumehood.tiers.gvisor.spawning import Launcher, Spawned
from fumehood.wire import Channel

_READY_TIMEOUT_S = 60.0
_TRY_TIMEOUT_S = 15.0
_STARTS_PER_CPU = 2
_NAMES = itertools.count(1)
#: Threads of gofer and Sentry, which are processes of Go, beside what the guest's processes need.
_RUNSC_TASKS = 256
_TASKS_MAX = 16384
#: Sentry, gofer and an idle guest take about 36 MiB together, which the limit on memory includes.
MEMORY_BYTES_MIN = 64 << 20

FEATURES = Features(
    boundary=Boundary.USER_KERNEL,
    summary="gVisor: a kernel in user space answers the program's system calls; no daemon",
    live=True,
    files=True,
    commands=True,
    contexts=True,
    displays=True,
    background=True,
    pty=True,
    environments=True,
    mounts=True,
    images=True,
)


class GvisorTier:
    """Tier ``gvisor``. ``image`` is a name given to `fumehood image build NAME --engine bundle`."""

    name = "gvisor"
    features = FEATURES

    def __init__(self, *, image: str | None = None) -> None:
        self.image = image or store.DEFAULT_NAME
        self._hierarchy: Hierarchy | None = None
        self._live: set[GvisorEnclosure] = set()
        self._launcher = Launcher()
        self._closings = 0
        self._swept = False
        self._opening = asyncio.Lock()
        # A start is work for the processors: more at once only make each slower, until deadlines pass.
        self._turns = asyncio.Semaphore(_STARTS_PER_CPU * (os.cpu_count() or 1))

    def probe(self) -> Probe:
        """Runs a sandbox that does nothing, once for this process and image."""
        try:
            return _Host.ask(self.image)
        except Exception as error:
            return Probe(False, f"{type(error).__name__}: {error}", "see what `runsc --version` says")

    async def create(self, policy: Policy) -> GuestSandbox:
        """A new sandbox. Raises UnsupportedError, PolicyError, UnavailableError, StartError; nothing is left then."""
        require(self, policy)
        spec.require_own(policy, tier=self.name, image=self.image, runtime=None)
        if policy.limits.memory_bytes < MEMORY_BYTES_MIN:
            unmet = f"a memory limit below {MEMORY_BYTES_MIN >> 20} MiB, which gVisor itself needs"
            raise UnsupportedError(f"cannot hold: {unmet}", unmet=(unmet,), tier=self.name)
        probe = await in_thread(self.probe)
        image = _Host.image(self.image)
        if not probe.available or image is None:
            raise UnavailableError(
                probe.reason or f"the image {self.image!r} is gone",
                tier=self.name,
                remedy=probe.remedy or _build(self.image),
            )
        tree = await self._tree()
        before = self._closings
        async with self._turns:
            sandbox = await _create(policy, image, _Host.runsc(), _Host.platform, tree, self._live, self._launcher)
        if self._closings != before:  # close() ended what was running then, and this was not yet
            await sandbox.close()
            raise ClosedError("the tier was closed while the sandbox started", tier=self.name)
        return sandbox

    async def _tree(self) -> Hierarchy | None:
        async with self._opening:
            found = _found()
            if not self._swept:
                self._swept = True
                await in_thread(leftovers.sweep)
            if self._hierarchy is None and found.version:
                self._hierarchy = await in_thread(found.open)
            return self._hierarchy

    async def close(self) -> None:
        """End what runs, and remove this tier's cgroups. Idempotent."""
        self._closings += 1
        await end_all(self._live)
        await in_thread(self._launcher.close)
        if self._hierarchy is not None:
            tree, self._hierarchy = self._hierarchy, None
            await in_thread(tree.close)


class GvisorEnclosure(PidfdEnclosure):
    """A sandbox's processes, whoever waits for the first of them, and the bundle."""

    def __init__(
        self, first: Spawned, group: Cgroup | None, folder: str, forget: Callable[[GvisorEnclosure], object]
    ) -> None:
        super().__init__(first.pid, first.pidfd, group, cpu_after_death=first.used, forget=lambda: forget(self))
        self._first = first
        self._folder = folder
        self._cleaned = False
        self.stderr = -1

    def lost_reason(self) -> str:
        """What runsc wrote, or that it died."""
        said = os.pread(self.stderr, 4096, 0).decode("utf-8", "replace").strip() if self.stderr >= 0 else ""
        return f"runsc said: {said[-400:]}" if said else "runsc ended"

    async def release(self) -> None:
        """Remove the bundle as well."""
        if self._cleaned:
            return
        self._cleaned = True
        await super().release()
        self._first.close()
        os.close(self.stderr)
        self.stderr = -1
        await in_thread(remove_tree, self._folder)


async def _create(
    policy: Policy,
    image: Image,
    program: Runsc,
    platform: str,
    tree: Hierarchy | None,
    live: set[GvisorEnclosure],
    launcher: Launcher,
) -> GuestSandbox:
    """One sandbox under ``platform``. Raises StartError, PolicyError; nothing is left then."""
    hard = tree.hard if tree is not None else ()
    binds, version = _binds(policy, image)
    limits = policy.limits
    rlimits = bundle.rlimits(limits, hard)
    folder = leftovers.make()
    group: Cgroup | None = None
    enclosure: GvisorEnclosure | None = None
    ours, theirs = socket.socketpair()
    stderr = os.memfd_create("runsc", os.MFD_CLOEXEC)
    try:
        plan = _plan(folder, image, binds, limits, rlimits, program, platform)
        group = _group(tree, limits)
        entries = group.entries() if group is not None else []
        try:
            first = await launcher.spawn(plan, [theirs.fileno(), stderr, *entries])
        finally:
            theirs.close()
            for entry in entries:
                os.close(entry)
        enclosure = GvisorEnclosure(first, group, folder, live.discard)
        live.add(enclosure)
        enclosure.stderr = os.dup(stderr)
        if group is not None and not entries:
            group.add(first.pid)
        await handshake(ours, enclosure, tier="gvisor")
        if group is not None and not group.holds(first.pid):
            raise StartError("the sandbox is not in its cgroup", tier="gvisor")
        await asyncio.get_running_loop().sock_sendall(
            ours, payload.message(python=version, rlimits=rlimits, preload=policy.preload, library=library.of(image))
        )
        try:
            report = await payload.report(ours, tier="gvisor", timeout_s=_READY_TIMEOUT_S)
        except StartError as error:
            raise StartError(f"{error.message}; {enclosure.lost_reason()}", tier="gvisor") from None
        receipt = _receipt(policy, image, program, platform, group, hard, rlimits, report)
        if "memory" not in hard:
            enclosure.poll_memory(limits.memory_bytes)
        fd = ours.detach()
        return GuestSandbox(Channel(fd, fd), enclosure, policy, receipt, env=spec.ENV)
    except BaseException as error:
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
        ours.close()
        theirs.close()


def _plan(
    folder: str,
    image: Image,
    binds: list[tuple[str, str]],
    limits: Limits,
    rlimits: dict[str, int],
    program: Runsc,
    platform: str,
) -> dict[str, Any]:
    """Write the bundle, and say what the launcher has to do."""
    scratch = f"{folder}/scratch"
    os.mkdir(scratch)
    os.mkdir(f"{folder}/state")
    root = os.geteuid() == 0
    text = bundle.config(str(image.rootfs), scratch, binds, rlimits, bundle.guest_uid())
    Path(folder, "config.json").write_text(json.dumps(text))
    ident = f"fumehood-{secrets.token_hex(8)}"
    return {
        "root": root,
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


def _overhead_tasks(limits: Limits) -> int:
    """How many tasks of the host gVisor may need beyond the guest's own, which are counted inside (RLIMIT_NPROC).

    On the platform ptrace every thread of the Sentry that runs guest code keeps a tracee of its own in every address
    space that it ever ran (pkg/sentry/platform/ptrace/subprocess.go): 32 busy processes were seen to take 1050 tasks.
    A Sentry that is refused one ends, and with it the sandbox. Each takes kernel memory, so the limit on memory
    holds them as well.
    """
    return min(_RUNSC_TASKS + limits.pids * (limits.pids + 2), _TASKS_MAX)


def _group(tree: Hierarchy | None, limits: Limits) -> Cgroup | None:
    if tree is None:
        return None
    try:
        return tree.create(
            f"g{next(_NAMES)}",
            memory_bytes=limits.memory_bytes,
            pids=limits.pids + _overhead_tasks(limits),
            cpus=limits.cpus,
        )
    except OSError as error:
        raise StartError(f"cannot make a cgroup: {error}", tier="gvisor") from None


def _binds(policy: Policy, image: Image) -> tuple[list[tuple[str, str]], str | None]:
    """Host folders to show read-only, and the Python that the environment's packages are for. Raises PolicyError."""
    for mount in policy.mounts:
        spec.refuse_sockets(mount.source)
    binds = [(mount.source, mount.target) for mount in policy.mounts]
    if policy.environment is None:
        return binds, None
    found = environments.find(policy.environment)
    if found.python != image.python:
        raise PolicyError(
            f"the environment {found.name!r} is for Python {found.python}, the image {image.name!r} has {image.python}",
            remedy=f"build the environment for Python {image.python}",
        )
    return [*binds, (str(found.site_packages), spec.PACKAGES.format(found.python))], found.python


def _receipt(
    policy: Policy,
    image: Image,
    program: Runsc,
    platform: str,
    group: Cgroup | None,
    hard: tuple[str, ...],
    rlimits: dict[str, int],
    report: dict[str, Any],
) -> Receipt:
    reading = posture.Reading("gvisor")
    limits = policy.limits
    found = group.read_back() if group is not None else {}
    reading.take("runtime", True, f"runsc {program.version}", program.path)
    reading.take("platform", True, platform, "the first that works here")
    reading.take("image", True, image.digest, f"image {image.name}, read-only")
    reading.take("network", True, "none", "runsc --network=none, in an empty network namespace")
    reading.take("seccomp", True, "our allow-list", "runsc --oci-seccomp: the Sentry filters the guest")
    reading.take("capabilities", True, "none", "runsc: the guest's sets are empty")
    reading.take("uid", True, bundle.guest_uid(), "inside; outside, the user who started it or fewer rights")
    reading.take("read_only", True, "all but scratch", "runsc: the gofer serves the root read-only")
    reading.take("disk", True, limits.disk_bytes, "size of one tmpfs of the host's kernel")
    reading.take("files", True, limits.files, "inodes of that tmpfs")
    posture.cgroup_view(reading, found, limits, hard, overhead_pids=_overhead_tasks(limits))
    posture.common_view(reading, policy, rlimits, report, "cpu" in hard)
    system = os.uname()
    released = f", released {program.released}" if program.released else ""
    host = f"runsc {program.version}{released} on {system.sysname} {system.release} {system.machine}"
    return reading.receipt(Boundary.USER_KERNEL, host=host, notes=_notes(program))


def _notes(program: Runsc) -> tuple[str, ...]:
    if program.released and program.released < "2025":
        return (f"this runsc is of {program.released}: gVisor's fixes since then are not in it",)
    return ()


@lru_cache(maxsize=1)
def _found() -> Found:
    return find()


def _build(name: str) -> str:
    return f"`fumehood image build {name} --engine bundle`"


_REMEDY = (
    "it needs namespaces, /proc and for ptrace the right to trace; `runsc --platform=ptrace --network=none do true` "
    "as this user says more"
)


class _Host:
    """What this process learned about the host, once."""

    lock = threading.Lock()
    platform = ""
    _runsc: Runsc | None = None
    _probes: ClassVar[dict[tuple[str, str], Probe]] = {}

    @classmethod
    def runsc(cls) -> Runsc:
        assert cls._runsc is not None
        return cls._runsc

    @classmethod
    def image(cls, name: str) -> Image | None:
        return store.find(name)

    @classmethod
    def ask(cls, name: str) -> Probe:
        """The probe, found out the first time that it is good; a missing part may be mended any moment."""
        with cls.lock:
            image = cls.image(name)
            cls._runsc = cls._runsc or runsc.find()
            if cls._runsc is None:
                return Probe(
                    False, "runsc is not installed", "`apt-get install runsc`, or gvisor.dev/docs/user_guide/install"
                )
            if image is None:
                return Probe(False, f"there is no image {name!r} on this host", _build(name))
            key = (image.digest, cls._runsc.path)
            if key not in cls._probes:
                probe = cls._try(image, cls._runsc)
                if not probe.available:
                    return probe
                cls._probes[key] = probe
            return cls._probes[key]

    @classmethod
    def _try(cls, image: Image, program: Runsc) -> Probe:
        if sys.platform != "linux":
            return Probe(False, "needs Linux", "use a tier of another kind")
        reasons = []
        for platform in runsc.platforms():
            reason = _starts(image, program, platform)
            if not reason:
                cls.platform = platform
                found = _found()
                details = [
                    ("runsc", f"{program.version} at {program.path}"),
                    ("released", program.released or "unknown"),
                    ("platform", platform),
                    ("cgroup", f"v{found.version}: {', '.join(found.hard)}" if found.version else found.reason),
                ]
                details += [("advice", note) for note in _notes(program)]
                return Probe(True, hard=(*found.hard, "disk"), details=tuple(details))
            reasons.append(f"{platform}: {reason}")
        return Probe(False, f"runsc does not start a sandbox ({'; '.join(reasons)})"[:1000], _REMEDY)


def _starts(image: Image, program: Runsc, platform: str) -> str:
    """Why a sandbox does not start on ``platform``, or ""."""
    answer: list[str] = []

    async def attempt() -> None:
        launcher = Launcher()
        try:
            async with asyncio.timeout(_TRY_TIMEOUT_S):
                sandbox = await _create(Policy(), image, program, platform, None, set(), launcher)
            await sandbox.close()
        finally:
            launcher.close()

    def work() -> None:  # this thread may have a running loop
        try:
            asyncio.run(attempt())
        except TimeoutError:
            answer.append(f"no answer within {_TRY_TIMEOUT_S:g} s")
        except Exception as error:
            answer.append(re.sub(r"\s+", " ", str(error)))

    thread = threading.Thread(target=work, name="fumehood-probe")
    thread.start()
    thread.join()
    return answer[0] if answer else ""
