"""The host's witnesses: each factory returns a :class:`~fumehood.attacks.model.Watch`.

A watch reads only what :class:`~fumehood.attacks.observe.Run` gathered from outside. What an attacker prints counts
in one case: it holds a canary that the attacker was never told.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
from collections.abc import Callable, Iterable
from pathlib import Path

from fumehood.attacks import host
from fumehood.attacks.model import Watch
from fumehood.attacks.observe import Run, self_namespaces
from fumehood.attacks.procfs import OpenFile, Posture, namespaces, open_files, process
from fumehood.attacks.procfs import status as process_status

MiB = 1 << 20

#: A limit on time counts as missed when the program is still there after this many times the limit. The supervisor
#: needs far less; what is between is the noise of a shared machine.
LATE = 2.5


# --- what came out


def printed(*kinds: str) -> Watch:
    """A canary of one of ``kinds`` came out in the program's output."""

    def judge(run: Run) -> str | None:
        text = run.text()
        found = [kind for kind in kinds if run.stage.canaries[kind].encode() in text]
        return f"the canary {found[0]!r} came out in the output" if found else None

    return Watch(f"the canary {' or '.join(kinds)} in the output", judge)


def printed_fact(name: str, fact: Callable[[Run], str]) -> Watch:
    """A value of the host that the program was not told came out between << and >>."""

    def judge(run: Run) -> str | None:
        value = fact(run)
        return f"the host's {name} came out" if value and f"<<{value}>>".encode() in run.text() else None

    return Watch(f"the host's {name} in the output", judge)


def printed_note() -> Watch:
    """The second program printed what only the first one was told."""

    def judge(run: Run) -> str | None:
        note = run.stage.note.encode()
        return "the second run printed the note of the first" if note in run.second_output else None

    return Watch("the first run's note in the second run's output", judge)


def downloaded(kind: str) -> Watch:
    """A file that the host read from the sandbox held the canary."""

    def judge(run: Run) -> str | None:
        canary = run.stage.canaries[kind].encode()
        found = [path for path, data in run.downloads.items() if canary in data]
        return f"read_file({found[0]!r}) returned the canary {kind!r}" if found else None

    return Watch(f"the canary {kind} in what read_file returns", judge)


def _saved_files(run: Run) -> Iterable[Path]:
    for folder, _, names in os.walk(run.out):
        yield from (Path(folder) / name for name in names)


def saved(kind: str) -> Watch:
    """A collected artifact holds the canary."""

    def judge(run: Run) -> str | None:
        if not run.closed:
            return None
        canary = run.stage.canaries[kind].encode()
        for path in _saved_files(run):
            with contextlib.suppress(OSError):
                if stat.S_ISREG(path.stat().st_mode) and canary in path.read_bytes()[:MiB]:
                    return f"the artifact {path.name!r} holds the canary {kind!r}"
        return None

    return Watch(f"the canary {kind} in a collected artifact", judge)


def saved_over(*, count: int | None = None, total_bytes: int | None = None, depth: int | None = None) -> Watch:
    """More was collected than the policy's ArtifactLimits allow."""

    def judge(run: Run) -> str | None:
        if not run.closed:
            return None
        files = [path for path in _saved_files(run) if not path.is_symlink()]
        size = sum(path.lstat().st_blocks * 512 for path in files)
        deep = max((len(path.relative_to(run.out).parts) for path in files), default=0)
        for what, have, limit in (("files", len(files), count), ("bytes", size, total_bytes), ("deep", deep, depth)):
            if limit is not None and have > limit:
                return f"{have} {what} were collected"
        return None

    return Watch("how much was collected", judge)


def odd_artifact() -> Watch:
    """Something that is not a regular file was made on the host by collecting."""

    def judge(run: Run) -> str | None:
        if not run.closed:
            return None
        odd = [path for path in _saved_files(run) if not stat.S_ISREG(path.lstat().st_mode)]
        return f"{odd[0].name!r} was saved as something that is not a regular file" if odd else None

    return Watch("the kind of the collected files", judge)


# --- time


