"""Group B: the host's files, read, changed or planted."""

from __future__ import annotations

from fumehood.attacks import watch
from fumehood.attacks.model import Attack
from fumehood.model import Boundary

_G = "files"
_LIVE = ("live", "files")

ATTACKS = (
    Attack(
        "B1", _G, "a planted secret of the supervisor's user",
        "leak(T.secret)",
        watch.printed("secret"), "the article's six",
    ),
    Attack(
        "B1b", _G, "a file of the host that every user may read",
        "leak(T.public)",
        watch.printed("public"), proves=("mount_ns",),
    ),
    Attack(
        "B1c", _G, "the secret through the root and working folder of every process",
        """
for pid in [os.getpid(), *others()]:
    for link in ("root", "cwd"):
        leak("/proc/%d/%s%s" % (pid, link, T.public))
        leak("/proc/%d/%s/../../../../../../..%s" % (pid, link, T.public))
""",
        watch.printed("public"), "CVE-2024-21626",
    ),
    Attack(
        "B1d", _G, "a file opened by its handle, past every mount (Shocker)",
        """
buffer = ctypes.create_string_buffer(struct.pack("=Ii", 128, 0) + bytes(128))
where = ctypes.c_int()
with trying:
    # From the handle of any folder an attacker guesses those of others; here it asks for the very one.
    syscall("name_to_handle", -100, ctypes.c_char_p(T.secret.encode()), buffer, ctypes.byref(where), 0)
    fd = syscall("open_by_handle", os.open(T.folder, os.O_RDONLY), buffer, os.O_RDONLY)
    say(os.read(fd, 4096))
""",
        watch.printed("secret"), "shocker.c, 2014", needs=("dac_read_search",),
    ),
    Attack(
        "B2", _G, "the environment of every process in /proc",
        """
for pid in [*others(), T.supervisor, T.bystander]:
    leak("/proc/%d/environ" % pid)
""",
        watch.printed("env"), "bubblewrap --clearenv",
    ),
    Attack(
        "B2b", _G, "the command line of every process in /proc",
        """
for pid in [*others(), T.bystander]:
    leak("/proc/%d/cmdline" % pid)
""",
        watch.printed("cmdline"),
    ),
    Attack(
        "B2c", _G, "the descriptors of every process in /proc",
        """
for pid in [*others(), T.bystander]:
    for fd in range(3, 64):
        with trying:
            say(os.read(os.open("/proc/%d/fd/%d" % (pid, fd), os.O_RDONLY | os.O_NONBLOCK), 4096))
""",
        watch.printed("fd"), "CVE-2024-21626",
    ),
    Attack(
        "B4", _G, "the kernel's own files in /proc: boot id",
        """
with trying:
    say("<<" + open("/proc/sys/kernel/random/boot_id").read().strip() + ">>")
""",
        watch.printed_fact("boot id", lambda _: watch.fact_file("/proc/sys/kernel/random/boot_id")), proves=("proc",),
    ),
    Attack(
        "B4b", _G, "the kernel's command line",
        """
with trying:
    say("<<" + open("/proc/cmdline").read().strip() + ">>")
""",
        watch.printed_fact("kernel command line", lambda _: watch.fact_file("/proc/cmdline")), proves=("proc",),
    ),
    Attack(
        "B6", _G, "a cgroup of its own made at the top of the tree",
        """
for folder in glob.glob("/sys/fs/cgroup/*") + ["/sys/fs/cgroup"]:
    with trying:
        os.mkdir(folder + "/attack-" + T.token)
""",
        watch.cgroup_made(), "CVE-2022-0492", needs=("cgroup_root",),
    ),
    Attack(
        "B7", _G, "a link to the secret left as an artifact",
        "os.symlink(T.secret, 'report.txt')",
        watch.saved("secret"), "CVE-2018-15664", Boundary.LIMITS, collect=True, features=("files",),
    ),
    Attack(
        "B7b", _G, "a link to the secret's folder left among the artifacts",
        "os.symlink(os.path.dirname(T.secret), 'data')",
        watch.saved("secret"), "CVE-2018-15664", Boundary.LIMITS, collect=True, features=("files",),
    ),
    Attack(
        "B7c", _G, "a hard link to the secret left as an artifact",
        """
with trying:
    os.link(T.secret, "report.txt")
""",
        watch.saved("secret"), "CVE-2018-15664 class", collect=True, features=("files",),
    ),
    Attack(
        "B7d", _G, "a FIFO left where artifacts are read",
        "os.mkfifo('report.txt')",
        watch.close_slow(3.0), holds_from=Boundary.LIMITS, collect=True, features=("files",),
    ),
    Attack(
        "B7e", _G, "a link to an endless device left as an artifact",
        "os.symlink('/dev/zero', 'report.txt')",
        watch.saved_over(total_bytes=16 << 20), holds_from=Boundary.LIMITS, collect=True, features=("files",),
    ),
    Attack(
        "B7f", _G, "an artifact swapped for a link while it is collected",
        """
if os.fork() == 0:
    end = time.monotonic() + 4
    while time.monotonic() < end:  # outlives the program if it can
        with trying:
            os.symlink(T.secret, "new")
            os.replace("new", "report.txt")
os._exit(0)
""",
        watch.saved("secret"), "CVE-2018-15664", Boundary.LIMITS, collect=True, features=("files",),
        limits={"wall_s": 1.0},
    ),
    Attack(
        "B9", _G, "an upload to a path with ..",
        "pass",
        watch.planted(), "CWE-22", Boundary.LIMITS, features=("files",), uploads={"../../open/evil": b"x"},
    ),
    Attack(
        "B9b", _G, "an upload to an absolute path",
        "pass",
        watch.planted(), "CWE-22", Boundary.LIMITS, features=("files",), uploads={"OPEN/evil": b"x"},
    ),
    Attack(
        "B9c", _G, "a download through .. and an absolute link",
        "os.symlink(T.public, 'innocent')",
        watch.downloaded("public"), "CVE-2019-14271 class", Boundary.LIMITS, features=_LIVE,
        downloads=("innocent", "../../public"),
    ),
    Attack(
        "B9d", _G, "a download through a folder that is a link",
        "os.symlink(os.path.dirname(T.public), 'folder')",
        watch.downloaded("public"), "CVE-2018-15664", Boundary.LIMITS, features=_LIVE, downloads=("folder/public",),
    ),
    Attack(
        "B10", _G, "the next upload's target replaced by a link",
        "os.symlink(T.victim, 'data.csv')",
        watch.victim_changed(), "CVE-2018-15664", Boundary.LIMITS, features=_LIVE, reuploads={"data.csv": b"evil"},
    ),
    Attack(
        "B10b", _G, "the next upload's folder replaced by a link",
        "os.symlink(T.open, 'data')",
        watch.planted(), "CVE-2018-15664", Boundary.LIMITS, features=_LIVE, reuploads={"data/evil": b"evil"},
    ),
    Attack(
        "B12", _G, "a device node of its own",
        """
with trying:
    os.mknod("node", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
hold()
""",
        watch.node_made("node"), needs=("mknod",),
    ),
    Attack(
        "B12b", _G, "the host's devices",
        """
keep = []
for name in ("kvm", "fuse", "net/tun", "loop-control", "mem", "vda", "sda", "nvme0n1", "kmsg"):
    with trying:
        keep.append(os.open("/dev/" + name, os.O_RDONLY))
hold()
""",
        watch.holds_open(r"^/dev/(kvm|fuse|net/tun|loop-control|mem|vda|sda|nvme0n1|kmsg)"), needs=("devices",),
    ),
    Attack(
        "B13", _G, "mount",
        """
with trying:
    call("mount", T.token.encode(), b"/tmp", b"tmpfs", 0, None)
hold()
""",
        watch.mounted(), needs=("sys_admin",), throwaway=True,
    ),
    Attack(
        "B13b", _G, "mount in a user namespace of its own",
        """
with trying:
    call("unshare", 0x10000000 | 0x20000)  # CLONE_NEWUSER | CLONE_NEWNS
    call("mount", T.token.encode(), b"/tmp", b"tmpfs", 0, None)
hold()
""",
        watch.mounted(), "CVE-2022-0185", needs=("user_namespaces",),
    ),
    Attack(
        "B13c", _G, "mount by the newer calls (fsopen, fsconfig, fsmount, move_mount)",
        """
text = ctypes.c_char_p
with trying:
    call("unshare", 0x10000000 | 0x20000)
    fs = syscall("fsopen", text(b"tmpfs"), 0)
    syscall("fsconfig", fs, 1, text(b"source"), text(T.token.encode()), 0)
    syscall("fsconfig", fs, 6, None, None, 0)
    syscall("move_mount", syscall("fsmount", fs, 0, 0), text(b""), -100, text(b"/tmp"), 4)
hold()
""",
        watch.mounted(), "CVE-2022-0185", needs=("user_namespaces",),
    ),
    Attack(
        "B14", _G, "a write into the operator's read-only mount",
        """
for flags in (os.O_WRONLY | os.O_TRUNC, os.O_RDWR | os.O_APPEND):
    with trying:
        os.write(os.open(T.mounted + "/victim", flags), b"evil")
""",
        watch.victim_changed(),
    ),
    Attack(
        "B14b", _G, "a new file in the operator's read-only mount",
        """
with trying:
    open(T.mounted + "/evil", "w").close()
""",
        watch.planted(),
    ),
    Attack(
        "B14c", _G, "the mode of a file in the operator's read-only mount",
        """
with trying:
    os.chmod(T.mounted + "/victim", 0o4777)
""",
        watch.victim_changed(),
    ),
    Attack(
        "B16", _G, "every descriptor number tried for a file that leaked in",
        """
for fd in range(3, 1024):
    with trying:
        say(os.pread(fd, 4096, 0))
""",
        watch.printed("fd"), "CVE-2024-21626", Boundary.LIMITS,
    ),
    Attack(
        "B16b", _G, "every descriptor number tried for a folder that leaked in",
        """
for fd in range(3, 1024):
    with trying:
        leak(os.open("in-folder", os.O_RDONLY, dir_fd=fd))
""",
        watch.printed("dir"), "CVE-2024-21626", Boundary.LIMITS,
    ),
    Attack(
        "B17", _G, "a file left in the host's /tmp and /var/tmp",
        """
for folder in ("/tmp", "/var/tmp"):
    with trying:
        open(folder + "/left-" + T.token, "w").close()
""",
        watch.left_at("/tmp", "/var/tmp"),
    ),
    Attack(
        "B17b", _G, "a file left in the host's /dev/shm",
        """
with trying:
    open("/dev/shm/left-" + T.token, "w").close()
""",
        watch.left_at("/dev/shm"),
    ),
    Attack(
        "B21", _G, "a hook planted in a project of the host, which runs at the next checkout",
        """
with trying:
    with open(T.hook, "w") as file:
        file.write("#!/bin/sh\\n")
    os.chmod(T.hook, 0o755)
""",
        watch.planted(), "CVE-2025-59041 class",
    ),
    Attack(
        "B22", _G, "a file of the host overwritten",
        """
with trying:
    with open(T.victim, "w") as file:
        file.write("evil")
""",
        watch.victim_changed(),
    ),
    Attack(
        "B23", _G, "a file of the host removed",
        """
with trying:
    os.unlink(T.victim)
""",
        watch.victim_changed(),
    ),
)  # fmt: skip
