"""Templates: machines that have booted and wait, as a sealed memory file and the state of their devices.

The cache folder holds, beside the images::

    microvm/templates/<key>/memory          the guest's memory, with holes
    microvm/templates/<key>/state           the devices' state as QEMU saved it
    microvm/templates/<key>/manifest.json   when it was made, and what the files must hold
    microvm/templates/<key>.lock            held by the one who builds or loads it

The key is the SHA-256 of all that the machine depends on: QEMU, accelerator, command line, the host's CPU, kernel,
image, our own files in the guest, and what is preloaded. Clones of one template share its address layout and hash seed,
so a template that is older than :data:`AGE_MAX_S` is made anew.

Both files are loaded into memory that is then sealed (memfd_create(2)), and checked as they are: what a clone maps has
the digest that the builder wrote down, and nothing can alter it any more, neither a clone nor this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import io
import json
import os
import shutil
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from fumehood.environments import Environment
from fumehood.errors import FumehoodError, StartError
from fumehood.model import Limits, MiB, Policy
from fumehood.threads import in_thread
from fumehood.tiers.jail.tier import JailTier
from fumehood.tiers.microvm import images, machine, qemu
from fumehood.tiers.microvm.cpio import Archive
from fumehood.tiers.microvm.images import Image
from fumehood.tiers.microvm.qemu import Program, Shape
from fumehood.wire import Channel, ChannelClosed

_NEEDED = "a kernel of your own needs virtio-mmio, virtio-console, tmpfs, cgroup v2 and ACPI built in"

#: A day: long enough to be worth its seconds, short enough that a layout learnt from one sandbox is soon of no use.
AGE_MAX_S = 86400.0

#: Templates kept on disk; the least recently used ones go.
KEPT_MAX = 8

BOOT_TIMEOUT_S = 240.0
#: How often init takes limits before the snapshot, so that it takes a clone's with code and pages as they stay.
_REHEARSALS = 12
_SAVE_TIMEOUT_S = 60.0
_STATE_BYTES_MAX = 64 * MiB
_PIECE = 1 * MiB
_BECOME = struct.Struct("<c?q48sI")  # as in guest_init.py, which is not loaded here
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE

#: Inside, CPU time goes on while the host lets others run, so it is no measure: the supervisor counts and kills. There
#: is a limit none the less, so that a program cannot set one.
_CPU_S_MAX = 30 * 86400

Runs = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that a template depends on."""

    program: Program
    shape: Shape
    image: Image
    environment: Environment | None
    preload: tuple[str, ...]

    @property
    def options(self) -> str:
        """For the guest's init, on the kernel's command line."""
        return f"fumehood.preload={','.join(self.preload)}" if self.preload else ""

    def key(self) -> str:
        """The name under which it is kept."""
        parts = [
            self.program.version,
            [[path, os.stat(path).st_size, os.stat(path).st_mtime_ns] for path, _ in self.program.files],
            self.shape.clone_arguments(self.program),
            _cpu_model(),
            self.image.digest,
            hashlib.sha256(images.own_archive(self.image.python)).hexdigest(),
            self.environment.digest if self.environment else None,
            self.options,
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


class Template:
    """A sealed memory file and device state, in memory. Owns both descriptors."""

    def __init__(self, recipe: Recipe, memory_fd: int, state_fd: int, made_at: float) -> None:
        self.recipe = recipe
        self.memory_fd = memory_fd
        self.made_at = made_at
        self._state_fd = state_fd

    @property
    def stale(self) -> bool:
        """Whether it is time for another."""
        return not 0 <= time.time() - self.made_at < AGE_MAX_S

    @contextlib.contextmanager
    def state(self) -> Iterator[int]:
        """The device state to be read from its beginning: each clone has an offset of its own."""
        fd = os.open(f"/proc/self/fd/{self._state_fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield fd
        finally:
            os.close(fd)

    def close(self) -> None:
        """Let go of the memory; clones keep what they have mapped. Idempotent."""
        for fd in (self.memory_fd, self._state_fd):
            if fd >= 0:
                os.close(fd)
        self.memory_fd = self._state_fd = -1


def shape_for(limits: Limits, image: Image, environment: Environment | None, accelerator: str) -> Shape:
    """The machine for these limits. Few sizes, so that few templates serve many policies: the limit itself is set
    by init in each clone.

    An archive is unpacked while it lies in memory beside its content, into at most half of the memory.
    """
    programs = 256 * MiB
    while programs < limits.memory_bytes:
        programs *= 2
    unpacked = image.initramfs_bytes + (environment.size_bytes if environment else 0)
    base = 96 * MiB + unpacked * 9 // 4
    step = 32 * MiB
    return Shape(accelerator, (programs + base + step - 1) // step * step)


def inside(policy: Policy) -> dict[str, object]:
    """What the guest's kernel holds: limits of the sandbox as a whole, and of each process by rlimit; terminals."""
    limits = policy.limits
    rlimits = {
        "CORE": 0,
        "NOFILE": limits.open_files,
        "NPROC": limits.pids + 1,  # the agent is one
        "MEMLOCK": 0,
        "MSGQUEUE": 0,
        "FSIZE": limits.disk_bytes,
        "CPU": _CPU_S_MAX,
        "NICE": 0,
        "RTPRIO": 0,
        "SIGPENDING": 1024,
    }
    whole = {"memory_bytes": limits.memory_bytes, "pids": limits.pids + 1, "disk_bytes": limits.disk_bytes}
    return {**whole, "files": limits.files, "rlimits": rlimits, "terminals": policy.terminals}


def adoption(policy: Policy, *, fresh: bool) -> bytes:
    """What init is told of the sandbox that its machine becomes: entropy, the clock, limits unlike the template's."""
    different = fresh or inside(policy) != inside(Policy())
    return _become(b"A", fresh=fresh, policy=policy if different else None)


def _become(kind: bytes, *, fresh: bool = False, policy: Policy | None) -> bytes:
    follows = json.dumps(inside(policy)).encode() if policy is not None else b""
    return _BECOME.pack(kind, fresh, time.time_ns(), os.urandom(48), len(follows)) + follows


async def obtain(recipe: Recipe, jail: JailTier, progress: Callable[[str], None] = lambda line: None) -> Template:
    """The template for ``recipe``: from the cache if it is there, whole and young enough, or else booted now.

    Raises PolicyError (unsafe cache folder), UnavailableError, StartError (the machine did not boot; no space).
    """
    place = images.folder() / "templates"
    folder = place / recipe.key()
    try:
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = await in_thread(_lock, folder.with_suffix(".lock"))
        try:
            found = await in_thread(_load, recipe, folder)
            if found is None:
                progress("booting a template")
                found = await _boot(recipe, jail)
                try:
                    await in_thread(_save, found, found._state_fd, folder)
                except BaseException:
                    found.close()
                    raise
                await in_thread(_forget_old, place, folder)
            return found
        finally:
            os.close(lock)
    except OSError as error:
        raise StartError(
            f"the template could not be kept: {error}",
            tier="microvm",
            remedy="make room in the cache folder, or set FUMEHOOD_CACHE to another one",
        ) from None


# --- booting ---------------------------------------------------------------------------------------------------------


async def boots(recipe: Recipe, jail: JailTier, timeout_s: float) -> str:
    """Why this machine does not boot within ``timeout_s``, or "" if it does. For trying an accelerator."""
    try:
        async with asyncio.timeout(timeout_s):
            (await _boot(recipe, jail)).close()
    except TimeoutError:
        return f"a guest does not boot within {timeout_s:g} s"
    except FumehoodError as error:
        return error.message
    return ""


async def _boot(recipe: Recipe, jail: JailTier) -> Template:
    memory_fd = _memfd("memory", recipe.shape.memory_bytes)
    state_fd = -1
    try:
        with contextlib.ExitStack() as files:
            kernel = await in_thread(_loaded, "kernel", [recipe.image.kernel.read_bytes()])
            files.callback(os.close, kernel)
            root = await in_thread(_loaded, "root", _archives(recipe))
            files.callback(os.close, root)
            fds = {qemu.MEMORY_FD: memory_fd, qemu.KERNEL_FD: kernel, qemu.INITRAMFS_FD: root}
            arguments = recipe.shape.template_arguments(recipe.program, recipe.options)
            limits = Limits(wall_s=BOOT_TIMEOUT_S, cpu_s=4 * BOOT_TIMEOUT_S)
            started = await machine.start(jail, limits, recipe.shape, arguments, fds)
            try:
                await _until_ready(started)
                for _ in range(_REHEARSALS):
                    started.control.send(_become(b"L", policy=Policy()))
                    async with asyncio.timeout(_SAVE_TIMEOUT_S):
                        await started.control.line()
                state = await _saved_state(started)
            finally:
                await asyncio.shield(started.discard())
        state_fd = await in_thread(_loaded, "state", [state])
        for fd in (memory_fd, state_fd):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return Template(recipe, memory_fd, state_fd, time.time())
    except BaseException:
        os.close(memory_fd)
        if state_fd >= 0:
            os.close(state_fd)
        raise


async def _until_ready(started: machine.Machine) -> None:
    """Until the agent has rehearsed a run. Raises StartError with what init or QEMU said."""
    fd = os.dup(started.agent.fileno())
    channel = Channel(fd, fd)
    ready = asyncio.ensure_future(channel.receive())
    failed = asyncio.ensure_future(started.control.line())
    ended = asyncio.ensure_future(started.monitor.ended())
    try:
        done, _ = await asyncio.wait({ready, failed, ended}, timeout=BOOT_TIMEOUT_S, return_when="FIRST_COMPLETED")
        if ready in done and not ready.exception() and ready.result()[0]["op"] == "ready":
            return
        said = "it took too long" if not done else f"its agent did not begin; {_NEEDED}"
        if failed in done and not failed.exception():
            said = str(failed.result().get("message"))[-2000:]
        elif ended in done:
            said = str(ended.exception() or "QEMU ended")
        raise StartError(f"the template did not boot: {said}", tier="microvm")
    except ChannelClosed as error:
        raise StartError(f"the template did not boot: {error}", tier="microvm") from None
    finally:
        for task in (ready, failed, ended):
            task.cancel()
        await asyncio.gather(ready, failed, ended, return_exceptions=True)
        channel.close()


async def _saved_state(started: machine.Machine) -> bytes:
    """What QEMU saves of the devices; the memory stays in its file."""
    state = bytearray()
    end, its_end = socket.socketpair()
    end.setblocking(False)

    async def read() -> None:
        loop = asyncio.get_running_loop()
        while piece := await loop.sock_recv(end, _PIECE):
            state.extend(piece)
            if len(state) > _STATE_BYTES_MAX:
                raise StartError("the state of the machine has no end", tier="microvm")

    reading = asyncio.ensure_future(read())
    try:
        async with asyncio.timeout(_SAVE_TIMEOUT_S):
            with its_end:
                await started.monitor.save(its_end)
            started.enclosure.kill()
            await reading
    except TimeoutError:
        raise StartError("the state of the machine could not be saved in time", tier="microvm") from None
    finally:
        reading.cancel()
        end.close()
    return bytes(state)


def _archives(recipe: Recipe) -> list[bytes]:
    """What the kernel unpacks, one after the other: the image, our files, and the environment's packages."""
    parts = [recipe.image.initramfs.read_bytes(), images.own_archive(recipe.image.python)]
    environment = recipe.environment
    if environment is not None:
        file = io.BytesIO()
        archive = Archive(file)
        site = f"opt/env/lib/python{recipe.image.python}/site-packages"
        for depth in range(3, len(site.split("/")) + 1):
            archive.folder("/".join(site.split("/")[:depth]))
        archive.tree(environment.site_packages, site)
        archive.close()
        parts.append(file.getvalue())
    return parts


@lru_cache(maxsize=1)
def _cpu_model() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        return next((line for line in file if line.startswith("model name")), "").strip()
    return ""


# --- memory files and the disk ---------------------------------------------------------------------------------------


def _memfd(name: str, size: int) -> int:
    fd = os.memfd_create(f"fumehood-{name}", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    return fd


def _loaded(name: str, parts: list[bytes]) -> int:
    fd = _memfd(name, 0)
    for part in parts:
        view = memoryview(part)
        while view:
            view = view[os.write(fd, view) :]
    return fd


def _runs(fd: int, size: int) -> Runs:
    """Where a file has content, as (offset, length)."""
    runs = []
    position = 0
    while position < size:
        try:
            start = os.lseek(fd, position, os.SEEK_DATA)
        except OSError:
            break  # nothing but a hole is left
        position = min(os.lseek(fd, start, os.SEEK_HOLE), size)
        runs.append((start, position - start))
    return runs


def _copy(source: int, target: int, runs: Runs) -> str:
    """Copy ``runs``; the digest of what was copied and where."""
    total = hashlib.blake2b()
    for offset, length in runs:
        total.update(b"%d %d\n" % (offset, length))
        for start in range(offset, offset + length, _PIECE):
            piece = os.pread(source, min(_PIECE, offset + length - start), start)
            total.update(piece)
            view, at = memoryview(piece), start
            while view:
                written = os.pwrite(target, view, at)
                view, at = view[written:], at + written
    return total.hexdigest()


def _save(template: Template, state_fd: int, folder: Path) -> None:
    """Write a template to disk, all or nothing. Raises OSError."""
    draft = folder.with_suffix(f".{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir(mode=0o700)
        manifest: dict[str, object] = {"made_at": template.made_at}
        for name, source in (("memory", template.memory_fd), ("state", state_fd)):
            size = os.fstat(source).st_size
            runs = _runs(source, size)
            target = os.open(draft / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(target, size)
                manifest[name] = {"size": size, "runs": runs, "digest": _copy(source, target, runs)}
            finally:
                os.close(target)
        (draft / "manifest.json").write_text(json.dumps(manifest))
        shutil.rmtree(folder, ignore_errors=True)
        draft.rename(folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _load(recipe: Recipe, folder: Path) -> Template | None:
    """A template from disk; None if there is none, or it is old or damaged."""
    fds: list[int] = []
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        for name in ("memory", "state"):
            facts = manifest[name]
            fds.append(_memfd(name, facts["size"]))
            source = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC)
            try:
                digest = _copy(source, fds[-1], [(offset, length) for offset, length in facts["runs"]])
            finally:
                os.close(source)
            if digest != facts["digest"]:
                raise ValueError("damaged")
            fcntl.fcntl(fds[-1], fcntl.F_ADD_SEALS, _SEALS)
        template = Template(recipe, fds[0], fds[1], float(manifest["made_at"]))
        if template.stale or manifest["memory"]["size"] != recipe.shape.memory_bytes:
            raise ValueError("old")
        os.utime(folder)  # for _forget_old
        return template
    except (OSError, ValueError, KeyError, TypeError):
        for fd in fds:
            os.close(fd)
        return None


def _forget_old(place: Path, keep: Path) -> None:
    """Remove all but the templates used last."""
    with contextlib.suppress(OSError):
        kept = [path for path in place.iterdir() if path.is_dir() and path != keep and not path.suffix]
        kept.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        for path in kept[KEPT_MAX - 1 :]:
            shutil.rmtree(path, ignore_errors=True)


def _lock(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
    except BaseException:
        os.close(fd)
        raise
    return fd
