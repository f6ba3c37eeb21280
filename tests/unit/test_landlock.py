"""Landlock rulesets, shown by what a forked child under one can no longer do."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from fumehood.linux import landlock, libc, seccomp
from fumehood.linux.steps import at_once

ABI = landlock.abi()
PR_SET_NO_NEW_PRIVS = 38
TCGETS = 0x5401

pytestmark = pytest.mark.skipif(ABI == 0, reason="this kernel has no Landlock")


def needs(version: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(version > ABI, reason=f"Landlock ABI {version}; this kernel has {ABI}")


def in_child(act: Callable[[], object], prepare: Callable[[], object] = lambda: None) -> str:
    """What ``act`` does in a forked child after ``prepare``: its result, or its errno's name."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(30)
            prepare()
            answer = repr(act())
        except OSError as error:
            answer = errno.errorcode[error.errno or 0]
        except BaseException as error:
            answer = repr(error)
        os.write(writer, answer.encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as stream:
        answer = stream.read().decode()
    os.waitpid(pid, 0)
    return answer


class Jail:
    """A scratch folder that a jail may write, and one beside it that it may not."""

    def __init__(self, base: Path) -> None:
        self.inside, self.outside = base / "inside", base / "outside"
        self.inside.mkdir()
        self.outside.mkdir()
        (self.outside / "file").write_text("host")

    def seal(self) -> None:
        libc.prctl("PR_SET_NO_NEW_PRIVS", PR_SET_NO_NEW_PRIVS, 1)
        at_once(landlock.jail, self.beneath(("/dev/null", landlock.DEVICE & landlock.FILE_RIGHTS)), ABI)

    def beneath(self, *more: tuple[str, int]) -> list[tuple[str, int]]:
        return [("/", landlock.READ_ONLY), (str(self.inside), landlock.WRITABLE), *more]

    def attempt(self, act: Callable[[], object]) -> tuple[str, str]:
        """The answer without and with the ruleset. The latter goes first, so that it finds nothing done already."""
        held = in_child(act, self.seal)
        return in_child(act), held


@pytest.fixture
def jail(tmp_path: Path) -> Jail:
    return Jail(tmp_path)


def test_everything_is_read_but_only_scratch_is_written(jail: Jail) -> None:
    assert jail.attempt((jail.outside / "file").read_text) == ("'host'", "'host'")
    assert jail.attempt(lambda: (jail.outside / "new").write_text("x")) == ("1", "EACCES")
    assert jail.attempt(lambda: (jail.outside / "file").write_text("x")) == ("1", "EACCES")
    assert jail.attempt((jail.outside / "folder").mkdir) == ("None", "EACCES")
    assert jail.attempt(lambda: (jail.outside / "link").symlink_to("/")) == ("None", "EACCES")
    assert jail.attempt((jail.outside / "new").unlink) == ("None", "EACCES")


def test_scratch_is_free(jail: Jail) -> None:
    def work() -> str:
        one, other = jail.inside / "one", jail.inside / "other"
        one.mkdir()
        other.mkdir()
        (one / "file").write_text("x")
        (one / "file").rename(other / "file")
        os.link(other / "file", one / "hard")
        os.mkfifo(one / "fifo")
        (one / "link").symlink_to("hard")
        os.truncate(one / "hard", 0)
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(one / "s"))
        (other / "file").unlink()
        other.rmdir()
        return "done"

    assert in_child(work, jail.seal) == "'done'"


@needs(3)
def test_truncate_outside_is_refused(jail: Jail) -> None:
    assert jail.attempt(lambda: os.truncate(jail.outside / "file", 1)) == ("None", "EACCES")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make devices")
def test_no_device_is_made_even_in_scratch(jail: Jail) -> None:
    device = jail.inside / "null"
    assert jail.attempt(lambda: os.mknod(device, 0o020600, os.makedev(1, 3))) == ("None", "EACCES")


def test_only_named_devices_are_written(jail: Jail) -> None:
    def write(path: str) -> int:
        with open(path, "wb", buffering=0) as device:
            return device.write(b"x")

    assert jail.attempt(lambda: write("/dev/null")) == ("1", "1")
    assert jail.attempt(lambda: write("/dev/zero")) == ("1", "EACCES")


@needs(5)
def test_only_named_devices_take_an_ioctl(jail: Jail) -> None:
    def ask(path: str) -> object:
        with open(path, "rb", buffering=0) as device:
            return fcntl.ioctl(device, TCGETS, bytes(64))

    assert jail.attempt(lambda: ask("/dev/null")) == ("ENOTTY", "ENOTTY")
    assert jail.attempt(lambda: ask("/dev/zero")) == ("ENOTTY", "EACCES")


