"""The agent of a machine: the one of every tier, and a shorter way for single runs beside its general one.

Runs inside the guest only, before the snapshot and after it. What a single run is, and why its way is short, says
:mod:`fumehood.tiers.microvm.direct`. Short means few different paths of code, in Python, C and the kernel: pollers that
are made before the snapshot, one read for a frame, no exception on the way, and no wait for the interpreter's exit.

Who trusts whom is as in the agent: the private socket is closed before the program runs, and the exit status is
waitpid's. There is one word before it. An interpreter that has finalized writes its exit code into a page that it
shares with the agent, and closes stderr, which wakes the agent; then it exits. What a program gains by doing so in its
place is what ``os._exit()`` gains, and if somebody else holds stderr, or it is elsewhere, the agent waits for the exit
as ever.
"""

from __future__ import annotations

# The C calls behind ``signal``, whose enum wrappers are more code to translate.
import _signal  # type: ignore[import-not-found]
import builtins
import linecache
import mmap
import os
import random
import select
import socket
import struct
import sys
import time

from fumehood.guest import agent
from fumehood.tiers.microvm.direct import ENVIRONMENT, HEAD

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SPENT_HEAD = b'{"op":"spent","memory_peak_bytes":'
SPENT_MIDDLE = b',"oom_kills":'
SPENT_END = b"}\n"

#: On the private socket, before each request: the length of a direct one that follows, or zero and a general one.
_LENGTH = struct.Struct("!I")
_GENERAL = _LENGTH.pack(0)
_EMPTY_HEADER_BYTES = 2  # of "{}"
_DIRECT_NUMBER = 1

#: What agent and interpreters share: whether the program of a single run has ended, and its exit code.
_told = mmap.mmap(-1, mmap.PAGESIZE)

# Called by their names: ``super()`` is code of its own.
_forward, _finish = agent.Agent.forward, agent.Agent.finish


