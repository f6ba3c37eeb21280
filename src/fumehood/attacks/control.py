"""Tier ``none``: what is left when nothing is enforced. Only the suite reaches it; the registry does not know it.

It is the exec tool that one writes in an afternoon: the supervisor's own environment and descriptors, its user and
its session, a folder below the temporary one, all output read to its end, the exit code taken from a line that the
wrapper prints, artifacts copied as they are found. So it lacks every control at once, those of the guest and of the
supervisor included, and an attack that does not succeed here proves nothing elsewhere.

The host is protected by an outer guard, a process between the supervisor and the program that adopts every orphan and
kills all of them when they are too many, too large or too old, and when the supervisor is gone (its end of a pipe
closes). Attacks that would change the host itself (``Attack.throwaway``) run in a mount and a UTS namespace of the
guard's own.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from fumehood.attacks import guard
from fumehood.attacks.stage import python, remove_tree
from fumehood.errors import ClosedError, FileError
from fumehood.model import Artifact, Boundary, Code, Control, Held, Outcome, Policy, Program, Receipt, Result, Usage
from fumehood.threads import in_thread
from fumehood.tier import Features, FileInfo, Probe, Sink

FEATURES = Features(
    boundary=Boundary.NONE, summary="the control of the attack suite: nothing is enforced", live=True, files=True,
    note="not a boundary",
)  # fmt: skip

_EXIT_LINE = re.compile(rb"^::exit=(-?\d+)::$", re.MULTILINE)

#: How long the naive collector may take before the guard ends it.
COLLECT_S = 4.0

#: Copies every file that opening gives something for: no check of kinds, links, sizes or counts, as one writes it.
_COLLECT = """\
import os, sys
source, target = sys.argv[1:]
for folder, folders, names in os.walk(source, followlinks=True):
    for name in names:
        path = os.path.join(folder, name)
        into = os.path.join(target, os.path.relpath(path, source))
        os.makedirs(os.path.dirname(into), exist_ok=True)
        with open(path, "rb") as file, open(into, "wb") as copy:
            while piece := file.read(1 << 20):
                copy.write(piece)
"""


class ControlTier:
    """The unconfined control. ``home`` is the HOME that programs get; :meth:`close` kills all that they left."""

    name = "none"
    features = FEATURES

    def __init__(self, *, home: Path, throwaway: bool = False) -> None:
        self._home = home
        self._throwaway = throwaway
        self._guards: list[tuple[subprocess.Popen[bytes], int]] = []

    def probe(self) -> Probe:
        """Always there."""
        return Probe(True)

    async def create(self, policy: Policy) -> ControlSandbox:
        """A folder; nothing else is set up."""
        return ControlSandbox(self, policy)

    async def close(self) -> None:
        """Let every guard kill what it watches."""
        for process, lifeline in self._guards:
            os.close(lifeline)
            with contextlib.suppress(subprocess.TimeoutExpired):
                await in_thread(process.wait, 10)
        self._guards.clear()

    def spawn(self, folder: Path, program: str) -> subprocess.Popen[bytes]:
        """Start the guard, which starts the program."""
        read_end, write_end = os.pipe()
        os.set_inheritable(read_end, True)
        settings = {"lifeline": read_end, "throwaway": self._throwaway, "program": program, "python": python()}
        settings_file = folder.parent / f"{folder.name}.json"
        settings_file.write_text(json.dumps(settings))
        try:
            process = subprocess.Popen(
                [python(), "-I", "-S", guard.__file__, str(settings_file)], cwd=folder, close_fds=False,
                env={**os.environ, "HOME": str(self._home)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )  # fmt: skip
        finally:
            os.close(read_end)
        self._guards.append((process, write_end))
        return process


class ControlSandbox:
    """A folder in which programs run as the caller would run them."""

    def __init__(self, tier: ControlTier, policy: Policy) -> None:
        self._tier = tier
        self._policy = policy
        self._folder = Path(tempfile.mkdtemp(prefix="control-"))
        self._closed = False
        # A claim that is not true: what the suite compares receipts with must see it.
        self.receipt = Receipt("none", Boundary.NONE, (Control("no_new_privs", Held.HARD, "none", "1"),))

    async def exec(
        self, program: Program, *, stdin: bytes = b"", sink: Sink | None = None, last: bool = False
    ) -> Result:
        """Run a program and read all of its output. Raises UnicodeDecodeError, as naive code does."""
        if self._closed:
            raise ClosedError("the sandbox is closed", tier="none")
        if not isinstance(program, Code):
            raise FileError("the control runs only code", tier="none")
        began = time.monotonic()
        process = self._tier.spawn(self._folder, program.data.decode())
        out, err = await in_thread(_communicate, process, stdin)
        out.decode(), err.decode()
        found = _EXIT_LINE.search(out)
        code = int(found.group(1)) if found else None
        return Result(
            outcome=Outcome.EXITED, exit_code=code, stdout_data=out, stderr_data=err,
            seconds=time.monotonic() - began, usage=Usage(stdout_bytes=len(out), stderr_bytes=len(err)),
            receipt=self.receipt,
        )  # fmt: skip

    async def write_file(self, path: str, data: bytes) -> None:
        """Write wherever ``path`` leads."""
        target = self._folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)

    async def read_file(self, path: str, *, max_bytes: int = 64 << 20) -> bytes:
        """Read wherever ``path`` leads."""
        with open(self._folder / path, "rb") as file:
            return file.read(max_bytes)

    async def list_files(self) -> tuple[FileInfo, ...]:
        """The folder's own entries."""
        return tuple(FileInfo(p.name, "file", p.lstat().st_size) for p in sorted(self._folder.iterdir()))

    async def remove(self, path: str) -> None:
        """Remove one file."""
        (self._folder / path).unlink()

    async def interrupt(self) -> None:
        """Nothing is interrupted."""

    async def close(self, *, out: Path | None = None) -> tuple[Artifact, ...]:
        """Copy what is there, then remove the folder. Nothing is killed. Raises what the naive code would."""
        if self._closed:
            return ()
        self._closed = True
        try:
            if out is not None:
                await in_thread(self._collect, out)
            shutil.rmtree(self._folder)
        finally:
            if self._folder.exists():
                remove_tree(self._folder)
        return ()

    def _collect(self, out: Path) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                [python(), "-I", "-S", "-c", _COLLECT, str(self._folder), str(out)], timeout=COLLECT_S, check=False,
                stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=_bound_file_size,
            )  # fmt: skip


def _bound_file_size() -> None:
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (guard.FILE_BYTES_MAX, guard.FILE_BYTES_MAX))


def _communicate(process: subprocess.Popen[bytes], stdin: bytes) -> tuple[bytes, bytes]:
    """Both streams to their end; the guard itself stays, so nobody waits for it."""
    assert process.stdin and process.stdout and process.stderr
    parts: dict[str, bytes] = {}
    import threading

    def drain(name: str, stream: object) -> None:
        parts[name] = stream.read()  # type: ignore[attr-defined]

    threads = [
        threading.Thread(target=drain, args=(name, stream), daemon=True)
        for name, stream in (("out", process.stdout), ("err", process.stderr))
    ]
    for thread in threads:
        thread.start()
    with contextlib.suppress(OSError):
        process.stdin.write(stdin)
        process.stdin.close()
    for thread in threads:
        thread.join()
    process.stdout.close()
    process.stderr.close()
    return parts["out"], parts["err"]
