"""What every tier answers to a program: the fields of a result, exit codes, signals, streams and what is inherited."""

from __future__ import annotations

import hashlib
import json
import os
import signal

import pytest
from support.needs import RunnerFactory
from support.programs import BURN

from fumehood import registry
from fumehood.errors import FumehoodError
from fumehood.model import Held, Limits, Outcome, Policy
from fumehood.runner import Runner
from fumehood.tier import Features


def test_a_result_has_every_field(runner: Runner, features: Features) -> None:
    result = runner.run("print('out')")
    assert result.ok and result.outcome is Outcome.EXITED and result.exit_code == 0
    assert (result.stdout, result.stderr) == ("out\n", "")
    assert (result.usage.stdout_bytes, result.usage.stderr_bytes) == (4, 0)
    assert 0 < result.seconds < runner.policy.limits.wall_s
    assert not result.timed_out and not result.truncated and result.artifacts == ()
    assert result.receipt.tier == runner.tier.name and result.receipt.boundary is features.boundary
    assert result.receipt.controls and result.receipt.host
    assert json.loads(json.dumps(result.to_dict()))["outcome"] == "exited"


def test_a_receipt_names_every_limit_and_nothing_twice(runner: Runner) -> None:
    receipt = runner.run("").receipt
    names = [control.name for control in receipt.controls]
    assert len(names) == len(set(names))
    assert {"memory", "pids", "disk", "files", "cpu", "cpu_time", "wall", "output"} <= set(names)
    assert all(control.mechanism for control in receipt.controls)
    for limit in ("wall", "output"):  # held by the supervisor itself, wherever the program runs
        held = receipt.control(limit)
        assert held is not None and held.held is Held.HARD


def test_the_boundary_is_never_below_the_floor(tier_name: str, features: Features) -> None:
    for boundary in type(features.boundary):
        if features.boundary.meets(boundary):
            continue
        with pytest.raises(FumehoodError) as caught:
            Runner(tier=tier_name, floor=boundary)
        assert boundary.value in str(caught.value) and caught.value.tier == tier_name


def test_what_is_not_a_boundary_says_so(features: Features) -> None:
    if features.boundary.rank <= 1:
        assert "not a boundary" in features.note


def test_an_uncaught_exception_is_exit_1_with_its_traceback(runner: Runner) -> None:
    result = runner.run("x = 1\ndef f():\n    return x / 0\nf()\n")
    assert result.outcome is Outcome.EXITED and result.exit_code == 1
    assert "ZeroDivisionError" in result.stderr and "line 4" in result.stderr and "line 3" in result.stderr


@pytest.mark.usefixtures("full_python")
class TestExitCodes:
    @pytest.mark.parametrize(
        ("statement", "code", "message"),
        [
            ("sys.exit()", 0, ""),
            ("sys.exit(0)", 0, ""),
            ("sys.exit(7)", 7, ""),
            ("sys.exit(256 + 9)", 9, ""),
            ("sys.exit(-1)", 255, ""),
            ("sys.exit(1 << 70)", 255, ""),
            ("sys.exit(1 << 40)", 0, ""),
            ("sys.exit(True)", 1, ""),
            ("sys.exit('told why')", 1, "told why\n"),
            ("sys.exit((1, 2))", 1, "(1, 2)\n"),
            ("raise SystemExit", 0, ""),
            ("raise SystemExit(3)", 3, ""),
            ("exit(4)", 4, ""),
            ("os._exit(5)", 5, ""),
            ("sys.stdout.flush(); os.abort()", -signal.SIGABRT, ""),
            ("raise KeyboardInterrupt", 130, "KeyboardInterrupt\n"),
            ("import atexit; atexit.register(os._exit, 6)", 6, ""),
            ("import threading; threading.Thread(target=sys.exit, args=(9,)).start()", 0, ""),
        ],
    )
    def test_code(self, runner: Runner, statement: str, code: int, message: str) -> None:
        result = runner.run(f"import os, sys\n{statement}\n")
        assert result.exit_code == code
        assert result.outcome is (Outcome.EXITED if code >= 0 else Outcome.SIGNALED)
        assert result.stderr.endswith(message) and bool(result.stderr) == bool(message)

    @pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL", "SIGSEGV", "SIGUSR1", "SIGHUP", "SIGPIPE", "SIGRTMIN"])
    def test_signal_of_its_own(self, runner: Runner, name: str) -> None:
        number = int(getattr(signal, name))
        result = runner.run(
            f"import os, signal\nsignal.signal({number}, signal.SIG_DFL)\nos.kill(os.getpid(), {number})\n"
            if name != "SIGKILL"
            else f"import os\nos.kill(os.getpid(), {number})\n"
        )
        assert (result.outcome, result.exit_code) == (Outcome.SIGNALED, -number)


