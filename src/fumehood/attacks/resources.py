"""Group A: more time, memory, processes, files or output than the policy gives."""

from __future__ import annotations

from fumehood.attacks import watch
from fumehood.attacks.model import Attack
from fumehood.model import Boundary

MiB = 1 << 20
_G = "resources"
_WALL = {"wall_s": 1.0, "cpu_s": 30.0}
_ROOM = {"memory_bytes": 256 * MiB, "disk_bytes": 32 * MiB}

ATTACKS = (
    Attack(
        "A1", _G, "CPU loop in Python",
        """
end = time.monotonic() + 5
while time.monotonic() < end:
    pass
""",
        watch.outlived(), "the article's six", Boundary.LIMITS, proves=("wall",), limits=_WALL,
    ),
    Attack(
        "A2", _G, "C code that never returns to the interpreter (a regular expression that explodes)",
        """
signal.alarm(5)  # ends itself: nothing in Python can
re.match("(a+)+$", "a" * 60 + "b")
""",
        watch.outlived(), "CWE-1333", Boundary.LIMITS, limits=_WALL,
    ),
    Attack(
        "A3", _G, "every signal ignored and blocked, then a loop",
        """
for number in range(1, 65):
    with contextlib.suppress(OSError, ValueError):
        signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
end = time.monotonic() + 5
while time.monotonic() < end:
    pass
""",
        watch.outlived(), "snekbox tests", Boundary.LIMITS, limits=_WALL,
    ),
    Attack(
        "A4", _G, "sleeps without any CPU time",
        "time.sleep(5)",
        watch.outlived(), "snekbox tests", Boundary.LIMITS, limits=_WALL,
    ),
    Attack(
        "A5", _G, "processes that each stay under the CPU limit of one",
        """
for _ in range(6):
    if os.fork() == 0:
        while time.process_time() < 0.9:
            pass
        os._exit(0)
for _ in range(6):
    os.wait()
""",
        watch.cpu_over(2.2), "isolate's manual", proves=("cpu_time",), limit="cpu",
        limits={"wall_s": 15.0, "cpu_s": 1.0}, alone=True,
    ),
    Attack(
        "A6", _G, "stops itself, so that it is neither running nor dead",
        """
if os.fork() == 0:
    time.sleep(5)
    os.kill(os.getppid(), signal.SIGKILL)
    os._exit(0)
os.kill(os.getpid(), signal.SIGSTOP)
""",
        watch.outlived(), holds_from=Boundary.LIMITS, limits=_WALL,
    ),
    Attack(
        "A6b", _G, "stops its own parent, the process that would report the end",
        """
time.sleep(0.3)  # so that what was said so far is with the host: no other word comes
with trying:
    os.kill(os.getppid(), signal.SIGSTOP)
time.sleep(5)
with trying:
    os.kill(os.getppid(), signal.SIGCONT)
""",
        watch.outlived(), holds_from=Boundary.LIMITS, limits=_WALL,
    ),
    Attack(
        "A7", _G, "512 MB of memory touched",
        """
block = b"\\1" * (512 << 20)
time.sleep(1)
""",
        watch.memory_over(400 * MiB), "the article's six", Boundary.LIMITS, limits=_ROOM,
    ),
    Attack(
        "A8", _G, "processes that each stay under the memory limit of one",
        """
for _ in range(5):
    if os.fork() == 0:
        block = b"\\1" * (120 << 20)
        time.sleep(2)
        os._exit(0)
for _ in range(5):
    os.wait()
""",
        watch.memory_over(450 * MiB), "isolate's manual", proves=("memory",), limit="memory", limits=_ROOM,
    ),
    Attack(
        "A9", _G, "/tmp, /dev/shm and the work folder filled",
        """
keep = []
for folder in ("/tmp", "/dev/shm", "."):
    with trying:
        file = open(os.path.join(folder, "fill-" + T.token), "wb")
        keep.append(file)
        os.unlink(file.name)
        for _ in range(60):
            file.write(bytes(1 << 20))
            file.flush()
time.sleep(1)
""",
        watch.files_over(64 * MiB), "CVE-2016-8867 discussion", limits=_ROOM, proves=("disk",),
    ),
    Attack(
        "A10", _G, "memory held in memfds, where no limit on the address space counts it",
        """
keep = []
for number in range(12):
    fd = os.memfd_create("x")
    keep.append(fd)
    for _ in range(30):
        os.write(fd, b"\\1" * (1 << 20))
time.sleep(1)
""",
        watch.files_over(320 * MiB), limit="memory", limits=_ROOM,
    ),
    Attack(
        "A10b", _G, "memory held in a shared anonymous mapping",
        """
area = mmap.mmap(-1, 400 << 20)
for offset in range(0, len(area), 1 << 20):
    area[offset:offset + (1 << 20)] = b"\\1" * (1 << 20)
time.sleep(1)
""",
        watch.memory_over(360 * MiB), holds_from=Boundary.LIMITS, proves=("memory",), limit="memory", limits=_ROOM,
    ),
    Attack(
        "A14", _G, "200 forks",
        """
for _ in range(200):
    with trying:
        if os.fork() == 0:
            time.sleep(2)
            os._exit(0)
time.sleep(1)
""",
        watch.processes_over(100), "the article's six", proves=(), limit="pids", limits={"pids": 32},
    ),
    Attack(
        "A15", _G, "200 threads",
        """
for _ in range(200):
    with contextlib.suppress(RuntimeError):
        threading.Thread(target=time.sleep, args=(2,), daemon=True).start()
time.sleep(1)
""",
        watch.threads_over(100), limit="pids", limits={"pids": 32},
    ),
    Attack(
        "A16", _G, "150 zombies",
        """
for _ in range(150):
    with trying:
        if os.fork() == 0:
            os._exit(0)
time.sleep(1)
""",
        watch.processes_over(100), limit="pids", limits={"pids": 32},
    ),
    Attack(
        "A19", _G, "800 descriptors hoarded",
        """
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
keep = []
with trying:
    for _ in range(800):
        keep.append(os.open("/dev/null", os.O_RDONLY))
time.sleep(0.5)
""",
        watch.descriptors_over(500), holds_from=Boundary.LIMITS, proves=("rlimits",), limits={"open_files": 256},
    ),
    Attack(
        "A23", _G, "150 pseudo-terminals hoarded, of which the kernel has 4096 for all",
        """
keep = []
with trying:
    for _ in range(150):
        keep.append(os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY))
hold()
""",
        watch.terminals_over(100), "kernel.pty.max in proc_sys_kernel(5)", only="jail", proves=("terminals",), pty=True,
    ),
    Attack(
        "A20", _G, "one file of 50 MB",
        """
file = open("large", "wb")
for _ in range(50):
    file.write(bytes(1 << 20))
    file.flush()
time.sleep(0.5)
""",
        watch.files_over(40 * MiB), "the article's six", Boundary.LIMITS, limits=_ROOM,
    ),
    Attack(
        "A21", _G, "50 MB in files of 1 MB",
        """
keep = []
for number in range(50):
    file = open("part%d" % number, "wb", buffering=0)
    keep.append(file)
    file.write(bytes(1 << 20))
time.sleep(0.5)
""",
        watch.files_over(40 * MiB), proves=("disk",), limits=_ROOM,
    ),
    Attack(
        "A22", _G, "1,500 empty files, which fill the table of inodes and not the disk",
        """
os.mkdir("flood")
with trying:
    for number in range(1500):
        os.close(os.open("flood/%d" % number, os.O_CREAT | os.O_WRONLY))
hold()
""",
        watch.entries_over("flood", 1000), proves=("disk",), limits={"files": 500, "wall_s": 20.0},
    ),
    Attack(
        "A24", _G, "a tree of 3,000 folders, each within the last",
        """
with trying:
    for _ in range(3000):
        os.mkdir("d")
        os.chdir("d")
""",
        watch.close_slow(20.0), "CPython issue 89727 (rmtree recursion)", Boundary.LIMITS, collect=True,
        features=("files",),
    ),
    Attack(
        "A26", _G, "600 artifacts",
        """
for number in range(600):
    with trying, open("artifact%d" % number, "w") as file:
        file.write("x")
""",
        watch.saved_over(count=64), holds_from=Boundary.LIMITS, collect=True, features=("files",),
        artifacts={"count": 64},
    ),
    Attack(
        "A26b", _G, "8 MB of artifacts",
        """
for number in range(8):
    with trying, open("artifact%d" % number, "wb") as file:
        file.write(os.urandom(1 << 20))
""",
        watch.saved_over(total_bytes=2 * MiB), holds_from=Boundary.LIMITS, collect=True, features=("files",),
        artifacts={"total_bytes": 1 * MiB},
    ),
    Attack(
        "A26c", _G, "an artifact 40 folders deep",
        """
path = "/".join("d" * 40)
with trying:
    os.makedirs(path)
    open(path + "/file", "w").close()
""",
        watch.saved_over(depth=10), holds_from=Boundary.LIMITS, collect=True, features=("files",),
        artifacts={"depth": 8},
    ),
    Attack(
        "A27", _G, "200 MB to stdout",
        """
for _ in range(3200):
    os.write(1, b"flood\\n" * 10922)
""",
        watch.received_over(16 * MiB), "CVE-2021-41091 class", Boundary.LIMITS, proves=("output",),
        limits={"output_bytes": MiB},
    ),
    Attack(
        "A28", _G, "200 MB to stderr while stdout is idle",
        """
for _ in range(3200):
    os.write(2, b"flood\\n" * 10922)
""",
        watch.received_over(16 * MiB), holds_from=Boundary.LIMITS, limits={"output_bytes": MiB},
    ),
    Attack(
        "A29", _G, "one line of 200 MB",
        """
for _ in range(3200):
    os.write(1, b"x" * 65536)
""",
        watch.received_over(16 * MiB), holds_from=Boundary.LIMITS, limits={"output_bytes": MiB},
    ),
)  # fmt: skip
