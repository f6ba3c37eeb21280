"""A runner for tests of what stands around one: it runs nothing, and plays what it is told to."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from fumehood.model import Boundary, Code, Limits, Outcome, Policy, Program, Receipt, Result, Usage
from fumehood.tier import Features, FileInfo, Probe, Sink

RECEIPT = Receipt("stand_in", Boundary.KERNEL, ())

Play = Callable[[Program], Awaitable[Result]]


def result(
    stdout: bytes = b"", *, outcome: Outcome = Outcome.EXITED, exit_code: int | None = 0, **fields: Any
) -> Result:
    fields = {"stderr_data": b"", "seconds": 0.25, "usage": Usage(0.125, 1 << 20, len(stdout), 0)} | fields
    return Result(outcome=outcome, exit_code=exit_code, stdout_data=stdout, receipt=RECEIPT, **fields)


class StandInTier:
    name = "stand_in"

    def __init__(self, *, live: bool = True, files: bool = True) -> None:
        self.features = Features(Boundary.KERNEL, "plays", live=live, files=files, commands=True)

    def probe(self) -> Probe:
        return Probe(True)

    async def create(self, policy: Policy) -> Any:
        raise AssertionError("the runner makes the sandboxes here")

    async def close(self) -> None:
        return None


class StandInSandbox:
    receipt = RECEIPT

    def __init__(self, runner: StandInRunner) -> None:
        self._runner = runner
        self.files: dict[str, bytes] = {}
        self.saved_to: list[Path | None] = []

    async def exec(
        self, program: Program, *, stdin: bytes = b"", sink: Sink | None = None, last: bool = False
    ) -> Result:
        return await self._runner.play(program, sink)

    async def write_file(self, path: str, data: bytes) -> None:
        self.files[path] = data

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        return self.files[path]

    async def list_files(self) -> tuple[FileInfo, ...]:
        return tuple(FileInfo(path, "file", len(data)) for path, data in sorted(self.files.items()))

    async def remove(self, path: str) -> None:
        del self.files[path]

    async def interrupt(self) -> None:
        return None

    async def close(self, *, out: Path | None = None) -> tuple[Any, ...]:
        self.saved_to.append(out)
        return ()


class StandInRunner:
    """``plays`` is called for each program and gives its result; ``programs`` are those that were run."""

    def __init__(self, plays: Play | None = None, *, limits: Limits | None = None, **features: bool) -> None:
        self.policy = Policy(limits=limits or Limits())
        self.tier = StandInTier(**features)
        self.programs: list[Program] = []
        self.sandboxes: list[StandInSandbox] = []
        self._plays = plays

    async def play(self, program: Program, sink: Sink | None) -> Result:
        self.programs.append(program)
        ended = result(b"ran") if self._plays is None else await self._plays(program)
        if sink is not None:
            sink("stdout", ended.stdout_data)
        return ended

    async def run(
        self,
        program: Program | str | bytes,
        *,
        files: Mapping[str, bytes] | None = None,
        stdin: bytes = b"",
        out: Path | None = None,
        sink: Sink | None = None,
    ) -> Result:
        return await self.play(Code(program) if isinstance(program, (str, bytes)) else program, sink)

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[StandInSandbox]:
        sandbox = StandInSandbox(self)
        self.sandboxes.append(sandbox)
        yield sandbox
