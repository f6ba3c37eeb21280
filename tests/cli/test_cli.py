from __future__ import annotations

import argparse
import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import fakes
import pytest

import fumehood
from fumehood import cli, errors, registry
from fumehood.cli import exits
from fumehood.cli.exits import ExitCode
from fumehood.errors import FumehoodError
from fumehood.model import Outcome, Result, Usage

FAKES = str(Path(fakes.__file__))


@dataclass
class Ended:
    code: int
    out: bytes
    err: str

    def json(self) -> dict[str, object]:
        value = json.loads(self.out)
        assert isinstance(value, dict)
        return value


class Command:
    """The command line in this process, with the fake tiers."""

    def __init__(self, capture: pytest.CaptureFixture[bytes]) -> None:
        self._capture = capture

    def __call__(self, *arguments: str) -> Ended:
        code = cli.main(arguments)
        out, err = self._capture.readouterr()
        return Ended(code, out, err.decode())


@pytest.fixture
def fumehood_command(capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.setattr(registry, "_TIERS", fakes.TIERS)
    return Command(capfdbinary)


@contextlib.contextmanager
def started(*arguments: str, **options: object) -> Iterator[subprocess.Popen[bytes]]:
    """The command line as a process, with the fake tiers."""
    process = subprocess.Popen([sys.executable, FAKES, *arguments], **options)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        process.kill()
        process.wait()


# -- output and exit codes


def test_output_passes_through(fumehood_command: Command) -> None:
    assert fumehood_command("run", "-c", "hello") == Ended(0, b"hello\n", "warned\n")


def test_what_is_no_terminal_gets_the_bytes_as_they_are(fumehood_command: Command) -> None:
    assert fumehood_command("run", "-c", "hostile").out == b"\xe2\x82\xac \x1b[31mred\x1b[0m \xe2\x80\xae \xff\n"


@pytest.mark.parametrize(
    ("script", "code", "words"),
    [
        ("exit3", 3, ""),
        ("segfault", 139, "fumehood: died of signal 11 (SIGSEGV)\n"),
        ("wall", 245, "fumehood: ran longer than the 10 s allowed\n"),
        ("cpu", 246, "fumehood: used more than the 10 s of CPU time allowed\n"),
        ("memory", 247, "fumehood: used more than the 256 MiB of memory allowed\n"),
        ("output", 248, "fumehood: printed more than the 1 MiB allowed\n"),
        ("lacking", 1, "fumehood: the Python of tier fake lacks what it needs: import numpy\n"),
        ("denied", 249, "fumehood: was not approved\n"),
        ("cancelled", 130, "fumehood: was cancelled\n"),
        ("unstartable", 243, "fumehood: fake: no room\nfumehood: what to do: make room\n"),
        ("lost", 244, "fumehood: fake: it is gone\n"),
        ("no_space", 243, "fumehood: no space for data.csv\n"),
        ("host_fails", 250, "fumehood: [Errno 28] No space left on device: '/out/a.csv'\n"),
    ],
)
def test_every_end_has_its_code_and_its_words(fumehood_command: Command, script: str, code: int, words: str) -> None:
    assert fumehood_command("run", "-c", script) == Ended(code, b"", words)
    told = fumehood_command("run", "--json", "-c", script)
    assert told.code == code
    assert told.err == ""
    assert {"error", "outcome"} & told.json().keys()


def test_a_fault_shows_where_it_is(fumehood_command: Command) -> None:
    ended = fumehood_command("run", "--json", "-c", "broken")
    assert ended.code == ExitCode.FAULT
    assert "Traceback" in ended.err
    assert ended.json() == {"error": {"type": "RuntimeError", "message": "a fault", "tier": None, "remedy": None}}


def test_dropped_output_is_said(fumehood_command: Command) -> None:
    ended = fumehood_command("run", "-c", "truncated")
    assert ended == Ended(0, b"abc", "fumehood: 2 KiB of output beyond the 1 MiB allowed were dropped\n")


def every_error() -> list[type[FumehoodError]]:
    return [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, FumehoodError)]