def outlived() -> Watch:
    """The program was still there long after its wall-clock limit."""

    def judge(run: Run) -> str | None:
        limit = run.policy.limits.wall_s
        late = run.seconds > LATE * limit
        return f"still there after {run.seconds:.1f} s; the limit was {limit:g} s" if late else None

    return Watch(f"time to the end as a multiple of wall_s (over {LATE:g})", judge)


def cpu_over(ratio: float) -> Watch:
    """The sandbox used ``ratio`` times its CPU limit, summed over all of its processes."""

    def judge(run: Run) -> str | None:
        limit = run.policy.limits.cpu_s
        return f"{run.cpu_s:.1f} s of CPU used; the limit was {limit:g} s" if run.cpu_s > ratio * limit else None

    return Watch(f"CPU time of all processes as a multiple of cpu_s (over {ratio:g})", judge)


def close_slow(seconds: float) -> Watch:
    """Destroying the sandbox failed, or took long."""

    def judge(run: Run) -> str | None:
        if not run.closed:
            return None
        if run.close_failure:
            return f"destroying the sandbox failed: {run.close_failure}"
        return f"destroying the sandbox took {run.close_s:.1f} s" if run.close_s > seconds else None

    return Watch(f"time to destroy the sandbox (over {seconds:g} s), or its failure", judge)


# --- quantity


def processes_over(count: int) -> Watch:
    """More processes at once than the limit."""

    def judge(run: Run) -> str | None:
        return f"{run.processes_peak} processes at once" if run.processes_peak > count else None

    return Watch(f"processes in the host's table (over {count})", judge)


def threads_over(count: int) -> Watch:
    """More threads at once than the limit."""

    def judge(run: Run) -> str | None:
        return f"{run.threads_peak} threads at once" if run.threads_peak > count else None

    return Watch(f"threads in the host's table (over {count})", judge)


def memory_over(size_bytes: int) -> Watch:
    """More memory touched than the limit."""

    def judge(run: Run) -> str | None:
        peak = run.memory_peak_bytes
        return f"{peak / MiB:.0f} MiB of memory in use" if peak > size_bytes else None

    return Watch(f"anonymous and shared memory of all processes (over {size_bytes // MiB} MiB)", judge)


def files_over(size_bytes: int) -> Watch:
    """More bytes in files held open than the limit on writable files."""

    def judge(run: Run) -> str | None:
        peak = run.file_bytes_peak
        return f"{peak / MiB:.0f} MiB in files" if peak > size_bytes else None

    return Watch(f"blocks of the files that the program holds open (over {size_bytes // MiB} MiB)", judge)


def descriptors_over(count: int) -> Watch:
    """More descriptors in one process than the limit."""

    def judge(run: Run) -> str | None:
        return f"{run.descriptors_peak} descriptors in one process" if run.descriptors_peak > count else None

    return Watch(f"descriptors of one process (over {count})", judge)


def entries_over(folder: str, count: int) -> Watch:
    """More files in a folder of the work folder than the limit on files."""

    def check(run: Run, seen: Posture) -> str | None:
        have = len(os.listdir(f"/proc/{seen.pid}/cwd/{folder}"))
        return f"{have} files in one folder" if have > count else None

    return _on_marked(f"files in the program's folder (over {count})", check)


def received_over(size_bytes: int) -> Watch:
    """The supervisor kept, or grew by, more output than the limit."""

    def judge(run: Run) -> str | None:
        kept = len(run.result.stdout_data) + len(run.result.stderr_data) if run.result else 0
        grown = run.supervisor_peak_bytes - run.supervisor_before_bytes
        if kept > size_bytes:
            return f"the supervisor kept {kept / MiB:.0f} MiB of output"
        return f"the supervisor grew by {grown / MiB:.0f} MiB" if grown > 4 * size_bytes else None

    return Watch(f"output kept by the supervisor (over {size_bytes // MiB} MiB), and its own memory", judge)


# --- the host's things


def reached(*listeners: str) -> Watch:
    """A service of the host got a connection or a datagram."""

    def judge(run: Run) -> str | None:
        for name in listeners:
            listener = run.stage.listeners.get(name)
            if listener is not None and listener.log:
                return f"the host's service {name}: {listener.log[0]}"
        return None

    return Watch(f"the log of the host's service {' or '.join(listeners)}", judge)


