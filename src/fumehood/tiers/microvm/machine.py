"""One machine in the jail: started, its sockets, and what holds it from outside."""

from __future__ import annotations

import array
import asyncio
import contextlib
import json
import os
import signal
import socket
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fumehood.enclosure import PidfdEnclosure
from fumehood.errors import StartError
from fumehood.execs import Run
from fumehood.folders import remove_tree
from fumehood.model import Artifact, Code, KiB, Limits, Policy, Receipt
from fumehood.session import GuestSandbox
from fumehood.threads import in_thread
from fumehood.tiers.jail.client import Guest
from fumehood.tiers.jail.tier import JailTier
from fumehood.tiers.microvm import direct, qemu
from fumehood.tiers.microvm.control import Control
from fumehood.tiers.microvm.export import receive_folder
from fumehood.tiers.microvm.qemu import Monitor, Shape
from fumehood.wire import BODY_MAX, Channel

#: Where the machine's root stands in the zygote's.
_ROOT = "/opt/machine"

#: How long the work folder may take to come out; what has not come by then is told as skipped.
EXPORT_TIMEOUT_S = 30.0
_ENVIRONMENT = b"".join(f"{name}={value}\0".encode() for name, value in direct.ENVIRONMENT.items())

#: CPU time that QEMU may use beside the program: starting, and sending the work folder. The exact limit is the
#: supervisor's; this is in the rlimit behind it.
_CPU_OVERHEAD_S = 60.0


def jail_guest(program: qemu.Program, accelerator: str) -> Guest:
    """The jail for ``program``: it sees its own files, and nothing of the zygote's."""
    return Guest(
        entry="fumehood.tiers.microvm.monitor:serve",
        modules=(
            "tiers/microvm/__init__.py",
            "tiers/microvm/filters.py",
            "tiers/microvm/monitor.py",
        ),
        binds=tuple((source, _ROOT + path) for source, path in program.files),
        filters="fumehood.tiers.microvm.filters",
        root=_ROOT,
        devices=(qemu.KVM,) if accelerator == "kvm" else (),
    )


def jail_policy(limits: Limits, shape: Shape) -> Policy:
    """What QEMU may use: the guest's memory and its own, its threads, and no disk."""
    outer = Limits(
        wall_s=limits.wall_s,
        cpu_s=limits.cpu_s + _CPU_OVERHEAD_S,
        cpus=limits.cpus,
        memory_bytes=shape.memory_bytes + qemu.OVERHEAD_BYTES,
        pids=qemu.THREADS,
        disk_bytes=64 * KiB,
        files=16,
        open_files=64,
    )
    return Policy(limits=outer)


@dataclass(slots=True)
class Machine:
    """A QEMU that was started: its monitor, the ends of the guest's two ports, and what holds it."""

    monitor: Monitor
    agent: socket.socket
    control: Control
    enclosure: PidfdEnclosure
    receipt: Receipt

    async def discard(self) -> None:
        """Kill it and let go of everything."""
        self.close()
        with contextlib.suppress(OSError):
            self.agent.close()
        await self.enclosure.discard()

    def close(self) -> None:
        """Close the monitor and the control port."""
        self.monitor.close()
        self.control.close()


async def start(jail: JailTier, limits: Limits, shape: Shape, arguments: list[str], fds: dict[int, int]) -> Machine:
    """Execute QEMU in the jail with ``arguments`` and the descriptors ``fds`` (its number there -> ours).

    The ports' descriptors are added here. Raises UnavailableError, StartError; nothing is left behind then.
    """
    with contextlib.ExitStack() as undo:
        agent, its_agent = socket.socketpair()
        undo.callback(agent.close)
        with its_agent:
            control, its_control = socket.socketpair()
            undo.callback(control.close)
            with its_control:
                channel, enclosure, receipt = await jail.start_bare(jail_policy(limits, shape))
                try:
                    given = {qemu.AGENT_FD: its_agent.fileno(), qemu.CONTROL_FD: its_control.fileno(), **fds}
                    _hand_over(channel, arguments, given)
                except OSError as error:
                    channel.close()
                    await asyncio.shield(enclosure.discard())
                    raise StartError(f"the machine monitor was lost: {error}", tier="microvm") from None
        undo.pop_all()
    return Machine(Monitor(channel), agent, Control(control), enclosure, receipt)


def _hand_over(channel: socket.socket, arguments: list[str], fds: dict[int, int]) -> None:
    message = json.dumps({"argv": arguments, "fds": list(fds)}).encode()
    channel.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds.values()))])


