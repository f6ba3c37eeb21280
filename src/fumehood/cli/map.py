"""``fumehood map``: many programs, JSON lines in and JSON lines out."""

from __future__ import annotations

import argparse
import array
import asyncio
import base64
import binascii
import bisect
import contextlib
import fcntl
import hashlib
import json
import os
import signal
import stat
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from fumehood import policy_file
from fumehood.cli.exits import ExitCode
from fumehood.cli.output import forget_stdout, say
from fumehood.errors import OutcomeUnknownError, PolicyError
from fumehood.mapping import Item, Job, Mapped, Refused
from fumehood.model import Code, MiB, Policy
from fumehood.runner import AsyncRunner

#: The longest line of the input: the longest program escaped as JSON, and files beside it.
LINE_BYTES_MAX = 128 * MiB

_READ_BYTES = 1 << 18
_PROGRESS_S = (0.5, 10.0)  # between two looks: on a terminal, elsewhere
_ID = '{"id": '  # how every line of ours begins

_EPILOG = """\
A line of the input is an object: "code" (text), and if wanted "id" (text or a whole number; else it is
the number of the line), "stdin" (text) and "files" (name: text, or name: {"base64": text}).

A line of the output is {"id", "result"}, or {"id", "error"} with "type", "message" and "ran": "no" where
the line or what it asks for is wrong, "unknown" where the sandbox was lost while the program may have
been running. A program that could not be started is tried again; if that does not help it is told on
stderr and has no line. So --resume runs what never started, what was cut short by the interruption, and
what is new in the input; ids must be different then."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``fumehood map``."""
    parser.epilog = _EPILOG
    parser.add_argument("input", metavar="FILE", help="the programs as JSON lines; - reads stdin")
    parser.add_argument("--out", metavar="FILE", help="where the results go (default: stdout)")
    parser.add_argument("--resume", action="store_true", help="add to --out what it lacks; nothing in it is run again")
    parser.add_argument("--concurrency", metavar="N", help="programs at a time (default: the number of processors)")
    parser.add_argument("--unordered", action="store_true", help="results as they come, not in the input's order")
    parser.add_argument("--no-receipt", action="store_true", help="leave the receipts out, most of a short line")
    parser.add_argument("--tier", help="the tier to use, see `fumehood tiers`")
    parser.add_argument("--floor", metavar="BOUNDARY", help="the weakest boundary accepted (default: kernel)")
    parser.add_argument("--policy", metavar="FILE", help="policy file (TOML)")


def main(args: argparse.Namespace) -> int:
    """Run all; 0 when every line has its result, whatever the programs did. Raises FumehoodError, OSError."""
    if args.resume and args.out is None:
        raise PolicyError("--resume needs --out, where the results of the last time are")
    concurrency = _count(args.concurrency)
    policy = policy_file.load(args.policy) if args.policy is not None else Policy()
    with contextlib.ExitStack() as stack:
        source = _open_input(args.input, stack)
        sink, done = _open_output(args.out, args.resume, stack)
        runner = AsyncRunner(tier=args.tier, floor=args.floor, policy=policy)
        work = _Work(source, sink, done, receipts=not args.no_receipt)
        stopped_by = asyncio.run(_until_signal(work.run(runner, concurrency, ordered=not args.unordered)))
        work.progress.end()
        if stopped_by:
            say(f"interrupted: {work.told()}" + ("; --resume goes on" if args.out else ""))
            return 128 + stopped_by
        say(work.told())
        return work.exit_code()


