"""The targets of one attack, fresh for each: files, sockets, a bystander process, descriptors, and their canaries.

A canary is a random string that only this process knows. That it turns up where the attacker speaks is evidence that
no attacker can forge; that the attacker says so is not.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import secrets
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import termios
import threading
import time
from pathlib import Path

from fumehood.attacks import procfs

#: The environment variable of the supervisor that holds a canary; whoever starts a supervisor may set it beforehand.
ENV_NAME = "FUMEHOOD_VERIFY_CANARY"

#: Signals that a process may ignore without harm, since an attacker sends them to all that it can reach.
HARMLESS = (signal.SIGURG, signal.SIGWINCH)

#: The path of a Unix socket has room for 107 bytes (unix(7)), and one of them lies in the folder.
_FOLDER_CHARACTERS_MAX = 60

CREDENTIALS = (".aws/credentials", ".ssh/id_ed25519", ".netrc", ".config/gcloud/application_default_credentials.json",
               ".docker/config.json", ".kube/config", ".git-credentials", ".pypirc", ".env")  # fmt: skip

_BYSTANDER = """\
import ctypes, os, signal, sys, time
keep = open(sys.argv[2], "rb")
buffer = ctypes.create_string_buffer(os.environ["FUMEHOOD_VERIFY_CANARY"].encode())
ctypes.CDLL(None).prctl(0x59616d61, ctypes.c_ulong(-1), 0, 0, 0)  # PR_SET_PTRACER_ANY, where Yama is in force
wanted = {signal.SIGURG, signal.SIGWINCH, signal.SIGUSR1}
signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
print(ctypes.addressof(buffer), keep.fileno(), flush=True)
while True:
    print(signal.sigwaitinfo(wanted).si_signo, flush=True)
"""


def new_canary(kind: str) -> str:
    """A fresh random string that says what it is."""
    return f"FHCANARY-{kind}-{secrets.token_hex(12)}"


def python() -> str:
    """The real path of the interpreter that runs this, outside any virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


#: Folders of stages that are not closed, for whoever ends this process in a hurry.
LIVE: set[Path] = set()
_REMOVING = threading.Lock()


def remove_all() -> None:
    """Remove the folders of all stages of this process, which is about to end. Another thread may be closing one."""
    for folder in list(LIVE):
        _forget(folder)


def _forget(folder: Path) -> None:
    with _REMOVING:
        remove_tree(folder)
        LIVE.discard(folder)


class Listener:
    """A service on the host. It greets with a canary, and its log is the evidence."""

    def __init__(self, name: str, family: int, kind: int, address: object, greeting: str) -> None:
        self.name = name
        self.socket = socket.socket(family, kind)
        self.socket.setblocking(False)
        self.socket.bind(address)  # type: ignore[arg-type]
        if kind == socket.SOCK_STREAM:
            self.socket.listen(64)
        self.kind = kind
        self.greeting = greeting.encode()
        self.log: list[str] = []

    def collect(self) -> None:
        """Take what has arrived, without waiting."""
        with contextlib.suppress(OSError):
            while True:
                if self.kind == socket.SOCK_STREAM:
                    peer, where = self.socket.accept()
                    with peer, contextlib.suppress(OSError):
                        peer.send(self.greeting)
                    self.log.append(f"connection from {where!r}")
                else:
                    data, where = self.socket.recvfrom(2048)
                    self.log.append(f"{len(data)} bytes from {where!r}")


