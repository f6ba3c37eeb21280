"""The tier ``gvisor``: one bundle and one runsc per sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
import threading
from collections.abc import Coroutine
from functools import lru_cache
from typing import Any, ClassVar

from fumehood import environments
from fumehood.errors import (
    ClosedError,
    FumehoodError,
    OutcomeUnknownError,
    PolicyError,
    StartError,
    UnavailableError,
    UnsupportedError,
)
from fumehood.folders import remove_tree
from fumehood.images import store
from fumehood.images.store import Image
from fumehood.linux.cgroup import Cgroup, Found, Hierarchy, find
from fumehood.model import Boundary, Code, Policy, Receipt
from fumehood.session import GuestSandbox
from fumehood.threads import in_thread
from fumehood.tier import Features, Probe, require
from fumehood.tiers.container import payload, posture, spec
from fumehood.tiers.container.ending import end_all
from fumehood.tiers.gvisor import bundle, leftovers, library, python, runsc
from fumehood.tiers.gvisor.beginning import Begun, GvisorEnclosure, Shape, begin, overhead_tasks
from fumehood.tiers.gvisor.runsc import Runsc
from fumehood.tiers.gvisor.single import GvisorSingle, link
from fumehood.tiers.gvisor.spawning import Launcher
from fumehood.wire import Channel

_READY_TIMEOUT_S = 60.0
_TRY_TIMEOUT_S = 15.0
_STARTS_PER_CPU = 2
#: How long nothing may have started before the next sandbox is begun: longer than a caller in a row, or the end of a
#: command that runs one program, takes.
_AHEAD_AFTER_S = 0.02
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
        self._ahead: Begun | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._used: dict[GvisorEnclosure, Shape] = {}
        self._closings = 0
        self._swept = False
        self._opening = asyncio.Lock()
        # A start is work for the processors: more at once only make each slower, until deadlines pass.
        self._turns = asyncio.Semaphore(_STARTS_PER_CPU * (os.cpu_count() or 1))

    def probe(self) -> Probe:
        """Runs a sandbox that does nothing, once for this process and image."""
        try:
            probe = _Host.ask(self.image)
            if probe.available:  # the first run, which is likely to follow, need not wait for it
                self._launcher.wait_served()
        except Exception as error:
            return Probe(False, f"{type(error).__name__}: {error}", "see what `runsc --version` says")
        return probe

    async def create(self, policy: Policy) -> GuestSandbox:
        """A new sandbox. Raises UnsupportedError, PolicyError, UnavailableError, StartError; nothing is left then."""
        return await self._create(policy, single=False)

    async def create_single(self, policy: Policy, *, warm: bool = False) -> GuestSandbox:
        """The same for one simple program, see :class:`fumehood.tier.Single`."""
        return await self._create(policy, single=not warm)

    async def _create(self, policy: Policy, *, single: bool) -> GuestSandbox:
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
        binds, version = _binds(policy, image)
        single = single and _Host.tells_ends
        before = self._closings
        shape = _shape(policy, image, binds, version, tree, single=single)
        async with self._turns:
            begun = await self._take(shape, tree)
            if not policy.mounts:  # the host may put another folder in the place of one meanwhile
                self._used[begun.enclosure] = shape
            sandbox = await _finish(begun, policy, version, tree.hard if tree is not None else ())
        if self._closings != before:  # close() ended what was running then, and this was not yet
            self._used.pop(begun.enclosure, None)
            await sandbox.close()
            raise ClosedError("the tier was closed while the sandbox started", tier=self.name)
        return sandbox

    # --- what is made ahead (docs/decisions/0009-gvisor-half-ahead.md)

    async def _take(self, shape: Shape, tree: Hierarchy | None) -> Begun:
        """What waits for such a sandbox, or a new one."""
        if self._timer is not None:
            self._timer.cancel()
        begun, self._ahead = self._ahead, None
        if begun is not None:
            if begun.shape == shape and begun.enclosure.alive():
                return begun
            self._do(begun.discard())
        return await self._begin(shape, tree)

    async def _begin(self, shape: Shape, tree: Hierarchy | None, *, ahead: bool = False) -> Begun:
        program, platform = _Host.runsc(), _Host.platform
        begun = await begin(shape, program, platform, tree, self._forgotten, self._launcher, ahead=ahead)
        self._live.add(begun.enclosure)
        return begun

    def _forgotten(self, enclosure: GvisorEnclosure) -> None:
        """A sandbox is gone, and its caller does not wait for its folder. If nothing starts soon, the next is begun."""
        self._live.discard(enclosure)
        self._do(in_thread(remove_tree, enclosure.folder))
        shape = self._used.pop(enclosure, None)
        if shape is not None and self._ahead is None:
            if self._timer is not None:
                self._timer.cancel()
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_AHEAD_AFTER_S, self._start_ahead, shape)

    def _start_ahead(self, shape: Shape) -> None:
        # Counted here: close() may be called before the task has its first turn.
        self._do(self._make_ahead(shape, self._closings))

    async def _make_ahead(self, shape: Shape, closings: int) -> None:
        with contextlib.suppress(StartError):  # whoever needs one is told
            begun = await self._begin(shape, self._hierarchy, ahead=True)
            if self._ahead is None and self._closings == closings:
                self._ahead = begun
            else:
                await begun.discard()

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

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
        self._used.clear()
        if self._timer is not None:
            self._timer.cancel()
        begun, self._ahead = self._ahead, None
        if begun is not None:
            await begun.discard()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await end_all(self._live)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await in_thread(self._launcher.close)
        if self._hierarchy is not None:
            tree, self._hierarchy = self._hierarchy, None
            await in_thread(tree.close)


def _shape(
    policy: Policy,
    image: Image,
    binds: list[tuple[str, str]],
    version: str | None,
    tree: Hierarchy | None,
    *,
    single: bool,
) -> Shape:
    hard = tree.hard if tree is not None else ()
    start = python.of(image, library.of(image).magic, environment=version is not None, single=single)
    rlimits = bundle.rlimits(policy.limits, hard, single=single)
    return Shape(policy.limits, rlimits, image, tuple(binds), start, single)


async def _finish(begun: Begun, policy: Policy, version: str | None, hard: tuple[str, ...]) -> GuestSandbox:
    """The sandbox that ``begun`` becomes. Raises StartError; nothing is left then."""
    enclosure, channel, shape = begun.enclosure, begun.channel, begun.shape
    try:
        enclosure.let_go_on()
        message = payload.message(
            python=version,
            rlimits=shape.rlimits,
            preload=policy.preload,
            library=library.of(shape.image),
            paths=shape.start.paths,
            same_python=shape.start.same_python,
            single=shape.single,
        )
        try:
            await asyncio.get_running_loop().sock_sendall(channel, message)
            report = await payload.report(channel, tier="gvisor", timeout_s=_READY_TIMEOUT_S)
        except StartError as error:
            raise StartError(f"{error.message}; {begun.lost_reason()}", tier="gvisor") from None
        except OSError as error:
            raise StartError(f"the sandbox was lost: {error}; {begun.lost_reason()}", tier="gvisor") from None
        receipt = _receipt(policy, shape, _Host.runsc(), _Host.platform, enclosure.group, hard, report)
        if "memory" not in hard:
            enclosure.poll_memory(policy.limits.memory_bytes)
        if shape.single:
            return GvisorSingle(link(begun), enclosure, policy, receipt, env=spec.ENV)
        fd = channel.detach()
        return GuestSandbox(Channel(fd, fd), enclosure, policy, receipt, env=spec.ENV)
    except BaseException as error:
        await asyncio.shield(begun.discard())
        if isinstance(error, OSError) and not isinstance(error, FumehoodError):
            raise StartError(f"the sandbox could not be set up: {error}", tier="gvisor") from None
        raise


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
    shape: Shape,
    program: Runsc,
    platform: str,
    group: Cgroup | None,
    hard: tuple[str, ...],
    report: dict[str, Any],
) -> Receipt:
    reading = posture.Reading("gvisor")
    limits, image = policy.limits, shape.image
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
    posture.cgroup_view(reading, found, limits, hard, overhead_pids=overhead_tasks(limits))
    posture.common_view(reading, policy, shape.rlimits, report, "cpu" in hard)
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
    tells_ends = True  # whether runsc's log has what runsc.ended() looks for
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
    """Why a sandbox does not start on ``platform``, or "". Learns whether this runsc tells how a container ended."""
    answer: list[str] = []

    async def attempt() -> None:
        launcher = Launcher()
        policy = Policy()
        try:
            async with asyncio.timeout(_TRY_TIMEOUT_S):
                shape = _shape(policy, image, [], None, None, single=True)
                begun = await begin(shape, program, platform, None, lambda gone: remove_tree(gone.folder), launcher)
                sandbox = await _finish(begun, policy, None, ())
                try:
                    _Host.tells_ends = (await sandbox.exec(Code("pass"), last=True)).ok
                except OutcomeUnknownError:
                    _Host.tells_ends = False
                finally:
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
