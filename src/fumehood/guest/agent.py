"""The guest agent: serves programs and files inside a boundary, over one byte stream to the host.

Theory of operation
===================

Processes::

    host ══ stream (frames) ══ agent ── private socket ── interpreter ── whatever the program starts
                                 │ └──── stdin, stdout, stderr pipes ────┘
                                 │ └──── pipe of displays, if asked for ─┘
                                 └ commands (fork and exec; the same three pipes, or a pseudo-terminal)

The *agent* is the init of the sandbox's PID namespace where the tier has one. It forks the *interpreter* as soon as
it starts, before any program is known, so that a run does not wait for a fork. The interpreter runs the program in a
fresh ``__main__``; it is a session leader and its process group is what is signalled.

Who trusts whom. The agent trusts the host, and the host trusts nobody here: it bounds every frame, and it holds the
deadlines, the memory and the output from outside. The agent trusts no program. It is not dumpable, so a program of
the same user can neither attach to it nor take its descriptors (ptrace(2), pidfd_getfd(2), /proc/PID/fd); the
interpreter closes the stream before a program runs; the stream's words never pass through a process that runs one.
What a program can reach is its end of the private socket, in a live sandbox: anything there but one "done" message
of six bytes for the current exec makes the agent kill the interpreter. Forging that message gains what ``sys.exit()``
gains. The exit status of a whole process comes from waitpid, never from the process. What comes over the pipe of
displays is a program's word like its output: it is bounded and passed on, and not looked at here.

One exec runs at a time, and beside it commands in the background. Displays, top-level await and the value of the last
expression are the business of a second file, :mod:`fumehood.guest.displays`, whose text the host sends along with the
execs that ask for them, so that nobody else pays for it; the interpreter compiles it once.

The agent never blocks on what a program controls: its loop polls, its ends of all pipes are non-blocking, output
is forwarded only while the host keeps up, and when a program's main process is gone its pipes are drained once,
bounded, whoever still holds them. It ends when the stream does: end of file is the lifeline, and as PID 1 its end is
everybody's.

Signals: every handler is the default one, because a PID 1 is safe from its own namespace only for signals that it
does not handle. SIGCHLD is the exception; it does no more than wake the loop.

Frames, both ways
=================

Header length (4 bytes, big-endian), body length (4 bytes), header (a JSON object, at most 16 KiB), body (raw, at
most 1 MiB). Whatever can be long (paths, environment, arguments, code) is in the body. From the host::

    exec       id kind("code"|"command") name last output_bytes overflow("truncate"|"stop") stdin(bool)
               env_bytes size more     body: NUL-ended NAME=VALUE items, then code or NUL-ended arguments;
                                       ``size`` bytes in all, continued by frames ``more`` while ``more`` is true
               of code: [context]      the namespace that it runs in
               [helper_bytes           the text of fumehood.guest.displays stands before the code: displays are wanted,
               display_bytes]          so many bytes of them at most, their framing included
               of commands: [cwd_bytes]     the folder to run in stands before the arguments
               [background]            beside the exec that runs, or will
               [rows columns]          on a pseudo-terminal of this size, where stdout and stderr are one
    more       id more                 body: the next part
    stdin      id more                 body: the next piece of standard input, sent when asked for
    interrupt                          SIGINT to the process group of the exec that is not in the background
    signal     id number               a signal to the process group of a program, in the background or not
    resize     id rows columns         the size of its pseudo-terminal
    write      id path_bytes offset    body: path, data. Offset 0 creates or replaces the file
    read       id path_bytes offset length
    list       id count [path_bytes]
    remove     id path_bytes
    stat       id path_bytes
    mkdir      id path_bytes           with its parents; a folder that exists is no error
    rename     id path_bytes to_bytes  body: path, new path. Replaces a file, as rename(2) does

and from the agent::

    ready      version pid
    out, err   id                      body: a piece of output
    display    id                      body: a piece of what came over the pipe of displays
    stdin      id                      asks for the next piece of standard input
    done       id status out_bytes err_bytes overflow lost
                                       status: exit code, or -N for signal N; lost: the interpreter's state is gone
    failed     id error message        nothing ran
    reply      id [error message] [size] [kind mtime mode] [more truncated]     body: what was read or listed
    fatal      message                 the agent's last words
"""

from __future__ import annotations

# The C modules behind ``signal``, ``socket`` and ``json``, whose enums and patterns would cost each sandbox a hundred
# page faults, and one that imports them for itself twice the time.
import _json
import _signal  # type: ignore[import-not-found]
import _socket as socket
import atexit
import builtins
import ctypes
import errno
import gc
import io
import linecache
import os
import select
import stat
import struct
import sys
import time
import traceback
import types
from _collections import deque  # type: ignore[import-not-found]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

VERSION = 1

FRAME = struct.Struct("!II")  # header length, body length
HEADER_MAX = 16 << 10
BODY_MAX = 1 << 20

#: Code is at most 16 MiB (model.CODE_BYTES_MAX); environment and arguments come on top, and execve(2) takes no more
#: than a few MiB of those.
PAYLOAD_MAX = 24 << 20

PIECE = 64 << 10  # one read of output: what a pipe holds by default, pipe(7)

#: What is drained from a pipe once its program is gone. An ordinary user can enlarge a pipe to 1 MiB
#: (/proc/sys/fs/pipe-max-size), so this is all that the program itself can have left in it.
DRAIN_MAX = (1 << 20) + PIECE

BACKLOG_MAX = 1 << 20  # unsent bytes for the host beyond which no more output is read
REAP_MAX = 512  # zombies reaped before the loop looks at anything else
LIST_COUNT_MAX = 65536
LIST_BYTES_MAX = 4 << 20
LIST_DEPTH_MAX = 64
REMOVE_STEPS_MAX = 200_000
BACKGROUND_MAX = 32  # commands in the background at once: each costs the agent three descriptors

# <linux/prctl.h>
PR_GET_DUMPABLE = 3
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36

TIOCSWINSZ = 0x5414  # <asm-generic/ioctls.h>

#: Exec number, flags, lengths of name, context, environment, helper and code, most bytes of displays.
REQUEST = struct.Struct("!HBHHIIII")
LAST, NEW_STDIN, DISPLAYS = 1, 2, 4  # flags; for each of the latter two a descriptor comes along, in this order
DONE = struct.Struct("!2sHH")  # b"fh", exec number, exit code

#: What goes through agent and interpreter beforehand, see Agent.rehearse.
REHEARSAL = b"import sys\nprint(sum(i * i for i in range(10)), f'{3.5:.2f}', {'a': [1]})\n"
REHEARSAL_NUMBER = 0

IGNORED = (_signal.SIGPIPE, _signal.SIGXFSZ)  # as CPython ignores them, for programs as well as for us

EXIT_LOST = 70  # EX_SOFTWARE of <sysexits.h>: our own failure in a forked child
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it
EXIT_FLUSH_FAILED = 120  # what CPython exits with when it cannot flush stdout

_REGULAR = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_WAY = _FOLDER | os.O_PATH  # without O_PATH, gVisor of 2022 follows a link here in spite of O_NOFOLLOW


class _Reading:
    """How the scanner behind ``json`` reads."""

    strict = True
    object_hook = object_pairs_hook = None
    parse_float = float
    parse_int = int
    parse_constant = None


