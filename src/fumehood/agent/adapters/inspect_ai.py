"""A sandbox environment for Inspect (extra ``inspect``): ``sandbox="fumehood"``, or ``("fumehood", "policy.toml")``.

Each sample has a live sandbox of its own under the policy file, or under :data:`POLICY`. Commands are run one after the
other. There is one user: another one, root included, is refused with SandboxUserUnsupportedError. Where a policy names
no tier, the floor is ``kernel``.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxEnvironment,
    SandboxEnvironmentConfigType,
    SandboxEnvironmentLimits,
    SandboxUserUnsupportedError,
    sandboxenv,
)
from inspect_ai.util._sandbox.environment import SandboxUnavailableError

from fumehood import policy_file
from fumehood.errors import ClosedError, FileError, OutcomeUnknownError, PolicyError, StartError
from fumehood.model import Command, Limits, MiB, Outcome, Policy, Result
from fumehood.runner import AsyncRunner
from fumehood.tier import Sandbox

T = TypeVar("T")

#: For samples without a policy file: what evaluations ask of a container, within one sandbox's limits.
POLICY = Policy(
    limits=Limits(
        wall_s=3600,
        cpu_s=3600,
        memory_bytes=1024 * MiB,
        disk_bytes=512 * MiB,
        pids=256,
        files=65536,
        output_bytes=64 * MiB,
    )
)

_SHELL, _ENV, _TIMEOUT = "/bin/sh", "/usr/bin/env", "/usr/bin/timeout"

#: coreutils' timeout: 124 when it ended the command, 137 when it had to use SIGKILL.
_TIMED_OUT = (124, 137)

# What the scripts below exit with, where shells and coreutils use nothing.
_MISSING, _FORBIDDEN, _FOLDER = 72, 73, 74

_CHECK_READ = f'[ -e "$1" ] || exit {_MISSING}; [ -d "$1" ] && exit {_FOLDER}; [ -r "$1" ] || exit {_FORBIDDEN}; '
_WRITE = (
    f'[ -d "$1" ] && exit {_FOLDER}; [ -e "$1" ] && [ ! -w "$1" ] && exit {_FORBIDDEN}; '
    f'mkdir -p -- "$(dirname -- "$1")" || exit {_FORBIDDEN}; cat > "$1" || exit {_FORBIDDEN}'
)


@sandboxenv(name="fumehood")
class FumehoodSandboxEnvironment(SandboxEnvironment):
    """See the module and :class:`inspect_ai.util.SandboxEnvironment`."""

    def __init__(self, sandbox: Sandbox, stack: contextlib.AsyncExitStack, workdir: str) -> None:
        super().__init__()
        self._sandbox = sandbox
        self._stack = stack
        self._workdir = workdir
        self._turn = asyncio.Lock()

    @classmethod
    async def open(cls, runner: AsyncRunner) -> FumehoodSandboxEnvironment:
        """A new environment over ``runner``, which it does not close. Raises UnsupportedError for a lesser tier."""
        if not (runner.tier.features.live and runner.tier.features.commands):
            raise PolicyError("Inspect needs live sandboxes with commands", tier=runner.tier.name)
        stack = contextlib.AsyncExitStack()
        try:
            sandbox = await stack.enter_async_context(runner.open())
            where = await sandbox.exec(Command((_SHELL, "-c", "pwd")))
            return cls(sandbox, stack, where.stdout.rstrip("\n"))
        except BaseException:
            await stack.aclose()
            raise

    async def close(self) -> None:
        """End the sandbox."""
        await _apart(self._stack.aclose())

    # --- Inspect's life cycle

    @classmethod
    async def sample_init(
        cls, task_name: str, config: SandboxEnvironmentConfigType | None, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        """See Inspect. ``config`` is the name of a policy file."""
        if config is not None and not isinstance(config, str):
            raise PolicyError("the configuration of Inspect's sandbox is the name of a policy file")
        policy = policy_file.load(Path(config)) if config is not None else POLICY
        runner = AsyncRunner(policy=policy)
        try:
            environment = await cls.open(runner)
        except BaseException:
            await runner.close()
            raise
        environment._stack.push_async_callback(runner.close)
        return {"default": environment}

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: SandboxEnvironmentConfigType | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        """See Inspect."""
        for environment in environments.values():
            await environment.as_type(FumehoodSandboxEnvironment).close()

    # --- commands

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """See Inspect. A command that timed out is not tried again: it may have had effects."""
        if user is not None:
            raise SandboxUserUnsupportedError(f"the sandbox has one user, so nothing can run as {user!r}")
        argv = [_ENV, *(f"{name}={value}" for name, value in (env or {}).items()), *cmd]
        if timeout is not None:
            argv = [_TIMEOUT, "-k", "1", str(timeout), *argv]
        if cwd is not None:
            argv = [_SHELL, "-c", f'cd -- {shlex.quote(cwd)} && exec "$@"', "sh", *argv]
        result = await self._run(argv, input.encode() if isinstance(input, str) else input or b"")
        code = result.exit_code if result.exit_code is not None else 137
        if timeout is not None and code in _TIMED_OUT and result.seconds >= timeout:
            raise TimeoutError(f"the command ran longer than {timeout} s")
        if code == 126 and "ermission denied" in result.stderr:
            raise PermissionError(f"{cmd[0]!r} may not be executed: {result.stderr.strip()[:200]}")
        limit = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE
        if result.truncated or max(len(result.stdout_data), len(result.stderr_data)) > limit:
            text = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR
            raise OutputLimitExceededError(text, result.stdout[:limit])
        code = 128 - code if code < 0 else code
        return ExecResult(code == 0, code, result.stdout, result.stderr)

    async def _run(self, argv: list[str], stdin: bytes = b"") -> Result:
        """Raises TimeoutError, SandboxUnavailableError."""
        try:
            async with self._turn:
                result = await _apart(self._sandbox.exec(Command(tuple(argv)), stdin=stdin))
        except (StartError, ClosedError, OutcomeUnknownError) as error:
            raise SandboxUnavailableError(error.message) from error
        if result.outcome in (Outcome.WALL, Outcome.CPU):
            raise TimeoutError("the sandbox was ended by its policy's limit on time")
        return result

    # --- files

    async def write_file(self, file: str, contents: str | bytes) -> None:
        """See Inspect."""
        data = contents.encode() if isinstance(contents, str) else contents
        result = await self._run([_SHELL, "-c", _WRITE, "sh", self._path(file)], data)
        self._raise_for(result, file)

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...

    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        """See Inspect. Files outside the work folder come over stdout, within the policy's output_bytes."""
        limit = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        path = self._path(file)
        inside = path.removeprefix(self._workdir + "/") if path.startswith(self._workdir + "/") else None
        look = _CHECK_READ + ('stat -Lc %s -- "$1"' if inside is not None else f'head -c {limit + 1} -- "$1"')
        result = await self._run([_SHELL, "-c", look, "sh", path])
        self._raise_for(result, file)
        data = result.stdout_data
        size = int(data) if inside is not None else result.usage.stdout_bytes
        if size > limit or (inside is None and result.truncated):
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None)
        if inside is not None:
            try:
                async with self._turn:
                    data = await _apart(self._sandbox.read_file(inside, max_bytes=limit))
            except (FileError, PolicyError) as error:  # it was replaced by something else meanwhile
                raise FileNotFoundError(f"{file}: {error.message}") from error
        return data.decode() if text else data

    def _path(self, file: str) -> str:
        return file if file.startswith("/") else f"{self._workdir}/{file}"

    def _raise_for(self, result: Result, file: str) -> None:
        code = result.exit_code
        if code == _MISSING:
            raise FileNotFoundError(2, "No such file or directory", file)
        if code == _FOLDER:
            raise IsADirectoryError(21, "Is a directory", file)
        if code == _FORBIDDEN:
            raise PermissionError(13, "Permission denied", file)
        if code != 0:
            raise OSError(f"{file!r}: {result.stderr.strip()[:200]}")


async def _apart(work: Coroutine[Any, Any, T]) -> T:
    """Await ``work`` in a task of its own: anyio cancels again and again, and would cancel the clean-up too."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.cancel()
        raise
