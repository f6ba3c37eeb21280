"""A language runtime as the boundary, in a worker of ours that itself runs in the jail where the host has one.

Theory of operation::

    supervisor ══ frames ══ worker ── the runtime (a child process, or a library in the worker) ── the program

A worker is trusted like the guest agent and speaks its frames (:mod:`fumehood.guest.agent`), so that a
:class:`~fumehood.session.GuestSandbox` serves here as it does everywhere: output is bounded, the deadline is held and
the worker is killed from outside, whatever it does. The program reaches none of this: it has no system calls, only what
the runtime gives it. What must break twice is the runtime and then the jail.

Five things are added to the frames. The host's first is ``configure``; ``done`` may carry ``limit`` (the runtime ended
the program for this outcome), ``unsupported`` (what the program needs and the runtime lacks) and ``tail`` (its body is
the last output, and this the operation that it would have had); and a program may call a host function: ``call`` from
the worker, ``answer`` from the host, both with a JSON body.

Where the host has no jail, the worker is a child process with rlimits, as the unprivileged user that runs the
supervisor; the receipt then says so in its notes and its control ``jail`` is off.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import fumehood
from fumehood.enclosure import PidfdEnclosure, handshake
from fumehood.errors import FumehoodError, StartError, UnavailableError
from fumehood.execs import Run, Stdin
from fumehood.linux import process
from fumehood.model import (
    DEFAULT_NAME,
    Boundary,
    Code,
    Control,
    Held,
    Limits,
    Outcome,
    Policy,
    Program,
    Receipt,
    Result,
)
from fumehood.session import GRACE_S, GuestSandbox
from fumehood.threads import in_thread
from fumehood.tier import Sink, Stream
from fumehood.tiers.jail.client import Guest
from fumehood.tiers.jail.runtime import ENVIRONMENT_HOME, base_python
from fumehood.tiers.jail.tier import JailTier, drop_spare
from fumehood.wire import BODY_MAX, Channel, ChannelClosed, Header, header_text

#: A host function that a program may call. Arguments and result are JSON values; it may be a coroutine function.
Tool = Callable[..., Any]

_PACKAGE = Path(fumehood.__file__).parent
_PLAIN = str(_PACKAGE / "tiers" / "worker_child.py")
_READY_TIMEOUT_S = 60.0
#: A start takes some ten milliseconds, and a second where ten times too much is to be done. One that takes this long
#: hangs: Monty's client has been seen to wait for ever for a process of its own that waits for it, for a reason that
#: was not found, on a machine with a load of twenty. Nothing has run then, so another worker is made, once.
_HANGS_S = 20.0
_UNSUPPORTED_MAX = 200
_KILL_AFTER_S = 0.001  # after a single-use program's end was told; close() does not wait for it
_CALLS_MAX = 16  # host functions under way at once
_UID_FIRST = 0x6FFE0000  # for root's children where there is no jail, below those of tier subprocess
_UID_COUNT = 0xFFFF
#: Limits that the jail, or what stands in for it, holds for the runtime where the runtime does not itself.
_LIMITS_AROUND = ("memory", "pids", "disk", "files", "cpu", "cpu_time")
_IN_JAIL = Control("jail", Held.HARD, "the worker runs in the jail", "yes")
#: Which stream a frame's output is of.
_STREAMS: Mapping[str, Stream] = {"out": "stdout", "err": "stderr"}
_LIMITS = {o.value: o for o in (Outcome.MEMORY, Outcome.CPU, Outcome.WALL, Outcome.OUTPUT)}


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a worker is made of.

    ``packages`` are import names of this Python that the worker needs; ``files`` maps names inside the worker's folder
    :attr:`home` to host paths, all read-only. The overheads are what worker and runtime take beside the program: they
    are added to the policy's limits in the jail, where the runtime's own limit is the exact one.
    """

    tier: str
    boundary: Boundary
    entry: str  # module:function, called with read_fd, write_fd, workdir
    modules: tuple[str, ...]  # of this package, relative to it
    packages: tuple[str, ...]
    files: Mapping[str, str] = field(default_factory=dict)
    memory_overhead_bytes: int = 0
    pids_overhead: int = 0
    open_files_min: int = 64

    home = "/opt/worker"

    def guest(self) -> Guest:
        """For the jail: packages where its Python finds them, files in the worker's folder."""
        site = f"{ENVIRONMENT_HOME}/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
        binds = [(path, f"{site}/{os.path.basename(path)}") for path in map(locate, self.packages)]
        binds += [(path, f"{self.home}/{name}") for name, path in self.files.items()]
        return Guest(self.entry, self.modules, tuple(binds))

    def inner(self, policy: Policy) -> Policy:
        """The policy of the jail around the worker."""
        limits = policy.limits
        wider = replace(
            limits,
            memory_bytes=limits.memory_bytes + self.memory_overhead_bytes,
            pids=limits.pids + self.pids_overhead,
            open_files=max(limits.open_files, self.open_files_min),
        )
        return replace(policy, limits=wider, floor=None, hard=())