_quote = _json.encode_basestring_ascii
_scan = _json.make_scanner(_Reading)  # type: ignore[arg-type]


class ProtocolError(Exception):
    """The host broke the frames' format: there is no telling what it means next, so the agent ends."""


# --- the agent -------------------------------------------------------------------------------------------------------


class Process:
    """A program's main process: its pipes, and the private socket if it is an interpreter."""

    __slots__ = ("err", "out", "pid", "requests", "sock", "stdin", "stdin_used", "unsent")

    def __init__(self, pid: int, stdin: int, out: int, err: int, sock: socket.socket | None) -> None:
        self.pid = pid
        self.stdin = stdin  # our ends of the pipes, -1 once closed
        self.out = out
        self.err = err
        self.sock = sock
        self.stdin_used = False  # the pipe may hold what an earlier exec did not read
        self.unsent = memoryview(b"")  # of the request to the interpreter
        self.requests = 0

    def close_stdin(self) -> None:
        if self.stdin >= 0:
            os.close(self.stdin)
            self.stdin = -1

    def close(self) -> None:
        self.close_stdin()
        for fd in (self.out, self.err):
            if fd >= 0:
                os.close(fd)
        self.out = self.err = -1
        if self.sock is not None:
            self.sock.close()
            self.sock = None

    def signal(self, number: int) -> None:
        """A signal to the group, or to the process itself if it has not made its group yet."""
        for send in (os.killpg, os.kill):
            try:
                send(self.pid, number)
                return
            except OSError:
                pass

    def kill(self) -> None:
        """SIGKILL to the group, and to the process itself in case it has not made its group yet."""
        for send in (os.killpg, os.kill):
            try:
                send(self.pid, _signal.SIGKILL)
            except OSError:
                pass


class Exec:
    """An exec that is being received or is running."""

    __slots__ = (
        "background", "budget", "columns", "context", "counts", "display", "display_budget", "env_bytes", "ident",
        "is_code", "last", "middle_bytes", "name", "overflowed", "payload", "process", "rows", "size", "stdin",
        "stdin_more", "stop", "wants_stdin",
    )  # fmt: skip

    def __init__(self, header: dict[str, Any]) -> None:
        self.ident = _integer(header, "id")
        self.is_code = header.get("kind") == "code"
        self.last = header.get("last") is True
        self.name = str(header.get("name", "<agent>")).replace("\0", "?")[:255]
        self.budget = _integer(header, "output_bytes")
        self.stop = header.get("overflow") == "stop"
        self.wants_stdin = header.get("stdin") is True
        self.env_bytes = _integer(header, "env_bytes")
        self.size = _integer(header, "size")
        middle = "helper_bytes" if self.is_code else "cwd_bytes"
        self.middle_bytes = _integer(header, middle) if middle in header else 0
        if self.size > PAYLOAD_MAX or self.env_bytes + self.middle_bytes > self.size:
            raise ProtocolError("an exec that is too large")
        self.background = header.get("background") is True and not self.is_code
        self.context = str(header["context"])[:255] if "context" in header else ""
        self.display = -1  # our end of its pipe
        self.display_budget = _integer(header, "display_bytes") if self.is_code and self.middle_bytes else 0
        self.rows, self.columns = _size(header) if "rows" in header else (0, 0)
        self.payload = bytearray()
        self.process: Process | None = None
        self.stdin = memoryview(b"")
        self.stdin_more = self.wants_stdin
        self.counts = [0, 0]
        self.overflowed = False


