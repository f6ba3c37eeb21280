"""The program's own process in a sandbox for one program: it seals itself, takes the program, runs it and exits.

Runs inside the zygote. Where a sandbox lives on or serves files, the guest agent stands between the host and the
interpreter (:mod:`fumehood.guest.agent`). One program needs none: PID 1 of its namespaces is an
:class:`~fumehood.linux.namespaces.IdleInit`, and this process, a child of the zygote that has joined them, is the
interpreter. The host reads its output from the pipes themselves, and its exit status is what the zygote waited for. See
docs/decisions/0010.

On the socket from the host::

    host -> here    Numbers     with descriptors by which this process enters its cgroup; all is sealed then
    here -> host    SEALED      with the reading ends of stdout and stderr and the work folder; or FAILED and the reason
    host -> here    HEAD, name, environment, code
    here -> host    the end of the stream; or FAILED, if there was no memory for that

Nothing of it is open any more when the program runs: it finds descriptors 0 to 2. When the interpreter has finalized,
the exit status is left in the permission bits of the pipe that is stderr, and that is closed: the host need not wait
until the kernel has taken the process apart. See docs/decisions/0013.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # as in fumehood.guest.agent
import _socket as socket
import array
import ctypes
import gc
import linecache
import os
import struct

from fumehood.guest import agent
from fumehood.linux.steps import Steps
from fumehood.tiers.jail.controls import GO, Box, Numbers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

#: Lengths of the name, the environment and the code.
HEAD = struct.Struct("!HII")

SEALED, FAILED = b"S", b"F"  # as in fumehood.enclosure, which is not loaded here
#: The sticky bit of the pipe's mode says that its other low bits are the exit status.
ENDED, STATUS_MASK = 0o1000, 0xFF
ENTER = b"0"  # as in fumehood.linux.cgroup
_ENTRIES_SPACE = socket.CMSG_SPACE(4 * 4)  # a cgroup has at most four trees
# What a program does to these modules, such as a test's doubles, does not change its exit status.
_close, _exit, _fchmod, _fstat, _getpid = os.close, os._exit, os.fchmod, os.fstat, os.getpid
_pthread_sigmask, _ALL_SIGNALS = _signal.pthread_sigmask, _signal.valid_signals()
_KIND, _PIPE = 0o170000, 0o010000  # S_IFMT, S_IFIFO
_NUMBERS_BYTES = ctypes.sizeof(Numbers)
_FIRST_BYTES = 32 << 10  # most programs, and less than what malloc(3) would map and unmap
#: After so many the interpreter has nothing left to adapt.
_TIMES = 20
_REHEARSAL_NAME = "<rehearsal>"


def become_single(box: Box, end: socket.socket) -> NoReturn:
    """In a child of the zygote: join PID 1's namespaces, wait for the word, seal, run, exit. ``end`` is the channel."""
    status = agent.EXIT_LOST
    try:
        box.begin.run()
        if box.rehearsed:
            rehearse()
        if go_on(end, box):
            status = serve(end, box)
    finally:
        _exit(status)


def go_on(end: socket.socket, box: Box) -> bool:
    """Wait for the word, enter the cgroup and seal; False, with the reason told, if that failed or no word came."""
    size, entries, _, _ = end.recvmsg_into([box.numbers], _ENTRIES_SPACE, socket.MSG_WAITALL)
    if size != _NUMBERS_BYTES or box.numbers.word != GO:
        return False
    try:
        enter(entries)
        box.seal.run()
    except Exception as error:
        end.send(FAILED + f"{type(error).__name__}: {error}".encode())
        return False
    return True


def enter(entries: list[tuple[int, int, bytes]]) -> None:
    """Move this process into the cgroup whose files came along; see Cgroup.entries(). The descriptors stay open until
    the sandbox closes all that are not its own. Raises OSError."""
    for _, _, given in entries:
        for fd in array.array("i", given):
            try:
                os.write(fd, ENTER)
            except OSError as error:
                raise OSError(error.errno, f"enter the cgroup: {error.strerror}") from None


