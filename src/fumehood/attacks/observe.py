"""One attack under way, as the host sees it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fumehood.attacks import procfs
from fumehood.attacks.model import Attack
from fumehood.attacks.prelude import ARMED, DONE, MARK
from fumehood.attacks.procfs import Posture, Proc
from fumehood.attacks.stage import Stage
from fumehood.model import Policy, Receipt, Result

#: How much of the output is kept for the comparison with canaries; all of it is counted.
KEPT_BYTES = 4 << 20


@dataclass(slots=True)
class Run:
    """Everything that watches judge. Filled by :mod:`fumehood.attacks.engine`, by looking from outside."""

    attack: Attack
    policy: Policy
    stage: Stage
    known: frozenset[tuple[int, int]]  # (pid, started) of what makes sandboxes, and the bystander
    elsewhere: Callable[[], Iterable[int]] = tuple  # first processes that are no descendants of this one
    control: bool = False
    in_runtime: bool = False  # the program is no process of its own: see fumehood.attacks.dialects
    full_python: bool = True
    task: asyncio.Future[Any] | None = None  # the exec, where the host did not wait for its end
    began: float = field(default_factory=time.monotonic)
    output: bytearray = field(default_factory=bytearray)
    result: Result | None = None
    receipt: Receipt | None = None
    failure: str | None = None  # the exec raised
    seconds: float = 0.0  # of the exec, so far or in all
    done: list[Posture] = field(default_factory=list)  # processes that marked the end of their attempt
    beside: list[Posture] = field(default_factory=list)  # the same of the second program
    processes_peak: int = 0  # zombies too
    threads_peak: int = 0
    memory_peak_bytes: int = 0
    cpu_by_process: dict[tuple[int, int], float] = field(default_factory=dict)
    file_bytes_peak: int = 0
    own_kernel: bool = False  # the program's kernel is not this host's
    descriptors_peak: int = 0
    comms: set[str] = field(default_factory=set)
    supervisor_before_bytes: int = field(default_factory=procfs.resident_bytes)
    supervisor_peak_bytes: int = 0
    downloads: dict[str, bytes] = field(default_factory=dict)
    refusals: list[str] = field(default_factory=list)  # requests that the tier refused
    second_output: bytes = b""
    closed: bool = False
    close_s: float = 0.0
    close_failure: str | None = None
    survivors: list[str] = field(default_factory=list)  # alive after close()
    orphans: list[str] = field(default_factory=list)  # alive after the supervisor was killed
    bystander_tracer: str = "0"
    traced: list[str] = field(default_factory=list)
    seen: str | None = None  # the evidence, once there is some
    unseen: str | None = None  # what the host could not read

    @property
    def armed(self) -> bool:
        """Whether the attacker got as far as its attempt."""
        return bool(self.done) or ARMED in self.output or (self.result is not None and ARMED in self.result.stdout_data)

    def judge(self) -> str | None:
        """Ask the watch, and keep its answer. One that reads a marked process is asked once, while that is held."""
        watch = self.attack.watch
        if self.seen is None and not (watch.marked and (self.closed or not self.done)):
            try:
                self.seen = watch.judge(self)
            except (OSError, ValueError) as error:
                self.unseen = f"{type(error).__name__}: {error}"
        return self.seen

    @property
    def cpu_s(self) -> float:
        """CPU time of all processes of the sandbox that were seen."""
        return sum(self.cpu_by_process.values())

    @property
    def out(self) -> Path:
        """Where artifacts were saved."""
        return self.stage.out

    def text(self) -> bytes:
        """All output that is at hand, of both streams."""
        parts = [bytes(self.output), self.second_output]
        if self.result is not None:
            parts += [self.result.stdout_data, self.result.stderr_data]
        return b"\n".join(parts)

    def feed(self, _stream: str, data: bytes) -> None:
        """The sink of the exec."""
        if len(self.output) < KEPT_BYTES:
            self.output += data

    def mine(self) -> dict[int, Proc]:
        """Processes of the sandbox: below this one or begun by an engine for it, and not there before."""
        there = procfs.descendants(others=self.elsewhere())
        return {pid: proc for pid, proc in there.items() if (pid, proc.started) not in self.known}

    def look(self) -> None:
        """One look from outside at everything; a few milliseconds."""
        if not self.closed:
            self.seconds = time.monotonic() - self.began
        self.stage.collect()
        processes = self.mine()
        self.processes_peak = max(self.processes_peak, len(processes))
        self.threads_peak = max(self.threads_peak, sum(p.threads for p in processes.values()))
        for proc in processes.values():
            key = (proc.pid, proc.started)
            self.cpu_by_process[key] = max(proc.cpu_s, self.cpu_by_process.get(key, 0.0))
            self.comms.add(proc.comm)
        self._look_memory(processes)
        self.supervisor_peak_bytes = max(self.supervisor_peak_bytes, procfs.resident_bytes())
        if not self.done:
            self._look_marked(processes)

    def _look_memory(self, processes: dict[int, Proc]) -> None:
        if len(processes) > 40:  # a flood of processes: its memory is not what is watched
            return
        self.memory_peak_bytes = max(self.memory_peak_bytes, sum(procfs.memory_bytes(pid) for pid in processes))
        held: dict[tuple[int, int], int] = {}
        for pid in processes:
            files = procfs.open_files(pid)
            self.descriptors_peak = max(self.descriptors_peak, len(files))
            held.update({f.identity: f.blocks_bytes for f in files if f.writable and not self._is_memory(f)})
        self.file_bytes_peak = max(self.file_bytes_peak, sum(held.values()))

    def _is_memory(self, file: procfs.OpenFile) -> bool:
        """Whether it is the memory of the sandbox's own kernel, which its monitor holds as a file."""
        return self.own_kernel and file.link.startswith("/memfd:")

    def marked(self, known: set[int]) -> list[Posture]:
        """Processes of a second sandbox that marked themselves."""
        pids = [p.pid for p in self.mine().values() if p.comm == DONE and p.alive and p.pid not in known]
        return [seen for seen in map(procfs.posture, pids) if seen is not None]

    def _look_marked(self, processes: dict[int, Proc]) -> None:
        marked = [pid for pid, proc in processes.items() if proc.comm == DONE and proc.alive]
        if not marked:
            return
        self.done = [seen for seen in map(procfs.posture, marked) if seen is not None]
        if any(not seen.readable for seen in self.done):
            self.unseen = "the kernel does not let the host read the process"
        self.bystander_tracer = procfs.status(self.stage.bystander.pid).get("TracerPid", "0")
        for pid, proc in self.mine().items():  # again: the table was read before the mark was
            tracer = procfs.status(pid).get("TracerPid", "0")
            if tracer not in ("0", ""):
                self.traced.append(f"{proc.comm} is traced by process {tracer}")

    def alive(self) -> list[str]:
        """Processes of the program that still live, described: those under a name that it gave itself."""
        mine = [p for p in self.mine().values() if p.alive and p.comm.startswith(MARK)]
        return [f"{p.comm} (pid {p.pid}, state {p.state})" for p in mine]


def self_namespaces() -> dict[str, str]:
    """The supervisor's own namespaces."""
    return procfs.namespaces(os.getpid())