@needs(4)
def test_no_tcp(jail: Jail) -> None:
    def bind() -> None:
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        address = server.getsockname()
        assert jail.attempt(lambda: socket.create_connection(address).close()) == ("None", "EACCES")
    assert jail.attempt(bind) == ("None", "EACCES")


@needs(6)
def test_abstract_sockets_reach_only_the_own_jail(jail: Jail) -> None:
    def reach(name: str) -> None:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(name)

    def reach_own() -> None:
        with socket.socket(socket.AF_UNIX) as own:
            own.bind(f"\0{uuid.uuid4()}")
            own.listen()
            reach(own.getsockname())

    name = f"\0{uuid.uuid4()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        assert jail.attempt(lambda: reach(name)) == ("None", "EPERM")
    assert in_child(reach_own, jail.seal) == "None"


@needs(6)
def test_signals_reach_only_the_own_jail(jail: Jail) -> None:
    def signal_own_child() -> int:
        pid = os.fork()
        if pid == 0:
            signal.pause()
        os.kill(pid, signal.SIGKILL)
        return os.WTERMSIG(os.waitpid(pid, 0)[1])

    host = os.getpid()
    assert jail.attempt(lambda: os.kill(host, 0)) == ("None", "EPERM")
    assert in_child(signal_own_child, jail.seal) == str(int(signal.SIGKILL))


@pytest.mark.parametrize("version", range(1, ABI + 1))
def test_an_older_abi_still_holds_the_files(version: int, jail: Jail) -> None:
    def seal() -> None:
        libc.prctl("PR_SET_NO_NEW_PRIVS", PR_SET_NO_NEW_PRIVS, 1)
        at_once(landlock.jail, jail.beneath(("/dev", landlock.DEVICE)), version)

    assert in_child(lambda: (jail.inside / "new").write_text("x"), seal) == "1"
    assert in_child(lambda: (jail.outside / "new").write_text("x"), seal) == "EACCES"


def test_no_descriptor_is_left(jail: Jail) -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    def seal_and_count() -> int:
        before = count()
        jail.seal()
        return count() - before

    assert in_child(seal_and_count) == "0"


@pytest.mark.parametrize(
    ("path", "rights", "refusal"),
    [
        ("link", landlock.READ_ONLY, "ENOTDIR"),
        ("file", landlock.WRITABLE, "ENOTDIR"),
        ("no", landlock.WRITABLE, "ENOENT"),
    ],
)
def test_a_path_is_what_it_is_said_to_be(path: str, rights: int, refusal: str, jail: Jail) -> None:
    (jail.inside / "link").symlink_to("/")
    (jail.inside / "file").touch()

    def seal() -> None:
        libc.prctl("PR_SET_NO_NEW_PRIVS", PR_SET_NO_NEW_PRIVS, 1)
        at_once(landlock.jail, jail.beneath((str(jail.inside / path), rights)), ABI)

    assert in_child(seal) == refusal


def test_a_rule_on_a_link_gives_nothing_behind_it(jail: Jail) -> None:
    link = jail.inside / "link"
    link.symlink_to(jail.outside / "file")

    def seal() -> None:
        libc.prctl("PR_SET_NO_NEW_PRIVS", PR_SET_NO_NEW_PRIVS, 1)
        at_once(landlock.jail, jail.beneath((str(link), landlock.FILE_RIGHTS)), ABI)

    assert in_child(lambda: (jail.outside / "file").write_text("x"), seal) == "EACCES"


def test_where_the_kernel_refuses_landlock(jail: Jail) -> None:
    def seal() -> None:
        libc.prctl("PR_SET_NO_NEW_PRIVS", PR_SET_NO_NEW_PRIVS, 1)
        at_once(seccomp.load, seccomp.allow_list())
        at_once(seccomp.load, seccomp.seal())

    assert in_child(landlock.abi, seal) == "0"
    assert in_child(lambda: at_once(landlock.jail, jail.beneath(), ABI), seal) == "ENOSYS"


def test_covers_names_what_is_held_and_what_is_not() -> None:
    assert landlock.covers(0) == "absent"
    assert landlock.covers(1) == "ABI 1: files; not truncate, TCP, device ioctl, abstract sockets, signals"
    assert landlock.covers(7) == "ABI 7: files, truncate, TCP, device ioctl, abstract sockets, signals"
