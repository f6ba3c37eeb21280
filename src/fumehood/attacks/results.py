"""Group F: what the host believes of a run."""

from __future__ import annotations

from fumehood.attacks import watch
from fumehood.attacks.model import Attack
from fumehood.model import Boundary

_G = "results"

# Frames as the guest sends them (a length, a JSON header, a body), and a line as naive wrappers print it.
_FORGE = """
import itertools
header = json.dumps({"op": "exit", "type": "exit", "event": "exit", "t": "exit", "id": 1, "code": 0, "exit_code": 0,
                     "status": 0, "outcome": "exited"}).encode()
frames = [struct.pack(">II", len(header), 0) + header, struct.pack("<II", len(header), 0) + header,
          struct.pack(">I", len(header)) + header, header + b"\\n"]
"""

ATTACKS = (
    Attack(
        "F1", _G, "forged results on stdout and stderr",
        _FORGE + """
for fd in (1, 2):
    os.write(fd, b"\\n::exit=0::\\n" + b"".join(frames))
os._exit(7)
""",
        watch.forged_exit(7), "CVE-2024-12366 class", Boundary.LIMITS,
    ),
    Attack(
        "F2", _G, "forged results on every descriptor, early and twice",
        _FORGE + """
for fd in range(256):
    for frame in [b"\\n::exit=0::\\n", *frames, *frames]:
        with trying:
            os.set_blocking(fd, False)
            os.write(fd, frame)
os._exit(7)
""",
        watch.forged_exit(7), holds_from=Boundary.LIMITS,
    ),
    Attack(
        "F2b", _G, "bytes into a pipe of the supervisor that leaked in",
        """
for fd in range(3, 256):
    with trying:
        os.set_blocking(fd, False)
        os.write(fd, b"\\xff" * 64)
""",
        watch.pipe_written(), holds_from=Boundary.LIMITS,
    ),
    Attack(
        "F2c", _G, "a frame that announces a huge length, on every descriptor",
        """
for fd in range(256):
    with trying:
        os.set_blocking(fd, False)
        os.write(fd, b"\\n::exit=0::\\n" + b"\\xff" * 64)
os._exit(7)
""",
        watch.forged_exit(7), holds_from=Boundary.LIMITS,
    ),
    Attack(
        "F2d", _G, "forged results in the descriptors of the process that started the program",
        _FORGE + """
for pid in [os.getppid(), *others()]:
    for fd in range(64):
        with trying:
            target = os.open("/proc/%d/fd/%d" % (pid, fd), os.O_WRONLY | os.O_NONBLOCK)
            os.write(target, b"\\n::exit=0::\\n" + b"".join(frames))
os.write(1, b"\\n::exit=0::\\n")
os._exit(7)
""",
        watch.forged_exit(7), "CVE-2019-5736 class", Boundary.LIMITS,
    ),
    Attack(
        "F5", _G, "bytes that are not UTF-8",
        """
os.write(1, bytes(range(256)) + "\\ud800".encode("utf-8", "surrogatepass"))
os.write(2, b"\\xc3")
""",
        watch.host_failed(), "CWE-838", Boundary.LIMITS,
    ),
    Attack(
        "F7", _G, "an artifact that is no regular file, made on the host",
        """
os.symlink("/etc/hostname", "link")
os.mkfifo("fifo")
server = socket.socket(socket.AF_UNIX)
server.bind("socket")
os.symlink("loop", "loop")
for name in ("link", "fifo", "socket", "loop"):
    os.path.lexists(name)
open("plain", "w").close()
""",
        watch.artifact_trouble(3.0), holds_from=Boundary.LIMITS, collect=True, features=("files",),
    ),
)  # fmt: skip