def answer(end: socket.socket, *fds: int) -> None:
    """Say that this process is sealed, hand over descriptors and close them."""
    given = [fd for fd in fds if fd >= 0]
    end.sendmsg([SEALED], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", given))] if given else [])
    for fd in given:
        os.close(fd)


def serve(end: socket.socket, box: Box) -> int:
    """Make the pipes, hand over their ends, take the program and run it to its end; the exit status."""
    agent.make_dumpable()
    if box.numbers.touch:
        rehearse()
    stdin, none = os.pipe()
    out, stdout = os.pipe()
    err, stderr = os.pipe()
    for number, fd in enumerate((stdin, stdout, stderr)):
        os.dup2(fd, number)
        os.close(fd)
    os.close(none)
    answer(end, out, err, box.work_fd.value)
    # While the host reads back what is enforced.
    _signal.signal(_signal.SIGINT, _signal.SIG_IGN)  # until a program is there to be interrupted
    os.umask(0o022)
    module = agent.fresh_interpreter()
    me = _getpid()
    gc.freeze()  # what was made since the zygote's, so that the collection at the end looks at the program's alone
    try:
        name, env, code = receive(end)
    except MemoryError:
        end.send(FAILED)
        raise
    end.close()
    agent.set_environment(env)
    try:
        status = agent.run_code(code, name, module.__dict__, _signal.default_int_handler)
        _signal.signal(_signal.SIGINT, _signal.SIG_IGN)
    except KeyboardInterrupt:  # it came between the program's end and ours
        status = agent.EXIT_INTERRUPTED
        _signal.signal(_signal.SIGINT, _signal.SIG_IGN)
    except BaseException as error:  # of a handler of the program's, which a timer called then
        agent.show(error)
        status = 1
    try:
        status = agent.finalize(status, module.__dict__)
    except BaseException:  # as above; what is left to do is done without
        _pthread_sigmask(_signal.SIG_BLOCK, _ALL_SIGNALS)
        status = agent.finalize(status, module.__dict__)
    try:
        _pthread_sigmask(_signal.SIG_BLOCK, _ALL_SIGNALS)
        if _getpid() == me:  # and not a child that the program has forked
            say_end(2, status)
    except BaseException:  # it has no stderr any more, or a handler of its own raised
        pass
    return status


def say_end(fd: int, status: int) -> None:
    """Leave the exit status where the host looks once stderr is closed, and close it. Raises OSError."""
    if _fstat(fd).st_mode & _KIND == _PIPE:  # and not a file that the program has put in its place
        _fchmod(fd, ENDED | status & STATUS_MASK)
        _close(fd)


def receive(end: socket.socket) -> tuple[str, bytes, bytes]:
    """The program's name, environment and code. Ends the process when the host is gone."""
    got = end.recv(_FIRST_BYTES)
    while len(got) < HEAD.size or len(got) < HEAD.size + sum(HEAD.unpack_from(got)):
        missing = HEAD.size + sum(HEAD.unpack_from(got)) - len(got) if len(got) >= HEAD.size else 1
        more = end.recv(missing, socket.MSG_WAITALL)  # in one go: a large program comes in hundreds of pieces
        if not more:
            _exit(agent.EXIT_LOST)
        got += more
    name_bytes, env_bytes, _ = HEAD.unpack_from(got)
    env_start = HEAD.size + name_bytes
    code_start = env_start + env_bytes
    return got[HEAD.size : env_start].decode(), got[env_start:code_start], got[code_start:]


def practise() -> None:
    """Go through what each program's process will go through, in the process that they are forked from.

    The interpreter counts how often code runs and adapts it to what it meets, and the dynamic linker looks functions up
    when they are first called. Each of that is written to memory, and what is done here a forked process need not do,
    on a copied page, itself.
    """
    env = agent.prepared_environment()  # so that it is left as it is
    harmless = Steps()
    harmless.call("getpid")
    ours, theirs = socket.socketpair()
    for _ in range(_TIMES):
        harmless.run()
        enter([])
        answer(theirs)
        ours.recv(1)
        ours.send(HEAD.pack(1, len(env), 1) + b"x" + env + b"x")
        agent.set_environment(receive(theirs)[1])
        rehearse()
        reading, writing = os.pipe()
        say_end(writing, 0)
        os.close(reading)
    ours.close()
    theirs.close()
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)


def rehearse() -> None:
    """Go once through what a program goes through, so that the first one finds every page in place.

    What it prints goes nowhere: descriptors 0 to 2 are the zygote's /dev/null until the pipes are there.
    """
    namespace = {"__builtins__": __builtins__}
    agent.run_code(agent.REHEARSAL, _REHEARSAL_NAME, namespace, _signal.default_int_handler)
    _signal.signal(_signal.SIGINT, _signal.SIG_IGN)
    agent._drop_objects(namespace)
    agent._flush_standard_streams()
    del linecache.cache[_REHEARSAL_NAME]
    gc.collect()