def pipe_written() -> Watch:
    """Bytes arrived on a pipe of the supervisor that the program was never given."""

    def judge(run: Run) -> str | None:
        got = len(run.stage.pipe_bytes)
        return f"{got} bytes arrived on the supervisor's own pipe" if got else None

    return Watch("bytes on a pipe of the supervisor", judge)


def victim_changed() -> Watch:
    """A file of the host was changed or removed."""
    return Watch("the hash and the mode of a file of the host", lambda run: run.stage.victim_changed())


def planted() -> Watch:
    """A new file is in a folder of the host."""

    def judge(run: Run) -> str | None:
        new = run.stage.planted()
        return f"planted on the host: {Path(new[0]).name}" if new else None

    return Watch("new files in the host's folders", judge)


def left_at(*folders: str) -> Watch:
    """A file with the run's token in its name is in a shared folder of the host."""

    def judge(run: Run) -> str | None:
        for folder in folders:
            with contextlib.suppress(OSError):
                for name in os.listdir(folder):
                    if run.stage.token in name and Path(folder, name) != run.stage.folder:
                        return f"{folder}/{name} is on the host"
        return None

    return Watch(f"{' and '.join(folders)} on the host", judge)


def signalled(number: int) -> Watch:
    """A signal reached a process of the host."""

    def judge(run: Run) -> str | None:
        return f"signal {number} reached a process of the host" if number in run.stage.signals else None

    return Watch(f"signal {number} in a process of the host", judge)


def bystander_changed() -> Watch:
    """A process of the host has other limits now, or is gone."""
    return Watch("the limits of a process of the host", lambda run: run.stage.bystander_changed())


def typed() -> Watch:
    """Input appeared on the supervisor's controlling terminal."""

    def judge(run: Run) -> str | None:
        got = run.stage.typed() if run.closed or run.done else b""
        return f"the terminal got input: {got!r}" if run.stage.token[:4].encode() in got else None

    return Watch("input waiting on the supervisor's terminal", judge)


def sysv_left(kind: str) -> Watch:
    """A System V object with the run's key is in the host's IPC namespace."""

    def judge(run: Run) -> str | None:
        with open(f"/proc/sysvipc/{kind}", encoding="ascii") as file:
            keys = [line.split()[0] for line in file][1:]
        return f"an object of the run is in the host's /proc/sysvipc/{kind}" if str(run.stage.key) in keys else None

    return Watch(f"/proc/sysvipc/{kind} on the host", judge)


def mqueue_left() -> Watch:
    """A POSIX message queue named after the run is in the host's IPC namespace."""

    def judge(run: Run) -> str | None:
        return "the host can open the run's message queue" if host.mqueue_exists(f"/{run.stage.token}") else None

    return Watch("the host opening a message queue of that name", judge)


def key_left() -> Watch:
    """A key described with the run's token is in a keyring that the host's user sees."""

    def judge(run: Run) -> str | None:
        with open("/proc/keys", encoding="utf-8", errors="replace") as file:
            return "the run's key is in /proc/keys on the host" if run.stage.token in file.read() else None

    return Watch("/proc/keys on the host", judge)


def cgroup_made() -> Watch:
    """A cgroup with the run's token in its name exists."""

    def judge(run: Run) -> str | None:
        found = [f for f in host.cgroup_folders() if run.stage.token in f.name]
        return f"the run made the cgroup {found[0]}" if found else None

    return Watch("the host's cgroup tree", judge)


def survivors() -> Watch:
    """A process of the sandbox lives after the sandbox was destroyed."""

    def judge(run: Run) -> str | None:
        return f"alive after the end: {run.survivors[0]}" if run.survivors else None

    return Watch("processes alive after the sandbox was destroyed", judge)


def orphaned() -> Watch:
    """A process of the sandbox lives on without its supervisor."""

    def judge(run: Run) -> str | None:
        return f"alive after the supervisor's death: {run.orphans[0]}" if run.orphans else None

    return Watch("processes alive after the supervisor was killed", judge)


