"""PID 1 of the guest: prepares the machine, starts the agent, and serves one small port of its own.

Runs inside the guest only, as root of a kernel that nobody shares, before and beside programs that it must not trust:
it reads no file that a program can write, follows no link, and what it sends of the work folder is bounded by the
host. Imports nothing beyond the standard library and the modules of this package that the image carries.

On the control port come first, from the host, one message each: ``BECOME`` with what follows it. Kind ``LIMITS``,
before the snapshot, sets what most sandboxes will ask for; ``ADOPT`` makes the machine one certain sandbox. The JSON
object behind it is what limits differ, or nothing. To both the answer is a line::

    adopted    memory_bytes pids disk_bytes inodes rlimits: what the guest's kernel holds now

From then on lines are JSON objects of at most LINE_MAX bytes. From the host::

    export     entries bytes depth

and to the host::

    spent      memory_peak_bytes oom_kills, before every end of a program
    entry      path(hex) kind(f d l p s, x for a file that is not sent) mode size target(hex) same(hex) runs
    exported   truncated
    failed     message

An entry's content follows its line raw: for each of ``runs``, an (offset, length), so many bytes. ``same`` is the path
of the first name of a file that has several; the others carry no content.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import glob
import importlib
import json
import os
import resource
import select
import signal
import socket
import stat
import struct
import sys
import time
import traceback

from fumehood.guest import agent
from fumehood.linux import capabilities, seccomp
from fumehood.linux.libc import mount, setns, syscall, unshare
from fumehood.linux.mounts import (
    MS_BIND,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_RDONLY,
    MS_REC,
    MS_REMOUNT,
    tmpfs,
)
from fumehood.linux.namespaces import (
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUTS,
    clone3,
)
from fumehood.linux.steps import at_once
from fumehood.tiers.microvm import guest_agent
from fumehood.tiers.microvm.guest_files import export, put, say

CODE_HOME = "/opt/fumehood"

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

INIT = "/init"
FRESH = "fumehood-fresh-agent"
LINE_MAX = 64 << 10
UID = 1000
AGENT_NICE = -10  # before the programs, whose end and output it tells
WORK = "/work"
SCRATCH = "/tmp"
CGROUP = "/sys/fs/cgroup/programs"
MODULES = "/lib/fumehood-modules"
ENVIRONMENT = "/opt/env"
#: A fork copies one thread, so nothing that is preloaded may start another: libraries that would have this form.
ENVIRONMENT_OF_IMPORTS = {name: "1" for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")}
ENVIRONMENT_OF_IMPORTS["MPLCONFIGDIR"] = "/tmp"
#: The first message: kind, fresh, time_ns, entropy, bytes of JSON that follow.
BECOME = struct.Struct("<c?q48sI")
LIMITS, ADOPT = b"L", b"A"
ENTROPY_HEAD = struct.pack("ii", 8 * 48, 48)  # struct rand_pool_info of <linux/random.h>
_READY = b'{"op":"ready","version":%d,"pid":1}' % agent.VERSION
READY = agent.FRAME.pack(len(_READY), 0) + _READY
_GRACE_MS = 2000  # how long the machine stays for its files once the agent has ended by itself
TERMINALS = "/dev/pts"
TERMINALS_MAX = 64  # of one sandbox
DEVICES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9)}
_NAMESPACES = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWNET

#: Work that the kernel does now and then, for which a machine is too small and lives too short: without hardware
#: virtualisation it takes some 10 ms of each clone's first.
QUIET = {"vm/compaction_proactiveness": "0", "vm/stat_interval": "3600", "vm/dirty_writeback_centisecs": "0"}

#: While the template boots; a sandbox's own limits come with "adopt".
_FIRST_DISK_BYTES = 64 << 20
_FIRST_FILES = 4096
_SHARED_INODES = 4  # the root of the tmpfs and the three folders in it

_PORT_PATIENCE_S = 30.0
_CLONE_FS = 0x200
_FINIT_MODULE = 313
_RNDADDENTROPY = 0x40085203  # _IOW('R', 3, int[2]) of <linux/random.h>
_RNDRESEEDCRNG = 0x5207
_REBOOT_POWER_OFF = 0x4321FEDC  # <linux/reboot.h>

#: What ordinary programs import first; shared by every clone.
_COMMON = (
    "base64 bisect collections contextlib copy csv dataclasses datetime decimal enum functools hashlib heapq io "
    "itertools json math operator random re statistics string struct textwrap time types typing uuid"
)


# --- the machine -----------------------------------------------------------------------------------------------------


def set_up() -> dict[str, str]:
    """Mounts, modules, devices; the options of the kernel's command line."""
    unshare(_CLONE_FS)  # PID 1 shares its root with kernel threads, and then may enter no mount namespace (setns(2))
    mount("devtmpfs", "/dev", "devtmpfs", MS_NOSUID)
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    while os.open("/dev/null", os.O_RDWR) < 2:  # there is no console, so 0 to 2 may be closed
        pass
    mount("sysfs", "/sys", "sysfs", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    mount("cgroup2", "/sys/fs/cgroup", "cgroup2", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    write("/sys/fs/cgroup/cgroup.subtree_control", "+memory +pids")
    os.mkdir(CGROUP)
    for name, value in QUIET.items():
        if os.path.exists(f"/proc/sys/{name}"):
            write(f"/proc/sys/{name}", value)
    for name in read(f"{MODULES}/order").split():
        load_module(f"{MODULES}/{name}")
    return dict(word.partition("=")[::2] for word in read("/proc/cmdline").split())


def load_module(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        syscall(f"finit_module {path}", _FINIT_MODULE, fd, b"", 0)
    except OSError as error:
        if error.errno != errno.EEXIST:
            raise
    finally:
        os.close(fd)


def open_ports() -> tuple[int, int]:
    """The agent's port and ours. A node appears a moment before its port can be opened."""
    deadline = time.monotonic() + _PORT_PATIENCE_S
    opened: dict[str, int] = {}
    while True:
        for number in "12":
            for path in glob.glob(f"/dev/vport*p{number}"):
                if number not in opened:
                    try:
                        opened[number] = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                    except OSError as error:
                        if error.errno not in (errno.ENXIO, errno.ENOENT):
                            raise
        if len(opened) == 2:
            return opened["1"], opened["2"]
        if time.monotonic() > deadline:
            raise RuntimeError("the virtio ports did not appear")
        time.sleep(0.002)


def preload(names: str) -> None:
    """Import what every program finds imported."""
    agent.restore_site_builtins()
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    sys.path.append(f"{ENVIRONMENT}/lib/{version}/site-packages")
    sys.prefix = sys.exec_prefix = ENVIRONMENT
    for name in [*_COMMON.split(), *filter(None, names.split(","))]:
        importlib.import_module(name)
        if len(os.listdir("/proc/self/task")) > 1:
            raise RuntimeError(f"preload: {name} started a thread when imported; leave it out")
    sys.path.remove(CODE_HOME)  # programs see a plain interpreter


def read(path: str) -> str:
    with open(path) as file:
        return file.read()


def write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


# --- the agent, in its own namespaces --------------------------------------------------------------------------------


class Service:
    """The agent's process, and the two ports that it and init use."""

    def __init__(self, port: int, control: int, imports: str) -> None:
        self.port = port
        self.control = control
        self.imports = imports
        self.pid = 0
        self.limits: dict[str, Any] = {}
        self.answer = b"\n"  # what the kernel said of them
        self.work = -1  # the work folder, which outlives the programs as long as this is open

    def start(self, *, fresh: bool) -> None:
        """Fork the agent, or with ``fresh`` execute it, and wait until it has sealed itself.

        A fork has this process's imports, and with them its address layout and hash seed.
        """
        if self.work >= 0:
            os.close(self.work)
        sealed, tell = os.pipe()
        self.pid, pidfd = clone3(_NAMESPACES)
        if self.pid == 0:
            try:
                if fresh:
                    self.execute(tell)
                become_agent(self.port, self.control, tell)
            except BaseException:
                say(self.control, {"op": "failed", "message": traceback.format_exc()[-2000:]})
            finally:
                os._exit(1)
        os.close(tell)
        os.close(pidfd)
        if not os.read(sealed, 1):
            raise RuntimeError("the agent did not seal itself")
        os.close(sealed)
        self.work = os.open(f"/proc/{self.pid}/root{WORK}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.limits = {}

    def execute(self, tell: int) -> NoReturn:
        handed = [self.port, self.control, tell]
        for fd in handed:
            os.set_inheritable(fd, True)
        arguments = [sys.executable, "-I", "-S", "-B", INIT, FRESH, self.imports, *map(str, handed)]
        os.execve(sys.executable, arguments, dict(ENVIRONMENT_OF_IMPORTS))

    def hold(self, limits: dict[str, Any]) -> None:
        """Set the limits that differ from those in force, and read all of them back."""
        old, self.limits = self.limits, limits
        if limits["memory_bytes"] != old.get("memory_bytes"):
            write(f"{CGROUP}/memory.max", str(limits["memory_bytes"]))
        if limits["pids"] != old.get("pids"):
            write(f"{CGROUP}/pids.max", str(limits["pids"]))
        if [limits["disk_bytes"], limits["files"]] != [old.get("disk_bytes"), old.get("files")]:
            bounds = f"size={limits['disk_bytes']},nr_inodes={limits['files'] + _SHARED_INODES}"
            mount_inside(self.pid, SCRATCH, None, None, bounds)
        if limits["rlimits"] != old.get("rlimits"):
            # The agent first: what it forks from then on has them.
            for pid in (self.pid, *map(int, read(f"{CGROUP}/cgroup.procs").split())):
                for name, value in limits["rlimits"].items():
                    resource.prlimit(pid, getattr(resource, "RLIMIT_" + name), (value, value))
        if limits["terminals"] and not old.get("terminals"):
            mount_inside(
                self.pid, TERMINALS, "devpts", "devpts", f"newinstance,ptmxmode=666,mode=600,max={TERMINALS_MAX}"
            )
        scratch = os.statvfs(f"/proc/{self.pid}/root{SCRATCH}")
        kinds = {name: getattr(resource, "RLIMIT_" + name) for name in limits["rlimits"]}
        held: dict[str, object] = {
            "op": "adopted",
            "memory_bytes": int(read(f"{CGROUP}/memory.max")),
            "pids": int(read(f"{CGROUP}/pids.max")),
            "disk_bytes": scratch.f_blocks * scratch.f_frsize,
            "inodes": scratch.f_files,
            "terminals": terminals_of(self.pid),
            "rlimits": {name: resource.prlimit(self.pid, kind)[1] for name, kind in kinds.items()},
        }
        self.answer = json.dumps(held).encode() + b"\n"

    def end(self) -> None:
        """Kill the agent and with it every program: PID 1 of a namespace is gone last of all in it."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0

    def ended_by_itself(self) -> bool:
        """Whether the agent is gone although nobody asked for it. Its work folder is still there."""
        if self.pid and os.waitpid(self.pid, os.WNOHANG)[0] == self.pid:
            self.pid = 0
            return True
        return False


def become_agent(port: int, control: int, tell: int) -> NoReturn:
    """Seal this process as a sandbox's first one, and serve."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setpriority(os.PRIO_PROCESS, 0, AGENT_NICE)
    write(f"{CGROUP}/cgroup.procs", "0")
    spent = [os.open(f"{CGROUP}/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in ("memory.peak", "memory.events")]
    os.setsid()
    socket.sethostname("sandbox")
    highest = capabilities.last()
    lay_out_files()
    os.setgroups([])
    os.setresgid(UID, UID, UID)
    at_once(capabilities.drop_bounding, highest)
    os.setresuid(UID, UID, UID)  # from 0 to another: the kernel clears every other capability set (capabilities(7))
    at_once(capabilities.no_new_privs)
    at_once(seccomp.load, seccomp.allow_list())
    at_once(seccomp.load, seccomp.seal())
    os.chdir(WORK)
    guest_agent.GuestAgent.spent = (control, spent[0], spent[1])
    guest_agent.install()
    os.write(tell, b"s")
    os.close(tell)
    agent.serve(port, port, WORK, touch=True)


def lay_out_files() -> None:
    """A root that is read-only but for one sized tmpfs, and a /dev and /proc of its own."""
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", "/dev", "tmpfs", MS_NOSUID | MS_NOEXEC, "size=64k,nr_inodes=32,mode=755")
    for name, (major, minor) in DEVICES.items():
        os.mknod(f"/dev/{name}", 0o666 | stat.S_IFCHR, os.makedev(major, minor))
        os.chmod(f"/dev/{name}", 0o666)
    os.mkdir("/dev/shm")
    os.mkdir(TERMINALS)
    os.symlink("pts/ptmx", "/dev/ptmx")  # leads nowhere unless the operator gives terminals
    os.symlink("/proc/self/fd", "/dev/fd")
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"/dev/{name}")
    tmpfs(
        SCRATCH,
        size_bytes=_FIRST_DISK_BYTES,
        inodes=_FIRST_FILES + _SHARED_INODES,
        mode="755",
        flags=MS_NOSUID | MS_NODEV,
        owner=UID,
    )
    for name, target in (("work", WORK), ("shm", "/dev/shm"), ("tmp", SCRATCH)):
        os.mkdir(f"{SCRATCH}/{name}", 0o700)
        os.chown(f"{SCRATCH}/{name}", UID, UID)
        mount(f"{SCRATCH}/{name}", target, None, MS_BIND)
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, "subset=pid,hidepid=invisible")
    mount("tmpfs", "/sys", "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_RDONLY, "size=4k,mode=555")
    for path in ("/dev", "/"):
        mount(None, path, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID)


# --- the control port ------------------------------------------------------------------------------------------------


def tell_of_end(service: Service) -> None:
    """Break the agent's stream, so that the host knows at once."""
    try:
        put(service.port, b"\xff" * agent.FRAME.size)
    except OSError:
        pass  # it does not listen any more


def become_sandbox(service: Service, device: int) -> bool:
    """Take one of the host's first messages; whether it said which sandbox this machine is.

    A clone without hardware virtualisation pays for every path of code that it enters, in Python and in the kernel,
    some ten microseconds for each block of it. So what most clones do is fixed in size and was done before, in the
    template: they read once, ask the kernel for three things, and write twice.
    """
    message = os.read(service.control, LINE_MAX)
    if not message:
        time.sleep(0.001)  # nobody is connected: between the template's end and the clone's start
        return False
    kind, fresh, time_ns, entropy, size = BECOME.unpack_from(message)
    time.clock_settime_ns(time.CLOCK_REALTIME, time_ns)
    fcntl.ioctl(device, _RNDADDENTROPY, bytearray(ENTROPY_HEAD + entropy))  # what is mutable it takes at once
    fcntl.ioctl(device, _RNDRESEEDCRNG)
    if fresh:
        service.end()
        service.start(fresh=True)
    if size:
        while len(message) < BECOME.size + size:
            message += os.read(service.control, LINE_MAX)
        service.hold(json.loads(message[BECOME.size :]))
    os.write(service.control, service.answer)
    if kind == ADOPT and not fresh:
        # The agent said "ready" before the snapshot, to the template's builder. It is idle, so this falls between no
        # two of its frames.
        os.write(service.port, READY)
    return bool(kind == ADOPT)


def mount_inside(pid: int, target: str, source: str | None, kind: str | None, options: str) -> None:
    """Mount in the programs' mount namespace; without ``kind``, change what is mounted."""
    ours = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    theirs = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    setns(theirs, CLONE_NEWNS)
    flags = MS_REMOUNT | MS_NOSUID | MS_NODEV if kind is None else MS_NOSUID | MS_NOEXEC
    mount(source, target, kind, flags, options)
    setns(ours, CLONE_NEWNS)
    os.close(ours)
    os.close(theirs)


def terminals_of(pid: int) -> str:
    """The bound of the programs' file system of terminals; "none" where there is none."""
    for line in read(f"/proc/{pid}/mountinfo").splitlines():
        if " - devpts " in line:
            return next((o for o in line.split()[-1].split(",") if o.startswith("max=")), "unbounded")
    return "none"


def serve(service: Service) -> None:
    """Answer the host until the agent has ended by itself and the host wants nothing more."""
    device = os.open("/dev/random", os.O_RDONLY | os.O_CLOEXEC)
    wake, wake_in = os.pipe()
    for fd in (wake, wake_in):
        os.set_blocking(fd, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)  # the wake-up descriptor does the work
    signal.set_wakeup_fd(wake_in, warn_on_full_buffer=False)
    poll = select.poll()
    poll.register(wake, select.POLLIN)
    poll.register(service.control, select.POLLIN)
    adopted, data = False, b""
    while True:
        ready = poll.poll(None if service.pid else _GRACE_MS)
        if not ready and not service.pid:
            return
        for fd, _ in ready:
            if fd == wake:
                os.read(wake, 4096)
                if service.ended_by_itself():
                    tell_of_end(service)
            elif adopted:
                data = answer(service, data)
            else:
                adopted = become_sandbox(service, device)


def answer(service: Service, data: bytes) -> bytes:
    """Read, and do what the lines say that are whole with ``data`` before them; what is left for the next time."""
    piece = os.read(service.control, LINE_MAX)
    if not piece:
        time.sleep(0.001)  # nobody is connected
    data += piece
    if len(data) > LINE_MAX:
        raise RuntimeError("the host sent an endless line")
    while b"\n" in data:
        line, _, data = data.partition(b"\n")
        asked = json.loads(line)
        if asked["op"] == "export":
            service.end()  # the programs first
            export(service.control, service.work, asked["entries"], asked["bytes"], asked["depth"])
    return data


def main() -> None:
    """Be PID 1."""
    options = set_up()
    os.setpriority(os.PRIO_PROCESS, 0, -20)  # before all programs, when the host asks for an end
    port, control = open_ports()
    try:
        os.environ.update(ENVIRONMENT_OF_IMPORTS)
        imports = options.get("fumehood.preload", "")
        preload(imports)
        gc.collect()
        gc.freeze()
        service = Service(port, control, imports)
        service.start(fresh=False)
        serve(service)
    except BaseException:
        say(control, {"op": "failed", "message": traceback.format_exc()[-2000:]})


def main_of_fresh_agent(imports: str, port: str, control: str, tell: str) -> None:
    """Be the agent, executed rather than forked."""
    for fd in (port, control, tell):
        os.set_inheritable(int(fd), False)
    preload(imports)
    guest_agent.GuestAgent.rehearsals = 1  # this one is in a clone already, and its program waits
    become_agent(int(port), int(control), int(tell))


def power_off() -> None:
    os.sync()
    ctypes.CDLL(None).reboot(_REBOOT_POWER_OFF)


def run() -> None:
    """Be PID 1, or what PID 1 executes. The kernel hands on its own options as arguments, so ours has a mark."""
    if sys.argv[1:2] == [FRESH]:
        main_of_fresh_agent(*sys.argv[2:])
    try:
        main()
    finally:
        power_off()
