"""Programs that are broken or break themselves: each ends in a defined way, and the next run works."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.needs import RunnerFactory

from fumehood.errors import FumehoodError, PolicyError
from fumehood.model import CODE_BYTES_MAX, Code, Command, Limits, Outcome, Policy
from fumehood.runner import Runner


@pytest.fixture(autouse=True)
def next_run_works(runner: Runner) -> Iterator[None]:
    yield
    assert runner.run("print('next')").stdout == "next\n"


def test_empty(runner: Runner) -> None:
    for program in ("", "\n\n", "# nothing\n", b""):
        result = runner.run(program)
        assert result.ok and result.stdout == result.stderr == ""


def test_syntax_error(runner: Runner) -> None:
    result = runner.run("print('before')\ndef f(:\n")
    assert result.exit_code == 1 and result.stdout == "" and "SyntaxError" in result.stderr


@pytest.mark.parametrize("kind", ["int", "None", "list"])
def test_what_is_no_program(runner: Runner, kind: str) -> None:
    with pytest.raises(FumehoodError):
        runner.run(Code({"int": 1, "None": None, "list": ["x"]}[kind]))  # type: ignore[arg-type]
    with pytest.raises(PolicyError):
        Command(())
    with pytest.raises(PolicyError):
        Command(("a\0b",))


def test_code_that_is_too_long_is_refused_before_anything_starts(runner: Runner) -> None:
    with pytest.raises(PolicyError, match="longer"):
        runner.run(b"#" * (CODE_BYTES_MAX + 1))
    with pytest.raises(PolicyError, match="longer"):
        runner.run("é" * (CODE_BYTES_MAX // 2 + 1))


@pytest.mark.usefixtures("full_python")
class TestFullPython:
    @pytest.mark.parametrize(
        ("program", "message"),
        [
            (b"print('\xff\xfe')", "SyntaxError"),
            (b"\xff\xff\xff", "SyntaxError"),
            (b"# coding: no-such\nprint(1)", "SyntaxError"),
            ("print('\ud800')", "SyntaxError"),
            (b"print(1)\0print(2)", "null bytes"),
            ("x = 'a\0b'", "null bytes"),
            (b"\0" * 1000, "null bytes"),
            ("(" * 100_000, "Error"),
            ("x = " + "-" * 100_000 + "1", "Error"),
        ],
    )
    def test_what_does_not_compile(self, runner: Runner, program: str | bytes, message: str) -> None:
        result = runner.run(program)
        assert result.outcome in (Outcome.EXITED, Outcome.SIGNALED) and not result.ok and result.stdout == ""
        assert message in result.stderr or result.outcome is Outcome.SIGNALED

    def test_other_encodings_with_a_cookie(self, runner: Runner) -> None:
        assert runner.run(b"# coding: latin-1\nprint('\xe9')").stdout == "é\n"
        assert runner.run(b"\xef\xbb\xbfprint('bom')").stdout == "bom\n"
        assert runner.run("print('crlf')\r\nprint(2)\r\n").stdout == "crlf\n2\n"

    def test_code_of_10_mb(self, runner_factory: RunnerFactory) -> None:
        runner = runner_factory(Policy(limits=Limits(wall_s=60, cpu_s=60, memory_bytes=1 << 30)))
        program = b"x = '" + b"a" * 10_000_000 + b"'\nprint(len(x))\n"
        assert runner.run(program).stdout == "10000000\n"

    @pytest.mark.parametrize(
        ("program", "exit_code"),
        [
            ("import ctypes; ctypes.string_at(0)", -11),
            ("import os; os._exit(3)", 3),
            ("import os; os.abort()", -6),
            ("def f(): f()\nf()", 1),
            ("import os; os.close(0); os.close(1); os.close(2); print('x')", None),
            ("import os; os.closerange(0, 1000)", None),
            ("import os; os.closerange(0, 1000); os._exit(4)", 4),
            ("import os; os.dup2(os.open('/dev/full', os.O_WRONLY), 1); print('x')", 120),
            ("import sys; sys.stdout = None; print('x')", 0),
            ("import sys; sys.stdout.close()", 0),
            ("import sys; sys.stderr.close(); 1/0", 1),
            ("import sys; sys.modules.clear()", None),
            ("import builtins; builtins.__dict__.clear()", None),
            ("import sys; del sys.excepthook; 1/0", 1),
            ("import sys; sys.excepthook = 3; 1/0", 1),
            ("class E(Exception):\n def __str__(self): raise E\nraise E", 1),
            ("import sys; sys.settrace(lambda *a: 1/0)\ndef f(): pass\nf()", 1),
            ("import os, signal; os.kill(0, signal.SIGTERM)", -15),
            ("import gc, sys; gc.disable(); x = []; x.append(x); raise SystemExit(x)", 1),
            ("import atexit; atexit.register(lambda: 1/0)", 0),
            ("class D:\n def __del__(self): raise SystemExit(4)\nx = D()", 0),
        ],
    )
    def test_what_breaks_itself(self, runner: Runner, program: str, exit_code: int | None) -> None:
        result = runner.run(program)
        assert result.outcome in (Outcome.EXITED, Outcome.SIGNALED)
        assert exit_code is None or result.exit_code == exit_code
        assert len(result.stderr_data) < 100_000

    def test_recursion_without_end(self, runner: Runner) -> None:
        """The interpreter's stack is on the heap (3.11) or the C stack: memory runs out, or it crashes.

        CPython 3.11 raises SystemError, "error return without exception set", where there is no room for a frame.
        """
        result = runner.run("import sys; sys.setrecursionlimit(10**8)\ndef f(): f()\nf()")
        said = any(name in result.stderr for name in ("MemoryError", "SystemError"))
        assert result.outcome in (Outcome.MEMORY, Outcome.SIGNALED, Outcome.WALL) or said
        assert not result.ok

    def test_input_at_end_of_file(self, runner: Runner) -> None:
        result = runner.run("input()")
        assert result.exit_code == 1 and "EOFError" in result.stderr

    @pytest.mark.parametrize(
        "program",
        [
            "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
            "import os, signal; os.kill(0, signal.SIGSTOP)",
            "import os, signal\nif os.fork(): signal.pause()\nos.kill(-1, signal.SIGSTOP)\nsignal.pause()",
            "import os, signal; os.close(0); os.close(1); os.close(2); signal.pause()",
            "import threading; threading.Thread(target=threading.Event().wait).start()",
            "import atexit; atexit.register(lambda: [None for _ in iter(int, 1)])",
            "class D:\n def __del__(self):\n  while True: pass\nx = D()",
        ],
    )
    def test_what_never_ends_meets_its_deadline(self, runner_factory: RunnerFactory, program: str) -> None:
        result = runner_factory(Policy(limits=Limits(wall_s=0.7))).run(program)
        assert result.outcome is Outcome.WALL and result.exit_code is None

    @pytest.mark.parametrize("signal_name", ["SIGKILL", "SIGTERM", "SIGSTOP", "SIGHUP"])
    def test_signals_to_everybody_end_at_most_the_run(self, runner_factory: RunnerFactory, signal_name: str) -> None:
        runner = runner_factory(Policy(limits=Limits(wall_s=0.7)))
        result = runner.run(
            f"import os, signal\nfor pid in [1, -1, *range(1, 50)]:\n"
            f"    if pid != os.getpid():\n"
            f"        try: os.kill(pid, signal.{signal_name})\n        except OSError: pass\nprint('lived')\n"
        )
        assert result.outcome in (Outcome.EXITED, Outcome.SIGNALED, Outcome.WALL)

    def test_live_too(self, runner: Runner) -> None:
        if not runner.tier.features.live:
            pytest.skip("the tier promises no live sandbox")
        with runner.open() as sandbox:
            for program in (
                b"\xff",
                "x\0",
                "import os; os.closerange(0, 1000)",
                "import sys; sys.modules.clear()",
                "import builtins; builtins.__dict__.clear()",
                "import os; os.write(3, b'fh' + bytes(100))",
                "import socket; s = socket.socket(fileno=3); s.send(b'x' * 6)",
                "import os; pid = os.fork()",
            ):
                sandbox.exec(program)
                assert sandbox.exec("print('next')").stdout == "next\n", program
