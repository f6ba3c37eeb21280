"""A runner for tests of what stands around one: it runs nothing, and plays what it is told to."""

from __future__ import annotations

import asyncio
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


class StandInProgram:
    def __init__(self, end: asyncio.Future[Result]) -> None:
        self._end = end
        self.calls: list[tuple[Any, ...]] = []

    @property
    def done(self) -> bool:
        return self._end.done()

    @property
    def stdout_data(self) -> bytes:
        return b"so far"

    @property
    def stderr_data(self) -> bytes:
        return b""

    async def wait(self) -> Result:
        return await asyncio.shield(self._end)

    async def write(self, data: bytes) -> None:
        self.calls.append(("write", data))

    async def close_stdin(self) -> None:
        self.calls.append(("close_stdin",))

    async def signal(self, number: int) -> None:
        self.calls.append(("signal", number))

    async def kill(self) -> None:
        self._end.cancel()

    async def resize(self, rows: int, columns: int) -> None:
        self.calls.append(("resize", rows, columns))


class StandInSandbox:
    receipt = RECEIPT

    def __init__(self, runner: StandInRunner) -> None:
        self._runner = runner
        self.files: dict[str, bytes] = {}
        self.saved_to: list[Path | None] = []
        self.calls: list[tuple[Any, ...]] = []

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
        self.calls.append(("interrupt",))

    def expire_after(self, *, idle_s: float | None = None, lifetime_s: float | None = None) -> None:
        self.calls.append(("expire_after", idle_s, lifetime_s))

    async def start(
        self, program: Program, *, stdin: bool = False, sink: Sink | None = None, background: bool = False
    ) -> StandInProgram:
        return StandInProgram(asyncio.ensure_future(self._runner.play(program, sink)))

    async def write_stream(self, path: str, source: Any) -> None:
        self.files[path] = b"".join(source)

    async def read_stream(self, path: str) -> AsyncIterator[bytes]:
        yield self.files[path]

    async def stat(self, path: str) -> FileInfo:
        return FileInfo(path, "file", len(self.files[path]))

    async def rename(self, path: str, new_path: str) -> None:
        self.files[new_path] = self.files.pop(path)

    async def make_folder(self, path: str) -> None:
        self.calls.append(("make_folder", path))

    async def export_tar(self, path: str = "", *, skipped: Any = None) -> AsyncIterator[bytes]:
        for data in self.files.values():
            yield data

    async def import_tar(self, source: Any, path: str = "") -> None:
        self.calls.append(("import_tar", path, b"".join(source)))

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
        displays: bool = False,
    ) -> Result:
        return await self.play(Code(program) if isinstance(program, (str, bytes)) else program, sink)

    @contextlib.asynccontextmanager
    async def open(
        self, *, idle_s: float | None = None, lifetime_s: float | None = None
    ) -> AsyncIterator[StandInSandbox]:
        sandbox = StandInSandbox(self)
        self.sandboxes.append(sandbox)
        yield sandbox