def host_address() -> str | None:
    """An IPv4 address of this host that is not loopback, or None."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1: chooses a route, sends nothing
            address: str = probe.getsockname()[0]
        except OSError:
            return None
    return None if address.startswith("127.") else address


class Stage:
    """Builds the targets when made; :meth:`close` removes them all. Not shared between attacks."""

    def __init__(self, *, terminal: bool = False) -> None:
        self.token = secrets.token_hex(6)
        self.note = f"FHNOTE-{secrets.token_hex(12)}"  # known to the first program, not to the second
        self.canaries = {k: new_canary(k) for k in ("secret", "public", "fd", "dir", "net", "name", "cmdline", "home")}
        self.canaries["env"] = os.environ.setdefault(ENV_NAME, new_canary("env"))
        short = len(tempfile.gettempdir()) <= _FOLDER_CHARACTERS_MAX
        self.folder = Path(tempfile.mkdtemp(prefix=f"fh-{self.token}-", dir=None if short else "/tmp"))
        self.folder.chmod(0o755)
        LIVE.add(self.folder)
        self._stack = contextlib.ExitStack()
        try:
            self._files()
            self._descriptors()
            self._sockets()
            self._bystander()
            self.terminal = self._terminal() if terminal else None
        except BaseException:
            self.close()
            raise

    # --- targets

    def _files(self) -> None:
        private = self.folder / "private"
        private.mkdir(mode=0o700)
        self.secret = self._write(private / "secret", self.canaries["secret"], 0o600)
        self._write(private / "in-folder", self.canaries["dir"], 0o600)
        self._write(private / "descriptor", self.canaries["fd"], 0o600)
        self.public = self._write(self.folder / "public", self.canaries["public"], 0o644)
        self.home = self.folder / "home"
        for name in CREDENTIALS:
            (self.home / name).parent.mkdir(parents=True, exist_ok=True)
            self._write(self.home / name, self.canaries["home"], 0o644)
        # Open to every user of the host, so that what holds is the boundary and not the file's mode.
        self.open = self.folder / "open"
        hooks = self.folder / "project" / ".git" / "hooks"
        hooks.mkdir(parents=True)
        self.open.mkdir()
        self.victim = self._write(self.open / "victim", "untouched", 0o666)
        for folder in (self.open, hooks):
            folder.chmod(0o777)
        self.hook = hooks / "post-checkout"
        self.work = self.folder / "tmp"  # the supervisor's TMPDIR, see fumehood.attacks.worker
        self.work.mkdir()
        self.out = self.folder / "out"
        self._victim_hash = self._hash(self.victim)
        self._planted_before = self._listing()

    @staticmethod
    def _write(path: Path, text: str, mode: int) -> Path:
        path.write_text(text + "\n")
        path.chmod(mode)
        return path

    @staticmethod
    def _hash(path: Path) -> str:
        info = path.lstat()
        if not stat.S_ISREG(info.st_mode):
            return "no regular file any more"
        return hashlib.sha256(path.read_bytes()).hexdigest() + oct(info.st_mode)

    def _listing(self) -> set[str]:
        folders = (self.folder, self.open, self.hook.parent, self.folder / "private", self.work)
        return {str(folder / name) for folder in folders for name in os.listdir(folder) if folder != self.work}

    def _descriptors(self) -> None:
        """Descriptors that a careless supervisor would hand on: a file, a folder, a pipe to itself."""
        file_fd = os.open(self.folder / "private" / "descriptor", os.O_RDONLY)
        folder_fd = os.open(self.folder / "private", os.O_RDONLY | os.O_DIRECTORY)
        self._pipe_read, pipe_write = os.pipe()
        os.set_blocking(self._pipe_read, False)
        for fd in (file_fd, folder_fd, pipe_write):
            os.set_inheritable(fd, True)
        for fd in (file_fd, folder_fd, pipe_write, self._pipe_read):
            self._stack.callback(os.close, fd)
        self.pipe_bytes = b""

    def _sockets(self) -> None:
        self.socket_path = self.folder / "open" / "service"
        self.abstract = f"fh-{self.token}"
        self.abstract_secret = self.canaries["name"]  # an attacker is not told this one
        self.listeners: dict[str, Listener] = {}
        stream, datagram = socket.SOCK_STREAM, socket.SOCK_DGRAM
        wanted: list[tuple[str, int, int, object]] = [
            ("tcp4", socket.AF_INET, stream, ("127.0.0.1", 0)),
            ("tcp6", socket.AF_INET6, stream, ("::1", 0)),
            ("udp4", socket.AF_INET, datagram, ("127.0.0.1", 0)),
            ("path", socket.AF_UNIX, stream, str(self.socket_path)),
            ("abstract", socket.AF_UNIX, stream, "\0" + self.abstract),
            ("listed", socket.AF_UNIX, stream, "\0" + self.abstract_secret),
        ]
        if address := host_address():
            wanted.append(("host4", socket.AF_INET, stream, (address, 0)))
        for name, family, kind, where in wanted:
            with contextlib.suppress(OSError):  # a host without IPv6: see fumehood.attacks.needs
                self.listeners[name] = Listener(name, family, kind, where, self.canaries["net"])
                self._stack.callback(self.listeners[name].socket.close)
        self.socket_path.chmod(0o777)
        self._planted_before.add(str(self.socket_path))

    def port(self, name: str) -> int:
        """The port of a listener, or 0 if this host cannot have it."""
        return int(self.listeners[name].socket.getsockname()[1]) if name in self.listeners else 0

    def _bystander(self) -> None:
        """Another process of the same user, with secrets in its environment, memory, arguments and descriptors."""
        self.bystander = subprocess.Popen(
            [python(), "-I", "-S", "-c", _BYSTANDER, self.canaries["cmdline"],
             str(self.folder / "private" / "descriptor")],
            env={ENV_NAME: self.canaries["env"]}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        )  # fmt: skip
        self._stack.callback(self._end_bystander)
        assert self.bystander.stdout is not None
        address, fd = self.bystander.stdout.readline().split()
        self._bystander_address, self._bystander_fd = int(address), int(fd)
        os.set_blocking(self.bystander.stdout.fileno(), False)
        self.signals: list[int] = []
        self._bystander_limits = procfs.limits(self.bystander.pid)

    def _end_bystander(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.bystander.kill()
        self.bystander.wait()
        assert self.bystander.stdout is not None
        self.bystander.stdout.close()

    def _terminal(self) -> int | None:
        """A terminal that becomes the controlling one of this session; the side that a shell would read from."""
        master, slave = os.openpty()
        self._stack.callback(os.close, master)
        self._stack.callback(os.close, slave)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # closing it must not end the supervisor
        try:
            fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
        except OSError:
            return None
        settings = termios.tcgetattr(slave)
        settings[3] &= ~(termios.ICANON | termios.ECHO)
        termios.tcsetattr(slave, termios.TCSANOW, settings)
        os.set_blocking(slave, False)
        return slave

    # --- what an attacker is told

    def targets(self, *, mounted: str) -> dict[str, object]:
        """Names, paths, ports and process ids. ``mounted`` is where a read-only mount of ``open`` is seen."""
        return {
            "token": self.token,
            "folder": str(self.folder),
            "secret": str(self.secret),
            "public": str(self.public),
            "victim": str(self.victim),
            "open": str(self.open),
            "hook": str(self.hook),
            "home": str(self.home),
            "credentials": CREDENTIALS,
            "mounted": mounted,
            "ports": {name: self.port(name) for name in ("tcp4", "tcp6", "udp4", "host4")},
            "address": host_address(),
            "socket_path": str(self.socket_path),
            "abstract": self.abstract,
            "supervisor": os.getpid(),
            "bystander": self.bystander.pid,
            "bystander_address": self._bystander_address,
            "bystander_fd": self._bystander_fd,
            "key": self.key,
        }

    @property
    def key(self) -> int:
        """A key for System V objects that no other run uses."""
        return int(self.token[:7], 16) | 1

    # --- what the host sees

    def collect(self) -> None:
        """Take, without waiting, what listeners, the pipe and the bystander have got."""
        for listener in self.listeners.values():
            listener.collect()
        with contextlib.suppress(OSError):
            self.pipe_bytes += os.read(self._pipe_read, 65536)
        assert self.bystander.stdout is not None
        with contextlib.suppress(OSError):
            data = os.read(self.bystander.stdout.fileno(), 65536)
            self.signals.extend(int(word) for word in data.split())

    def typed(self) -> bytes:
        """What waits as input of the controlling terminal."""
        if self.terminal is None:
            return b""
        try:
            return os.read(self.terminal, 4096)
        except OSError:
            return b""

    def victim_changed(self) -> str | None:
        """Whether the victim file is no longer what it was."""
        try:
            now = self._hash(self.victim)
        except FileNotFoundError:
            return f"the host's file {self.victim.name} is gone"
        return None if now == self._victim_hash else "the host's file has changed"

    def planted(self) -> list[str]:
        """Files that were not in the host's folders at the start."""
        known = self._planted_before | {str(self.out)}
        return sorted(self._listing() - known)

    def bystander_changed(self) -> str | None:
        """Whether the bystander's resource limits are not what they were, or it is gone."""
        if self.bystander.poll() is not None:
            return f"the host's process ended with {self.bystander.returncode}"
        now = procfs.limits(self.bystander.pid)
        changed = [name for name, value in now.items() if self._bystander_limits.get(name) != value]
        return f"the host's process now has another limit on {', '.join(changed)}" if changed else None

    def close(self) -> None:
        """Remove everything."""
        self._stack.close()
        _forget(self.folder)