def _count(text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise PolicyError(f"--concurrency: {text!r} is not a whole number")
    return int(text)


# -- the files ----------------------------------------------------------------------------------------------------


def _open_input(path: str, stack: contextlib.ExitStack) -> int:
    if path == "-":
        return 0
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise PolicyError(f"cannot read {path!r}: {getattr(error, 'strerror', error)}") from None
    stack.callback(os.close, fd)
    return fd


def _open_output(path: str | None, resume: bool, stack: contextlib.ExitStack) -> tuple[int, _Done]:
    """The output's descriptor, and what is in it already. A torn last line is cut off. Raises PolicyError."""
    done = _Done()
    if path is None:
        return 1, done
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        stack.callback(os.close, fd)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        regular = stat.S_ISREG(os.fstat(fd).st_mode)
    except BlockingIOError:
        raise PolicyError(f"--out: another `fumehood map` writes to {path!r}") from None
    except (OSError, ValueError) as error:
        raise PolicyError(f"--out: cannot write {path!r}: {getattr(error, 'strerror', error)}") from None
    if resume and not regular:
        raise PolicyError(f"--resume: {path!r} is not a regular file")
    if resume:
        done.load(Path(path), fd)
    elif regular and os.fstat(fd).st_size:
        raise PolicyError(f"--out: {path!r} has something in it", remedy="give --resume, or another file")
    return fd, done


class _Done:
    """The ids that have a line already: eight bytes of a hash for each, so that a million are 8 MB."""

    def __init__(self) -> None:
        self._hashes = array.array("Q")

    def __len__(self) -> int:
        return len(self._hashes)

    def __contains__(self, ident: object) -> bool:
        if not self._hashes:
            return False
        wanted = _hash(ident)
        at = bisect.bisect_left(self._hashes, wanted)
        return at < len(self._hashes) and self._hashes[at] == wanted

    def load(self, path: Path, fd: int) -> None:
        """Read the ids of a results file and cut off what is no whole line. Raises PolicyError."""
        decoder = json.JSONDecoder()
        whole = 0
        with open(path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"}\n"):
                    if line.endswith(b"\n"):
                        raise PolicyError(f"--resume: line {number} of {str(path)!r} is not a result")
                    break
                try:
                    ident, _ = decoder.raw_decode(line[:4096].decode("ascii").removeprefix(_ID))
                except (ValueError, RecursionError):
                    raise PolicyError(f"--resume: line {number} of {str(path)!r} is not a result") from None
                self._hashes.append(_hash(ident))
                whole += len(line)
        os.ftruncate(fd, whole)
        self._hashes = array.array("Q", sorted(self._hashes))


def _hash(ident: object) -> int:
    return int.from_bytes(hashlib.blake2b(json.dumps(ident).encode(), digest_size=8).digest(), "big")


# -- lines --------------------------------------------------------------------------------------------------------


async def _lines(fd: int, progress: _Progress) -> AsyncIterator[bytes]:
    """The lines of the input as they come, without their ends. Raises PolicyError for one that is endless."""
    rest = bytearray()
    while data := await _read(fd):
        seen = len(rest)
        rest += data
        start = 0
        while (end := rest.find(b"\n", max(start, seen))) >= 0:
            progress.read_bytes += end + 1 - start
            yield bytes(rest[start:end])
            start = end + 1
        del rest[:start]
        if len(rest) > LINE_BYTES_MAX:
            raise PolicyError(f"a line of the input is longer than {LINE_BYTES_MAX} bytes")
    if rest:
        yield bytes(rest)


async def _read(fd: int) -> bytes:
    """What there is to read; a pipe or terminal that has nothing yet does not keep the event loop."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    try:
        loop.add_reader(fd, _settle, ready)
    except PermissionError:  # epoll(7) takes no regular file, which never keeps us waiting
        return os.read(fd, _READ_BYTES)
    try:
        await ready
    finally:
        loop.remove_reader(fd)
    return os.read(fd, _READ_BYTES)


def _settle(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


def _item(line: bytes, number: int) -> Item | None:
    """The job on one line; Refused with the reason if it is none; None for a blank line."""
    ident: object = number
    try:
        if not line.strip():
            return None
        try:
            asked = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise PolicyError(f"line {number} is not JSON: {error}"[:300]) from None
        if not isinstance(asked, dict):
            raise PolicyError(f"line {number} is not an object")
        if type(asked.get("id", number)) not in (str, int) or len(str(asked.get("id"))) > 1000:
            raise PolicyError(f'line {number}: "id" must be text or a whole number of at most 1000 characters')
        ident = asked.get("id", number)
        return _job(asked, ident)
    except PolicyError as error:
        return Refused(error, ident)


def _job(asked: dict[str, Any], ident: object) -> Job:
    unknown = sorted(asked.keys() - {"id", "code", "stdin", "files"})
    if unknown:
        raise PolicyError(f"unknown key {unknown[0]!r}; keys are id, code, stdin and files")
    code, stdin, files = asked.get("code"), asked.get("stdin", ""), asked.get("files", {})
    if not isinstance(code, str) or not isinstance(stdin, str) or not isinstance(files, dict):
        raise PolicyError('"code" and "stdin" must be text, and "files" an object')
    contents = {path: _content(path, value) for path, value in files.items()}
    return Job(Code(code), ident, contents, stdin.encode("utf-8", "surrogatepass"))


def _content(path: str, value: object) -> bytes:
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    if isinstance(value, dict) and value.keys() == {"base64"} and isinstance(value["base64"], str):
        try:
            return base64.b64decode(value["base64"], validate=True)
        except (binascii.Error, ValueError):
            pass
    raise PolicyError(f'files: {path!r} must be text, or {{"base64": text}}')


def _line(item: Mapped, *, receipts: bool) -> str:
    """One line of the output, in ASCII, "id" first."""
    if item.result is not None:
        told: dict[str, Any] = {"id": item.ident, "result": item.result.to_dict()}
        if not receipts:
            del told["result"]["receipt"]
    else:
        error = item.error
        assert error is not None
        ran = "unknown" if item.may_have_run else "no"
        told = {"id": item.ident, "error": {"type": type(error).__name__, "message": str(error), "ran": ran}}
    return json.dumps(told) + "\n"


# -- the work -----------------------------------------------------------------------------------------------------


class _Work:
    """From the input's descriptor to the output's."""

    def __init__(self, source: int, sink: int, done: _Done, *, receipts: bool) -> None:
        self._source = source
        self._sink = sink
        self._done = done
        self._receipts = receipts
        self._ok = self._other = self._refused = self._unknown = self._unstarted = self._skipped = 0
        self.progress = _Progress(source)

    async def run(self, runner: AsyncRunner, concurrency: int | None, *, ordered: bool) -> None:
        """All of it. Cancelling it leaves whole lines behind, and no sandbox."""
        async with runner:
            results = runner.map(self._items(), concurrency=concurrency, ordered=ordered)
            async with contextlib.aclosing(results):  # type: ignore[type-var]
                async for item in results:
                    await self._take(item)

    async def _items(self) -> AsyncIterator[Item]:
        number = 0
        async for line in _lines(self._source, self.progress):
            number += 1
            item = _item(line, number)
            if item is None:
                continue
            if (item.ident if isinstance(item, (Job, Refused)) else None) in self._done:
                self._skipped += 1
                continue
            yield item

    async def _take(self, item: Mapped) -> None:
        if item.result is not None:
            self._ok += item.result.ok
            self._other += not item.result.ok
        elif isinstance(item.error, OutcomeUnknownError):
            self._unknown += 1
        elif isinstance(item.error, PolicyError):
            self._refused += 1
        else:
            self._unstarted += 1
            self.progress.clear()
            say(f"{item.ident!r} never started: {item.error}")
            return
        data = memoryview(_line(item, receipts=self._receipts).encode())
        # In a thread: a reader that stops holds the results back, but no deadline of a program that runs.
        writing = asyncio.get_running_loop().run_in_executor(None, _write, self._sink, data)
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            if self._sink != 1:  # a file takes it at once: a line is never torn by an interruption
                await writing
            raise
        self.progress.done += 1
        self.progress.show()

    def told(self) -> str:
        """What was done, in words."""
        parts = [f"{self._ok} exited with 0", f"{self._other} ended otherwise"]
        for count, words in (
            (self._refused, "were refused"),
            (self._unknown, "may have run"),
            (self._unstarted, "never started"),
            (self._skipped, "were there already"),
        ):
            if count:
                parts.append(f"{count} {words}")
        return f"{', '.join(parts)}; {self.progress.rate():.4g} a second"

    def exit_code(self) -> int:
        """0 if every line has its result."""
        if self._unstarted:
            return ExitCode.START
        if self._unknown:
            return ExitCode.UNKNOWN
        return ExitCode.REQUEST if self._refused else 0


def _write(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


async def _until_signal(work: Any) -> int:
    """Run ``work`` to its end, or cancel it at a signal, whose number is returned. A second one ends the process."""
    loop = asyncio.get_running_loop()
    running = asyncio.ensure_future(work)
    stopped_by: list[int] = []

    def stop(number: int) -> None:
        if stopped_by:
            os._exit(128 + number)
        stopped_by.append(number)
        running.cancel()

    heeded = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    for number in heeded:
        loop.add_signal_handler(number, stop, number)
    try:
        await running
    except asyncio.CancelledError:
        if not stopped_by:
            raise
    except BrokenPipeError:
        forget_stdout()
        return signal.SIGPIPE
    finally:
        for number in heeded:
            loop.remove_signal_handler(number)
    return stopped_by[0] if stopped_by else 0


class _Progress:
    """Rate and time left, on stderr: one line rewritten on a terminal, now and then a line elsewhere."""

    def __init__(self, source: int) -> None:
        info = os.fstat(source)
        self._size = info.st_size if stat.S_ISREG(info.st_mode) else 0
        self._began = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._next = self._began + _PROGRESS_S[not self._terminal]
        self.read_bytes = 0
        self.done = 0

    def rate(self) -> float:
        """Results a second so far."""
        return self.done / max(time.monotonic() - self._began, 1e-9)

    def show(self) -> None:
        """Say how far it is, if it is time to."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _PROGRESS_S[not self._terminal]
        text = f"{self.done} done, {self.rate():.4g} a second"
        if self._size and 0 < self.read_bytes <= self._size:
            left = (now - self._began) * (self._size - self.read_bytes) / self.read_bytes
            text += f", {_duration(left)} left"
        if self._terminal:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        else:
            say(text)

    def clear(self) -> None:
        """Make the line free for something else."""
        if self._terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    end = clear


def _duration(seconds: float) -> str:
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {whole % 60} s" if minutes else f"{whole} s"