@pytest.mark.parametrize("kind", [k for k in every_error() if k is not FumehoodError])
def test_every_error_has_a_code(kind: type[FumehoodError]) -> None:
    assert any(issubclass(kind, known) for known, _ in exits._OF_ERROR)
    assert exits.of_error(kind("x")) in ExitCode


def test_every_outcome_has_a_code() -> None:
    result = Result(Outcome.EXITED, 7, b"", b"", 0, Usage(), fakes.RECEIPT)
    assert exits.of_result(result) == 7
    assert exits.of_result(replace(result, outcome=Outcome.SIGNALED, exit_code=-9)) == 137
    limits = [o for o in Outcome if o not in (Outcome.EXITED, Outcome.SIGNALED)]
    codes = [exits.of_result(replace(result, outcome=o, exit_code=None)) for o in limits]
    assert len(set(codes)) == len(limits)
    assert exits.of_result(replace(result, exit_code=None)) == ExitCode.UNKNOWN


def test_codes_are_distinct_and_each_is_in_the_help() -> None:
    values = [code.value for code in ExitCode]
    assert len(set(values)) == len(values)
    for code in ExitCode:
        assert f"{code.value}" in exits.table()


# -- what the program gets


def test_files_stdin_and_variables_are_handed_over(fumehood_command: Command, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"A")
    (tmp_path / "b:c").write_bytes(b"B")
    (tmp_path / "in").write_bytes(b"IN")
    ended = fumehood_command(
        *("run", "-c", "inputs", "--stdin", f"{tmp_path}/in", "--env", "A=1=2", "--env", "B="),
        *("--file", f"{tmp_path}/a.csv", "--file", f"{tmp_path}/a.csv:in/x", "--file", f"{tmp_path}/a.csv:dir/"),
        *("--file", f"{tmp_path}/b:c:b"),
    )
    files = [("a.csv", b"A"), ("b", b"B"), ("dir/a.csv", b"A"), ("in/x", b"A")]
    assert ended.out.decode() == repr((b"IN", files, [("A", "1=2"), ("B", "")]))


