"""The tiers ``docker`` and ``podman``: one container per sandbox, and what this host offers for it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from fumehood import environments
from fumehood.errors import ClosedError, FumehoodError, StartError, UnavailableError
from fumehood.images import engines, store
from fumehood.images.engine import Engine, EngineError, EngineGoneError, Word
from fumehood.images.service import Service, reach
from fumehood.model import Boundary, Policy, Receipt
from fumehood.session import GuestSandbox
from fumehood.threads import in_thread
from fumehood.tier import Features, Probe, require
from fumehood.tiers.container import advice, owners, payload, posture, spec
from fumehood.tiers.container.enclosure import ContainerEnclosure
from fumehood.tiers.container.ending import end_all
from fumehood.tiers.container.stream import Pump
from fumehood.wire import Channel

_READY_TIMEOUT_S = 60.0
_PROBE_KEPT_S = 10.0  # an engine that is not there is asked each time: it may be mended any moment
#: Host ids for containers of a rootful engine, below the jail's block: no account has them, so that what the kernel
#: counts per user is the sandbox's own. A rootless engine maps 65536 ids at most.
_UID_FIRST, _UID_COUNT = 0x6FFE0000, 0xFFFF
_UID_ROOTLESS = 1000
_REFUSAL_SHOWN = 400
_STARTS_PER_CPU = 2


class ContainerTier:
    """One engine as a tier. ``image`` is a name given to `fumehood image build` or an engine's reference; ``runtime``
    is the OCI runtime, the engine's default if None. A policy names them, or else the environment
    (``FUMEHOOD_IMAGE``, ``FUMEHOOD_OCI_RUNTIME``), which is the operator's as well.
    """

    name: Word

    def __init__(self, *, image: str | None = None, runtime: str | None = None) -> None:
        self.image = image or os.environ.get("FUMEHOOD_IMAGE") or None
        self.runtime = runtime or os.environ.get("FUMEHOOD_OCI_RUNTIME") or None
        self.features = Features(
            boundary=spec.boundary_of(self.runtime or ""),
            summary=f"a container of {self.name.capitalize()}'s for each sandbox, with every door closed",
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
            runtimes=True,
        )
        self._live: set[ContainerEnclosure] = set()
        self._left: list[str] = []
        self._undoing: set[asyncio.Task[None]] = set()
        self._closings = 0
        self._service: Service | None = None
        self._host: Host | None = None
        self._profile: tempfile._TemporaryFileWrapper[str] | None = None
        self._starting = asyncio.Lock()
        # A start is work for the processors: more at once only make each slower, until deadlines pass.
        self._turns = asyncio.Semaphore(_STARTS_PER_CPU * (os.cpu_count() or 1))

    def probe(self) -> Probe:
        """Asks the engine what it is and whether it has the image; the answer is kept for some seconds."""
        try:
            return _probes.ask(self.name, self.image, self.runtime)
        except Exception as error:
            return Probe(False, f"{type(error).__name__}: {error}", f"see what `{self.name} info` says")

    def first_processes(self) -> list[int]:
        """The pids of the sandboxes' first processes, which are no children of this one: an engine started them."""
        return [enclosure.pid for enclosure in self._live if enclosure.pid]

    async def create(self, policy: Policy) -> GuestSandbox:
        """A container, started, its receipt read back. Nothing is left of one that did not come to be.

        Raises UnsupportedError (an image or a runtime that is not this tier's included), PolicyError (a mount that
        shows an engine's socket), UnavailableError (no engine, no image), StartError.
        """
        require(self, policy)
        spec.require_own(policy, tier=self.name, image=self.image, runtime=self.runtime)
        try:
            before = self._closings
            engine, host = await self._ready()
            try:
                async with self._turns:
                    sandbox = await self._create(policy, engine, host)
            except payload.SilentError:
                # Seen once in some hundred starts of Docker 20.10 on a busy host: the end of what was sent to the
                # container's stdin does not arrive. Nothing ran, so another container is tried, once.
                async with self._turns:
                    sandbox = await self._create(policy, engine, host)
            if self._closings != before:  # close() ended what was running then, and this was not yet
                await sandbox.close()
                raise ClosedError("the tier was closed while the sandbox started", tier=self.name)
            return sandbox
        except EngineGoneError as error:
            await self._forget()
            _probes.forget(self.name)
            raise UnavailableError(str(error), tier=self.name, remedy="start the engine, then try again") from None
        except EngineError as error:
            raise self._refused(error) from None

    async def _create(self, policy: Policy, engine: Engine, host: Host) -> GuestSandbox:
        packages, version = _packages(policy)
        rlimits = spec.rlimits(policy.limits, host.hard)
        wanted = spec.Container(
            name=f"fumehood-{secrets.token_hex(8)}",
            policy=policy,
            image=host.image,
            user=host.user(),
            held=host.hard,
            owner=owners.ours(),
            runtime=self.runtime,
            binds=(*_mounts(policy), *packages),
            seccomp=self._seccomp(),
        )
        enclosure = await self._made_or_removed(engine, wanted)
        try:
            pump = enclosure.pump = Pump(*await self._start(engine, enclosure.ident))
            await pump.send(payload.message(python=version, rlimits=rlimits, preload=policy.preload))
            inspected = await engine.call("GET", f"{_SPELLINGS[self.name].containers}/{enclosure.ident}/json")
            pid = int(inspected["State"]["Pid"])
            seen = enclosure.see(pid)
            report = await self._report(pump, enclosure)
            if not seen:
                raise StartError(
                    "the container's processes and files are not visible on this host, so it could not be held",
                    tier=self.name,
                    remedy="use an engine that runs on this host and belongs to this user, or run as root",
                )
            receipt = self._receipt(pid, inspected, policy, host, rlimits, report)
            if "memory" not in host.hard:
                enclosure.poll_memory(policy.limits.memory_bytes)
            return GuestSandbox(Channel(*pump.take()), enclosure, policy, receipt, env=spec.ENV)
        except BaseException as error:
            await asyncio.shield(enclosure.discard())
            if isinstance(error, OSError | KeyError | ValueError | TypeError) and not isinstance(error, FumehoodError):
                raise StartError(f"the sandbox could not be set up: {error!r}", tier=self.name) from None
            raise

    async def _made_or_removed(self, engine: Engine, wanted: spec.Container) -> ContainerEnclosure:
        """A container that does not run yet. Raises EngineError, EngineGoneError.

        An engine that was asked creates it though nobody waits any more, so whoever is cancelled here stays until the
        engine has answered and what came of it is removed.
        """
        making = asyncio.create_task(self._made(engine, wanted))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            undoing = asyncio.create_task(_discard(making))
            self._undoing.add(undoing)
            undoing.add_done_callback(self._undoing.discard)
            await asyncio.shield(undoing)
            raise

    async def _made(self, engine: Engine, wanted: spec.Container) -> ContainerEnclosure:
        spelling = _SPELLINGS[self.name]
        query = {"name": wanted.name} if self.name == "docker" else None
        try:
            made = await engine.call("POST", f"{spelling.containers}/create", query=query, body=spelling.body(wanted))
            if not isinstance(made, dict) or not made.get("Id"):
                raise EngineGoneError("what answers names no container")
        except EngineGoneError:
            self._left.append(wanted.name)  # it may have been made, or be made yet
            raise
        enclosure = ContainerEnclosure(engine, str(made["Id"]), self._forgotten)
        self._live.add(enclosure)
        return enclosure

    async def _start(self, engine: Engine, ident: str) -> tuple[socket.socket, bytes]:
        """Attach and start, so that nothing is lost of what the container says; EngineError, EngineGoneError.

        Podman answers an attach only when the container runs, so there the order is the other one: the container says
        nothing before it is spoken to, except why it could not start.
        """
        attach = f"/containers/{ident}/attach"
        if self.name == "podman":
            await engine.call("POST", f"/containers/{ident}/start")
            return await engine.attach(attach, _ATTACH)
        attached = await engine.attach(attach, _ATTACH)
        try:
            await engine.call("POST", f"/containers/{ident}/start")
        except BaseException:
            attached[0].close()
            raise
        return attached

    def _seccomp(self) -> str:
        if self.name == "docker":
            return spec.seccomp_text()
        if self._profile is None:
            self._profile = tempfile.NamedTemporaryFile("w", prefix="fumehood-seccomp-", suffix=".json")  # noqa: SIM115
            self._profile.write(spec.seccomp_text())
            self._profile.flush()
        return self._profile.name

    async def _report(self, pump: Pump, enclosure: ContainerEnclosure) -> dict[str, Any]:
        try:
            return await payload.report(pump.stream, tier=self.name, timeout_s=_READY_TIMEOUT_S)
        except payload.SilentError:
            raise
        except StartError as error:
            said = enclosure.lost_reason() if pump.stderr else ""
            raise StartError(f"{error.message}{f'; {said}' if said else ''}", tier=self.name) from None

    def _receipt(
        self,
        pid: int,
        inspected: dict[str, Any],
        policy: Policy,
        host: Host,
        rlimits: dict[str, int],
        report: dict[str, Any],
    ) -> Receipt:
        runtime = _runtime_of(inspected, host)
        if self.runtime not in (None, runtime):
            raise UnavailableError(
                f"the engine took {runtime!r} instead of the runtime {self.runtime!r}",
                tier=self.name,
                remedy="name the runtime in the engine's own configuration (Podman: containers.conf, runtime=)",
            )
        reading = posture.Reading(self.name)
        reading.take("runtime", True, runtime, "the engine, by inspect")
        reading.take("image", True, inspected["Image"], host.image)
        boundary = spec.boundary_of(runtime)
        posture.kernel_view(reading, pid, own_kernel=boundary is Boundary.KERNEL)
        posture.mounts_view(reading, pid, policy, tuple(mount.target for mount in policy.mounts))
        posture.engine_view(reading, inspected, policy, host.hard)
        posture.common_view(reading, policy, rlimits, report, "cpu" in host.hard)
        return reading.receipt(boundary, host=host.describe(), notes=host.notes)

    def _forgotten(self, enclosure: ContainerEnclosure, removed: bool) -> None:
        self._live.discard(enclosure)
        if not removed:
            self._left.append(enclosure.ident)

    async def _remove_left(self, engine: Engine) -> None:
        """Remove the containers that the engine could not remove when it was asked to: it was not there."""
        while self._left:
            await owners.remove(engine, self._left[-1])
            self._left.pop()

    async def _ready(self) -> tuple[Engine, Host]:
        """The engine and what it is, asked once; what dead supervisors left there is removed then."""
        if self._service is not None and self._host is not None and not self._service.lost:
            return self._service.engine, self._host
        async with self._starting:
            if self._service is None or self._service.lost or self._host is None:
                await self._forget()
                service = await in_thread(reach, self.name)
                try:
                    self._host = await learn(service.engine, self.image, self.runtime)
                    await owners.prune(service.engine)
                    await self._remove_left(service.engine)
                except BaseException:
                    service.close()
                    raise
                self._service = service
            return self._service.engine, self._host

    async def _forget(self) -> None:
        service, self._service, self._host = self._service, None, None
        if service is not None:
            await in_thread(service.close)

    def _refused(self, error: EngineError) -> FumehoodError:
        """The engine's refusal as ours: a missing image and a missing runtime have their own remedies."""
        text = error.message[:_REFUSAL_SHOWN]
        if error.status == 404 and "image" in text.lower():
            self._host = None
            _probes.forget(self.name)
            return _no_image(self.name, self.image)
        if _NO_RUNTIME.search(text):
            remedy = f"install it and name it in the engine's configuration, or choose another than {self.runtime!r}"
            return UnavailableError(f"the engine has no such runtime: {text}", tier=self.name, remedy=remedy)
        return StartError(f"the engine refused: {text}", tier=self.name)

    async def close(self) -> None:
        """End what runs and let go of the engine, ending a service that was started for it. Idempotent."""
        self._closings += 1
        await end_all(self._live)
        await asyncio.gather(*self._undoing)
        if self._service is not None:
            with contextlib.suppress(EngineError, EngineGoneError):  # `fumehood prune` removes what is left then
                await self._remove_left(self._service.engine)
        if self._profile is not None:
            with contextlib.suppress(FileNotFoundError):  # whoever owns the folder of temporary files was faster
                self._profile.close()
            self._profile = None
        await self._forget()