class MachineEnclosure:
    """Implements :class:`fumehood.session.Enclosure` for a machine.

    ``kill()`` stops QEMU, which no guest can see or avoid; it is killed when the sandbox closes, and until then its
    memory, with the work folder in it, is there. Takes ownership of ``machine``, but for its agent's socket.
    """

    def __init__(self, machine: Machine, policy: Policy) -> None:
        self._machine = machine
        self._inner = machine.enclosure
        self._limits = policy.limits
        self._depth = policy.artifacts.depth
        self._before_cpu_s = self._inner.usage()[0] or 0.0
        self._closing = False
        self._wants_files = False
        #: Why the copy of the work folder lacks something, or "".
        self.missing = ""
        self._folder = ""
        self._work_fd = -1

    def closing(self, *, wants_files: bool) -> None:
        """The sandbox is about to close: from here kill() is for good, once the files are out."""
        self._closing = True
        self._wants_files = wants_files

    @property
    def pid(self) -> int:
        """The process of QEMU."""
        return self._inner.pid

    def alive(self) -> bool:
        """Whether QEMU runs."""
        return self._inner.alive()

    def kill(self) -> None:
        """Stop every thread of QEMU, at once."""
        self._inner.signal(signal.SIGSTOP)

    async def wait_dead(self) -> None:
        """At once while the sandbox is only stopped; until QEMU is dead when it closes."""
        if not self._closing:
            return
        if self._wants_files and not self._folder:
            if not self._inner.alive():
                self.missing = "the machine is gone, and what it held with it"
            else:
                await self._export()
        self._inner.kill()
        await self._inner.wait_dead()

    async def _export(self) -> None:
        """Have init kill the programs and send the work folder into one of ours; what did not come is told."""
        self._folder = tempfile.mkdtemp(prefix="fumehood-microvm-")
        work = os.path.join(self._folder, "work")
        os.mkdir(work, 0o700)
        bounds = {"entries": self._limits.files, "bytes": self._limits.disk_bytes, "depth": self._depth}
        try:
            self._machine.control.post("export", **bounds)
            self._inner.signal(signal.SIGCONT)
            async with asyncio.timeout(EXPORT_TIMEOUT_S):
                self.missing = await receive_folder(self._machine.control, work, self._limits)
        except TimeoutError:
            self.missing = f"the rest did not come out of the machine within {EXPORT_TIMEOUT_S:g} s"
        except StartError as error:
            self.missing = f"the rest did not come out of the machine: {error.message}"
        except OSError as error:
            self.missing = f"the rest could not be received: {error}"
        self._work_fd = os.open(work, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def usage(self) -> tuple[float | None, int | None]:
        """CPU seconds of QEMU since the sandbox was ready; peak memory of the programs as the guest counts it."""
        cpu_s, _ = self._inner.usage()
        self._machine.control.hear()
        return None if cpu_s is None else max(cpu_s - self._before_cpu_s, 0.0), self._machine.control.memory_peak_bytes

    def memory_killed(self) -> bool:
        """Whether the guest's kernel killed a program for memory, or the host's kernel QEMU."""
        self._machine.control.hear()
        return self._machine.control.oom_kills > 0 or self._inner.memory_killed()

    def lost_reason(self) -> str:
        """Why the channel may have closed."""
        if not self._inner.dead:
            return "its agent ended, or sent what is no frame"
        return "the machine ended: the guest powered off or panicked, or QEMU died"

    def workdir_fd(self) -> int | None:
        """The copy of the work folder, if one was asked for."""
        return self._work_fd if self._work_fd >= 0 else None

    async def release(self) -> None:
        """Let go of everything. Idempotent."""
        self._machine.close()
        if not self._inner.dead:
            self._inner.kill()
            await self._inner.wait_dead()
        await self._inner.release()
        if self._work_fd >= 0:
            os.close(self._work_fd)
            self._work_fd = -1
        if self._folder:
            folder, self._folder = self._folder, ""
            await in_thread(remove_tree, folder)


class MachineSandbox(GuestSandbox):
    """A sandbox whose files are inside a machine and come out only if they are asked for."""

    def __init__(
        self,
        channel: Channel,
        enclosure: MachineEnclosure,
        policy: Policy,
        receipt: Receipt,
        *,
        env: Mapping[str, str],
    ) -> None:
        super().__init__(channel, enclosure, policy, receipt, env=env)
        self._machine = enclosure
        self._given = False  # a program that was not rehearsed
        self._rehearsing = False

    async def rehearse(self, programs: Sequence[str]) -> None:
        """Run these as single runs, each in an interpreter of its own, and then with displays in the one that stays.

        They must leave no name behind. Raises what exec() does; StartError if one fails.
        """
        for displays in (False, True):
            self._rehearsing = not displays
            for source in programs:
                result = await self.exec(Code(source, displays=displays))
                if not result.ok:
                    raise StartError(f"a rehearsal failed: {result.stderr[-500:]}", tier="microvm")
        self._given = False

    def _hand_over(self, run: Run, background: bool = False) -> memoryview:
        """As in GuestSandbox: the shortest way if it is the sandbox's only one and wants nothing more."""
        body = None if background or self._given else self._direct(run)
        if body is None:
            self._given = True
            return super()._hand_over(run, background)
        self._given = not self._rehearsing
        self._channel.post({}, body)
        return memoryview(b"")

    def _direct(self, run: Run) -> bytes | None:
        """The frame of a single run, or None if it is none."""
        program = run.program
        if not isinstance(program, Code) or not (run.last or self._rehearsing):
            return None
        if run.displays is not None or run.stdin.wanted or program.context:
            return None
        name = program.name[:255].replace("\0", "?").encode("utf-8", "replace")
        env = b"" if self._env == _ENVIRONMENT else self._env
        stop = self._policy.overflow == "stop"
        head = direct.HEAD.pack(run.ident, run.output.budget, stop, len(name), len(env))
        body = b"".join((head, name, env, program.data))
        return body if len(body) <= BODY_MAX else None

    @property
    def monitor_pid(self) -> int:
        """The process of the machine, as this host numbers it; for whoever inspects it from outside."""
        return self._machine.pid

    async def close(self, *, out: Path | None = None) -> tuple[Artifact, ...]:
        """See :class:`fumehood.tier.Sandbox`. If files are missing, the last entry, one for all the rest, says why."""
        self._machine.closing(wants_files=out is not None)
        artifacts = await super().close(out=out)
        if out is None or not self._machine.missing:
            return artifacts
        return (*artifacts, Artifact("", 0, skipped=self._machine.missing))
