"""Groups R and W: out of a language runtime, by what its values know of the world around them."""

from __future__ import annotations

from fumehood.attacks import watch
from fumehood.attacks.model import Attack, Watch
from fumehood.model import Boundary

_G = "runtimes"
_WALL = {"wall_s": 1.0, "cpu_s": 30.0}
MiB = 1 << 20


def _attack(
    ident: str,
    title: str,
    program: str,
    judge: Watch,
    source: str = "catalogue",
    limits: dict[str, float] | None = None,
    artifacts: bool = False,
) -> Attack:
    return Attack(
        ident, _G, title, program, judge, source, Boundary.INTERPRETER,
        runtimes_only=True, limits=limits or {}, collect=artifacts, features=("files",) if artifacts else (),
    )  # fmt: skip


ATTACKS = (
    _attack(
        "R1", "from an empty tuple to every class there is, and by one of them to open()",
        """
with trying:
    for kind in ().__class__.__base__.__subclasses__():
        if kind.__name__ == "_wrap_close":
            say(kind.__init__.__globals__["__builtins__"]["open"](T.public).read())
""",
        watch.printed("public"), "Python sandbox escapes, __subclasses__",
    ),
    _attack(
        "R1b", "the same by type() and its method resolution order",
        """
with trying:
    for kind in type(type("", (), {})).mro(type("", (), {}))[-1].__subclasses__():
        if kind.__name__ == "_wrap_close":
            say(kind.__init__.__globals__["__builtins__"]["open"](T.public).read())
""",
        watch.printed("public"), "Python sandbox escapes, __mro__",
    ),
    _attack(
        "R2", "from a generator to its frame, and by that to the builtins",
        '''
with trying:
    exec("""
def escape():
    yield frames[0].gi_frame.f_builtins["open"]
frames = [escape()]
say(next(frames[0])(T.public).read())
""")
''',
        watch.printed("public"), "Python sandbox escapes, gi_frame",
    ),
    _attack(
        "R3", "a format string that walks from a function to the environment",
        """
def known():
    pass
with trying:
    say("{0.__globals__[sys].modules[os].environ}".format(known))
""",
        watch.printed("env"), "CVE-2016-10745 class (str.format)",
    ),
    _attack(
        "R3b", "the same by getattr() with names that are made at run time",
        """
def known():
    pass
with trying:
    under = "_" * 2
    scope = getattr(known, under + "globals" + under)
    say(str(getattr(scope["sys"], "modu" + "les")["os"].environ))
""",
        watch.printed("env"), "CVE-2025-27516 class (attr filters)",
    ),
    _attack(
        "R5", "from an exception to the frames of its traceback",
        """
with trying:
    try:
        1 / 0
    except ZeroDivisionError as error:
        say(error.__traceback__.tb_frame.f_builtins["open"](T.public).read())
""",
        watch.printed("public"), "Python sandbox escapes, tb_frame",
    ),
    _attack(
        "R7", "from a harmless module to another that it has imported",
        """
for reach in (
    lambda: json.codecs.builtins.open(T.public).read(),
    lambda: re.enum.sys.modules["os"].popen("cat " + T.public).read(),
    lambda: json.decoder.scanner.re.enum.sys.modules["io"].open(T.public).read(),
):
    with trying:
        say(reach())
""",
        watch.printed("public"), "CVE-2023-37271 class",
    ),
    _attack(
        "R8", "every module tried that can open a file",
        """
for text in (
    "import posix; say(posix.read(posix.open(T.public, 0), 4096))",
    "import _io; say(_io.FileIO(T.public).read())",
    "import codecs; say(codecs.open(T.public).read())",
    "import linecache; say(str(linecache.getlines(T.public)))",
    "import pathlib; say(pathlib.Path(T.public).read_text())",
    "import subprocess; say(subprocess.check_output(['cat', T.public]))",
    "import os; say(os.read(os.open(T.public, 0), 4096))",
    "import importlib; say(importlib.import_module('io').open(T.public).read())",
):
    with trying:
        try:
            exec(text)
        except ImportError:
            pass
""",
        watch.printed("public"),
    ),
    _attack(
        "R9", "every module tried that can dial",
        """
for text in (
    "import socket; socket.create_connection(('127.0.0.1', T.ports['tcp4']), 1).sendall(b'x')",
    "import _socket; s = _socket.socket(2, 1); s.connect(('127.0.0.1', T.ports['tcp4'])); s.send(b'x')",
    "import urllib.request; urllib.request.urlopen('http://127.0.0.1:%d' % T.ports['tcp4'], timeout=1)",
):
    with trying:
        try:
            exec(text)
        except ImportError:
            pass
""",
        watch.reached("tcp4"),
    ),
    _attack(
        "R10", "from an AttributeError to the object that it is about",
        """
def known():
    pass
with trying:
    try:
        known.nothing
    except AttributeError as error:
        say(error.obj.__builtins__["open"](T.public).read())
""",
        watch.printed("public"), "CVE-2022-23530 class",
    ),
    _attack(
        "R11", "a path object that writes",
        """
with trying:
    from pathlib import Path
    Path(T.victim).write_text("evil")
""",
        watch.victim_changed(),
    ),
    _attack(
        "R12", "the environment by every name that it has",
        """
for text in (
    "import os; say(str(dict(os.environ)))",
    "import posix; say(str(posix.environ))",
    "import os; say(str([os.getenv(name) for name in os.environ]))",
):
    with trying:
        try:
            exec(text)
        except ImportError:
            pass
""",
        watch.printed("env"),
    ),
    _attack(
        "R13", "a huge power: one operation that looks at no clock",
        "number = 7 ** 10_000_000",
        watch.outlived(), "CVE-2020-10735 class", limits=_WALL,
    ),
    _attack(
        "R13b", "one integer of 400 MB",
        """
number = 1 << (400 << 23)
time.sleep(1)
""",
        watch.memory_over(360 * MiB), limits={"memory_bytes": 128 * MiB},
    ),
    _attack(
        "R14", "memory in many small pieces, each error caught",
        """
keep = []
for number in range(450):
    try:
        keep.append(b"\\1" * ((1 << 20) + number))
    except MemoryError:
        pass
time.sleep(1)
""",
        watch.memory_over(400 * MiB), limits={"memory_bytes": 128 * MiB},
    ),
    _attack(
        "R15", "200 MB printed by print()",
        """
line = "flood " * 10922
for _ in range(3200):
    print(line)
""",
        watch.received_over(16 * MiB), limits={"output_bytes": MiB},
    ),
    _attack(
        "W1", "a file outside the granted folders, by every path to it",
        """
for top in ("", "/work", "/tmp", ".", "/work/../../../..", "/tmp/../../../..", "../../../../../../.."):
    leak(top + T.public)
    with trying:
        os.chdir(top + os.path.dirname(T.public))
        leak("public")
""",
        watch.printed("public"), "CVE-2023-51661 class (preopens)",
    ),
    _attack(
        "W1b", "the same through links, relative and absolute, and through links to links",
        """
up = "../" * 12
for number, target in enumerate((T.public, up + T.public, up, "/", "..")):
    with trying:
        os.symlink(target, "link%d" % number)
    leak("link%d" % number)
    leak("link%d%s" % (number, T.public))
    with trying:
        os.symlink("link%d/%s" % (number, up), "again%d" % number)
    leak("again%d%s" % (number, T.public))
""",
        watch.printed("public"), "CVE-2025-53901 class (path_open)",
    ),
    _attack(
        "W1c", "the same by folder descriptors",
        """
for fd in list(range(3, 64)):
    for path in (T.public, T.public[1:], "../" * 12 + T.public):
        with trying:
            say(os.read(os.open(path, os.O_RDONLY, dir_fd=fd), 4096))
""",
        watch.printed("public"), "wasi-libc, path_open",
    ),
    _attack(
        "W4", "a link out of the granted folder, left for the host to collect",
        """
for number, target in enumerate((T.public, "../" * 12 + T.public)):
    with trying:
        os.symlink(target, "report%d.txt" % number)
""",
        watch.saved("public"), "CVE-2018-15664", artifacts=True,
    ),
    _attack(
        "W4b", "a file moved and linked out of the granted folder",
        """
with open("evil", "w") as file:
    file.write("evil")
for target in (T.open + "/evil", "../" * 12 + T.open + "/evil"):
    with trying:
        os.link("evil", target)
    with trying:
        os.rename("evil", target)
""",
        watch.planted(),
    ),
    _attack(
        "W3", "the runtime's memory grown page by page to 500 MB",
        """
keep = []
with trying:
    for _ in range(500):
        keep.append(bytearray(b"\\1") * (1 << 20))
time.sleep(1)
""",
        watch.memory_over(450 * MiB), limits={"memory_bytes": 128 * MiB},
    ),
)  # fmt: skip