def _nothing_holds(limit: str) -> Control:
    return Control(limit, Held.OFF, "nothing holds it on a host without the jail")


def locate(package: str) -> str:
    """The folder, or the file, of an importable module, without importing it. Raises UnavailableError."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise UnavailableError(f"the package {package} is not installed")
    return str(Path(spec.origin).parent) if spec.submodule_search_locations else spec.origin


def installed(package: str) -> bool:
    """Whether ``package`` can be imported; it is not."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


class WorkerHost:
    """Starts workers of one recipe. ``jailed`` None means where the host has the jail; False never (for tests)."""

    def __init__(self, recipe: Recipe, *, jailed: bool | None = None) -> None:
        self.recipe = recipe
        self._jail: JailTier | None = None
        self._jailed = jailed

    def jailed(self) -> bool:
        """Whether workers run in the jail. The first call probes the host for it."""
        if self._jailed is None:
            self._jailed = JailTier().probe().available
        return self._jailed

    async def create(
        self,
        policy: Policy,
        *,
        configure: Header,
        controls: tuple[Control, ...],
        notes: tuple[str, ...] = (),
        tools: Mapping[str, Tool] | None = None,
        rehearsals: int = 1,
    ) -> WorkerSandbox:
        """A worker that is ready for its program. Raises StartError, UnavailableError; nothing is left then."""
        for patience_s in (_HANGS_S, _READY_TIMEOUT_S):
            sandbox = await self._start(policy, controls, notes, tools or {})
            try:
                await sandbox.configure({**configure, "rehearsals": rehearsals}, self.recipe, patience_s)
            except BaseException as error:
                await asyncio.shield(sandbox.close())
                if isinstance(error, ChannelClosed):
                    raise StartError("the worker died while it started", tier=self.recipe.tier) from None
                if not isinstance(error, TimeoutError):
                    raise
            else:
                return sandbox
        raise StartError(f"the worker was not ready within {_READY_TIMEOUT_S:g} s", tier=self.recipe.tier)

    async def _start(
        self, policy: Policy, controls: tuple[Control, ...], notes: tuple[str, ...], tools: Mapping[str, Tool]
    ) -> WorkerSandbox:
        """A worker that does not know yet what it is to do."""
        if await in_thread(self.jailed):
            if self._jail is None:
                self._jail = JailTier(guest=self.recipe.guest())
            channel, enclosure, inner = await self._jail.start(self.recipe.inner(policy))
        else:
            channel, enclosure, inner = await _start_plain(self.recipe, policy)
        receipt = self._receipt(policy, inner, controls, notes)
        return WorkerSandbox(channel, enclosure, policy, receipt, tools=tools)

    def _receipt(
        self, policy: Policy, inner: Receipt, controls: tuple[Control, ...], notes: tuple[str, ...]
    ) -> Receipt:
        limits = policy.limits
        jailed = inner.tier == "jail"
        own = {control.name for control in controls} | {"wall", "output"}
        inside = "jail" if jailed else "worker"
        held = {control.name: control for control in inner.controls}
        around = (
            Control("wall", Held.HARD, "the supervisor's clock and a kill of the worker", str(limits.wall_s)),
            Control("output", Held.HARD, f"bounded reader, {policy.overflow}", str(limits.output_bytes)),
            _IN_JAIL if jailed else replace(_IN_JAIL, held=Held.OFF, value="no"),
            *(held.get(name, _nothing_holds(name)) for name in _LIMITS_AROUND if name not in own),
            *(replace(control, name=f"{inside}.{name}") for name, control in held.items()),
        )
        if not jailed:
            notes = (*notes, "this host has no jail: the worker is a child process with rlimits")
        return Receipt(self.recipe.tier, self.recipe.boundary, (*controls, *around), host=inner.host, notes=notes)

    async def close(self) -> None:
        """Release the jail's templates, and what its probe has kept ready for another guest. Idempotent."""
        if self._jail is not None:
            jail, self._jail = self._jail, None
            await jail.close()
            await in_thread(drop_spare)


