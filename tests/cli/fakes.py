"""A tier for tests of the front ends: a script by its name is played, nothing is isolated, nothing is executed."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from fumehood.errors import FileError, OutcomeUnknownError, StartError
from fumehood.model import (
    Artifact,
    Boundary,
    Code,
    Control,
    Held,
    Outcome,
    Policy,
    Program,
    Receipt,
    Result,
    Usage,
)
from fumehood.tier import Features, FileInfo, Probe, Sink


@dataclass
class Stage:
    """What a script may use, and what it leaves: the end of the run."""

    policy: Policy
    stdin: bytes
    files: dict[str, bytes]
    sink: Sink | None
    out: bytearray = field(default_factory=bytearray)
    err: bytearray = field(default_factory=bytearray)
    outcome: Outcome = Outcome.EXITED
    exit_code: int | None = 0
    dropped: int = 0
    unsupported: str | None = None
    left: dict[str, bytes] = field(default_factory=dict)

    def print(self, data: bytes, *, err: bool = False) -> None:
        (self.err if err else self.out).extend(data)
        if self.sink:
            self.sink("stderr" if err else "stdout", data)

    def end(self, outcome: Outcome, exit_code: int | None = None) -> None:
        self.outcome, self.exit_code = outcome, exit_code


async def hello(stage: Stage) -> None:
    stage.print(b"hello\n")
    stage.print(b"warned\n", err=True)


async def inputs(stage: Stage) -> None:
    stage.print(repr((stage.stdin, sorted(stage.files.items()), sorted(stage.policy.env.items()))).encode())


async def limits(stage: Stage) -> None:
    stage.print(repr(stage.policy.limits).encode())


async def hostile(stage: Stage) -> None:
    stage.print(b"\xe2\x82")  # a euro sign in two pieces
    stage.print(b"\xac \x1b[31mred\x1b[0m \xe2\x80\xae \xff\n")


async def forever(stage: Stage) -> None:
    stage.print(b"started\n")
    await asyncio.sleep(600)


async def babble(stage: Stage) -> None:
    while True:
        stage.print(b"line\n")
        await asyncio.sleep(0.001)


async def flood(stage: Stage) -> None:
    for _ in range(64):
        stage.print(b"x" * 65535 + b"\n")
        await asyncio.sleep(0)


async def leave(stage: Stage) -> None:
    stage.left = {"a.csv": b"1,2\n", "bad\x1b[2J\n.csv": b"", "huge": b"skip me"}


async def truncated(stage: Stage) -> None:
    stage.print(b"abc")
    stage.dropped = 2048


async def lacking(stage: Stage) -> None:
    stage.end(Outcome.EXITED, 1)
    stage.unsupported = "import numpy"


async def unstartable(stage: Stage) -> None:
    raise StartError("no room", tier="fake", remedy="make room")


async def lost(stage: Stage) -> None:
    raise OutcomeUnknownError("it is gone", tier="fake")


async def no_space(stage: Stage) -> None:
    raise FileError("no space for data.csv")


async def broken(stage: Stage) -> None:
    raise RuntimeError("a fault")


async def host_fails(stage: Stage) -> None:
    raise OSError(28, "No space left on device", "/out/a.csv")


def _ending(outcome: Outcome, exit_code: int | None = None) -> Callable[[Stage], Awaitable[None]]:
    async def script(stage: Stage) -> None:
        stage.end(outcome, exit_code)

    return script


_PLAYS = (hello, inputs, limits, hostile, forever, flood, leave, truncated, babble, lacking)
_FAILURES = (unstartable, lost, no_space, broken, host_fails)
_ENDINGS = {o.value: _ending(o) for o in Outcome if o not in (Outcome.EXITED, Outcome.SIGNALED)}

SCRIPTS: dict[str, Callable[[Stage], Awaitable[None]]] = {f.__name__: f for f in (*_PLAYS, *_FAILURES)} | _ENDINGS
SCRIPTS |= {"exit3": _ending(Outcome.EXITED, 3), "segfault": _ending(Outcome.SIGNALED, -11)}

RECEIPT = Receipt(
    tier="fake",
    boundary=Boundary.KERNEL,
    controls=(Control("memory", Held.HARD, "cgroup v2", "256 MiB"), Control("pids", Held.BEST_EFFORT, "rlimit", "64")),
    host="Linux 6.1",
    notes=("a test\x1b[2J",),
)


class FakeSandbox:
    receipt = RECEIPT

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._files: dict[str, bytes] = {}
        self._left: dict[str, bytes] = {}

    async def exec(
        self, program: Program, *, stdin: bytes = b"", sink: Sink | None = None, last: bool = False
    ) -> Result:
        assert isinstance(program, Code)
        stage = Stage(self._policy, stdin, self._files, sink)
        began = time.perf_counter()
        await SCRIPTS[program.data.decode().strip()](stage)
        self._left = stage.left
        usage = Usage(stdout_bytes=len(stage.out) + stage.dropped, stderr_bytes=len(stage.err))
        seconds = time.perf_counter() - began
        return Result(
            stage.outcome,
            stage.exit_code,
            bytes(stage.out),
            bytes(stage.err),
            seconds,
            usage,
            self.receipt,
            unsupported=stage.unsupported,
        )

    async def write_file(self, path: str, data: bytes) -> None:
        self._files[path] = data

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        return self._files[path]

    async def list_files(self) -> tuple[FileInfo, ...]:
        return ()

    async def remove(self, path: str) -> None:
        del self._files[path]

    async def interrupt(self) -> None:
        return None

    async def close(self, *, out: Path | None = None) -> tuple[Artifact, ...]:
        closed = os.environ.get("FAKE_CLOSED")
        if closed:  # tells a test in another process that the sandbox was destroyed
            Path(closed).touch()
        if out is None:
            return ()
        artifacts = []
        for path, data in self._left.items():
            if path == "huge":
                artifacts.append(Artifact(path, len(data), skipped="over the limit"))
            else:
                (out / path).write_bytes(data)
                artifacts.append(Artifact(path, len(data), saved=out / path))
        return tuple(artifacts)


class FakeTier:
    name = "fake"
    features = Features(Boundary.KERNEL, "plays scripts", files=True, environments=True, note="for tests")
    available = True

    def probe(self) -> Probe:
        if self.available:
            return Probe(True, hard=("memory",), details=(("zygote", "none"),))
        return Probe(False, "switched off\x1b[2J", "switch it on")

    async def create(self, policy: Policy) -> FakeSandbox:
        return FakeSandbox(policy)

    async def close(self) -> None:
        return None


class AbsentTier(FakeTier):
    name = "absent"
    available = False


TIERS = {"fake": "fakes:FakeTier", "absent": "fakes:AbsentTier"}


if __name__ == "__main__":  # the command line with these tiers, as a process of its own
    from fumehood import registry
    from fumehood.cli import main

    registry._TIERS = TIERS
    sys.exit(main())
