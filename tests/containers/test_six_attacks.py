"""The six attacks that every tier faces, against the tiers of this folder. The host is the witness."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fumehood import Limits, MiB, Outcome, Policy, Runner


@contextmanager
def attacked(tier: str, limits: Limits) -> Iterator[Runner]:
    """A runner for the attack; an ordinary run must succeed afterwards."""
    with Runner(tier=tier, policy=Policy(limits=limits)) as runner:
        yield runner
        assert runner.run("print('still here')").stdout == "still here\n"


def test_a_cpu_loop_is_ended(container_tier: str) -> None:
    with attacked(container_tier, Limits(cpu_s=1, wall_s=60)) as runner:
        result = runner.run("while True: pass")
        assert result.outcome is Outcome.CPU and result.timed_out
        assert result.usage.cpu_s is not None and result.usage.cpu_s < 30


def test_512_megabytes_are_not_had(container_tier: str) -> None:
    with attacked(container_tier, Limits(memory_bytes=128 * MiB, wall_s=60)) as runner:
        result = runner.run("b = bytearray(512 << 20)\nb[::4096] = b'x' * len(b[::4096])\nprint('had it')")
        assert result.outcome is Outcome.MEMORY or result.exit_code == 1
        assert "had it" not in result.stdout
        assert result.usage.memory_peak_bytes is not None and result.usage.memory_peak_bytes < 256 * MiB


def test_200_processes_are_not_had(container_tier: str) -> None:
    program = """
import os, time
made = 0
for _ in range(200):
    try:
        pid = os.fork()
    except OSError:
        break
    if pid == 0:
        time.sleep(600)
    made += 1
print(made, flush=True)
"""
    with attacked(container_tier, Limits(pids=32, wall_s=60, memory_bytes=512 * MiB)) as runner:
        result = runner.run(program)
        assert result.outcome is Outcome.EXITED, result
        assert int(result.stdout) < 32


def test_a_file_of_50_megabytes_is_not_had(container_tier: str, tmp_path: Path) -> None:
    program = """
import os
with open('big', 'wb', buffering=0) as f:
    try:
        for _ in range(50): f.write(bytes(1 << 20))
        print('had it')
    except OSError as error:
        print(error.errno)
"""
    with attacked(container_tier, Limits(disk_bytes=16 * MiB, wall_s=60)) as runner:
        result = runner.run(program, out=tmp_path)
        assert "had it" not in result.stdout
        assert sum(p.stat().st_size for p in tmp_path.rglob("*")) <= 16 * MiB


def test_a_secret_of_the_host_is_not_read(container_tier: str, tmp_path: Path) -> None:
    canary = secrets.token_hex(16)
    (tmp_path / "secret").write_text(canary)
    program = f"""
import os
for root in ('', '/proc/1/root', '/proc/self/root', '/host', '/mnt'):
    try: print(open(root + {str(tmp_path / "secret")!r}).read())
    except OSError as error: print(type(error).__name__)
print(open('/proc/self/mountinfo').read() if os.path.exists('/proc/self/mountinfo') else '')
"""
    with attacked(container_tier, Limits(wall_s=60)) as runner:
        result = runner.run(program)
        assert result.ok and canary not in result.stdout and str(tmp_path) not in result.stdout


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_service_on_loopback_is_not_reached(container_tier: str, family: socket.AddressFamily) -> None:
    host = "127.0.0.1" if family is socket.AF_INET else "::1"
    heard: list[object] = []
    with socket.socket(family) as listener:
        try:
            listener.bind((host, 0))
        except OSError:
            pytest.skip(f"this host has no {host}")
        listener.listen()
        listener.settimeout(0.1)
        ended = threading.Event()

        def listen() -> None:
            while not ended.is_set():
                try:
                    heard.append(listener.accept()[1])
                except TimeoutError:
                    continue

        thread = threading.Thread(target=listen)
        thread.start()
        port = listener.getsockname()[1]
        program = (
            f"import socket\ntry:\n s = socket.create_connection(({host!r}, {port}), 2)\n print('connected')\n"
            "except OSError as error: print(type(error).__name__)\n"
        )
        try:
            with attacked(container_tier, Limits(wall_s=60)) as runner:
                result = runner.run(program)
        finally:
            ended.set()
            thread.join()
    assert result.ok and "connected" not in result.stdout and heard == []