def test_the_program_comes_from_a_file_or_stdin(fumehood_command: Command, tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text("hello\n")
    assert fumehood_command("run", str(tmp_path / "hello.py")).out == b"hello\n"
    with started("run", "-", stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.communicate(b"hello\n")[0] == b"hello\n"


def test_stdin_is_not_passed_on_unasked(tmp_path: Path) -> None:
    for options, expected in (([], b""), (["--stdin", "-"], b"secret")):
        with started("run", "-c", "inputs", *options, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.communicate(b"secret")[0].decode() == repr((expected, [], []))


def test_options_count_more_than_the_policy_file(fumehood_command: Command, tmp_path: Path) -> None:
    policy = tmp_path / "p.toml"
    policy.write_text("[limits]\nwall_s = 3\npids = 7\n[env]\nA = '1'\nB = '1'\n")
    ended = fumehood_command("run", "-c", "limits", "--policy", str(policy), "--pids", "9", "--memory", "1GiB")
    for part in (b"wall_s=3,", b"pids=9,", b"memory_bytes=1073741824,", b"cpu_s=10.0,"):
        assert part in ended.out
    ended = fumehood_command("run", "-c", "inputs", "--policy", str(policy), "--env", "B=2")
    assert ended.out.decode() == repr((b"", [], [("A", "1"), ("B", "2")]))


def test_every_limit_has_its_option(fumehood_command: Command) -> None:
    options = {
        "--wall": ("500ms", b"wall_s=0.5"),
        "--cpu": ("2m", b"cpu_s=120.0"),
        "--cpus": ("0.5", b"cpus=0.5"),
        "--memory": ("64M", b"memory_bytes=67108864"),
        "--pids": ("5", b"pids=5"),
        "--disk": ("1MB", b"disk_bytes=1000000"),
        "--output": ("0", b"output_bytes=0"),
    }
    for option, (value, expected) in options.items():
        assert expected in fumehood_command("run", "-c", "limits", option, value).out


def test_the_floor_of_the_policy_holds_against_options(fumehood_command: Command, tmp_path: Path) -> None:
    policy = tmp_path / "p.toml"
    policy.write_text("floor = 'hardware'\n")
    for options in (["--floor", "kernel", "--tier", "fake"], ["--tier", "fake"]):
        ended = fumehood_command("run", "-c", "hello", "--policy", str(policy), *options)
        assert ended.code == ExitCode.UNSUPPORTED
        assert ended.out == b""
        assert "the policy's floor is 'hardware'" in ended.err
    assert fumehood_command("run", "-c", "hello", "--policy", str(policy), "--floor", "none").code == 242


# -- what is refused


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "required: COMMAND"),
        (["rnu"], "invalid choice: 'rnu'"),
        (["run"], "give one program"),
        (["run", "-c", "hello", "x.py"], "give one program"),
        (["run", "--wal", "3", "-c", "hello"], "unrecognized arguments: --wal"),
        (["run", "-c", "hello", "--wall", "-1"], "--wall: '-1' is not a time"),
        (["run", "-c", "hello", "--wall", "nan"], "--wall: 'nan' is not a time"),
        (["run", "-c", "hello", "--wall", "0"], "--wall: limits.wall_s must be between"),
        (["run", "-c", "hello", "--cpus", "inf"], "--cpus: limits.cpus must be finite"),
        (["run", "-c", "hello", "--cpus", "two"], "--cpus: 'two' is not a number"),
        (["run", "-c", "hello", "--memory", "1"], "--memory: limits.memory_bytes must be between"),
        (["run", "-c", "hello", "--memory", "lots"], "--memory: 'lots' is not a size"),
        (["run", "-c", "hello", "--pids", "1.5"], "--pids: '1.5' is not a whole number"),
        (["run", "-c", "hello", "--env", "PATH"], "--env: 'PATH' has no value"),
        (["run", "-c", "hello", "--env", "1A=x"], "--env: env: '1A'"),
        (["run", "-c", "hello", "--env", "A=\udcff"], "--env: the value of A is not UTF-8"),
        (["run", "-c", "hello", "--preload", "a b"], "--preload: preload: 'a b'"),
        (["run", "-c", "hello", "--environment", ""], "--environment: environment must be"),
        (["run", "-c", "hello", "--policy", "/nonexistent.toml"], "policy file '/nonexistent.toml'"),
        (["run", "-c", "hello", "--tier", "fort"], "unknown tier 'fort'; tiers are fake, absent"),
        (["run", "-c", "hello", "--floor", "wood"], "unknown boundary 'wood'"),
        (["run", "-c", "hello", "--file", "/nonexistent"], "--file /nonexistent: cannot read"),
        (["run", "-c", "hello", "--file", "/etc"], "Is a directory"),
        (["run", "-c", "hello", "--file", "/dev/null:"], "not a relative path"),
        (["run", "-c", "hello", "--file", "/dev/null:../x"], "not a relative path"),
        (["run", "-c", "hello", "--file", "/dev/null:a", "--file", "/dev/null:./a"], "a is given twice"),
        (["run", "-c", "hello", "--file", "/dev/zero"], "--file /dev/zero: '/dev/zero' is over the 64 MiB"),
        (["run", "-c", "hello", "--out", "/dev/null/x"], "--out: cannot make the folder"),
        (["run", "-c", "hello", "--stdin", "/nonexistent"], "--stdin: cannot read"),
        (["run", "-", "--stdin", "-"], "stdin cannot be both"),
        (["run", "/nonexistent.py"], "the program: cannot read '/nonexistent.py': No such file"),
        (["run", "nul\0.py"], "cannot read"),
        (["run", "/etc"], "Is a directory"),
        (["run", "/dev/zero"], "the program: '/dev/zero' is over the 16 MiB"),
        (["env", "build", "demo", "--", "-r"], "'-r' is not a package"),
        (["env"], "required: ACTION"),
    ],
)
def test_a_wrong_request_is_refused_in_words_and_in_json(
    fumehood_command: Command, arguments: list[str], words: str
) -> None:
    ended = fumehood_command(*arguments)
    assert (ended.code, ended.out) == (ExitCode.REQUEST, b"")
    assert words in ended.err
    if arguments and arguments[0] == "run":
        told = fumehood_command(arguments[0], "--json", *arguments[1:])
        assert (told.code, told.err) == (ExitCode.REQUEST, "")
        error = told.json()["error"]
        assert isinstance(error, dict)
        assert (error["type"], words in error["message"]) == ("PolicyError", True)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    secret.chmod(0)
    if os.access(secret, os.R_OK):
        pytest.skip("root reads everything")
    assert cli.main(["run", "-c", "hello", "--file", str(secret)]) == ExitCode.REQUEST


