"""The command line end to end, with the tiers that this host has."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fumehood import registry
from fumehood.cli.exits import ExitCode


@functools.cache
def why_not(name: str) -> str:
    tier = registry.make(name)
    probe = tier.probe()
    return "" if probe.available else f"{name}: {probe.reason}"


@pytest.fixture(params=["jail", "subprocess"])
def tier(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    if reason := why_not(name):
        pytest.skip(reason)
    return name


def run(*arguments: str, stdin: bytes = b"") -> tuple[int, str, str]:
    command = [sys.executable, "-m", "fumehood", "run", *arguments]
    ended = subprocess.run(command, input=stdin, capture_output=True, timeout=120)
    return ended.returncode, ended.stdout.decode(), ended.stderr.decode()


@pytest.mark.parametrize(
    ("code", "options", "expected", "words"),
    [
        ("print('out')", [], 0, ""),
        ("import sys; sys.exit(7)", [], 7, ""),
        ("import os; os._exit(254)", [], 254, ""),
        ("import os; os.kill(os.getpid(), 11)", [], 139, "died of signal 11 (SIGSEGV)"),
        ("1/0", [], 1, "ZeroDivisionError"),
        ("while True: pass", ["--wall", "500ms"], ExitCode.WALL, "ran longer than the 0.5 s allowed"),
        ("while True: pass", ["--cpu", "500ms"], ExitCode.CPU, "more than the 0.5 s of CPU time allowed"),
        ("print('x' * 10**6)", ["--output", "64k"], 0, "of output beyond the 64 KiB allowed were dropped"),
    ],
)
def test_every_end_has_its_code(tier: str, code: str, options: list[str], expected: int, words: str) -> None:
    ended, _, err = run("--tier", tier, *options, "-c", code)
    assert ended == expected, err
    assert words in err


def test_memory_and_overflow(tier: str, tmp_path: Path) -> None:
    policy = tmp_path / "p.toml"
    policy.write_text("overflow = 'stop'\n[limits]\noutput_bytes = '64k'\n")
    assert run("--tier", tier, "--policy", str(policy), "-c", "while True: print('x' * 999)")[0] == ExitCode.OUTPUT
    if "memory" in registry.make(tier).probe().hard:  # where it is not, malloc fails in the process instead
        code, _, err = run("--tier", tier, "--memory", "64MiB", "-c", "x = bytearray(900 << 20)")
        assert (code, err) == (ExitCode.MEMORY, "fumehood: used more than the 64 MiB of memory allowed\n")


def test_what_goes_in_and_what_comes_out(tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "table.csv").write_text("1,2\n")
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\n"
        "print(open('in/table.csv').read() + sys.stdin.read(), os.environ['A'], os.environ.get('SECRET'))\n"
        "open('made.txt', 'w').write('made')\n"
    )
    monkeypatch.setenv("SECRET", "planted")
    out = tmp_path / "out"
    options = ["--file", f"{tmp_path}/table.csv:in/table.csv", "--stdin", "-", "--env", "A=x", "--out", str(out)]
    code, printed, err = run("--tier", tier, *options, str(program), stdin=b"typed")
    assert (code, printed) == (0, "1,2\ntyped x None\n"), err
    assert err == f"fumehood: saved made.txt (4 bytes) as {out}/made.txt\n"
    assert (out / "made.txt").read_text() == "made"
    assert os.listdir(out) == ["made.txt"]


def test_json_and_receipt(tier: str) -> None:
    code, printed, err = run("--tier", tier, "--json", "--receipt", "-c", "print('\\x1b[2J')")
    told = json.loads(printed)
    assert code == 0
    assert told["stdout"] == "\x1b[2J\n"
    assert told["receipt"]["tier"] == tier
    assert f"receipt: tier {tier}" in err
    assert ("not a boundary" in err) == (tier == "subprocess")


def test_output_comes_as_it_is_printed_and_a_signal_ends_it(tier: str) -> None:
    code = "import time; print('first', flush=True); time.sleep(600)"
    command = [sys.executable, "-m", "fumehood", "run", "--tier", tier, "--wall", "1h", "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"first\n"
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == ExitCode.INTERRUPTED
        finally:
            process.kill()


def test_a_floor_is_never_undercut() -> None:
    assert run("--tier", "subprocess", "--floor", "kernel", "-c", "print(1)")[:2] == (ExitCode.UNSUPPORTED, "")


@pytest.mark.parametrize("command", ["tiers", "doctor"])
def test_what_this_host_has(command: str) -> None:
    ended = subprocess.run([sys.executable, "-m", "fumehood", command, "--json"], capture_output=True, timeout=120)
    here = {tier["name"]: tier["available"] for tier in json.loads(ended.stdout)["tiers"]}
    assert list(here) == list(registry.names())
    assert here["jail"] == (why_not("jail") == "")
    if command == "doctor":
        assert (ended.returncode == 0) == here["jail"]
    words = subprocess.run([sys.executable, "-m", "fumehood", command], capture_output=True, timeout=120).stdout
    assert b"not a boundary" in words