class DockerTier(ContainerTier):
    """Tier ``docker``."""

    name = "docker"


class PodmanTier(ContainerTier):
    """Tier ``podman``."""

    name = "podman"


async def _discard(making: asyncio.Task[ContainerEnclosure]) -> None:
    """Remove what comes of ``making``, if anything does."""
    with contextlib.suppress(EngineError, EngineGoneError):
        await (await making).discard()


class _Spelling(NamedTuple):
    """How an engine is asked for a container."""

    containers: str  # the path below which it has them
    body: Callable[[spec.Container], dict[str, Any]]


_SPELLINGS: dict[Word, _Spelling] = {
    "docker": _Spelling("/containers", spec.docker_body),
    "podman": _Spelling("/v4.0.0/libpod/containers", spec.podman_body),
}
#: Docker: "unknown or invalid runtime name", "Unknown runtime specified"; Podman: "OCI runtime … is not available",
#: and either when the runtime's file is not there.
_NO_RUNTIME = re.compile(
    r"unknown (or invalid )?runtime|runtime \S+ (is )?not (available|found)|no such runtime|requested OCI runtime"
    r"|executable file not found|fork/exec \S+: no such file",
    re.IGNORECASE,
)
_ATTACH = {"stream": 1, "stdin": 1, "stdout": 1, "stderr": 1}


