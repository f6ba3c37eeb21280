"""What the command line writes: its own words, JSON, and the program's output as it comes."""

from __future__ import annotations

import json
import os
import queue
import select
import sys
import threading
from collections.abc import Callable
from typing import Any

from fumehood.cli.terminal import TerminalFilter, escape
from fumehood.errors import PolicyError
from fumehood.tier import Stream

_FD: dict[Stream, int] = {"stdout": 1, "stderr": 2}


def say(text: str) -> None:
    """Fumehood's own words, on stderr; they may quote hostile names, so they are escaped."""
    print(f"fumehood: {escape(text)}", file=sys.stderr)


def print_json(value: dict[str, Any]) -> None:
    """The one JSON object of a command with ``--json``, in ASCII, so that no terminal obeys what it quotes."""
    print(json.dumps(value))


def check_reports(*paths: str | os.PathLike[str] | None) -> None:
    """See that files for reports can be written, before the work they report on. "-" and None are no files.

    Raises PolicyError.
    """
    for path in paths:
        if path is None or path == "-":
            continue
        folder = os.path.dirname(os.fspath(path)) or "."
        if not os.path.isdir(folder):
            raise PolicyError(f"cannot write {os.fspath(path)}: there is no folder {folder}")
        if os.path.isdir(path) or not os.access(path if os.path.exists(path) else folder, os.W_OK):
            raise PolicyError(f"cannot write {os.fspath(path)}")


def bytes_in_words(size: int) -> str:
    """A size for people: ``256 MiB``, ``1.5 KiB``, ``17 bytes``."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:.4g} {unit}"
    return f"{size} byte" + ("" if size == 1 else "s")


def open_standard_descriptors() -> None:
    """Put /dev/null in the place of a closed stdin, stdout or stderr.

    A descriptor opened later would get its number otherwise, and the program's output would go there.
    """
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, so ``fd``
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 - Python's own, for the process's life
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def forget_stdout() -> None:
    """After a broken pipe: let what is still buffered go nowhere, or Python complains of it at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)


class LiveOutput:
    """Writes a program's output to our stdout and stderr as it comes, from a thread of its own.

    So a reader that is slow, or stops, delays no deadline. What waits here is bounded by Limits.output_bytes. What goes
    to a terminal is made harmless, anything else is passed on byte by byte. ``on_failure`` is called, in the thread,
    when a stream cannot be written any longer; the rest of the output is dropped then, and ``failure`` says why.
    """

    def __init__(self, on_failure: Callable[[], None]) -> None:
        self.failure: OSError | None = None
        self._on_failure = on_failure
        self._waiting: queue.SimpleQueue[tuple[Stream, bytes] | None] = queue.SimpleQueue()
        self._filters: dict[Stream, TerminalFilter] = {
            stream: TerminalFilter(getattr(sys, stream).encoding or "utf-8")
            for stream, fd in _FD.items()
            if os.isatty(fd)
        }
        # A daemon: after an interrupt, nobody waits for a reader that has stopped.
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()

    def sink(self, stream: Stream, data: bytes) -> None:
        """Take the next piece; never blocks (a :data:`~fumehood.tier.Sink`)."""
        self._waiting.put((stream, data))

    def finish(self) -> None:
        """Wait until everything taken is written or dropped."""
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while (piece := self._waiting.get()) is not None:
                stream, data = piece
                filter_ = self._filters.get(stream)
                _write(_FD[stream], filter_.feed(data) if filter_ else data)
            for stream, filter_ in self._filters.items():
                _write(_FD[stream], filter_.finish())
        except OSError as error:
            self.failure = error
            self._on_failure()


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:  # whoever shares the terminal or pipe made it non-blocking
            select.select([], [fd], [])