def test_a_tier_that_is_not_here_says_why_and_what_to_do(fumehood_command: Command) -> None:
    ended = fumehood_command("run", "-c", "hello", "--tier", "absent")
    assert ended.code == ExitCode.UNAVAILABLE
    assert ended.err == (
        "fumehood: absent: not available on this host: switched off␛[2J\nfumehood: what to do: switch it on\n"
    )


def test_what_a_tier_cannot_hold_is_named_in_json(fumehood_command: Command, tmp_path: Path) -> None:
    policy = tmp_path / "p.toml"
    policy.write_text("egress = ['pypi.org']\nhard = ['disk']\n")
    ended = fumehood_command("run", "--json", "-c", "hello", "--tier", "fake", "--policy", str(policy))
    assert ended.code == ExitCode.UNSUPPORTED
    error = ended.json()["error"]
    assert isinstance(error, dict)
    assert error["unmet"] == ["egress by an allow-list", "a hard limit on disk"]
    assert error["tier"] == "fake"


# -- what comes of it


def test_json_is_one_object_and_nothing_else(fumehood_command: Command) -> None:
    ended = fumehood_command("run", "--json", "-c", "hostile")
    assert ended.out.count(b"\n") == 1
    assert ended.out.isascii()
    assert ended.json()["stdout"] == "€ \x1b[31mred\x1b[0m \u202e \ufffd\n"
    assert ended.json()["receipt"] == fakes.RECEIPT.to_dict()