class Host:
    """What one engine on this host is: read once, constant while it runs."""

    def __init__(self, word: Word, info: dict[str, Any], version: dict[str, Any], image: str) -> None:
        self.word = word
        self.info = info
        self.image = image
        self.version = str(version.get("Version", "?"))
        self.components = {
            str(c.get("Name", "")): str(c.get("Version", "")) for c in version.get("Components") or () if c
        }
        options = [str(o) for o in info.get("SecurityOptions") or ()]
        own = info.get("libpod") or {}
        self.rootless = any("rootless" in o for o in options) or bool((own.get("security") or {}).get("rootless"))
        ranges = (own.get("idMappings") or {}).get("uidmap") or ()
        self.ids = sum(int(r.get("size", 0)) for r in ranges) if ranges else 65536
        # Without delegated control groups (cgroup v1) rootless Podman holds none of them.
        grouped = not (self.rootless and own.get("cgroupVersion") == "v1")
        self.hard = (
            *(("memory",) if grouped and info.get("MemoryLimit") and info.get("SwapLimit", True) else ()),
            *(("pids",) if grouped and info.get("PidsLimit") else ()),
            *(("cpu",) if grouped and info.get("CpuCfsQuota") else ()),
            "disk",
        )
        self.notes = advice.notes(self.components)

    def user(self) -> int:
        """The id for a container's processes: one of its own, or what a rootless engine can map."""
        if not self.rootless:
            return _UID_FIRST + random.SystemRandom().randrange(_UID_COUNT)
        return _UID_ROOTLESS if self.ids > _UID_ROOTLESS else 0

    def describe(self) -> str:
        """For a receipt: the engine, its mode and the kernel below."""
        system = os.uname()
        mode = ", rootless" if self.rootless else ""
        return f"{self.word} {self.version}{mode} on {system.sysname} {system.release} {system.machine}"