class GuestAgent(agent.Agent):
    """The agent, with the short way, that lets the host know what memory was used before it tells of an end."""

    spent: tuple[int, int, int]  # the control port, memory.peak and memory.events
    #: After so many, CPython 3.11 has specialized the code (PEP 659), and it stays as it is in the snapshot.
    rehearsals = 20

    def __init__(self, read_fd: int, write_fd: int, workdir: str, touch: bool) -> None:
        super().__init__(read_fd, write_fd, workdir, touch)
        self.handlers[""] = self.on_direct
        header = {"id": 0, "kind": "code", "output_bytes": 0, "env_bytes": 0, "size": 0}
        self.direct = agent.Exec(header)  # all single runs, one after the other
        self.dry = False  # its pipes have been drained
        #: The interpreter's end, while no general exec needs to see it close: the last one that closes an end pays for
        #: its release, and in a single run that would be the interpreter, before the program.
        self.kept: socket.socket | None = None
        self.polled: agent.Process | None = None  # whose descriptors the two pollers hold
        self.idle = self.running = select.poll()

    def rehearse(self) -> None:
        kept, self.kept = self.kept, None  # the general rehearsal shall not let go of it
        super().rehearse()
        self.kept = kept
        self.rehearsing = True
        head = HEAD.pack(0, 1 << 20, False, len("<rehearsal>"), 0)
        for _ in range(self.rehearsals):
            self.on_direct({}, head + b"<rehearsal>" + agent.REHEARSAL)
            while self.exec is not None:
                self.turn()
        self.rehearsing = False
        if self.interpreter is not None and self.interpreter.sock is not None:
            self.interpreter.close_stdin()
            self.running.unregister(self.interpreter.sock)

    def watch(self, process: agent.Process) -> None:
        """Have the pollers hold this interpreter's descriptors."""
        if self.polled is process or process.sock is None:
            return
        self.polled, self.idle, self.running = process, select.poll(), select.poll()
        for fd in (process.out, process.err):
            self.running.register(fd, select.POLLIN)
        for poller in (self.idle, self.running):
            poller.register(self.read_fd, select.POLLIN)
            poller.register(self.wake, select.POLLIN)
        self.idle.register(process.sock, select.POLLIN)
        if self.rehearsing:
            self.running.register(process.sock, select.POLLIN)

    def turn(self) -> bool:
        """One turn of the loop. The general one serves whatever is out of the ordinary: it looks for itself again."""
        now, process = self.exec, self.interpreter
        if process is None or process is not self.polled or process.sock is None:
            return super().turn()
        if self.inbox or self.outbox or self.background or self.zombies_left or process.unsent:
            return super().turn()
        if now is None:
            for fd, events in self.idle.poll():
                if fd != self.read_fd or events != select.POLLIN:
                    return super().turn()
            return self.read_direct()
        if now is not self.direct or process.out < 0 or process.err < 0:
            return super().turn()
        for fd, events in self.running.poll():
            if fd == process.out and events == select.POLLIN:
                self.forward(now, 0)
            elif fd == process.err and events == select.POLLIN:
                self.forward(now, 1)
            elif fd == process.err and _told[0]:
                self.finish(now, _told[1])
            elif self.rehearsing and fd == process.sock.fileno():
                self.hear(process)
            else:
                return super().turn()
        return True

    def read_direct(self) -> bool:
        """Take a frame: a direct one that is there as a whole, or else leave what was read to the general way."""
        head = os.read(self.read_fd, agent.FRAME.size + _EMPTY_HEADER_BYTES)
        if len(head) == agent.FRAME.size + _EMPTY_HEADER_BYTES:
            header_bytes, body_bytes = agent.FRAME.unpack_from(head)
            if header_bytes == _EMPTY_HEADER_BYTES and body_bytes <= agent.BODY_MAX:
                body = b""
                try:
                    body = os.read(self.read_fd, body_bytes)
                except BlockingIOError:
                    pass
                if len(body) == body_bytes:
                    self.on_direct({}, body)
                    return True
                head += body
        self.inbox += head
        return len(head) > 0

    def on_direct(self, header: dict[str, Any], body: bytes) -> None:
        """Hand a single run over to the interpreter."""
        if self.exec is not None or self.background:
            raise agent.ProtocolError("a single run beside another program")
        now = self.direct
        now.ident, now.budget, now.stop, _, _ = HEAD.unpack_from(body)
        now.counts = [0, 0]
        now.overflowed = False
        _told[0] = 0
        self.exec = now
        process = self.interpreter
        if process is None:
            try:
                process = self.interpreter = self.fork_interpreter()
            except OSError as error:
                self.exec = None
                message = {"op": "failed", "id": now.ident, "error": error.errno, "message": str(error)}
                self.send(agent._dumps(message))
                return
        now.process = process
        if not self.rehearsing:
            process.close_stdin()
        process.requests = _DIRECT_NUMBER
        self.watch(process)
        assert process.sock is not None
        data = _LENGTH.pack(len(body)) + body
        sent = 0
        try:
            sent = process.sock.send(data)
        except BlockingIOError:
            pass
        except OSError:
            return  # it is dead or dying, and waitpid will tell
        if sent < len(data):
            process.unsent = memoryview(data)[sent:]

    def fork_interpreter(self) -> agent.Process:
        """As every agent does, but that its end of the private socket is kept: see :attr:`kept`."""
        ours, theirs = socket.socketpair()
        try:
            process = self.fork(theirs.fileno(), ours)
        except OSError:
            ours.close()
            theirs.close()
            raise
        ours.setblocking(False)
        self.let_go()
        self.kept = theirs
        return process

    def let_go(self) -> None:
        """The interpreter alone has its end of the private socket from here on."""
        if self.kept is not None:
            self.kept.close()
            self.kept = None

    def hand_over(self, process: agent.Process, now: agent.Exec, env: bytes, helper: bytes, code: bytes) -> None:
        assert process.sock is not None
        self.let_go()
        try:
            process.sock.send(_GENERAL)
        except OSError:
            pass  # it is dead or dying, and waitpid will tell
        super().hand_over(process, now, env, helper, code)
        self.watch(process)

    def hear(self, process: agent.Process) -> None:
        if self.rehearsing or self.exec is not self.direct or self.direct.process is not process:
            super().hear(process)
        elif process.sock is not None:  # the interpreter has closed its end
            process.sock.close()
            process.sock = None
            process.unsent = memoryview(b"")

    def send(self, header: bytes, body: bytes = b"") -> None:
        if self.rehearsing or self.outbox:
            super().send(header, body)
            return
        frame = agent.FRAME.pack(len(header), len(body)) + header + body
        try:
            written = os.write(self.write_fd, frame)
        except BlockingIOError:
            written = 0
        if written < len(frame):
            self.outbox.append(memoryview(frame)[written:])
            self.backlog += len(frame) - written

    def forward(self, now: agent.Exec, index: int) -> int:
        return 0 if self.dry else _forward(self, now, index)

    def finish(self, now: agent.Exec, status: int, dead: bool = False) -> None:
        report_spent(*self.spent, status, told=not self.rehearsing)
        if now is self.direct and now.process is self.polled:
            self.drain()
            self.dry = True
        _finish(self, now, status, dead)
        self.dry = False
        if now is self.direct and not dead and not self.rehearsing and self.interpreter is not None:
            self.interpreter.close()
            self.interpreter = None
            self.let_go()

    def drain(self) -> None:
        """What the direct run left in its pipes, as far as finish() would read it."""
        now, process = self.direct, self.direct.process
        assert process is not None
        drained, got = 0, 1
        while got and drained < 2 * agent.DRAIN_MAX:
            got = 0
            for fd, events in self.running.poll(0):
                if fd == process.out and events & select.POLLIN:
                    got += self.forward(now, 0)
                elif fd == process.err and events & select.POLLIN:
                    got += self.forward(now, 1)
            drained += got


