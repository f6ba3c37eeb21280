"""Ordinary libraries work in the jail: the standard library's with processes, threads and native code, and packages."""

# ruff: noqa: E501 - a program of one line stays on one line

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.needs import need_tier

from fumehood import environments
from fumehood.errors import FumehoodError
from fumehood.model import Limits, MiB, Policy
from fumehood.runner import Runner

PACKAGES = ("numpy", "pandas", "matplotlib")
LIMITS = Limits(wall_s=120, cpu_s=120, cpus=2, memory_bytes=1024 * MiB, pids=64)


@pytest.fixture(scope="module")
def jail() -> Iterator[Runner]:
    need_tier("jail")
    with Runner(tier="jail", policy=Policy(limits=LIMITS)) as runner:
        yield runner


STANDARD = {
    "sqlite3": """
import sqlite3
for path in (":memory:", "data.db", "/tmp/x.db"):
    with sqlite3.connect(path) as db:
        db.execute("pragma journal_mode=wal")
        db.execute("create table t (a integer primary key, b text)")
        db.executemany("insert into t (b) values (?)", [(str(i),) for i in range(1000)])
        assert db.execute("select count(*), max(a) from t").fetchone() == (1000, 1000)
        db.execute("vacuum") if db.in_transaction is False else None
""",
    "subprocess": """
import subprocess, sys
assert subprocess.run(["echo", "hi"], capture_output=True, text=True).stdout == "hi\\n"
assert subprocess.run("echo $((6*7)) | cat", shell=True, capture_output=True).stdout == b"42\\n"
assert subprocess.run([sys.executable, "-c", "print(input())"], input=b"x", capture_output=True).stdout == b"x\\n"
assert subprocess.check_output([sys.executable, "-I", "-c", "import json, ssl; print(1)"]) == b"1\\n"
p = subprocess.Popen(["sleep", "60"]); p.kill(); assert p.wait() == -9
try: subprocess.run(["sleep", "60"], timeout=0.1)
except subprocess.TimeoutExpired: pass
else: raise SystemExit("no timeout")
import os
assert os.system("exit 3") >> 8 == 3 and os.popen("pwd").read() == os.getcwd() + "\\n"
assert subprocess.run(["bash", "-c", "x=$(ls / | sort | head -1); test -n $x && mktemp -d >/dev/null"]).returncode == 0
""",
    "multiprocessing": """
import multiprocessing as mp, sys
from multiprocessing.shared_memory import SharedMemory
def square(x): return x * x
def put(q, x): q.put(x)
def fill(name):
    s = SharedMemory(name); s.buf[:3] = b"abc"; s.close()
if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        c = mp.get_context(method)
        q = c.Queue(); p = c.Process(target=print, args=(method,)); p.start(); p.join(); assert p.exitcode == 0
    with mp.get_context("fork").Pool(4) as pool:
        assert pool.map(square, range(100)) == [x * x for x in range(100)]
    s = SharedMemory(create=True, size=4096)
    p = mp.get_context("fork").Process(target=fill, args=(s.name,)); p.start(); p.join()
    assert bytes(s.buf[:3]) == b"abc"
    s.close(); s.unlink()
    lock, value = mp.Lock(), mp.Value("i", 0)
    with lock: value.value += 1
    with mp.Manager() as m: d = m.dict(a=1); assert d["a"] == 1
    from concurrent.futures import ProcessPoolExecutor
    with ProcessPoolExecutor(2, mp_context=mp.get_context("fork")) as e: assert list(e.map(square, range(5))) == [0, 1, 4, 9, 16]
""",
    "threading": """
import threading, queue, concurrent.futures, time
q = queue.Queue()
ts = [threading.Thread(target=lambda i=i: q.put(i)) for i in range(30)]
[t.start() for t in ts]; [t.join() for t in ts]
assert sorted(q.get() for _ in ts) == list(range(30))
with concurrent.futures.ThreadPoolExecutor(8) as e: assert sum(e.map(lambda x: x, range(100))) == 4950
e = threading.Event(); threading.Timer(0.01, e.set).start(); assert e.wait(10)
""",
    "asyncio": """
import asyncio, sys
async def main():
    p = await asyncio.create_subprocess_exec(sys.executable, "-c", "print(1)", stdout=-1)
    assert (await p.communicate())[0] == b"1\\n"
    assert await asyncio.to_thread(lambda: 3) == 3
    server = await asyncio.start_unix_server(lambda r, w: w.write(b"x") or w.close(), "/tmp/s")
    r, w = await asyncio.open_unix_connection("/tmp/s"); assert await r.read() == b"x"
    async with asyncio.TaskGroup() as g:
        for _ in range(50): g.create_task(asyncio.sleep(0.001))
asyncio.run(main())
""",
    "ctypes": """
import ctypes, ctypes.util
libc = ctypes.CDLL("libc.so.6")
values = (ctypes.c_int * 5)(5, 3, 1, 4, 2)
kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_int))
libc.qsort(values, 5, ctypes.sizeof(ctypes.c_int), kind(lambda a, b: a[0] - b[0]))
assert list(values) == [1, 2, 3, 4, 5]
""",
    "tempfile, mmap, files": """
import mmap, os, shutil, tempfile, fcntl, select, pathlib
with tempfile.TemporaryDirectory() as d, tempfile.NamedTemporaryFile() as f, tempfile.TemporaryFile() as g:
    assert os.path.isdir(d); f.write(b"x" * 5000); f.flush(); shutil.copy2(f.name, d); shutil.copytree(d, d + "2")
    m = mmap.mmap(f.fileno(), 0); assert m[:2] == b"xx"; m.close(); fcntl.flock(g, fcntl.LOCK_EX)
assert pathlib.Path.home() and os.path.expanduser("~/x")
import zipfile, tarfile, gzip, bz2, lzma, csv, json, xml.etree.ElementTree, hashlib, ssl, uuid, secrets, decimal
with tarfile.open("t.tgz", "w:gz") as t: t.addfile(tarfile.TarInfo("a"))
ep = select.epoll(); ep.close()
import pty, getpass, socket; assert socket.gethostname() == "sandbox" and getpass.getuser()
a, b = socket.socketpair(); a.send(b"x"); assert b.recv(1) == b"x"
import locale, curses, readline, pdb, unittest, doctest, venv
""",
    "zoneinfo": """
import zoneinfo, datetime, time
z = zoneinfo.ZoneInfo("Europe/Vienna")
assert datetime.datetime(2024, 7, 1, tzinfo=z).utcoffset() == datetime.timedelta(hours=2)
assert len(zoneinfo.available_timezones()) > 300
time.tzset(); datetime.datetime.now().astimezone()
""",
    "signals, timers, limits": """
import signal, time, resource, os, faulthandler
hit = []
signal.signal(signal.SIGALRM, lambda *_: hit.append(1)); signal.setitimer(signal.ITIMER_REAL, 0.01); time.sleep(0.1)
assert hit and resource.getrusage(resource.RUSAGE_SELF).ru_utime >= 0
assert os.cpu_count() >= 1 and len(os.sched_getaffinity(0)) >= 1
assert os.nice(1) == 1
""",
}