class Agent:
    """The loop. One exec at a time; files are served, and commands run in the background, beside it."""

    def __init__(self, read_fd: int, write_fd: int, workdir: str, touch: bool) -> None:
        self.read_fd = read_fd
        self.write_fd = write_fd
        self.touch = touch
        _fill_low_descriptors()
        self.workdir = os.open(workdir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.wake, self.wake_in = os.pipe()
        for fd in {read_fd, write_fd, self.wake, self.wake_in}:
            os.set_blocking(fd, False)
        self.inbox = bytearray()
        self.outbox: deque[memoryview] = deque()
        self.backlog = 0
        self.exec: Exec | None = None
        self.background: dict[int, Exec] = {}
        self.interpreter: Process | None = None
        self.zombies_left = False
        self.rehearsing = False
        self.handlers = {
            "exec": self.on_exec,
            "more": self.on_more,
            "stdin": self.on_stdin,
            "interrupt": self.on_interrupt,
            "signal": self.on_signal,
            "resize": self.on_resize,
            "write": self.on_write,
            "read": self.on_read,
            "list": self.on_list,
            "remove": self.on_remove,
            "stat": self.on_stat,
            "mkdir": self.on_mkdir,
            "rename": self.on_rename,
        }

    def run(self) -> None:
        """Serve until the stream ends."""
        make_undumpable()
        adopt_orphans()
        self.take_signals()
        if prepare():
            gc.collect()
            gc.freeze()  # what exists now is never collected, so the pages stay shared with the children
        try:
            self.interpreter = self.fork_interpreter()
        except OSError:
            pass  # the exec tries again and reports it
        if self.touch and self.interpreter is not None:
            self.rehearse()
        self.send(b'{"op":"ready","version":%d,"pid":%d}' % (VERSION, os.getpid()))
        while self.turn():
            pass

    def take_signals(self) -> None:
        for number in range(1, _signal.NSIG):
            if _signal.getsignal(number) not in (_signal.SIG_DFL, None) and number not in IGNORED:
                _signal.signal(number, _signal.SIG_DFL)
        for number in IGNORED:
            _signal.signal(number, _signal.SIG_IGN)
        _signal.signal(_signal.SIGCHLD, _wake_only)
        _signal.set_wakeup_fd(self.wake_in, warn_on_full_buffer=False)

    def rehearse(self) -> None:
        """Go once through all that an exec goes through, unheard, so that the first one finds every page in place.

        After a fork both processes pay a page fault for each page that they write to, if only a reference count: some
        200 faults, which are most of the time of a short program.
        """
        self.rehearsing = True
        header = {"op": "exec", "id": 0, "kind": "code", "name": "<rehearsal>", "output_bytes": 1 << 20}
        header.update(env_bytes=0, size=len(REHEARSAL))
        self.on_exec(_loads(_dumps(header)), REHEARSAL)
        while self.exec is not None:
            self.turn()
        self.rehearsing = False

    # --- the loop

    def turn(self) -> bool:
        """Wait once and handle what is ready; False when the host is gone."""
        poll = select.poll()
        if not self.rehearsing:
            poll.register(self.read_fd, select.POLLIN)
        poll.register(self.wake, select.POLLIN)
        if self.outbox:
            if self.write_fd == self.read_fd:
                poll.register(self.read_fd, select.POLLIN | select.POLLOUT)
            else:
                poll.register(self.write_fd, select.POLLOUT)
        programs = [self.exec] if self.exec is not None else []
        if self.background:
            programs += self.background.values()
        for now in programs:
            process = now.process
            if process is None:
                continue
            if self.backlog < BACKLOG_MAX:
                for fd in (process.out, process.err, now.display):
                    if fd >= 0:
                        poll.register(fd, select.POLLIN)
            if now.stdin and process.stdin >= 0:
                poll.register(process.stdin, select.POLLOUT)
        interpreter = self.interpreter
        if interpreter is not None and interpreter.sock is not None:
            mask = select.POLLIN | select.POLLOUT if interpreter.unsent else select.POLLIN
            poll.register(interpreter.sock, mask)

        ready = dict(poll.poll(0 if self.zombies_left else None))

        if self.read_fd in ready and ready[self.read_fd] & ~select.POLLOUT and not self.read_stream():
            return False
        if self.outbox and (self.write_fd in ready):
            self.flush()
        for now in programs:
            process = now.process
            if process is None or self.find(now.ident) is not now:
                continue
            for index, fd in enumerate((process.out, process.err)):
                if fd in ready:
                    self.forward(now, index)
            if now.display in ready:
                self.forward_display(now)
            if process.stdin >= 0 and process.stdin in ready:
                self.feed_stdin(now)
        if interpreter is not None and interpreter is self.interpreter and interpreter.sock is not None:
            event = ready.get(interpreter.sock.fileno(), 0)
            if event & select.POLLOUT:
                self.push_request(interpreter)
            if event & ~select.POLLOUT:
                self.hear(interpreter)
        if self.wake in ready or self.zombies_left:
            self.reap()
        return True

    def read_stream(self) -> bool:
        """Take what the host sent; False at its end."""
        try:
            data = os.read(self.read_fd, 256 << 10)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not data:
            return False
        inbox = self.inbox
        inbox += data
        start = 0
        while len(inbox) - start >= FRAME.size:
            header_bytes, body_bytes = FRAME.unpack_from(inbox, start)
            if header_bytes > HEADER_MAX or body_bytes > BODY_MAX:
                raise ProtocolError("a frame that is too large")
            middle = start + FRAME.size + header_bytes
            end = middle + body_bytes
            if len(inbox) < end:
                break
            header = _loads(bytes(inbox[start + FRAME.size : middle]))
            if not isinstance(header, dict):
                raise ProtocolError("a header that is not an object")
            handler = self.handlers.get(header.get("op", ""))
            if handler is None:
                raise ProtocolError("an unknown operation")
            handler(header, bytes(inbox[middle:end]))
            start = end
        del inbox[:start]
        return True

    def send(self, header: bytes, body: bytes = b"") -> None:
        """Queue a frame and write what the stream takes now."""
        if self.rehearsing:
            return
        head = FRAME.pack(len(header), len(body)) + header
        idle = not self.outbox
        self.backlog += len(head) + len(body)
        if len(body) < 4096:
            self.outbox.append(memoryview(head + body))
        else:
            self.outbox.append(memoryview(head))
            self.outbox.append(memoryview(body))
        if idle:
            self.flush()

    def flush(self) -> None:
        outbox = self.outbox
        while outbox:
            try:
                written = os.writev(self.write_fd, list(outbox)[:8])
            except BlockingIOError:
                return
            self.backlog -= written
            while written:
                piece = outbox[0]
                if len(piece) <= written:
                    written -= len(piece)
                    outbox.popleft()
                else:
                    outbox[0] = piece[written:]
                    written = 0

    # --- programs

    def on_exec(self, header: dict[str, Any], body: bytes) -> None:
        now = Exec(header)
        if now.background:
            if now.ident in self.background:
                raise ProtocolError("a second exec of one number")
            self.background[now.ident] = now
        elif self.exec is not None:
            raise ProtocolError("a second exec")
        else:
            self.exec = now
        self.take_payload(now, header, body)

    def on_more(self, header: dict[str, Any], body: bytes) -> None:
        now = self.find(header.get("id"))
        if now is None or now.process is not None:
            raise ProtocolError("a continuation of nothing")
        self.take_payload(now, header, body)

    def find(self, ident: object) -> Exec | None:
        """The exec of this number, if it is not over."""
        now = self.exec
        return now if now is not None and now.ident == ident else self.background.get(ident)  # type: ignore[call-overload]

    def forget(self, now: Exec) -> None:
        """The exec is over."""
        if now.display >= 0:
            os.close(now.display)
            now.display = -1
        if now.background:
            del self.background[now.ident]
        else:
            self.exec = None

    def take_payload(self, now: Exec, header: dict[str, Any], body: bytes) -> None:
        now.payload += body
        if len(now.payload) > now.size:
            raise ProtocolError("more than was announced")
        if header.get("more") is not True:
            if len(now.payload) != now.size:
                raise ProtocolError("less than was announced")
            try:
                self.start(now)
            except OSError as error:
                self.forget(now)
                self.send(_dumps({"op": "failed", "id": now.ident, "error": error.errno, "message": str(error)}))

    def start(self, now: Exec) -> None:
        middle_end = now.env_bytes + now.middle_bytes
        env = bytes(now.payload[: now.env_bytes])
        middle = bytes(now.payload[now.env_bytes : middle_end])
        rest = bytes(now.payload[middle_end:])
        now.payload = bytearray()
        if now.is_code:
            if self.interpreter is None:
                self.interpreter = self.fork_interpreter()
            now.process = self.interpreter
            self.hand_over(self.interpreter, now, env, middle, rest)
        else:
            if len(self.background) > BACKGROUND_MAX:
                raise OSError(errno.EAGAIN, f"more than {BACKGROUND_MAX} commands in the background")
            now.process = self.fork_command(now, env, middle, rest)
        now.process.stdin_used = now.wants_stdin
        if now.wants_stdin:
            self.ask_stdin(now)
        elif not self.rehearsing:
            now.process.close_stdin()

    def hand_over(self, process: Process, now: Exec, env: bytes, helper: bytes, code: bytes) -> None:
        """Send the program to the interpreter, with a new stdin if the old one has been used. Raises OSError."""
        assert process.sock is not None
        process.requests = REHEARSAL_NUMBER if self.rehearsing else process.requests % 0xFFFF + 1
        name, context = now.name.encode("utf-8", "replace"), now.context.encode("utf-8", "replace")
        flags = LAST if now.last else 0
        given: list[int] = []
        try:
            if process.stdin_used or (now.wants_stdin and process.stdin < 0):
                process.close_stdin()
                taken, process.stdin = os.pipe()
                given.append(taken)
                os.set_blocking(process.stdin, False)
                flags |= NEW_STDIN
            if helper:
                now.display, taken = os.pipe()
                given.append(taken)
                os.set_blocking(now.display, False)
                flags |= DISPLAYS
            lengths = len(name), len(context), len(env), len(helper), len(code)
            head = REQUEST.pack(process.requests, flags, *lengths, min(now.display_budget, 0xFFFFFFFF))
            process.unsent = memoryview(b"".join((head, name, context, env, helper, code)))
            fds = struct.pack(f"{len(given)}i", *given)
            self.push_request(process, [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)] if given else None)
        finally:
            for fd in given:
                os.close(fd)

    def push_request(self, process: Process, rights: list[tuple[int, int, bytes]] | None = None) -> None:
        assert process.sock is not None
        try:
            sent = process.sock.sendmsg([process.unsent[: 256 << 10]], rights or [])
        except BlockingIOError:
            return
        except OSError:
            process.unsent = memoryview(b"")  # it is dead or dying, and waitpid will tell
            return
        process.unsent = process.unsent[sent:]
        if not process.unsent and self.exec is not None and self.exec.last:
            process.sock.close()  # it closes its end before the program runs; from here only waitpid speaks
            process.sock = None

    def hear(self, process: Process) -> None:
        """What the interpreter says on the private socket: one "done" for the current exec, or it is lost."""
        assert process.sock is not None
        try:
            data = process.sock.recv(DONE.size + 1)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        now = self.exec
        current = now is not None and now.process is process
        if len(data) == DONE.size and current and now is not None and not process.unsent:
            magic, number, code = DONE.unpack(data)
            if magic == b"fh" and number == process.requests and code <= 255:
                self.finish(now, code)
                return
        process.kill()
        process.sock.close()
        process.sock = None
        if not current:
            self.interpreter = None
            process.close()

    def reap(self) -> None:
        try:
            os.read(self.wake, 4096)
        except BlockingIOError:
            pass
        for _ in range(REAP_MAX):
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if os.WIFSTOPPED(status):
                continue  # PTRACE_TRACEME makes us its tracer; it may wait for its deadline
            now, interpreter = self.exec, self.interpreter
            if now is not None and now.process is not None and now.process.pid == pid:
                self.finish(now, os.waitstatus_to_exitcode(status), dead=True)
            elif interpreter is not None and interpreter.pid == pid:
                interpreter.close()
                self.interpreter = None
            else:
                for now in self.background.values():
                    if now.process is not None and now.process.pid == pid:
                        self.finish(now, os.waitstatus_to_exitcode(status), dead=True)
                        break
        else:
            self.zombies_left = True
            return
        self.zombies_left = False

    def finish(self, now: Exec, status: int, dead: bool = False) -> None:
        """Drain what the program left in its pipes and report the end of the exec."""
        process = now.process
        assert process is not None
        for index in (0, 1):
            drained = 0
            while drained < DRAIN_MAX:
                got = self.forward(now, index)
                if got == 0:
                    break
                drained += got
        drained = 0
        while now.display >= 0 and drained < DRAIN_MAX:
            got = self.forward_display(now)
            if got == 0:
                break
            drained += got
        if not self.rehearsing:
            process.close_stdin()
        if dead:
            process.close()
            if process is self.interpreter:
                self.interpreter = None
        self.forget(now)
        self.send(
            b'{"op":"done","id":%d,"status":%d,"out_bytes":%d,"err_bytes":%d,"overflow":%s,"lost":%s}'
            % (
                now.ident,
                status,
                now.counts[0],
                now.counts[1],
                _json_bool(now.overflowed),
                _json_bool(dead and now.is_code),
            )
        )

    def forward(self, now: Exec, index: int) -> int:
        """Read one piece of output and pass on what the budget has left; the number of bytes read."""
        process = now.process
        assert process is not None
        fd = process.err if index else process.out
        if fd < 0:
            return 0
        try:
            data = os.read(fd, PIECE)
        except BlockingIOError:
            return 0
        except OSError:  # a pseudo-terminal that nobody has open any more: EIO, as tty_ioctl(4) has it
            data = b""
        if not data:  # every writer closed it: from here poll() would only spin
            os.close(fd)
            if index:
                process.err = -1
            else:
                process.out = -1
            return 0
        now.counts[index] += len(data)
        passed = data[: now.budget]
        now.budget -= len(passed)
        if len(passed) < len(data) and not now.overflowed:
            now.overflowed = True
            if now.stop:
                process.kill()
        if passed:
            self.send(b'{"op":"err","id":%d}' % now.ident if index else b'{"op":"out","id":%d}' % now.ident, passed)
        return len(data)

    def forward_display(self, now: Exec) -> int:
        """Read one piece of displays and pass on what the budget has left; the number of bytes read."""
        try:
            data = os.read(now.display, PIECE)
        except BlockingIOError:
            return 0
        passed = data[: now.display_budget]
        now.display_budget -= len(passed)
        if passed:
            self.send(b'{"op":"display","id":%d}' % now.ident, passed)
        if not data or len(passed) < len(data):  # nobody writes any more, or nobody may
            os.close(now.display)
            now.display = -1
        return len(data)

    def ask_stdin(self, now: Exec) -> None:
        self.send(b'{"op":"stdin","id":%d}' % now.ident)

    def on_stdin(self, header: dict[str, Any], body: bytes) -> None:
        now = self.find(header.get("id"))
        if now is None or now.process is None:
            return  # it crossed our "done"
        now.stdin = memoryview(body)
        now.stdin_more = header.get("more") is True
        self.feed_stdin(now)

    def feed_stdin(self, now: Exec) -> None:
        process = now.process
        assert process is not None
        if process.stdin < 0:
            return
        while now.stdin:
            try:
                now.stdin = now.stdin[os.write(process.stdin, now.stdin) :]
            except BlockingIOError:
                return
            except OSError:  # nobody will read it
                now.stdin = memoryview(b"")
                process.close_stdin()
                return
        if now.stdin_more:
            self.ask_stdin(now)
        elif now.rows and now.wants_stdin:  # the end of a terminal's input is a character, VEOF of termios(3)
            now.wants_stdin = False
            now.stdin = memoryview(b"\x04")
            self.feed_stdin(now)
        else:
            process.close_stdin()

    def on_interrupt(self, header: dict[str, Any], body: bytes) -> None:
        if self.exec is not None:
            self.signal_group(self.exec, _signal.SIGINT)

    def on_signal(self, header: dict[str, Any], body: bytes) -> None:
        now, number = self.find(header.get("id")), _integer(header, "number")
        if now is not None and 0 < number < _signal.NSIG:
            self.signal_group(now, number)

    def signal_group(self, now: Exec, number: int) -> None:
        if now.process is not None:
            now.process.signal(number)

    def on_resize(self, header: dict[str, Any], body: bytes) -> None:
        now = self.find(header.get("id"))
        if now is not None and now.process is not None and now.rows:
            set_terminal_size(now.process.out, *_size(header))

    def fork_interpreter(self) -> Process:
        """A child that waits for a program on its private socket. Raises OSError."""
        ours, theirs = socket.socketpair()
        try:
            process = self.fork(theirs.fileno(), ours)
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        return process

    def fork_command(self, now: Exec, env: bytes, folder: bytes, arguments: bytes) -> Process:
        """A child that executes ``arguments`` in ``folder``, which is below the work folder. Raises OSError."""
        if now.rows:
            return self.fork_on_terminal(now, env, folder, arguments)
        return self.fork(-1, None, env, folder, arguments)

    def fork_on_terminal(self, now: Exec, env: bytes, folder: bytes, arguments: bytes) -> Process:
        """The same on a pseudo-terminal of its own. Raises OSError: there may be none here."""
        ours, theirs = os.openpty()
        stdin = os.dup(ours)
        try:
            set_terminal_size(ours, now.rows, now.columns)
            pid = os.fork()
            if pid == 0:
                try:
                    become_program((theirs, theirs, theirs), -1, self.workdir, terminal=True)
                    execute(env, folder, arguments)
                finally:
                    os._exit(EXIT_LOST)
        except OSError:
            os.close(ours)
            os.close(stdin)
            raise
        finally:
            os.close(theirs)
        for fd in (ours, stdin):
            os.set_blocking(fd, False)
        return Process(pid, stdin, ours, -1, None)

    def fork(
        self,
        socket_fd: int,
        sock: socket.socket | None,
        env: bytes = b"",
        folder: bytes = b"",
        arguments: bytes = b"",
    ) -> Process:
        ends: list[int] = []
        try:
            for _ in range(3):
                ends += os.pipe()
            pid = os.fork()
        except OSError:
            for fd in ends:
                os.close(fd)
            raise
        stdin_r, stdin_w, out_r, out_w, err_r, err_w = ends
        if pid == 0:
            try:
                become_program((stdin_r, out_w, err_w), socket_fd, self.workdir)
                if sock is not None:
                    sock.detach()  # its number is closed or is another's by now
                    interpret()
                else:
                    execute(env, folder, arguments)
            finally:
                os._exit(EXIT_LOST)
        for fd in (stdin_r, out_w, err_w):
            os.close(fd)
        for fd in (stdin_w, out_r, err_r):
            os.set_blocking(fd, False)
        return Process(pid, stdin_w, out_r, err_r, sock)

    # --- files of the work folder

    def reply(self, header: dict[str, Any], body: bytes = b"", **fields: object) -> None:
        self.send(_dumps({"op": "reply", "id": _integer(header, "id"), **fields}), body)

    def reply_error(self, header: dict[str, Any], error: OSError) -> None:
        code = error.errno or errno.EIO
        self.reply(header, error=code, message=error.strerror or os.strerror(code))

    def on_write(self, header: dict[str, Any], body: bytes) -> None:
        try:
            path, data = _split_path(header, body)
            write_file(self.workdir, path, _integer(header, "offset"), data)
        except OSError as error:
            self.reply_error(header, error)
        else:
            self.reply(header)

    def on_read(self, header: dict[str, Any], body: bytes) -> None:
        try:
            path, _ = _split_path(header, body)
            length = min(_integer(header, "length"), BODY_MAX)
            data, size = read_file(self.workdir, path, _integer(header, "offset"), length)
        except OSError as error:
            self.reply_error(header, error)
        else:
            self.reply(header, data, size=size)

    def on_list(self, header: dict[str, Any], body: bytes) -> None:
        try:
            path = _split_path(header, body)[0] if "path_bytes" in header else []
            listing, truncated = list_files(self.workdir, min(_integer(header, "count"), LIST_COUNT_MAX), path)
        except OSError as error:
            self.reply_error(header, error)
            return
        for start in range(0, max(len(listing), 1), BODY_MAX):
            end = start + BODY_MAX
            self.reply(header, listing[start:end], more=end < len(listing), truncated=truncated)

    def on_remove(self, header: dict[str, Any], body: bytes) -> None:
        try:
            path, _ = _split_path(header, body)
            remove(self.workdir, path)
        except OSError as error:
            self.reply_error(header, error)
        else:
            self.reply(header)

    def on_stat(self, header: dict[str, Any], body: bytes) -> None:
        try:
            path, _ = _split_path(header, body)
            info = stat_file(self.workdir, path)
        except OSError as error:
            self.reply_error(header, error)
        else:
            kind = "file" if stat.S_ISREG(info.st_mode) else "folder" if stat.S_ISDIR(info.st_mode) else "other"
            when = max(int(info.st_mtime), 0)
            self.reply(header, size=info.st_size, kind=kind, mtime=when, mode=stat.S_IMODE(info.st_mode))

    def on_mkdir(self, header: dict[str, Any], body: bytes) -> None:
        try:
            path, _ = _split_path(header, body)
            os.close(open_folder(self.workdir, path, create=True))
        except OSError as error:
            self.reply_error(header, error)
        else:
            self.reply(header)

    def on_rename(self, header: dict[str, Any], body: bytes) -> None:
        try:
            path, rest = _split_path(header, body)
            target, _ = _split_path({"path_bytes": _integer(header, "to_bytes")}, rest)
            rename(self.workdir, path, target)
        except OSError as error:
            self.reply_error(header, error)
        else:
            self.reply(header)