def report_spent(control: int, peak: int, events: int, status: int, *, told: bool) -> None:
    """Tell the host the peak of memory and, if the program was killed, how many the kernel killed for memory."""
    kills = b"0"
    if status == -_signal.SIGKILL:
        found = [line for line in os.pread(events, 4096, 0).split(b"\n") if line.startswith(b"oom_kill ")]
        kills = found[0].split()[1] if found else b"0"
    line = SPENT_HEAD + os.pread(peak, 64, 0)[:-1] + SPENT_MIDDLE + kills + SPENT_END
    if told:
        os.write(control, line)


# --- in the interpreter ----------------------------------------------------------------------------------------------


def install() -> None:
    """Have the agent of this process be ours, and its interpreters know the short way."""
    agent.Agent = GuestAgent  # type: ignore[misc]
    give_way_once()
    take_requests()
    compile_tools()


def give_way_once() -> None:
    """Have what the agent forks run with no priority, whichever the agent itself has."""
    pending = [True]

    def give_way() -> None:
        if pending[0]:
            pending[0] = False  # a program's forks are its own
            os.setpriority(os.PRIO_PROCESS, 0, 0)

    os.register_at_fork(after_in_child=give_way)


def take_requests() -> None:
    """Put the short way before the general one.

    The waiting interpreter was cloned, so it seeds its generators anew when the first program comes.
    """
    receive_general = agent._receive
    untouched = [True]

    def receive(private: Any) -> Any:
        if untouched[0]:
            os.environb.update({name.encode(): value.encode() for name, value in ENVIRONMENT.items()})
        while True:
            head = private.recv(_LENGTH.size, socket.MSG_WAITALL)
            if len(head) < _LENGTH.size:
                os._exit(0)  # the agent is gone
            (size,) = _LENGTH.unpack_from(head)
            if size:
                run_direct(private, private.recv(size, socket.MSG_WAITALL))
                continue
            request = receive_general(private)
            if untouched[0] and request[0] != agent.REHEARSAL_NUMBER:
                untouched[0] = False
                reseed()
            return request

    agent._receive = receive


_seed = super(random.Random, random._inst).seed


def reseed() -> None:
    """The clone's own randomness: what ``random.seed()`` does."""
    _seed()
    random._inst.gauss_next = None  # type: ignore[attr-defined]
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def run_direct(private: Any, block: bytes) -> None:
    """Run a single program and end with it; returns from the rehearsal only."""
    ident, _, _, name_bytes, env_bytes = HEAD.unpack_from(block)
    env_start = HEAD.size + name_bytes
    name, env = block[HEAD.size : env_start].decode(), block[env_start : env_start + env_bytes]
    code = block[env_start + env_bytes :]
    rehearsal = ident == 0
    if env:
        os.environb.update(agent._environment(env))
        if "TZ" in os.environ:
            time.tzset()
    if not rehearsal:
        private.close()
        reseed()
    pid = os.getpid()
    main = sys.modules["__main__"]
    namespace = {"__builtins__": builtins} if rehearsal else main.__dict__
    try:
        status = agent.run_code(code, name, namespace, _signal.default_int_handler)
        _signal.signal(_signal.SIGINT, _signal.SIG_IGN)
    except KeyboardInterrupt:  # it came between the program's end and ours
        status = agent.EXIT_INTERRUPTED
        _signal.signal(_signal.SIGINT, _signal.SIG_IGN)
    if rehearsal:
        agent._drop_objects(namespace)
        agent._flush_standard_streams()
        del linecache.cache[name]
        private.send(agent.DONE.pack(b"fh", _DIRECT_NUMBER, status))
        return
    status = agent.finalize(status, namespace)
    if os.getpid() == pid:  # and not a fork of the program's own that ran to the program's end
        _told[1], _told[0] = status, 1
        try:
            os.close(2)
        except OSError:
            pass  # the program has closed it
    os._exit(status)


def compile_tools() -> None:
    """Compile the tools of displays before the snapshot: emulated, it takes longer than most programs."""
    with open(agent.__file__.replace("agent.py", "displays.py"), "rb") as file:
        known = file.read()
    code = compile(known, "<fumehood>", "exec", 0, True)
    load = agent.load_tools

    def load_tools(text: bytes) -> dict[str, Any]:
        if text != known:
            return load(text)
        tools: dict[str, Any] = {"__name__": "fumehood.guest.displays", "__builtins__": builtins}
        exec(code, tools)
        return tools

    agent.load_tools = load_tools
