"""The sandboxes of the endpoint: one live Fumehood sandbox each, with its tokens, its paths and its hour of death."""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
import secrets
import time
from dataclasses import dataclass, field

from fumehood.errors import PolicyError
from fumehood.model import check_path
from fumehood.runner import AsyncRunner
from fumehood.tier import FullSandbox

#: Where E2B's sandboxes have their user's folder; here it is the work folder.
HOME = "/home/user"
TIMEOUT_MAX_S = 24 * 3600.0


@dataclass(eq=False)
class Box:
    """One sandbox as the protocol knows it."""

    ident: str
    token: str  # for envd; told to whoever made the sandbox
    traffic_token: str  # for the sandbox's other ports
    template: str
    metadata: dict[str, str]
    envs: dict[str, str]
    sandbox: FullSandbox
    started_at: float  # Unix time
    ends_at: float
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # one program at a time
    dead: asyncio.Event = field(default_factory=asyncio.Event)
    executions: int = 0
    folder: str = ""  # of the interpreter's context, as its sandbox names it; "" is the work folder
    pids: int = 100


class Sandboxes:
    """All of them. Each ends by itself when its time is over."""

    def __init__(self, runner: AsyncRunner) -> None:
        self._runner = runner
        self._boxes: dict[str, Box] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}

    async def create(self, *, template: str, timeout_s: float, metadata: dict[str, str], envs: dict[str, str]) -> Box:
        """A new sandbox. Raises what :meth:`fumehood.runner.AsyncRunner.open` does."""
        stack = contextlib.AsyncExitStack()
        sandbox = await stack.enter_async_context(self._runner.open())
        now = time.time()
        box = Box(
            ident=f"i{secrets.token_hex(9)}",
            token=secrets.token_urlsafe(24),
            traffic_token=secrets.token_urlsafe(24),
            template=template,
            metadata=metadata,
            envs=envs,
            sandbox=sandbox,
            started_at=now,
            ends_at=now,
        )
        self._boxes[box.ident] = box
        self.prolong(box, timeout_s)
        self._keepers[box.ident] = asyncio.create_task(self._keep(box, stack))
        return box

    def find(self, ident: str) -> Box | None:
        """The sandbox called ``ident``, if it lives."""
        return self._boxes.get(ident)

    def all(self) -> tuple[Box, ...]:
        """Every living sandbox."""
        return tuple(self._boxes.values())

    def prolong(self, box: Box, timeout_s: float) -> None:
        """Let it live for so long from now."""
        box.ends_at = time.time() + min(max(timeout_s, 0.0), TIMEOUT_MAX_S)

    async def kill(self, box: Box) -> None:
        """End it now, and return when it is dead."""
        keeper = self._keepers.get(box.ident)
        box.dead.set()
        if keeper is not None:
            await asyncio.shield(keeper)

    async def close(self) -> None:
        """End all."""
        await asyncio.gather(*(self.kill(box) for box in self.all()))

    async def _keep(self, box: Box, stack: contextlib.AsyncExitStack) -> None:
        while not box.dead.is_set() and (left := box.ends_at - time.time()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left, 1.0)):
                    await box.dead.wait()
        box.dead.set()
        self._boxes.pop(box.ident, None)
        self._keepers.pop(box.ident, None)
        await stack.aclose()


def inside(path: str) -> str:
    """A path of the protocol as a path of the work folder; "" is the folder itself. Raises PolicyError."""
    absolute = posixpath.normpath(posixpath.join(HOME, path))
    if absolute == HOME:
        return ""
    if not absolute.startswith(HOME + "/"):
        raise PolicyError(f"{path!r:.200} is outside {HOME}")
    return check_path(absolute.removeprefix(HOME + "/"))