def dials(port_fact: str) -> Watch:
    """The host reaches a service that the program opened."""

    def judge(run: Run) -> str | None:
        if not run.done:
            return None
        kind = socket.AF_UNIX if port_fact == "abstract" else socket.AF_INET
        # The port is derived from the token, so that neither side has to be told by the other.
        where: object = (
            f"\0in-{run.stage.token}" if port_fact == "abstract" else ("127.0.0.1", host.port_of(run.stage.key))
        )
        with socket.socket(kind, socket.SOCK_STREAM) as dialler:
            dialler.settimeout(0.5)
            try:
                dialler.connect(where)  # type: ignore[arg-type]
            except OSError:
                return None
        return f"the host reached the program's {port_fact} service"

    return Watch(f"the host dialling the program's {port_fact} service", judge, marked=True)


def beside_shares_namespace(kind: str) -> Watch:
    """Two sandboxes that live at once are in one namespace of ``kind``."""

    def judge(run: Run) -> str | None:
        if not run.done or not run.beside:
            return None
        first, second = run.done[0].namespaces[kind], run.beside[0].namespaces[kind]
        return f"two sandboxes share {first}" if first == second else None

    return Watch(f"/proc/PID/ns/{kind} of two live sandboxes", judge)


# --- outcomes


def forged_exit(true_code: int) -> Watch:
    """The host believes another exit than the true one, which is a constant of the program."""

    def judge(run: Run) -> str | None:
        if run.failure:
            return f"the host lost the sandbox: {run.failure}"
        if run.result is None or run.result.exit_code is None or run.result.exit_code < 0:
            return None
        code = run.result.exit_code
        if run.in_runtime and code == 1 and b"AttributeError: " in run.result.stderr_data:
            return None  # the runtime has no such function, and so the program has not come to its exit
        return f"the host believes exit code {code}; it was {true_code}" if code != true_code else None

    return Watch(f"the exit code that the host reports (not {true_code})", judge)


def host_failed() -> Watch:
    """The host's own call raised because of what the program printed."""

    def judge(run: Run) -> str | None:
        return f"the host's call raised {run.failure}" if run.failure else None

    return Watch("whether the host's call raises", judge)


# --- posture: what the kernel says of a process of the sandbox


def _on_marked(sees: str, check: Callable[[Run, Posture], str | None]) -> Watch:
    def judge(run: Run) -> str | None:
        return next((text for text in (check(run, seen) for seen in run.done) if text), None)

    return Watch(sees, judge, marked=True)


def named(comm: str) -> Watch:
    """A process has taken the name that only a call of the forbidden kind could give it."""

    def judge(run: Run) -> str | None:
        return f"a process is called {comm!r}" if comm in run.comms else None

    return Watch(f"a process called {comm!r} in the host's table", judge)


def shares_namespace(kind: str) -> Watch:
    """The program is in a namespace of ``kind`` with the supervisor, or with what prepares sandboxes."""

    def check(run: Run, seen: Posture) -> str | None:
        own = seen.namespaces[kind]
        if own == self_namespaces()[kind]:
            return f"in the host's {kind} namespace, {own}"
        # Network namespaces are prepared in stock; that their maker stands in the next one is no way to it.
        known = () if kind == "net" else run.known
        outside = next((pid for pid, _ in known if namespaces(pid).get(kind) == own), None)
        return f"in the {kind} namespace of process {outside}, outside the sandbox" if outside else None

    return _on_marked(f"/proc/PID/ns/{kind} against those of all processes outside", check)


def left_namespace(kind: str) -> Watch:
    """The marked process is in another namespace of ``kind`` than its parent, or than the receipt says where that is
    outside."""

    def check(run: Run, seen: Posture) -> str | None:
        own = seen.namespaces.get(kind)
        if seen.proc.ppid in {pid for pid, _ in run.known}:
            name = {"mnt": "mount"}.get(kind, kind)
            control = run.receipt.control(f"{name}_ns") if run.receipt is not None else None
            given = f"{kind}:[{control.value}]" if control is not None else None
        else:
            given = namespaces(seen.proc.ppid).get(kind)
        return f"made a new {kind} namespace" if given and own and given != own else None

    return _on_marked(f"/proc/PID/ns/{kind} of the process against its parent's", check)