def test_artifacts_are_saved_and_told(fumehood_command: Command, tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    ended = fumehood_command("run", "-c", "leave", "--out", str(out))
    assert (out / "a.csv").read_bytes() == b"1,2\n"
    assert ended.err.splitlines() == [
        f"fumehood: saved a.csv (4 bytes) as {out}/a.csv",
        f"fumehood: saved bad␛[2J␊.csv (0 bytes) as {out}/bad␛[2J␊.csv",
        "fumehood: skipped huge: over the limit",
    ]
    told = fumehood_command("run", "--json", "-c", "leave", "--out", str(out)).json()["artifacts"]
    assert isinstance(told, list)
    assert told[0] == {"path": "a.csv", "size_bytes": 4, "saved": f"{out}/a.csv", "skipped": None}


def test_the_receipt_is_a_table_on_stderr(fumehood_command: Command) -> None:
    ended = fumehood_command("run", "-c", "exit3", "--receipt")
    assert ended.code == 3
    assert ended.err == (
        "receipt: tier fake (for tests), boundary kernel, enforced by Linux 6.1\n"
        "  control  held         by         value\n"
        "  memory   hard         cgroup v2  256 MiB\n"
        "  pids     best effort  rlimit     64\n"
        "  note: a test␛[2J\n"
    )


# -- other commands


def test_tiers_says_what_is_here_and_what_to_do(fumehood_command: Command) -> None:
    ended = fumehood_command("tiers")
    assert ended.code == 0
    assert ended.out.decode() == (
        "tier               boundary\n"
        "fake    available  kernel (for tests)\n"
        "        plays scripts\n"
        "absent  not here   kernel (for tests)\n"
        "        plays scripts\n"
        "        why not: switched off␛[2J\n"
        "        what to do: switch it on\n"
    )
    tiers = fumehood_command("tiers", "--json").json()["tiers"]
    assert isinstance(tiers, list)
    assert tiers[0]["note"] == "for tests"
    assert tiers[0]["hard_limits"] == ["memory"]
    assert tiers[0]["features"]["files"] is True
    assert (tiers[1]["available"], tiers[1]["remedy"]) == (False, "switch it on")


def test_doctor_says_whether_the_default_is_here(fumehood_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = fumehood_command("doctor")
    assert ended.code == 0
    text = ended.out.decode()
    for part in ("kernel", "user namespaces", "Landlock", "fake: zygote: none", "default tier: fake", "why not:"):
        assert part in text
    assert "\x1b" not in text
    monkeypatch.setattr(registry, "_TIERS", {"absent": "fakes:AbsentTier"})
    ended = fumehood_command("doctor", "--json")
    assert ended.code == ExitCode.UNAVAILABLE
    told = ended.json()
    assert told["default"] is None
    assert isinstance(told["facts"], dict)
    assert told["facts"]["fumehood"] == fumehood.__version__


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "not in this kernel"),
        ({"user/max_user_namespaces": "0"}, "off"),
        ({"user/max_user_namespaces": "9"}, "on, at most 9"),
        ({"user/max_user_namespaces": "9", "kernel/unprivileged_userns_clone": "0"}, "for root only"),
        ({"user/max_user_namespaces": "9", "kernel/apparmor_restrict_unprivileged_userns": "1"}, "by AppArmor"),
        ({"user/max_user_namespaces": "9", "kernel/apparmor_restrict_unprivileged_userns": "0"}, "on, at most 9"),
    ],
)
def test_doctor_reads_the_switches_of_user_namespaces(tmp_path: Path, files: dict[str, str], words: str) -> None:
    from fumehood.cli.doctor import host_facts

    for name, content in files.items():
        path = tmp_path / "proc/sys" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    assert words in host_facts(tmp_path)["user namespaces"]