def serve(read_fd: int, write_fd: int, workdir: str, *, touch: bool = False) -> NoReturn:
    """Be the agent on this stream until it ends, then end the process.

    ``read_fd`` and ``write_fd`` may be one socket. ``workdir`` is the programs' folder, which must exist. ``touch``
    has agent and interpreter rehearse a run before "ready", so that a later program does not pay for page faults.
    """
    agent: Agent | None = None
    message = b""
    try:
        agent = Agent(read_fd, write_fd, workdir, touch)
        agent.run()
    except BaseException as error:
        message = f"{type(error).__name__}: {error}".encode("utf-8", "replace")[:1000]
    finally:
        _end(agent, write_fd, message)


def _end(agent: Agent | None, write_fd: int, message: bytes) -> NoReturn:
    """Kill all that is ours, say why if there is a reason, and exit."""
    try:
        if os.getpid() == 1:
            os.kill(-1, _signal.SIGKILL)
        elif agent is not None:
            programs = ([agent.exec] if agent.exec else []) + list(agent.background.values())
            for process in (agent.interpreter, *(now.process for now in programs)):
                if process is not None:
                    process.kill()
        if message:
            header = _dumps({"op": "fatal", "message": message.decode("utf-8", "replace")})
            os.write(write_fd, FRAME.pack(len(header), 0) + header)  # non-blocking, or there was no agent
    except OSError:
        pass
    finally:
        os._exit(EXIT_LOST if message else 0)