async def learn(engine: Engine, image: str | None, runtime: str | None) -> Host:
    """Ask the engine. Raises EngineError, EngineGoneError, UnavailableError (no image, no such runtime)."""
    info = await engine.call("GET", "/info")
    if engine.word == "podman":
        own = await engine.call("GET", "/v4.0.0/libpod/info")
        info["libpod"] = own.get("host") or {}
        version = _podman_version(own)
    else:
        version = await engine.call("GET", "/version")
    known = info.get("Runtimes") or {}
    if engine.word == "docker" and runtime is not None and runtime not in known:
        raise UnavailableError(
            f"the engine has no runtime {runtime!r}, only {', '.join(sorted(known))}",
            tier=engine.word,
            remedy='name it under "runtimes" in /etc/docker/daemon.json and restart the engine',
        )
    found = await engines.inspect(engine, image)
    if found is None:
        raise _no_image(engine.word, image)
    return Host(engine.word, info, version, str(found["reference"]))


def _podman_version(info: dict[str, Any]) -> dict[str, Any]:
    """What Podman's /version says, from its info: /version asks the host's package manager twice over, for 0.3 s."""
    host = info.get("host") or {}
    version = (info.get("version") or {}).get("Version", "?")
    conmon, runtime = host.get("conmon") or {}, host.get("ociRuntime") or {}
    parts = {
        "Podman Engine": version,
        "Conmon": conmon.get("version", ""),
        f"OCI Runtime ({runtime.get('name', '')})": runtime.get("version", ""),
    }
    return {"Version": version, "Components": [{"Name": name, "Version": text} for name, text in parts.items()]}