def status_not(field: str, wanted: str, *, threads: bool = False) -> Watch:
    """A field of /proc/PID/status is not ``wanted``, in the process or in any of its threads."""

    def check(_run: Run, seen: Posture) -> str | None:
        fields = [t.get(field, "") for t in seen.threads] if threads else [seen.status.get(field, "")]
        wrong = [value for value in fields if value != wanted]
        return f"{field} is {wrong[0]}" if wrong else None

    return _on_marked(f"{field} in /proc/PID/status (not {wanted})", check)


def capable(field: str) -> Watch:
    """The process holds a capability in the set ``field``."""

    def check(_run: Run, seen: Posture) -> str | None:
        value = seen.status.get(field, "")
        return f"{field} is {value}" if value and int(value, 16) else None

    return _on_marked(f"{field} in /proc/PID/status", check)


def limit_over(name: str, wanted: Callable[[Run], int]) -> Watch:
    """A hard resource limit of the process is looser than the policy's."""

    def check(run: Run, seen: Posture) -> str | None:
        value = seen.limits.get(name, "unlimited")
        loose = value == "unlimited" or int(value) > wanted(run)
        return f"{name} is {value}" if loose else None

    return _on_marked(f"{name!r} in /proc/PID/limits", check)


def same_user() -> Watch:
    """The process runs as a user who owns processes outside: the supervisor, or what prepares sandboxes."""

    def check(run: Run, seen: Posture) -> str | None:
        uid = seen.status["Uid"].split()[0]
        outside = {str(os.getuid())} | {process_status(pid).get("Uid", "").split("\t")[0] for pid, _ in run.known}
        return f"runs as the host's uid {uid}, as a process outside does" if uid in outside else None

    return _on_marked("Uid in /proc/PID/status as the host counts it", check)


def same_session() -> Watch:
    """The process is in the supervisor's session."""

    def check(_run: Run, seen: Posture) -> str | None:
        return f"in the supervisor's session {seen.proc.session}" if seen.proc.session == os.getsid(0) else None

    return _on_marked("the session in /proc/PID/stat", check)


def same_root() -> Watch:
    """The process has the host's root folder."""

    def check(_run: Run, seen: Posture) -> str | None:
        info = os.stat("/")
        return "its root is the host's" if seen.root == (info.st_dev, info.st_ino) else None

    return _on_marked("/proc/PID/root against the host's", check)


def environ_canary() -> Watch:
    """The environment that the kernel keeps for a process of the sandbox holds the supervisor's canary."""

    def check(run: Run, seen: Posture) -> str | None:
        return "the supervisor's canary is in /proc/PID/environ" if run.stage.canaries["env"] in seen.environ else None

    return _on_marked("/proc/PID/environ", check)


#: Filesystems that belong to one sandbox or hold nothing of the host.
_PRIVATE = ("tmpfs", "ramfs", "proc", "mqueue", "devpts")


def _mounts(seen: Posture) -> Iterable[tuple[str, str, str, str]]:
    """(mount point, its options, file system, source) of every mount."""
    for line in seen.mountinfo:
        head, _, tail = line.partition(" - ")
        fields, kind = head.split(), tail.split()
        yield fields[4], fields[5], kind[0], kind[1]


def writable_mount() -> Watch:
    """A file system of the host is mounted writable in the sandbox."""

    def check(_run: Run, seen: Posture) -> str | None:
        for where, options, kind, _ in _mounts(seen):
            if kind not in _PRIVATE and "rw" in options.split(",") and not where.startswith("/dev/"):
                return f"{where} ({kind}) is writable"
        return None

    return _on_marked("writable mounts of the host in /proc/PID/mountinfo", check)


def mount_without(option: str) -> Watch:
    """A mount of the sandbox lacks ``option``."""

    def check(_run: Run, seen: Posture) -> str | None:
        for where, options, kind, _ in _mounts(seen):
            if option not in options.split(",") and not (option == "nodev" and where.startswith("/dev/")):
                return f"{where} ({kind}) lacks {option}"
        return None

    return _on_marked(f"mounts without {option} in /proc/PID/mountinfo", check)