def main() -> NoReturn:
    """``agent.py [--fd N] [--workdir DIR] [--touch]``: the stream is one socket N, or descriptors 0 and 1."""
    read_fd, write_fd, workdir, touch = 0, 1, os.getcwd(), False
    arguments = sys.argv[1:]
    while arguments:
        option = arguments.pop(0)
        if option == "--fd" and arguments:
            read_fd = write_fd = int(arguments.pop(0))
        elif option == "--workdir" and arguments:
            workdir = arguments.pop(0)
        elif option == "--touch":
            touch = True
        else:
            sys.exit(f"usage: {main.__doc__}")
    if read_fd != 0:
        os.set_inheritable(read_fd, False)
    serve(read_fd, write_fd, workdir, touch=touch)


def _wake_only(number: int, frame: object) -> None:
    """The wake-up descriptor has done the work."""


def _fill_low_descriptors() -> None:
    """Occupy 0 to 3, which a child's own pipes will take, so that none of ours lies there."""
    while (fd := os.open("/", os.O_PATH | os.O_CLOEXEC)) < 4:
        pass
    os.close(fd)


def _integer(header: dict[str, Any], name: str) -> int:
    value = header.get(name)
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ProtocolError(f"{name} is not a number")
    return value


def _size(header: dict[str, Any]) -> tuple[int, int]:
    """A terminal's rows and columns, for the 16 bits that each has there."""
    return _integer(header, "rows") & 0xFFFF, _integer(header, "columns") & 0xFFFF


def _json_bool(value: bool) -> bytes:
    return b"true" if value else b"false"


def _dumps(header: dict[str, object]) -> bytes:
    return b"{%b}" % ",".join(f"{_quote(name)}:{_value(value)}" for name, value in header.items()).encode()


def _value(value: object) -> str:
    """Of the few kinds that a header holds."""
    if isinstance(value, str):
        return str(_quote(value))
    return "null" if value is None else str(value).lower()