def _no_image(word: Word, image: str | None) -> UnavailableError:
    name = image or store.DEFAULT_NAME
    if "/" in name or ":" in name:
        remedy = f"`fumehood image pull {name} --engine {word}`"
    else:
        remedy = f"`fumehood image build {name} --engine {word}`"
        if image is None:
            remedy += f", or where a registry can be reached `fumehood image pull --engine {word}`"
    return UnavailableError(f"{word} has no image {name!r}", tier=word, remedy=remedy)


def _runtime_of(inspected: dict[str, Any], host: Host) -> str:
    """The OCI runtime of the container, as the engine tells it: by name, or for Podman by its file's name."""
    name = str(inspected.get("OCIRuntime") or inspected["HostConfig"].get("Runtime") or "")
    if name in ("", "oci"):
        name = str(host.info.get("DefaultRuntime") or "")
    return os.path.basename(name) or "unknown"


def _mounts(policy: Policy) -> list[tuple[str, str]]:
    """The operator's mounts. Raises PolicyError for one that would show an engine's socket."""
    for mount in policy.mounts:
        spec.refuse_sockets(mount.source)
    return [(mount.source, mount.target) for mount in policy.mounts]


def _packages(policy: Policy) -> tuple[list[tuple[str, str]], str | None]:
    """The environment's folder on the host and inside, and the Python it is for. Raises PolicyError."""
    if policy.environment is None:
        return [], None
    found = environments.find(policy.environment)
    return [(str(found.site_packages), spec.PACKAGES.format(found.python))], found.python


class _Probes:
    """The last answers, so that a survey of all tiers does not ask an engine again and again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[object, ...], tuple[Probe, float]] = {}

    def ask(self, word: Word, image: str | None, runtime: str | None) -> Probe:
        key = (word, image, runtime, os.environ.get("DOCKER_HOST"), os.environ.get("CONTAINER_HOST"), os.geteuid())
        with self._lock:
            probe, until = self._known.get(key, (None, 0.0))
            if probe is None or time.monotonic() > until:
                probe = _look(word, image, runtime)
                self._known[key] = probe, time.monotonic() + (_PROBE_KEPT_S if probe.available else 0.0)
            return probe

    def forget(self, word: Word) -> None:
        with self._lock:
            for key in [k for k in self._known if k[0] == word]:
                del self._known[key]


_probes = _Probes()


def _look(word: Word, image: str | None, runtime: str | None) -> Probe:
    try:
        service = reach(word)
    except UnavailableError as error:
        return Probe(False, error.message, error.remedy or "")
    try:
        host = _run(learn(service.engine, image, runtime))
        details = [("engine", host.describe()), ("image", host.image), *advice.details(service.engine, host.components)]
        details += [("advice", note) for note in host.notes]
        reason = _not_ours(host)
        if reason:
            return Probe(False, reason, "run as root, or use a rootless engine", details=tuple(details))
        return Probe(True, hard=host.hard, details=tuple(details))
    except UnavailableError as error:
        return Probe(False, error.message, error.remedy or "")
    except EngineGoneError as error:
        return Probe(False, str(error), "start the engine, then try again")
    except EngineError as error:
        return Probe(False, f"the engine refused: {error.message}", f"see what `{word} info` says")
    finally:
        service.close()


def _not_ours(host: Host) -> str:
    if os.geteuid() != 0 and not host.rootless:
        return (
            "the engine runs as root and this user does not: what its containers do could not be held or collected, "
            "and who may call such an engine is root by another name"
        )
    return ""


def _run(coroutine: Any) -> Any:
    """Run to the end, also where this thread has a running loop already."""
    result: list[Any] = []

    def work() -> None:
        try:
            result.append(asyncio.run(coroutine))
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=work, name="fumehood-probe")
    thread.start()
    thread.join()
    with contextlib.suppress(IndexError):
        if isinstance(result[0], BaseException):
            raise result[0]
    return result[0]