class WorkerSandbox(GuestSandbox):
    """A sandbox whose guest is a worker: see the module for what its frames have more."""

    guest_is_agent = False

    def __init__(
        self,
        channel: Channel,
        enclosure: PidfdEnclosure,
        policy: Policy,
        receipt: Receipt,
        *,
        tools: Mapping[str, Tool],
    ) -> None:
        self._around = enclosure
        self._frames = channel
        self._tools = tools
        self._calls: set[asyncio.Task[None]] = set()
        self._lacking: str | None = None
        self._leaving = False  # its only program has ended by itself, and it is to be killed
        super().__init__(channel, enclosure, policy, receipt, env={})
        #: The header of a single run, but for what :meth:`_hand_over` puts before it.
        self._single = header_text(
            {
                "last": True,
                "output_bytes": policy.limits.output_bytes,
                "kind": "code",
                "overflow": policy.overflow,
                "stdin": False,
                "env_bytes": len(self._env),
                "more": False,
            }
        ).removeprefix("{")

    async def configure(self, configuration: Header, recipe: Recipe, patience_s: float) -> None:
        """Tell the worker what to do, and wait until it is ready. Raises TimeoutError, ChannelClosed, StartError."""
        home = recipe.home if self._receipt.control("jail") == _IN_JAIL else None
        files = {n: f"{home}/{n}" if home else path for n, path in recipe.files.items()}
        async with asyncio.timeout(patience_s):
            await self._channel.send({"op": "configure", **configuration, "files": files})
            await asyncio.shield(self._ready)
        self._around.expect_usage()

    async def exec(
        self, program: Program, *, stdin: bytes = b"", sink: Sink | None = None, last: bool = False
    ) -> Result:
        """See :class:`fumehood.tier.Sandbox`."""
        run = self._begin(program, Stdin(stdin), sink, last)
        self._lacking = None
        try:
            result = await self._follow(run)
        finally:
            for task in self._calls:
                task.cancel()
        return replace(result, unsupported=self._lacking) if self._lacking else result

    def _hand_over(self, run: Run, background: bool = False) -> memoryview:
        """As in GuestSandbox. What most runs say is text beforehand, so that little of ours is gone through."""
        program = run.program
        if isinstance(program, Code) and program.name == DEFAULT_NAME and run.last and not run.stdin.wanted:
            payload = self._env + program.data
            if len(payload) <= BODY_MAX:
                text = f'{{"op":"exec","id":{run.ident},"size":{len(payload)},{self._single}'
                self._frames.post_text(text, payload)
                return memoryview(b"")
        return super()._hand_over(run, background)

    def _deadline(self, run: Run) -> None:
        """A worker stops its runtime whatever the program does, and tells so; one that does not is broken."""
        if run.last or run.done.done():
            super()._deadline(run)
            return
        run.imposed = Outcome.WALL
        self.post({"op": "interrupt"})
        run.timers.append(self._loop.call_later(GRACE_S, self._impose, run, Outcome.WALL))

    async def _end(self, run: Run) -> None:
        """A program that the runtime has ended leaves no process of its own behind: see docs/decisions/0007."""
        ended_by_itself = run.status is not None and run.status >= 0 and run.imposed is None and not run.overflow
        if not ended_by_itself or self._killed is not None:
            await super()._end(run)
            return
        run.used = self._enclosure.usage()
        self._killed = "it was for one program only"  # from here on nothing is sent to it
        self._leaving = True

    def _tidy(self, run: Run) -> None:
        super()._tidy(run)
        if self._leaving:
            self._loop.call_later(_KILL_AFTER_S, self._kill, None)

    def _on_frame(self, header: Header, body: bytes) -> None:
        if header["op"] == "call":
            self._take_call(header, body)
            return
        run = self._run
        if header["op"] == "done" and run is not None and header.get("id") == run.ident and not run.done.done():
            self._take_end(run, header, body)
        else:
            super()._on_frame(header, body)

    def _take_end(self, run: Run, header: Header, body: bytes) -> None:
        limit, unsupported, tail = header.get("limit"), header.get("unsupported"), header.get("tail")
        if isinstance(limit, str) and limit in _LIMITS:
            run.imposed = _LIMITS[limit]
        if isinstance(unsupported, str):
            self._lacking = unsupported[:_UNSUPPORTED_MAX]
        if isinstance(tail, str) and tail in _STREAMS:
            self._take_output(run, _STREAMS[tail], body)
        self._take_done(run, header)

    # --- host functions

    def _take_call(self, header: Header, body: bytes) -> None:
        run, ident = self._run, header.get("call")
        if run is None or header.get("id") != run.ident or type(ident) is not int:
            return
        if len(self._calls) >= _CALLS_MAX:
            self._kill("too many calls of host functions at once")
            return
        task = self._loop.create_task(self._serve_call(ident, body))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _serve_call(self, ident: int, body: bytes) -> None:
        try:
            answer, ok = await self._call(body), True
        except (Exception, RecursionError) as error:
            # The kind of error and no more: a message may hold what only the host should know.
            answer, ok = json.dumps(type(error).__name__).encode(), False
        with contextlib.suppress(ChannelClosed):
            self._channel.post({"op": "answer", "call": ident, "ok": ok}, answer)

    async def _call(self, body: bytes) -> bytes:
        request = json.loads(body)
        name, args, kwargs = request["name"], request["args"], request["kwargs"]
        if not isinstance(args, list) or not isinstance(kwargs, dict):
            raise TypeError("malformed call")
        tool = self._tools[name]
        if asyncio.iscoroutinefunction(tool):
            value = await tool(*args, **kwargs)
        else:
            value = await in_thread(tool, *args, **kwargs)
            if isinstance(value, Awaitable):
                value = await value
        answer = json.dumps(value, allow_nan=False).encode()
        if len(answer) > BODY_MAX:
            raise ValueError("the result is too long")
        return answer