def mounted(source: str | None = None) -> Watch:
    """A mount appeared that the program made: its source is the run's token."""

    def check(run: Run, seen: Posture) -> str | None:
        wanted = source or run.stage.token
        made = [where for where, _, _, name in _mounts(seen) if wanted in name]
        return f"mounted at {made[0]}" if made else None

    return _on_marked("a mount of the program in /proc/PID/mountinfo", check)


def whole_proc() -> Watch:
    """The sandbox sees a /proc with the kernel's own files, or the host's processes."""

    def check(_run: Run, seen: Posture) -> str | None:
        top = {line.split()[4]: line.partition(" - ")[2] for line in seen.mountinfo}  # the last one covers the others
        whole = [where for where, tail in top.items() if tail.startswith("proc ") and "subset=pid" not in tail]
        return f"{whole[0]} is a whole proc" if whole else None

    return _on_marked("proc without subset=pid in /proc/PID/mountinfo", check)


def sees_system(kind: str) -> Watch:
    """A file system of the kernel's own state is mounted in the sandbox."""

    def check(_run: Run, seen: Posture) -> str | None:
        found = [where for where, _, fs, _ in _mounts(seen) if fs.startswith(kind)]
        return f"{kind} is mounted at {found[0]}" if found else None

    return _on_marked(f"{kind} in /proc/PID/mountinfo", check)


def unbounded_cgroup(controller: str) -> Watch:
    """The cgroup of the process has no limit of ``controller``."""

    def check(_run: Run, seen: Posture) -> str | None:
        value = host.cgroup_limit(seen.cgroup, controller)
        return f"its {controller} cgroup has no limit ({value})" if value in (None, "max") else None

    return _on_marked(f"the {controller} limit of its cgroup", check)


def holds_open(pattern: str) -> Watch:
    """The process holds a descriptor whose link matches ``pattern``."""
    compiled = re.compile(pattern)

    def check(_run: Run, seen: Posture) -> str | None:
        found = [f.link for f in seen.files if compiled.search(f.link)]
        return f"holds {found[0]}" if found else None

    return _on_marked(f"a descriptor like {pattern} in /proc/PID/fd", check)


def terminals_over(count: int) -> Watch:
    """The process holds more pseudo-terminals than the limit."""

    def check(_run: Run, seen: Posture) -> str | None:
        have = sum(f.link.endswith("/ptmx") for f in seen.files)
        return f"holds {have} pseudo-terminals" if have > count else None

    return _on_marked(f"pseudo-terminals in /proc/PID/fd (over {count})", check)


def holds_inherited() -> Watch:
    """The process holds a descriptor to a file of the supervisor."""

    def check(run: Run, seen: Posture) -> str | None:
        found = [f.link for f in seen.files if "/private" in f.link and run.stage.token in f.link]
        return "holds a descriptor of the supervisor" if found else None

    return _on_marked("descriptors of the supervisor in /proc/PID/fd", check)


def holds_socket(family: int) -> Watch:
    """The process holds a socket of ``family``, as the kernel says of a copy of the descriptor."""

    def check(_run: Run, seen: Posture) -> str | None:
        return f"holds a socket of family {family}" if any(f.family == family for f in seen.files) else None

    return _on_marked(f"SO_DOMAIN of its sockets (family {family})", check)


def traced_bystander() -> Watch:
    """A process of the host is traced."""

    def judge(run: Run) -> str | None:
        tracer = run.bystander_tracer
        return f"a process of the host is traced by {tracer}" if tracer not in ("0", "") else None

    return Watch("TracerPid of a process of the host", judge, marked=True)


def traced_own() -> Watch:
    """A process of the sandbox is traced."""
    return Watch("TracerPid of the sandbox's processes", lambda run: run.traced[0] if run.traced else None, marked=True)


def personality() -> Watch:
    """The process changed its execution domain."""

    def check(_run: Run, seen: Posture) -> str | None:
        value = seen.personality or "00000000"
        return f"personality is {value}" if int(value, 16) else None

    return _on_marked("/proc/PID/personality", check)


def locked_memory() -> Watch:
    """The process locked memory."""

    def check(_run: Run, seen: Posture) -> str | None:
        value = seen.status.get("VmLck", "0 kB").split()[0]
        return f"{value} kB locked" if int(value) else None

    return _on_marked("VmLck in /proc/PID/status", check)