def test_env_list_remove_and_a_failing_build(
    fumehood_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUMEHOOD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    assert fumehood_command("env", "list") == Ended(0, b"", "")
    assert fumehood_command("env", "list", "--json").json() == {"environments": []}
    ended = fumehood_command("env", "remove", "demo")
    assert ended.code == ExitCode.REQUEST
    assert "fumehood env build demo" in ended.err
    ended = fumehood_command("env", "build", "demo", "gamma")
    assert (ended.code, ended.out) == (ExitCode.START, b"")
    assert "resolving gamma\n" in ended.err, "progress"
    assert "No matching distribution found for gamma" in ended.err


def test_version_and_help(capfd: pytest.CaptureFixture[str]) -> None:
    for arguments, words in {
        ("--version",): f"fumehood {fumehood.__version__}\n",
        ("--help",): "241    nothing started",
        ("run", "--help"): "--receipt",
        ("env", "build", "--help"): "PACKAGE",
    }.items():
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        assert ended.value.code == 0
        assert words in capfd.readouterr().out


def test_help_imports_no_command() -> None:
    code = "import sys; from fumehood import cli; cli.parser(); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "fumehood.cli" in loaded
    assert not {"asyncio", "fumehood.runner", "fumehood.registry", "fumehood.environments"} & set(loaded)
    assert not {module for module, _ in cli.COMMANDS.values()} & set(loaded)


def test_the_help_in_the_documentation_is_the_help() -> None:
    root = Path(__file__).parents[2]
    script = [sys.executable, str(root / "scripts" / "cli_docs.py"), "--check"]
    if sys.version_info[:2] != (3, 11):
        pytest.skip("argparse words its help differently in each version of Python")
    assert subprocess.run(script, capture_output=True, text=True).stderr == ""


def test_every_command_can_be_configured() -> None:
    for name in cli.COMMANDS:
        assert isinstance(cli.parser(name), argparse.ArgumentParser)


# -- terminals, signals and pipes, each in a process of its own


def test_a_terminal_gets_nothing_that_it_would_obey() -> None:
    ours, theirs = pty.openpty()
    with started("run", "-c", "hostile", stdout=theirs, stderr=theirs, env=os.environ | {"PYTHONUTF8": "1"}) as process:
        assert process.wait(60) == 0
        os.close(theirs)
        with open(ours, "rb") as terminal:
            shown = terminal.read1(1000)
    assert shown.decode() == "€ ␛[31mred␛[0m <U+202E> \ufffd\r\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_destroys_the_sandbox(tmp_path: Path, number: signal.Signals) -> None:
    closed = tmp_path / "closed"
    env = os.environ | {"FAKE_CLOSED": str(closed)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with started("run", "-c", "forever", env=env, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"started\n"
        process.send_signal(number)
        assert process.wait(60) == 128 + number
        assert process.stderr is not None
        assert process.stderr.read() == b""
    assert closed.exists()


def test_a_reader_that_goes_away_ends_the_run(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    env = os.environ | {"FAKE_CLOSED": str(closed)}
    with started("run", "-c", "babble", env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"line\n"
        process.stdout.close()
        assert process.wait(60) == ExitCode.BROKEN_PIPE
        assert process.stderr is not None
        assert process.stderr.read() == b""
    assert closed.exists()


def test_a_reader_that_stops_delays_nothing(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    env = os.environ | {"FAKE_CLOSED": str(closed)}
    with started("run", "-c", "flood", "--output", "8MiB", env=env, stdout=subprocess.PIPE) as process:
        end = time.monotonic() + 60
        while not closed.exists():  # the sandbox is destroyed although 4 MiB wait for the reader
            assert time.monotonic() < end
            time.sleep(0.01)
        assert process.poll() is None
        assert process.communicate()[0] == (b"x" * 65535 + b"\n") * 64
        assert process.returncode == 0


def test_a_full_disk_under_stdout_is_told() -> None:
    with open("/dev/full", "wb") as full, started("run", "-c", "hello", stdout=full, stderr=subprocess.PIPE) as process:
        err = process.communicate()[1].decode()
    assert process.returncode == ExitCode.FAULT
    assert "the output could not be written: No space left on device" in err


@pytest.mark.parametrize(
    "arguments", [["run", "--json", "-c", "hello"], ["tiers"], ["--help"], ["run", "--json", "-c", "lost"]]
)
def test_a_broken_pipe_is_no_traceback(arguments: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with started(*arguments, stdout=writing, stderr=subprocess.PIPE) as process:
        os.close(writing)
        err = process.communicate()[1]
    assert err == b""
    assert process.returncode in (ExitCode.BROKEN_PIPE, ExitCode.UNKNOWN)


def test_closed_standard_descriptors_are_not_taken_by_others(tmp_path: Path) -> None:
    command = f'exec "{sys.executable}" "{FAKES}" run -c hello --out "{tmp_path}" <&- >&-'
    ended = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE)
    assert (ended.returncode, ended.stderr) == (0, b"warned\n")


@pytest.mark.parametrize("command", ["bench", "verify"])
def test_a_report_that_cannot_be_written_is_told_before_the_work(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "make", lambda *_: pytest.fail("the work has begun"))
    for path in (tmp_path / "absent" / "r.html", tmp_path):
        assert cli.main([command, "--tier", "jail", "--html", str(path)]) == ExitCode.REQUEST
        assert str(path) in capsys.readouterr().err