def _loads(data: bytes) -> Any:
    """What JSON text of the host's means. Raises ProtocolError, ValueError."""
    text = data.decode()
    try:
        value, end = _scan(text, 0)
    except StopIteration:
        end = -1
    if end != len(text):
        raise ProtocolError("a header that is not JSON")
    return value


def _split_path(header: dict[str, Any], body: bytes) -> tuple[list[bytes], bytes]:
    """The path's components and the rest of the body. Raises OSError for a path that is not plainly relative."""
    length = _integer(header, "path_bytes")
    parts = body[:length].split(b"/")
    if length > len(body) or any(p in (b"", b".", b"..") or b"\0" in p for p in parts):
        raise OSError(errno.EINVAL, "not a relative path inside the work folder")
    return parts, body[length:]


if sys.platform == "linux":
    _prctl = ctypes.CDLL(None, use_errno=True).prctl
    _prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4

    def make_undumpable() -> None:
        """Shut our memory and descriptors to other processes of our user. Raises OSError."""
        _prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
        if _prctl(PR_GET_DUMPABLE, 0, 0, 0, 0) != 0:
            raise OSError(errno.EPERM, "prctl PR_SET_DUMPABLE has no effect")

    def make_dumpable() -> None:
        """A program may debug itself and its children, as anywhere."""
        _prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)

    def adopt_orphans() -> None:
        """Where we are not PID 1, orphans still become our children, so that they are reaped."""
        _prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def set_terminal_size(fd: int, rows: int, columns: int) -> None:
        """Tell a terminal its size. Without the module fcntl: what is imported now may be a program's file."""
        size = struct.pack("HHHH", rows, columns, 0, 0)
        ctypes.CDLL(None).ioctl(fd, ctypes.c_ulong(TIOCSWINSZ), size)

else:

    def make_undumpable() -> None: ...

    def make_dumpable() -> None: ...

    def adopt_orphans() -> None: ...

    def set_terminal_size(fd: int, rows: int, columns: int) -> None: ...


# --- files, resolved component by component from a descriptor, following no link -------------------------------------


def open_folder(workdir: int, parts: list[bytes], create: bool = False) -> int:
    """A descriptor of the folder ``parts`` below ``workdir``, to go on from and not to list. Raises OSError."""
    fd = os.dup(workdir)
    for part in parts:
        try:
            if create:
                try:
                    os.mkdir(part, 0o755, dir_fd=fd)
                except FileExistsError:
                    pass
            below = os.open(part, _WAY, dir_fd=fd)
        finally:
            os.close(fd)
        fd = below
    return fd


def _open_regular(name: bytes, flags: int, folder: int) -> int:
    """Open a regular file: a FIFO does not block it, a device or link is refused. Raises OSError."""
    fd = os.open(name, flags | _REGULAR, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file")
    return fd


def write_file(workdir: int, path: list[bytes], offset: int, data: bytes) -> None:
    """Write a piece; at offset 0 the file is made anew, whatever had its name. Raises OSError."""
    folder = open_folder(workdir, path[:-1], create=True)
    name = path[-1]
    try:
        if offset == 0:
            try:
                os.unlink(name, dir_fd=folder)
            except FileNotFoundError:
                pass
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(name, flags, 0o644, dir_fd=folder)
        else:
            fd = _open_regular(name, os.O_WRONLY, folder)
        try:
            view = memoryview(data)
            while view:
                written = os.pwrite(fd, view, offset)
                offset += written
                view = view[written:]
        except OSError:
            os.unlink(name, dir_fd=folder)  # rather no file than a part of one
            raise
        finally:
            os.close(fd)
    finally:
        os.close(folder)


def read_file(workdir: int, path: list[bytes], offset: int, length: int) -> tuple[bytes, int]:
    """At most ``length`` bytes from ``offset``, and the file's size. Raises OSError."""
    folder = open_folder(workdir, path[:-1])
    try:
        fd = _open_regular(path[-1], os.O_RDONLY, folder)
    finally:
        os.close(folder)
    try:
        return os.pread(fd, length, offset), os.fstat(fd).st_size
    finally:
        os.close(fd)


def list_files(workdir: int, count: int, path: list[bytes] | None = None) -> tuple[bytes, bool]:
    """At most ``count`` entries below ``path`` as ``kind size SPACE path NUL``, and whether there was more.

    Raises OSError.
    """
    out = bytearray()
    entries = 0
    truncated = False
    if path:
        os.close(open_folder(workdir, path))
    folders: list[list[bytes]] = [path or []]
    while folders:
        parts = folders.pop()
        try:
            folder = open_folder(workdir, parts)
            try:
                fd = os.open(".", _FOLDER, dir_fd=folder)
            finally:
                os.close(folder)
        except OSError:
            continue  # gone or unreadable meanwhile; it is listed by its name already
        try:
            with os.scandir(fd) as names:
                for entry in names:
                    if entries >= count or len(out) >= LIST_BYTES_MAX:
                        return bytes(out), True
                    try:
                        info = entry.stat(follow_symlinks=False)
                    except OSError:
                        continue
                    inner = [*parts, os.fsencode(entry.name)]
                    kind = b"f" if stat.S_ISREG(info.st_mode) else b"d" if stat.S_ISDIR(info.st_mode) else b"o"
                    out += b"%b%d %b\0" % (kind, info.st_size, b"/".join(inner))
                    entries += 1
                    if kind == b"d":
                        if len(inner) < LIST_DEPTH_MAX:
                            folders.append(inner)
                        else:
                            truncated = True
        finally:
            os.close(fd)
    return bytes(out), truncated


def remove(workdir: int, path: list[bytes]) -> None:
    """Remove a file or a tree of any depth with two descriptors: what is nested is moved up first. Raises OSError."""
    parent = open_folder(workdir, path[:-1])
    try:
        if _removed(path[-1], parent):
            return
        pending = [path[-1]]
        steps = 0
        while pending:
            fd = os.open(pending[-1], _FOLDER, dir_fd=parent)
            deeper = False
            try:
                with os.scandir(fd) as names:
                    for entry in names:
                        steps += 1
                        if steps > REMOVE_STEPS_MAX:
                            raise OSError(errno.EBUSY, "the folder keeps being filled")
                        if not _removed(os.fsencode(entry.name), fd):
                            up = b".removed-%d-%d" % (os.getpid(), steps)
                            os.rename(entry.name, up, src_dir_fd=fd, dst_dir_fd=parent)
                            pending.insert(-1, up)
                            deeper = True
            finally:
                os.close(fd)
            try:
                os.rmdir(pending[-1], dir_fd=parent)
            except OSError as error:
                # Something was added, or the entries moved while we read them: look again.
                steps += 1
                if error.errno != errno.ENOTEMPTY or (not deeper and steps > REMOVE_STEPS_MAX):
                    raise
            else:
                pending.pop()
    finally:
        os.close(parent)


def stat_file(workdir: int, path: list[bytes]) -> os.stat_result:
    """What is at ``path``, a link itself and not what it points to. Raises OSError."""
    folder = open_folder(workdir, path[:-1])
    try:
        return os.stat(path[-1], dir_fd=folder, follow_symlinks=False)
    finally:
        os.close(folder)


def rename(workdir: int, path: list[bytes], target: list[bytes]) -> None:
    """Move a file or a folder, making the target's folders. Raises OSError."""
    source_folder = open_folder(workdir, path[:-1])
    try:
        target_folder = open_folder(workdir, target[:-1], create=True)
        try:
            os.rename(path[-1], target[-1], src_dir_fd=source_folder, dst_dir_fd=target_folder)
        finally:
            os.close(target_folder)
    finally:
        os.close(source_folder)


def _removed(name: bytes, folder: int) -> bool:
    """Remove a file or an empty folder; False if it is a folder that is not empty. Raises OSError."""
    try:
        os.unlink(name, dir_fd=folder)
    except IsADirectoryError:
        try:
            os.rmdir(name, dir_fd=folder)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
            return False
    return True


# --- in the forked child ---------------------------------------------------------------------------------------------


def become_program(pipes: tuple[int, int, int], socket_fd: int, workdir: int, terminal: bool = False) -> None:
    """Leave the agent behind: its session, signals, descriptors and protection."""
    _signal.set_wakeup_fd(-1)
    _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
    _signal.signal(_signal.SIGINT, _signal.SIG_IGN)  # until a program is there to be interrupted
    os.setsid()
    os.fchdir(workdir)
    os.umask(0o022)
    for number, fd in enumerate(pipes):
        os.dup2(fd, number)
    if terminal:  # without O_NOCTTY the first terminal that a session leader opens becomes its own (tty_ioctl(4))
        os.close(os.open(os.ttyname(0), os.O_RDWR))
    if socket_fd >= 0:
        os.dup2(socket_fd, 3, inheritable=False)
    os.closerange(4 if socket_fd >= 0 else 3, max(os.sysconf("SC_OPEN_MAX"), 1024))
    make_dumpable()
    try:  # so that the kernel's choice under memory pressure is the program and never the agent
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, b"1000")
        finally:
            os.close(fd)
    except OSError:
        pass


