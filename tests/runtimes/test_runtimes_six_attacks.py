"""The six attacks that begin the suite, on the tiers whose boundary is a language runtime; the host is the witness.

Each program is first run by a plain Python, where it must succeed: an attack that breaks nothing where nothing stops it
proves nothing. (The loop and the memory are bounded there, as an attacker bounds itself.)
"""

from __future__ import annotations

import os
import resource
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.needs import need_tier

from fumehood.model import Limits, MiB, Outcome, Policy
from fumehood.runner import Runner

WALL_S = 4.0
GRAB = "x = 'a' * (512 << 20)\nprint(len(x))"
LOOP = "while True: pass"


@pytest.fixture(params=["interpreter", "wasm"])
def runner(request: pytest.FixtureRequest) -> Iterator[Runner]:
    need_tier(request.param)
    limits = Limits(wall_s=WALL_S, cpu_s=60, memory_bytes=128 * MiB)
    with Runner(tier=request.param, policy=Policy(limits=limits)) as made:
        yield made
        assert made.run("print('after')").stdout == "after\n"  # an ordinary run still succeeds


def plain(program: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-I", "-c", program], capture_output=True, text=True, timeout=120, check=False, **options
    )  # type: ignore[call-overload,no-any-return]


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_1_a_loop(runner: Runner) -> None:
    started = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run([sys.executable, "-I", "-c", LOOP], timeout=0.5, check=False)
    result = runner.run(LOOP)
    assert result.outcome is Outcome.WALL and result.seconds <= WALL_S + 0.5 < time.monotonic() - started + WALL_S


def test_2_half_a_gigabyte(runner: Runner) -> None:
    assert plain(GRAB).stdout == f"{512 << 20}\n"
    before = resident()
    result = runner.run(GRAB)
    assert not result.ok and str(512 << 20) not in result.stdout
    assert resident() - before < 16 * MiB  # the supervisor stays flat
    peak = result.usage.memory_peak_bytes
    assert peak is None or peak < 400 * MiB


def test_3_two_hundred_processes(runner: Runner) -> None:
    marker = secrets.token_hex(8)
    program = (
        "import os, sys, time\nfor i in range({count}):\n    if os.fork() == 0:\n"
        "        line = [sys.executable, '-I', '-c', 'import time; time.sleep({nap})', '{marker}']\n"
        "        os.execvp(line[0], line)\n"
        "time.sleep({nap})"
    )

    def count() -> int:
        found = 0
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                found += marker.encode() in (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                pass
        return found

    control = subprocess.Popen([sys.executable, "-I", "-c", program.format(count=3, nap=3, marker=marker)])
    try:
        deadline = time.monotonic() + 20
        while count() < 3:
            assert time.monotonic() < deadline, "the attack does not work where nothing stops it"
            time.sleep(0.05)
    finally:
        control.wait()
    while count():
        time.sleep(0.05)
    seen = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.02):
            seen.append(count())

    watcher = threading.Thread(target=watch)
    watcher.start()
    result = runner.run(program.format(count=200, nap=1, marker=marker))
    stop.set()
    watcher.join()
    assert not result.ok and max(seen, default=0) == 0


def test_4_a_file_of_fifty_megabytes(runner: Runner, tmp_path: Path) -> None:
    program = "with open({path!r}, 'w') as f:\n    f.write('x' * (50 << 20))\nprint('written')"
    target = tmp_path / "big"
    assert plain(program.format(path=str(target))).stdout == "written\n" and target.stat().st_size == 50 << 20
    target.unlink()
    os.chmod(tmp_path, 0o777)
    result = runner.run(program.format(path=str(target)))
    assert not result.ok and not target.exists()


def test_5_a_secret_of_the_host(runner: Runner, tmp_path: Path) -> None:
    canary = secrets.token_hex(16)
    secret = tmp_path / "secret"
    secret.write_text(canary)
    for folder in (tmp_path, *list(tmp_path.parents)[:-2]):
        os.chmod(folder, 0o755)
    program = f"print(open({str(secret)!r}).read())"
    assert plain(program).stdout == canary + "\n"
    result = runner.run(program)
    assert not result.ok and canary not in result.stdout + result.stderr


def test_6_a_service_on_loopback(runner: Runner) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(5)
        address = listener.getsockname()
        program = f"import socket\nsocket.create_connection({address!r}, 2).sendall(b'knock')\nprint('connected')"
        assert plain(program).stdout == "connected\n"
        accepted, _ = listener.accept()
        accepted.close()
        result = runner.run(program)
        assert not result.ok and "connected" not in result.stdout
        listener.settimeout(0.3)
        with pytest.raises(TimeoutError):
            listener.accept()