def realtime() -> Watch:
    """The process runs under a real-time policy."""

    def check(_run: Run, seen: Posture) -> str | None:
        real = seen.scheduler in (os.SCHED_FIFO, os.SCHED_RR)
        return f"scheduling policy {seen.scheduler}" if real else None

    return _on_marked("sched_getscheduler(PID)", check)


def favoured() -> Watch:
    """The process gave itself a better priority than the supervisor's."""

    def check(_run: Run, seen: Posture) -> str | None:
        mine = os.getpriority(os.PRIO_PROCESS, 0)
        return f"nice value {seen.proc.nice}" if seen.proc.nice < mine else None

    return _on_marked("the nice value in /proc/PID/stat", check)


def hostname_is_token() -> Watch:
    """The host name in the process's UTS namespace is the run's token."""

    def check(run: Run, seen: Posture) -> str | None:
        name = host.hostname_of(seen.pid)
        return f"the host name is now {name}" if name == run.stage.token else None

    return _on_marked("gethostname() in the program's UTS namespace, asked by the host", check)


def node_made(name: str) -> Watch:
    """A device node is in the program's work folder."""

    def check(_run: Run, seen: Posture) -> str | None:
        try:
            mode = os.stat(f"/proc/{seen.pid}/cwd/{name}", follow_symlinks=False).st_mode
        except FileNotFoundError:
            return None
        return "made a device node" if stat.S_ISCHR(mode) or stat.S_ISBLK(mode) else None

    return _on_marked("the kind of a file in the program's work folder", check)


def lock_seen(path: Callable[[], str]) -> Watch:
    """The host cannot lock a file of the runtime because the program did."""

    def judge(run: Run) -> str | None:
        return "the program's lock is seen on the host" if run.done and host.is_locked(path()) else None

    return Watch("flock() by the host on a file of the runtime", judge, marked=True)


def bounded_by(name: str, value: int) -> Callable[[Run], int]:
    """A constant limit; ``name`` is for the reader of the catalogue."""
    del name
    return lambda _run: value


# --- facts of the host


def fact_file(path: str) -> str:
    """A small file's content, or nothing."""
    with contextlib.suppress(OSError):
        return Path(path).read_text().strip()
    return ""


def fact_line(path: str) -> str:
    """The first line of a file, or nothing."""
    return fact_file(path).partition("\n")[0]


def host_name() -> str:
    """The host's own name."""
    return os.uname().nodename


def listening_inode(run: Run) -> str:
    """The inode of a listening socket of the host, as /proc/net/tcp lists it."""
    return str(os.fstat(run.stage.listeners["tcp4"].socket.fileno()).st_ino)


def second_interface(_run: Run) -> str:
    """An interface of the host that is not loopback."""
    return next((name for _, name in socket.if_nameindex() if name != "lo"), "")


def printed_fact_anywhere(name: str, fact: Callable[[Run], str]) -> Watch:
    """A value of the host that is random enough to count wherever it stands in the output."""

    def judge(run: Run) -> str | None:
        return f"the {name} came out" if fact(run).encode() in run.text() else None

    return Watch(f"the {name} in the output", judge)


def holds_socket_kind(family: int, kind: int) -> Watch:
    """The process holds a socket of ``family`` and ``kind``."""

    def check(_run: Run, seen: Posture) -> str | None:
        found = any(f.family == family and f.socket_kind == kind for f in seen.files)
        return f"holds a socket of family {family} and kind {kind}" if found else None

    return _on_marked(f"SO_DOMAIN and SO_TYPE of its sockets ({family}, {kind})", check)


def oom_score(value: str) -> Watch:
    """A process of the sandbox changed how readily the kernel kills it, or its agent."""

    def check(_run: Run, seen: Posture) -> str | None:
        for pid in (seen.pid, seen.proc.ppid):
            if fact_file(f"/proc/{pid}/oom_score_adj") == value:
                return f"oom_score_adj is {value}"
        return None

    return _on_marked("/proc/PID/oom_score_adj", check)