def execute(env: bytes, folder: bytes, arguments: bytes) -> NoReturn:
    """Become the command; 127 if it is not found, 126 if it cannot be started, as a shell says."""
    for number in (_signal.SIGPIPE, _signal.SIGXFSZ, _signal.SIGINT):  # Python ignores the first two for itself
        _signal.signal(number, _signal.SIG_DFL)
    argv = arguments.split(b"\0")[:-1]
    try:
        if folder:
            os.chdir(folder)
    except (OSError, ValueError) as error:
        os.write(2, b"%b: %b\n" % (folder, str(error).encode()))
        os._exit(126)
    try:
        os.execvpe(argv[0], argv, _environment(env))
    except (OSError, ValueError, IndexError) as error:
        code = 127 if isinstance(error, (FileNotFoundError, NotADirectoryError)) else 126
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        os.write(2, b"%b: %b\n" % (argv[0] if argv else b"", reason.encode()))
        os._exit(code)


def interpret() -> NoReturn:
    """Be the interpreter: run the programs that come over descriptor 3."""
    modules = {"": fresh_interpreter()}
    private = socket.socket(fileno=3)
    pid = os.getpid()
    handler: Any = _signal.default_int_handler
    tools: dict[str, Any] | None = None
    first = True
    while True:
        request = _receive(private)
        number, last, name, context, env, code = request[:6]
        helper, display_bytes, stdin_fd, display_fd = request[6:]
        if stdin_fd >= 0:
            os.dup2(stdin_fd, 0)
            os.close(stdin_fd)
            sys.stdin = _open_stdin()
        rehearsal = number == REHEARSAL_NUMBER
        if first and not rehearsal:  # later, what the program itself put there stays
            first = False
            set_environment(env)
        if last:
            private.close()
        if context or len(modules) > 1:
            if context not in modules:
                modules[context] = types.ModuleType("__main__")
                modules[context].__dict__["__builtins__"] = builtins
            sys.modules["__main__"] = modules[context]
        namespace = {"__builtins__": builtins} if rehearsal else modules[context].__dict__
        if display_fd >= 0:
            if tools is None:
                tools = load_tools(helper)
            tools["open_channel"](display_fd, display_bytes)
        try:
            status = run_code(code, name, namespace, handler, tools if display_fd >= 0 else None)
            handler = _signal.getsignal(_signal.SIGINT)
            _signal.signal(_signal.SIGINT, _signal.SIG_IGN)
        except KeyboardInterrupt:  # it came between the program's end and ours
            status = EXIT_INTERRUPTED
            _signal.signal(_signal.SIGINT, _signal.SIG_IGN)
        if last or os.getpid() != pid:  # a fork of the program's own that ran to the program's end
            os._exit(finalize(status, namespace))
        _flush_standard_streams()
        if display_fd >= 0 and tools is not None:
            tools["close_channel"]()
        if rehearsal:
            del linecache.cache[name]
            gc.collect()
        private.sendall(DONE.pack(b"fh", number, status))


def load_tools(text: bytes) -> dict[str, Any]:
    """The names of :mod:`fumehood.guest.displays`, whose text the host has sent."""
    tools: dict[str, Any] = {"__name__": "fumehood.guest.displays", "__builtins__": builtins}
    exec(compile(text, "<fumehood>", "exec", 0, True), tools)
    return tools


def _receive(private: socket.socket) -> tuple[int, bool, str, str, bytes, bytes, bytes, int, int, int]:
    """The next request: number, whether it is the last, name, context, environment, code, helper, bytes of displays,
    and the descriptors of a new stdin and of the displays, or -1. Ends the process when the agent is gone."""
    data, rights, _, _ = private.recvmsg(PIECE, socket.CMSG_SPACE(8))
    got = bytearray(data)
    given = list(struct.unpack(f"{len(rights[0][2]) // 4}i", rights[0][2])) if rights else []
    while len(got) < REQUEST.size:
        got += _receive_more(private, REQUEST.size - len(got))
    number, flags, *lengths, display_bytes = REQUEST.unpack_from(got)
    size = REQUEST.size + sum(lengths)
    while len(got) < size:
        got += _receive_more(private, min(size - len(got), 1 << 20))
    fields = []
    start = REQUEST.size
    for length in lengths:
        fields.append(bytes(got[start : start + length]))
        start += length
    name, context, env, helper, code = fields
    stdin_fd = given.pop(0) if flags & NEW_STDIN else -1
    display_fd = given.pop(0) if flags & DISPLAYS else -1
    last = bool(flags & LAST)
    return number, last, name.decode(), context.decode(), env, code, helper, display_bytes, stdin_fd, display_fd


def _receive_more(private: socket.socket, size: int) -> bytes:
    more = private.recv(size)
    if not more:
        os._exit(0)
    return more


def _environment(block: bytes) -> dict[bytes, bytes]:
    items = (item.partition(b"=") for item in block.split(b"\0") if item)
    return {name: value for name, _, value in items}


def set_environment(env: bytes) -> None:
    """Have ``os.environ`` hold these NUL-ended items and nothing else."""
    if env.startswith(_prepared_env):
        env = env[len(_prepared_env) :]
    else:
        os.environ.clear()
    if env:
        os.environb.update(_environment(env))
        if "TZ" in os.environ:
            time.tzset()


_main_module: types.ModuleType | None = None
_prepared_env = b""