# --- without a jail


class PlainEnclosure(PidfdEnclosure):
    """A worker that is a plain child process: it and its process group are killed, its folder is removed."""

    def __init__(self, child: subprocess.Popen[bytes], pidfd: int, folder: str) -> None:
        super().__init__(child.pid, pidfd, None, cpu_after_death=self._used)
        self._child = child
        self._folder = folder
        self.work_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def kill(self) -> None:
        """SIGKILL to the worker and to what it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if not self._death.done():
                os.killpg(self._child.pid, signal.SIGKILL)
        super().kill()

    async def _used(self) -> float | None:
        return None

    async def release(self) -> None:
        """Reap the child and remove the folder as well."""
        from fumehood.folders import remove_tree

        if not self._released:
            await super().release()
            await in_thread(self._child.wait)
            await in_thread(remove_tree, self._folder)


async def _start_plain(recipe: Recipe, policy: Policy) -> tuple[Channel, PidfdEnclosure, Receipt]:
    """A worker as a child process with rlimits. Raises StartError, UnavailableError."""
    import tempfile

    if sys.platform != "linux":
        raise UnavailableError(f"needs Linux; this is {sys.platform}", tier=recipe.tier)
    root = os.geteuid() == 0
    uid = _UID_FIRST + random.SystemRandom().randrange(_UID_COUNT) if root else os.geteuid()
    folder = tempfile.mkdtemp(prefix="fumehood-")
    limits = recipe.inner(policy).limits
    rlimits = _rlimits(limits)
    plan = {
        "uid": uid if root else None,
        "rlimits": rlimits,
        "folder": folder,
        "entry": recipe.entry,
        "site": sorted({str(Path(locate(package)).parent) for package in recipe.packages}),
    }
    ours, theirs = socket.socketpair()
    enclosure = None
    try:
        if root:
            os.chown(folder, uid, uid)
        child = subprocess.Popen(
            [base_python(), "-I", "-S", "-B", _PLAIN, str(theirs.fileno()), json.dumps(plan)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
            cwd=folder,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
        enclosure = PlainEnclosure(child, os.pidfd_open(child.pid), folder)
        theirs.close()
        await handshake(ours, enclosure, tier=recipe.tier)
        receipt = _plain_receipt(child.pid, rlimits, limits)
        enclosure.poll_memory(limits.memory_bytes)
        ours.setblocking(False)
        fd = ours.detach()
        return Channel(fd, fd), enclosure, receipt
    except BaseException as error:
        ours.close()
        if enclosure is None:
            os.rmdir(folder)
        else:
            await asyncio.shield(enclosure.discard())
        if isinstance(error, OSError) and not isinstance(error, FumehoodError):
            raise StartError(f"the worker could not be set up: {error}", tier=recipe.tier) from None
        raise
    finally:
        theirs.close()


def _rlimits(limits: Limits) -> dict[str, int]:
    return {
        "CORE": 0,
        "NOFILE": limits.open_files,
        "FSIZE": limits.disk_bytes,
        "CPU": math.ceil(limits.cpu_s) + 1,
        "DATA": limits.memory_bytes,
    }


def _plain_receipt(pid: int, rlimits: dict[str, int], limits: Limits) -> Receipt:
    status = process.status(pid)
    found = process.limits(pid)
    wrong = [f"{name} is {found[name.lower()]}" for name, n in rlimits.items() if found[name.lower()] != (n, n)]
    if status["NoNewPrivs"] != 1:
        wrong.append("no_new_privs is off")
    if 0 in status["Uid"]:
        wrong.append("it runs as root")
    if wrong:
        raise StartError(f"not held as asked: {'; '.join(wrong)}")
    listed = " ".join(f"{name}={value}" for name, value in rlimits.items())
    controls = (
        Control("no_new_privs", Held.HARD, "PR_SET_NO_NEW_PRIVS", "1"),
        Control("rlimits", Held.HARD, "setrlimit(2)", listed),
        Control("memory", Held.BEST_EFFORT, "RLIMIT_DATA each, and a poller", str(limits.memory_bytes)),
        Control("cpu_time", Held.BEST_EFFORT, "RLIMIT_CPU each, and a poller", str(limits.cpu_s)),
    )
    system = os.uname()
    host = f"{system.sysname} {system.release} {system.machine}"
    return Receipt("worker", Boundary.LIMITS, controls, host=host)