@pytest.mark.parametrize("name", STANDARD)
def test_standard_library(jail: Runner, name: str) -> None:
    result = jail.run(STANDARD[name])
    assert result.ok and "Warning" not in result.stderr, f"{result.outcome} {result.exit_code} {result.stderr[-3000:]}"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An environment with numpy, pandas and matplotlib, built once for the machine's user and kept between sessions.

    In this user's cache folder, or where there is none for it, beside the session's other files.
    """
    need_tier("jail")
    keep = os.environ.get("FUMEHOOD_CACHE")
    home = Path(os.environ.get("HOME", "/nonexistent"))
    if keep is None and not (home.is_dir() and os.access(home, os.W_OK)):
        os.environ["FUMEHOOD_CACHE"] = str(tmp_path_factory.getbasetemp().parent / "environments")
    try:
        try:
            yield environments.find("fumehood-tests").name
        except FumehoodError:
            yield environments.build("fumehood-tests", PACKAGES).name
    finally:
        if keep is None:
            os.environ.pop("FUMEHOOD_CACHE", None)


NUMPY = """
import numpy as np
rng = np.random.default_rng(0)
a = rng.random((200, 200))
assert np.allclose(a @ np.linalg.inv(a), np.eye(200), atol=1e-6)
np.save("a.npy", a); assert np.load("a.npy", mmap_mode="r").shape == (200, 200)
assert np.fft.fft(a).shape == (200, 200)
"""
PANDAS = """
import pandas as pd
df = pd.DataFrame({"k": list("aabb"), "v": [1, 2, 3, 4.5], "t": pd.date_range("2024-01-01", periods=4, tz="Europe/Vienna")})
assert df.groupby("k").v.sum().tolist() == [3, 7.5]
df.to_csv("t.csv"); assert len(pd.read_csv("t.csv")) == 4
import sqlite3
with sqlite3.connect("t.db") as db: df.drop(columns="t").to_sql("t", db); assert len(pd.read_sql("select * from t", db)) == 4
print(df.describe())
"""
MATPLOTLIB = """
import matplotlib.pyplot as plt
fig, ax = plt.subplots()
ax.plot([1, 2, 3]); ax.set_title("α → β")
fig.savefig("plot.png"); fig.savefig("plot.svg"); fig.savefig("plot.pdf")
"""


@pytest.mark.parametrize("preload", [(), PACKAGES], ids=["imported", "preloaded"])
def test_packages(environment: str, tmp_path: Path, preload: tuple[str, ...]) -> None:
    policy = Policy(limits=LIMITS, environment=environment, preload=preload)
    with Runner(tier="jail", policy=policy) as runner:
        for program in (NUMPY, PANDAS):
            result = runner.run(program)
            assert result.ok, f"{result.outcome} {result.exit_code} {result.stderr[-3000:]}"
        result = runner.run(MATPLOTLIB, out=tmp_path)
        assert result.ok, f"{result.outcome} {result.exit_code} {result.stderr[-3000:]}"
        assert {a.path for a in result.artifacts if a.saved} == {"plot.png", "plot.svg", "plot.pdf"}
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
        child = runner.run(
            "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import numpy; print(numpy.pi)'], check=True)"
        )
        assert child.stdout.startswith("3.14"), child.stderr
        seeds = {
            runner.run("import numpy, random\nprint(numpy.random.rand(), random.random())").stdout for _ in range(3)
        }
        assert len(seeds) == 3
        with runner.open() as sandbox:
            sandbox.exec("import pandas as pd\ndf = pd.DataFrame({'a': range(1000)})")
            assert sandbox.exec("print(df.a.sum())").stdout == "499500\n"


def test_an_environment_cannot_be_written(environment: str) -> None:
    with Runner(tier="jail", policy=Policy(limits=LIMITS, environment=environment)) as runner:
        result = runner.run(
            "import numpy, os\nfor path in (numpy.__file__, os.path.dirname(numpy.__file__) + '/new'):\n"
            "    try: open(path, 'a'); print('wrote', path)\n    except OSError: pass\n"
        )
        assert result.ok and result.stdout == ""