def filters_under(count: int) -> Watch:
    """Fewer system-call filters than the tier loads: one for all sandboxes, one that takes away what set-up needed."""

    def check(_run: Run, seen: Posture) -> str | None:
        value = seen.status.get("Seccomp_filters", "0")
        return f"{value} filters" if int(value) < count else None

    return _on_marked(f"Seccomp_filters in /proc/PID/status (under {count})", check)


def maps_to_root() -> Watch:
    """The process is root in its own user namespace."""

    def check(_run: Run, seen: Posture) -> str | None:
        uid = int(seen.status.get("Uid", "0").split()[0])
        for line in fact_file(f"/proc/{seen.pid}/uid_map").splitlines():
            inside, outside, length = (int(n) for n in line.split())
            if outside <= uid < outside + length and inside + uid - outside == 0:
                return "runs as uid 0 of its namespace"
        return None

    return _on_marked("Uid and /proc/PID/uid_map", check)


def _inside(run: Run, seen: Posture) -> Iterable[int]:
    """The process and those of the sandbox that started it."""
    outside = {pid for pid, _ in run.known} | {os.getpid()}
    pid = seen.pid
    while pid not in outside and (found := process(pid)) is not None and pid > 1:
        yield pid
        pid = found.ppid


def no_own_session() -> Watch:
    """The session of a process of the sandbox was made by a process that is not of the sandbox."""

    def check(run: Run, seen: Posture) -> str | None:
        outside = {pid for pid, _ in run.known} | {os.getsid(0)}
        for pid in _inside(run, seen):
            found = process(pid)
            if found is not None and found.session in outside:
                return f"{found.comm} is in the session {found.session} of a process outside"
        return None

    return _on_marked("the leaders of the sessions of the sandbox's processes", check)


def shares_descriptor() -> Watch:
    """A process of the sandbox holds a descriptor that a process outside, besides the supervisor, holds too."""

    def check(run: Run, seen: Posture) -> str | None:
        def telling(pid: int) -> Iterable[OpenFile]:
            # All files without an inode of their own (eventfd, epoll) have one identity on the whole host.
            return (f for f in open_files(pid) if not f.link.startswith(("/dev/", "anon_inode:")))

        outside = {f.identity: pid for pid, _ in run.known for f in telling(pid)}
        for pid in _inside(run, seen):
            for entry in telling(pid):
                if entry.identity in outside:
                    return f"process {pid} holds {entry.link}, as process {outside[entry.identity]} outside does"
        return None

    return _on_marked("descriptors of the sandbox's processes against those of processes outside", check)


def unbounded_tmpfs() -> Watch:
    """What the program may write has no bound of its own: not a tmpfs with a size and a number of inodes."""

    def check(_run: Run, seen: Posture) -> str | None:
        cwd = os.readlink(f"/proc/{seen.pid}/cwd")
        best = ("", "", "")
        for line in seen.mountinfo:
            head, _, tail = line.partition(" - ")
            where, kind, options = head.split()[4], tail.split()[0], tail.split()[2]
            if (cwd + "/").startswith(where.rstrip("/") + "/") and len(where) >= len(best[0]):
                best = (where, kind, options)
        bounded = best[1] == "tmpfs" and "size=" in best[2] and "nr_inodes=" in best[2]
        return None if bounded else f"its folder is on {best[1]} with {best[2]}"

    return _on_marked("the mount of the program's folder in /proc/PID/mountinfo", check)


def extra_descriptor() -> Watch:
    """The process holds more than stdin, stdout and stderr."""

    def check(_run: Run, seen: Posture) -> str | None:
        extra = [f for f in seen.files if f.fd > 2]
        return f"holds descriptor {extra[0].fd}, {extra[0].link}" if extra else None

    return _on_marked("descriptors above 2 in /proc/PID/fd", check)


def artifact_trouble(seconds: float) -> Watch:
    """Collecting made something odd on the host, failed, or took long."""
    odd, slow = odd_artifact(), close_slow(seconds)
    return Watch(f"{odd.sees}; {slow.sees}", lambda run: odd.judge(run) or slow.judge(run))


def outlived_or_survived() -> Watch:
    """The program was there after its limit, whether the host still waited for it or not."""
    late, alive = outlived(), survivors()
    return Watch(f"{late.sees}; {alive.sees}", lambda run: late.judge(run) or alive.judge(run))
