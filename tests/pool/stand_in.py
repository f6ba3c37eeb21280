"""A tier without a boundary, whose sandboxes count what is done with them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from fumehood.errors import StartError
from fumehood.model import Artifact, Boundary, Code, Outcome, Policy, Program, Receipt, Result, Usage
from fumehood.tier import Features, FileInfo, Probe, Sink

RECEIPT = Receipt("stand-in", Boundary.NONE, ())


class StandInSandbox:
    """Runs nothing: an exec answers with its program's text once ``gate`` is set."""

    def __init__(self, tier: StandIn, policy: Policy, number: int) -> None:
        self.tier = tier
        self.policy = policy
        self.number = number
        self.alive = True
        self.closed = False
        self.execs = 0

    @property
    def receipt(self) -> Receipt:
        return RECEIPT

    async def exec(
        self, program: Program, *, stdin: bytes = b"", sink: Sink | None = None, last: bool = False
    ) -> Result:
        assert not self.closed and self.alive
        self.execs += 1
        self.tier.running += 1
        self.tier.running_most = max(self.tier.running, self.tier.running_most)
        try:
            await self.tier.gate.wait()
            assert isinstance(program, Code)
            error = self.tier.failure(program.data.decode())
            if error is not None:
                raise error
        finally:
            self.tier.running -= 1
        return Result(Outcome.EXITED, 0, program.data, b"", 0.0, Usage(), RECEIPT)

    async def write_file(self, path: str, data: bytes) -> None:
        raise NotImplementedError

    async def read_file(self, path: str, *, max_bytes: int = 0) -> bytes:
        raise NotImplementedError

    async def list_files(self) -> tuple[FileInfo, ...]:
        return (FileInfo(f"number-{self.number}", "file", 0),)

    async def remove(self, path: str) -> None:
        raise NotImplementedError

    async def interrupt(self) -> None:
        raise NotImplementedError

    async def close(self, *, out: Path | None = None) -> tuple[Artifact, ...]:
        if not self.closed:
            self.closed = True
            self.tier.living -= 1
        return ()


class StandIn:
    """The tier. ``refuse`` makes that many creations fail; ``failure`` says what an exec of a text raises."""

    name = "stand-in"
    features = Features(Boundary.NONE, "nothing", live=True, files=True)

    def __init__(self) -> None:
        self.made: list[StandInSandbox] = []
        self.living = self.living_most = 0
        self.running = self.running_most = 0
        self.refuse = 0
        self.closed = False
        self.gate = asyncio.Event()
        self.gate.set()
        self.failure: Callable[[str], Exception | None] = lambda text: None

    def probe(self) -> Probe:
        return Probe(True)

    async def create(self, policy: Policy) -> StandInSandbox:
        self.living += 1
        self.living_most = max(self.living, self.living_most)
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.living -= 1
            raise
        if self.refuse:
            self.refuse -= 1
            self.living -= 1
            raise StartError("refused by the test")
        sandbox = StandInSandbox(self, policy, len(self.made))
        self.made.append(sandbox)
        return sandbox

    async def close(self) -> None:
        self.closed = True