@pytest.mark.usefixtures("full_python")
class TestStreams:
    def test_streams_are_kept_apart_and_in_order(self, runner: Runner) -> None:
        result = runner.run("import sys\nfor i in range(100):\n print(i)\n print(-i, file=sys.stderr)\n")
        assert result.stdout.split() == [str(i) for i in range(100)]
        assert result.stderr.split() == [str(-i) for i in range(100)]

    def test_unicode_and_binary_come_out_as_they_went_in(self, runner: Runner) -> None:
        result = runner.run("print('héllo ☃ 𝄞', flush=True)\nimport os\nos.write(2, bytes(range(256)))\n")
        assert result.stdout_data == "héllo ☃ 𝄞\n".encode()
        assert result.stderr_data == bytes(range(256))
        assert "\ufffd" in result.stderr

    def test_output_comes_as_it_is_printed(self, runner_factory: RunnerFactory) -> None:
        """Each line waits for the sight of the one before: a sink that is served late would never end this."""
        seen: list[tuple[str, bytes]] = []
        runner = runner_factory()
        with runner.open() if runner.tier.features.live else pytest.raises(FumehoodError) as sandbox:
            program = "import time\nfor i in range(5):\n print(i, flush=True)\n time.sleep(0.15)\n"
            result = sandbox.exec(program, sink=lambda stream, data: seen.append((stream, data)))
        assert [data for _, data in seen] == [b"%d\n" % i for i in range(5)]
        assert b"".join(data for _, data in seen) == result.stdout_data

    def test_a_sink_sees_what_the_result_holds(self, runner: Runner) -> None:
        seen: dict[str, bytes] = {"stdout": b"", "stderr": b""}

        def sink(stream: str, data: bytes) -> None:
            seen[stream] += data

        result = runner.run("import sys\nprint('a' * 200000)\nprint('b' * 1000, file=sys.stderr)\n", sink=sink)
        assert seen == {"stdout": result.stdout_data, "stderr": result.stderr_data}

    def test_a_sink_that_fails_ends_the_run_and_is_heard(self, runner: Runner) -> None:
        def sink(stream: str, data: bytes) -> None:
            raise LookupError("of the sink")

        with pytest.raises(LookupError, match="of the sink"):
            runner.run("import time\nprint(1, flush=True)\ntime.sleep(600)\n", sink=sink)
        assert runner.run("print(2)").stdout == "2\n"

    @pytest.mark.parametrize("size", [0, 1, 70_000, 3 << 20])
    def test_stdin(self, runner: Runner, size: int) -> None:
        data = (b"0123456789abcde\n" * (size // 16 + 1))[:size]
        result = runner.run(
            "import sys, hashlib\nd = sys.stdin.buffer.read()\nprint(len(d), hashlib.sha256(d).hexdigest())\n",
            stdin=data,
        )
        assert result.stdout.split() == [str(size), hashlib.sha256(data).hexdigest()]

    def test_stdin_that_nobody_reads_delays_nothing(self, runner: Runner) -> None:
        assert runner.run("print(1)", stdin=b"x" * (2 << 20)).stdout == "1\n"

    def test_input_reads_lines_and_then_raises_eof(self, runner: Runner) -> None:
        result = runner.run("print(input('? '))\nprint(input())\ninput()\n", stdin="eins\nzwölf".encode())
        assert result.stdout == "? eins\nzwölf\n"
        assert result.exit_code == 1 and "EOFError" in result.stderr


@pytest.mark.usefixtures("full_python")
class TestInheritance:
    def test_environment_is_given_and_nothing_is_inherited(
        self, runner_factory: RunnerFactory, monkeypatch: pytest.MonkeyPatch, features: Features
    ) -> None:
        monkeypatch.setenv("FUMEHOOD_TEST_CANARY", "a-secret-of-the-host")
        runner = runner_factory(Policy(env={"GIVEN": "schön = ja", "EMPTY": ""}))
        result = runner.run("import os, json\nprint(json.dumps(dict(os.environ)))")
        seen = json.loads(result.stdout)
        assert seen.pop("GIVEN") == "schön = ja" and seen.pop("EMPTY") == ""
        assert "PATH" in seen or not features.commands
        assert set(seen) <= {"PATH", "LANG", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "USER", "PWD", "SHLVL", "LC_CTYPE"}
        found = runner.run("import subprocess\nprint(subprocess.run(['env'], capture_output=True, text=True).stdout)")
        assert "a-secret-of-the-host" not in found.stdout and "GIVEN=schön = ja" in found.stdout

    def test_the_block_of_environment_of_no_process_in_reach_holds_the_canary(
        self, runner_factory: RunnerFactory, monkeypatch: pytest.MonkeyPatch, features: Features
    ) -> None:
        if features.boundary.rank <= 1:
            pytest.skip("it sees the host's files as its user, and says that it is not a boundary")
        monkeypatch.setenv("FUMEHOOD_TEST_CANARY", "a-secret-of-the-host")
        program = (
            "import glob\nfor p in glob.glob('/proc/*/environ'):\n"
            " try: print(open(p).read())\n except OSError: pass\nprint('end')"
        )
        out = runner_factory().run(program).stdout
        assert "end" in out and "a-secret-of-the-host" not in out

    def test_no_descriptor_of_the_host_is_inherited(self, runner_factory: RunnerFactory) -> None:
        ours = os.open("/etc/passwd", os.O_RDONLY)
        low = [os.dup2(ours, fd) for fd in range(900, 910)]
        try:
            result = runner_factory().run(
                "import os\nfor fd in range(3, 2048):\n"
                " try: print(fd, os.readlink(f'/proc/self/fd/{fd}') if os.fstat(fd) else '')\n"
                " except OSError: pass\n"
            )
        finally:
            for fd in [ours, *low]:
                os.close(fd)
        assert result.ok and result.stdout == ""

    def test_it_starts_in_an_empty_writable_folder(self, runner: Runner) -> None:
        result = runner.run("import os\nprint(os.listdir('.'))\nopen('f', 'w').write('x')\nprint(os.listdir())")
        assert result.stdout == "[]\n['f']\n"

    def test_main_looks_like_a_fresh_interpreter(self, runner: Runner) -> None:
        result = runner.run(
            "import sys\nprint(__name__, sys.argv, sys.modules['__main__'].__dict__ is globals())\n"
            "print(sorted(n for n in sys.modules if 'fumehood' in n))\n"
            "class C: pass\nimport pickle\nprint(type(pickle.loads(pickle.dumps(C()))).__name__)\n"
        )
        assert result.stdout == "__main__ [''] True\n[]\nC\n"

    def test_two_runs_share_neither_files_nor_randomness(self, runner: Runner) -> None:
        program = (
            "import os, random, uuid\nopen('left', 'a').write('x')\n"
            "print(os.path.getsize('left'), random.random(), uuid.uuid4(), os.urandom(8).hex())"
        )
        first, second = (runner.run(program).stdout.split() for _ in range(2))
        assert first[0] == second[0] == "1"
        assert not set(first[1:]) & set(second[1:])


@pytest.mark.usefixtures("full_python")
def test_usage_counts_what_was_used(runner_factory: RunnerFactory) -> None:
    runner = runner_factory(Policy(limits=Limits(wall_s=60, cpu_s=60)))
    result = runner.run("b = bytearray(40 << 20)\nb[::4096] = b'x' * len(b[::4096])" + BURN)
    usage = result.usage
    assert result.ok
    assert usage.cpu_s is None or 0.45 <= usage.cpu_s < 60
    assert usage.memory_peak_bytes is None or 40 << 20 <= usage.memory_peak_bytes < 200 << 20
    control = result.receipt.control("cpu")
    assert control is not None and (control.held is not Held.HARD or usage.cpu_s is not None)


def test_the_registry_lists_no_tier_twice() -> None:
    assert len(set(registry.names())) == len(registry.names())
