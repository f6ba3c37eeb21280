"""Group G: what outlives a run, or keeps it from ending."""

from __future__ import annotations

from fumehood.attacks import watch
from fumehood.attacks.model import Attack
from fumehood.model import Boundary

_G = "lifecycle"

_DAEMON = """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in range(3):
            os.close(fd)
        {rest}
        time.sleep(6)
    os._exit(0)
os.wait()
"""

ATTACKS = (
    Attack(
        "A17", _G, "a daemon: two forks and a session of its own", _DAEMON.format(rest="pass"),
        watch.survivors(), "daemon(7)",
    ),
    Attack(
        "A17b", _G, "a daemon that ignores every signal",
        _DAEMON.format(rest="[signal.signal(n, signal.SIG_IGN) for n in (1, 2, 3, 13, 15)]"),
        watch.survivors(), "daemon(7)",
    ),
    Attack(
        "A17c", _G, "a child that is given to the program's parent (CLONE_PARENT)",
        """
pid = -1
with trying:
    pid = syscall("clone", 0x8000 | signal.SIGCHLD, 0, 0, 0, 0)
if pid == 0:
    os.setsid()
    for fd in range(3):
        os.close(fd)
    time.sleep(6)
    os._exit(0)
""",
        watch.survivors(), "clone(2)",
    ),
    Attack(
        "A17d", _G, "a process that never stays: it forks and dies, in a new session each time",
        """
end = time.monotonic() + 5
if os.fork():
    os._exit(0)
for fd in range(3):
    os.close(fd)
while time.monotonic() < end:
    if os.fork():
        os._exit(0)
    os.setsid()
    time.sleep(0.03)
os._exit(0)
""",
        watch.survivors(), "fork bombs that outrun killall",
    ),
    Attack(
        "G1", _G, "files left for the next run",
        """
for folder in ("/tmp", "/dev/shm", "/var/tmp", os.path.expanduser("~"), "."):
    with trying, open(os.path.join(folder, "next-" + T.token), "w") as file:
        file.write(T.note)
""",
        watch.printed_note(),
        second="""
for folder in ("/tmp", "/dev/shm", "/var/tmp", os.path.expanduser("~"), "."):
    leak(os.path.join(folder, "next-" + T.token))
""",
    ),
    Attack(
        "G1b", _G, "a module planted that the next run's interpreter imports by itself",
        """
import site
folders = [site.getusersitepackages(), *sys.path]
for folder in filter(None, folders):
    with trying:
        os.makedirs(folder, exist_ok=True)
        for name in ("usercustomize", "sitecustomize"):
            with open(os.path.join(folder, name + ".py"), "x") as file:
                file.write("print(%r, flush=True)" % T.note)
        break
""",
        watch.printed_note(), "site(1)", second="pass",
    ),
    Attack(
        "G3", _G, "System V shared memory left",
        "libc.shmget(T.key, 4096, 0o1600)\ntime.sleep(0.1)",
        watch.sysv_left("shm"), needs=("sysv_ipc",),
    ),
    Attack(
        "G3b", _G, "a System V semaphore left",
        "libc.semget(T.key, 1, 0o1600)\ntime.sleep(0.1)",
        watch.sysv_left("sem"), needs=("sysv_ipc",),
    ),
    Attack(
        "G3c", _G, "a System V message queue left",
        "libc.msgget(T.key, 0o1600)\ntime.sleep(0.1)",
        watch.sysv_left("msg"), needs=("sysv_ipc",),
    ),
    Attack(
        "G3d", _G, "a POSIX message queue left",
        "libc = ctypes.CDLL('librt.so.1')\n"
        "libc.mq_open(('/' + T.token).encode(), os.O_CREAT | os.O_RDWR, 0o600, None)\ntime.sleep(0.1)",
        watch.mqueue_left(), needs=("mqueue",),
    ),
    Attack(
        "G6", _G, "the supervisor killed in mid-run",
        "hold(6)",
        watch.orphaned(), "PR_SET_PDEATHSIG", Boundary.LIMITS, orphan=True,
    ),
    Attack(
        "G7", _G, "a grandchild that holds stdout open after the program's end",
        """
if os.fork() == 0:
    os.setsid()
    time.sleep(5)
    os._exit(0)
""",
        watch.outlived(), "bpo-37424 (communicate)", Boundary.LIMITS, limits={"wall_s": 1.0},
    ),
    Attack(
        "G8", _G, "32 MB of stdin never read",
        "time.sleep(5)",
        watch.outlived(), holds_from=Boundary.LIMITS, limits={"wall_s": 1.0}, stdin_bytes=32 << 20,
    ),
    Attack(
        "G9", _G, "stdout closed, and the program stays",
        """
for fd in range(3):
    os.close(fd)
time.sleep(5)
os._exit(0)
""",
        watch.outlived_or_survived(), holds_from=Boundary.LIMITS, limits={"wall_s": 1.0},
    ),
    Attack(
        "G11", _G, "an exit that never ends: atexit functions and a thread that stays",
        """
import atexit
atexit.register(time.sleep, 5)
threading.Thread(target=time.sleep, args=(5,)).start()
""",
        watch.outlived(), holds_from=Boundary.LIMITS, limits={"wall_s": 1.0},
    ),
)  # fmt: skip