def prepare(env: bytes = b"") -> bool:
    """Make this process look like an interpreter that has just started, so that its forks need not.

    ``env`` are NUL-ended items that most programs' environment begins with. False if that was done before.

    Whoever forks agents calls it beforehand: what is done here once is page faults saved in each of them.
    """
    global _main_module, _prepared_env  # noqa: PLW0603 - made once, before any fork
    if _main_module is not None:
        return False
    restore_site_builtins()
    _main_module = types.ModuleType("__main__")
    _main_module.__dict__.update(__builtins__=builtins, __annotations__={})
    for name in list(sys.modules):
        module = sys.modules[name]
        if name.partition(".")[0] == "fumehood" or getattr(module, "__dict__", None) is globals():
            del sys.modules[name]
    sys.modules["__main__"] = _main_module
    sys.argv = [""]
    sys.orig_argv[:] = [os.path.basename(sys.executable or "python3")]
    if sys.path[:1] != [""]:
        sys.path.insert(0, "")
    _open_standard_streams()
    os.environ.clear()
    os.environb.update(_environment(env))
    _prepared_env = env
    return True


def prepared_environment() -> bytes:
    """What :func:`prepare` was told that most programs' environment begins with."""
    return _prepared_env


def fresh_interpreter() -> types.ModuleType:
    """What is left to do in each interpreter; its ``__main__``."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:  # os.fork() has reseeded ``random``; numpy's global generator knows nothing of forks
        numpy_random.seed()
    gc.enable()
    assert _main_module is not None
    return _main_module


def _open_standard_streams() -> None:
    """The three streams on descriptors 0 to 2, which are pipes in every interpreter.

    A stream looks at its descriptor when it is made (can it seek?), so pipes stand there for that moment.
    """
    saved = [os.dup(fd) for fd in range(3)]
    read_end, write_end = os.pipe()
    try:
        for fd, end in enumerate((read_end, write_end, write_end)):
            os.dup2(end, fd)
        sys.stdin = sys.__stdin__ = _open_stdin()  # type: ignore[misc]
        sys.stdout = sys.__stdout__ = _open_output(1, "<stdout>", "surrogateescape", line_buffering=False)  # type: ignore[misc]
        sys.stderr = sys.__stderr__ = _open_output(2, "<stderr>", "backslashreplace", line_buffering=True)  # type: ignore[misc]
    finally:
        for fd, was in enumerate(saved):
            os.dup2(was, fd)
        for fd in (*saved, read_end, write_end):
            os.close(fd)


def _open_stdin() -> io.TextIOWrapper:
    """Standard input as CPython opens a pipe under C.UTF-8."""
    raw = io.FileIO(0, "r", closefd=False)
    raw.name = "<stdin>"
    stream = io.TextIOWrapper(io.BufferedReader(raw), "utf-8", "surrogateescape")
    stream.mode = "r"  # type: ignore[misc]
    return stream


def _open_output(fd: int, name: str, errors: str, line_buffering: bool) -> io.TextIOWrapper:
    """Standard output or error as CPython opens a pipe under C.UTF-8."""
    raw = io.FileIO(fd, "w", closefd=False)
    raw.name = name
    stream = io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", errors, newline="\n", line_buffering=line_buffering)
    stream.mode = "w"  # type: ignore[misc]
    return stream


def restore_site_builtins() -> None:
    """``exit``, ``quit`` and ``help``, which ``-S`` leaves out and programs use."""
    if not hasattr(builtins, "exit"):
        import _sitebuiltins

        builtins.exit = _sitebuiltins.Quitter("exit", "Ctrl-D (i.e. EOF)")
        builtins.quit = _sitebuiltins.Quitter("quit", "Ctrl-D (i.e. EOF)")
        builtins.help = _sitebuiltins._Helper()


def run_code(
    source: bytes, name: str, namespace: dict[str, Any], handler: Any, tools: dict[str, Any] | None = None
) -> int:
    """Compile and run a program as ``name``; its exit code. Only BaseException of our own making gets out.

    With ``tools`` (see :func:`load_tools`) its last value and its figures are displayed.
    """
    lines = source.decode("utf-8", "replace").splitlines(True)
    linecache.cache[name] = (len(source), None, lines, name)
    try:
        _signal.signal(_signal.SIGINT, handler)
        if tools is None:
            exec(compile(source, name, "exec", 0, True), namespace)
        else:
            tools["run"](source, name, namespace)
    except SystemExit as end:
        return _exit_code(end)
    except BaseException as error:
        if tools is not None:
            tools["keep_user_frames"](error)
        elif error.__traceback__ is not None:
            error.__traceback__ = error.__traceback__.tb_next
        show(error)
        return EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _exit_code(end: SystemExit) -> int:
    """What CPython makes of ``SystemExit.code``: None, a number, or a message for stderr and 1."""
    value = end.code
    if value is None:
        return 0
    if isinstance(value, int):
        # A number that a C long does not hold becomes -1, and the kernel keeps the low eight bits.
        return value & 0xFF if -(1 << 63) <= value < 1 << 63 else 0xFF
    try:
        print(value, file=sys.stderr)
    except BaseException:
        pass
    return 1


def show(error: BaseException) -> None:
    """Print an uncaught exception as the interpreter would."""
    try:
        if sys.excepthook is sys.__excepthook__:
            # The built-in hook, written in C, looks for source in files only, and ours is in linecache.
            traceback.print_exception(error)
        else:
            sys.excepthook(type(error), error, error.__traceback__)
    except BaseException:
        try:  # a traceback may want more memory than there is; the name of what was to be shown does not
            os.write(2, b"Error in sys.excepthook\n")
            os.write(2, b"The exception was " + type(error).__name__[:200].encode() + b"\n")
        except BaseException:
            pass


def finalize(status: int, namespace: dict[str, Any]) -> int:
    """End as CPython does: threads, atexit, streams, then the program's objects; the final exit status."""
    threading = sys.modules.get("threading")
    if threading is not None:
        _attempt(threading._shutdown)
    _attempt(atexit._run_exitfuncs)
    flushed = _flush_standard_streams()
    _attempt(lambda: _drop_objects(namespace))
    return status if _flush_standard_streams() and flushed else EXIT_FLUSH_FAILED


def _attempt(step: Any) -> None:
    try:
        step()
    except SystemExit:
        pass
    except BaseException:
        _attempt_print()


def _attempt_print() -> None:
    try:
        traceback.print_exc()
    except BaseException:
        pass


def _drop_objects(namespace: dict[str, Any]) -> None:
    """Let go of the program's objects, so that finalizers run and files left open are written.

    The order is CPython's (finalize_modules): names with one underscore first, then the rest but ``__builtins__``.
    """
    names = list(namespace)
    for name in names:
        if name[:1] == "_" and name[1:2] != "_":
            namespace[name] = None
    for name in names:
        if name != "__builtins__":
            namespace[name] = None
    gc.collect()
    kinds = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
    # Kept alive by a module that will not be torn down; the last two were frozen when the interpreter was made.
    for thing in (*gc.get_objects(), sys.__stdout__, sys.__stderr__):
        if type(thing) in kinds and thing is not sys.stdout and thing is not sys.stderr:
            try:
                thing.flush()
            except (OSError, ValueError):
                pass


def _flush_standard_streams() -> bool:
    done = True
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except BaseException:
            done = False
    return done


if __name__ == "__main__":
    main()