def remove_tree(folder: Path) -> None:
    """Remove a folder however deep it is: paths are never longer than one name, and nothing recurses."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    grave = Path(tempfile.mkdtemp(prefix="fh-grave-", dir=folder.parent))
    try:
        os.rename(folder, grave / "0")
    except FileNotFoundError:
        grave.rmdir()
        return
    top = os.open(grave, flags)
    serial = 0
    deadline = time.monotonic() + 60
    try:
        while (names := os.listdir(top)) and time.monotonic() < deadline:
            for name in names:
                try:
                    inner = os.open(name, flags, dir_fd=top)
                except OSError:
                    os.unlink(name, dir_fd=top)
                    continue
                try:
                    with contextlib.suppress(OSError):
                        os.fchmod(inner, 0o700)
                    for child in os.listdir(inner):
                        try:
                            os.unlink(child, dir_fd=inner)
                        except (IsADirectoryError, PermissionError):
                            serial += 1
                            os.rename(child, f"n{serial}", src_dir_fd=inner, dst_dir_fd=top)
                finally:
                    os.close(inner)
                os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
        with contextlib.suppress(OSError):
            grave.rmdir()


def remove_sysv(key: int) -> None:
    """Remove the System V objects of ``key``, which only an attack that succeeded has left."""
    library = ctypes.CDLL(None)
    library.semctl(library.semget(key, 0, 0), 0, 0)  # IPC_RMID is 0
    library.msgctl(library.msgget(key, 0), 0, None)
    library.shmctl(library.shmget(key, 0, 0), 0, None)
