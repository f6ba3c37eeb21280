"""What live execs show: values, MIME bundles, namespaces, top-level await, and tracebacks of the program alone."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable

import pytest
from support.needs import RunnerFactory

from fumehood.model import Code, Display, Limits, Outcome, Policy
from fumehood.runner import AsyncRunner, LiveSandbox, Runner
from fumehood.tier import Features

pytestmark = pytest.mark.usefixtures("with_displays")


@pytest.fixture
def with_displays(features: Features) -> None:
    if not features.displays:
        pytest.skip("the tier promises no displays; test_refused.py sees them refused")


def shown(sandbox: LiveSandbox, code: str) -> list[dict[str, bytes]]:
    result = sandbox.exec(code)
    assert result.ok, result.stderr
    assert not result.displays_truncated
    return [dict(display.data) for display in result.displays]


def plain(*texts: str) -> list[dict[str, bytes]]:
    return [{"text/plain": text.encode()} for text in texts]


def test_the_value_of_the_last_expression(runner: Runner) -> None:
    with runner.open() as sandbox:
        assert shown(sandbox, "x = 41\nx + 1") == plain("42")
        assert shown(sandbox, "'é'") == plain("'é'")
        for nothing in ("", "None", "x = 5", "x;", "x  # comment\npass", "def f(): return 1"):
            assert shown(sandbox, nothing) == [], nothing
        assert shown(sandbox, "for i in range(2): display(i)\ndisplay('a', x)\nf()") == plain("0", "1", "'a'", "5", "1")
        assert sandbox.exec("print('out')\n7").stdout == "out\n"
        assert shown(sandbox, "from __future__ import annotations\n(lambda: 1)()") == plain("1")
        assert shown(sandbox, b"# coding: latin-1\n'\xe9'".decode("latin-1")) == plain(repr("Ã©"))


def test_every_form_of_an_object(runner: Runner) -> None:
    forms = {
        "text/html": b"<b>h</b>",
        "text/markdown": b"*m*",
        "text/latex": rb"$\frac{1}{2}$",
        "image/svg+xml": b"<svg/>",
        "image/png": b"\x89PNG\r\n\x1a\n" + bytes(range(256)),
        "application/pdf": b"%PDF-1.7 \xff",
        "application/json": b'{"a": [1.5, null]}',
    }
    methods = "\n".join(
        f"    def _repr_{mime.partition('/')[2].removesuffix('+xml')}_(self): return "
        f"{form if mime in ('image/png', 'application/pdf') else form.decode()!r}"
        for mime, form in forms.items()
    )
    with runner.open() as sandbox:
        code = f"class A:\n{methods}\n    def __repr__(self): return 'A!'\nA()"
        assert shown(sandbox, code) == [{**forms, "text/plain": b"A!"}]
        assert shown(sandbox, "A") == plain("<class '__main__.A'>")  # the methods are of its instances
        jpeg = b"\xff\xd8\xff\xe0rest"
        code = f"class J:\n    def _repr_jpeg_(self): return {jpeg!r}\n    def __repr__(self): return ''\nJ()"
        assert shown(sandbox, code) == [{"image/jpeg": jpeg, "text/plain": b""}]
        result = sandbox.exec(
            "class M:\n    def _repr_mimebundle_(self, include=None, exclude=None):\n"
            "        return {'text/plain': 'p', 'text/x-own': 'o'}, {'width': 2.5}\nM()"
        )
        assert result.displays == (
            Display({"text/plain": b"p"}, {"width": 2.5}, ("text/x-own: not a type that is passed on",)),
        )
        raw = "display({'text/latex': r'$x$', 'image/png': 'iVBORw0KGgo='}, raw=True, metadata={'a': 1})"
        assert sandbox.exec(raw).displays == (
            Display({"text/latex": b"$x$", "image/png": b"\x89PNG\r\n\x1a\n"}, {"a": 1}),
        )


def test_a_form_that_fails_or_lies_costs_only_itself(runner: Runner) -> None:
    with runner.open() as sandbox:
        result = sandbox.exec(
            "class A:\n    def _repr_html_(self): raise ValueError('mine')\n"
            "    def _repr_png_(self): return b'GIF89a'\n"
            "    def _repr_svg_(self): return b'\\xff<svg'\n    def __repr__(self): return 'A'\nA()"
        )
        assert result.ok and [dict(d.data) for d in result.displays] == plain("A")
        dropped = " ".join(result.displays[0].dropped)
        assert "image/png: does not begin" in dropped and "image/svg+xml: not UTF-8" in dropped
        assert "ValueError: mine" in result.stderr and "fumehood" not in result.stderr
        result = sandbox.exec("class B:\n    def __repr__(self): raise ValueError('worse')\nB()")
        assert result.exit_code == 1 and result.displays == ()
        assert result.stderr.splitlines()[1].startswith('  File "<agent-2>", line 2')


def test_displays_are_bounded(runner_factory: RunnerFactory) -> None:
    with runner_factory(Policy(limits=Limits(display_bytes=200_000))).open() as sandbox:
        result = sandbox.exec("display({'text/plain': 'small', 'text/html': 'x' * 300_000}, raw=True)\n1")
        assert [dict(d.data) for d in result.displays] == plain("small", "1")
        assert result.displays[0].dropped == ("text/html: 300000 bytes are more than may be displayed",)
        result = sandbox.exec("for i in range(300): display(i)")
        assert result.ok and len(result.displays) == 256 and result.displays_truncated
        result = sandbox.exec("for i in range(100): display('x' * 10_000)\nprint('end')")
        assert result.stdout == "end\n"
        assert 0 < sum(len(f) for d in result.displays for f in d.data.values()) <= 200_000
        assert shown(sandbox, "'after'") == plain("'after'")


@pytest.mark.parametrize(
    "item",
    [
        b"\xff" * 100_000,
        struct.pack("!II", 2, 0) + b"[]",
        struct.pack("!II", 1 << 31, 1 << 31),
        struct.pack("!II", 5000, 0) + b"[" * 5000,
        struct.pack("!II", 33, 1) + b'{"types": [["text/plain", 999]]} x',
        struct.pack("!II", 10, 0) + b'{"types":',
    ],
    ids=["noise", "no object", "huge", "deep", "long", "cut"],
)
def test_a_program_that_writes_the_pipe_itself(runner: Runner, item: bytes) -> None:
    find = (
        "import os, stat\nfds = [f for f in map(int, os.listdir('/proc/self/fd')) if f > 3]\n"
        f"for f in fds:\n    try: os.write(f, {item!r})\n    except OSError: pass\n1"
    )
    with runner.open() as sandbox:
        result = sandbox.exec(find)
        assert result.ok and result.displays == () and result.displays_truncated
        assert shown(sandbox, "2") == plain("2")


def test_single_runs_display_when_asked(runner: Runner) -> None:
    result = runner.run("display(1)\n2", displays=True)
    assert [dict(d.data) for d in result.displays] == plain("1", "2")
    assert runner.run(Code("3", displays=True)).displays[0].data["text/plain"] == b"3"
    result = runner.run("import builtins\nprint(hasattr(builtins, 'display'))\n3")
    assert result.stdout == "False\n" and result.displays == ()


def test_contexts_are_namespaces_of_one_interpreter(runner: Runner) -> None:
    with runner.open() as sandbox:
        sandbox.exec("x = 1\nimport math\nmath.ours = 7")
        assert "NameError" in sandbox.exec("x", context="b").stderr
        assert sandbox.exec("x = 2\nimport math\nprint(math.ours)", context="b").stdout == "7\n"
        assert sandbox.exec("print(x)").stdout == "1\n" and sandbox.exec("print(x)", context="b").stdout == "2\n"
        pickled = "class C: pass\nimport pickle\nprint(type(pickle.loads(pickle.dumps(C()))) is C)"
        for context in ("b", "c", None):
            assert sandbox.exec(pickled, context=context).stdout == "True\n"


def test_await_outside_functions(runner: Runner) -> None:
    with runner.open() as sandbox:
        code = (
            "import asyncio\nqueue = asyncio.Queue()\nresults = []\n"
            "async def worker():\n    while True: results.append(await queue.get())\n"
            "task = asyncio.create_task(worker())\nawait asyncio.sleep(0)\nawait asyncio.sleep(0, 'value')"
        )
        assert shown(sandbox, code) == plain("'value'")
        assert shown(sandbox, "await queue.put(3)\nawait asyncio.sleep(0.01)\nresults") == plain("[3]")  # one loop
        assert shown(sandbox, "[await asyncio.sleep(0, i) for i in (1, 2)]") == plain("[1, 2]")
        assert sandbox.exec("asyncio.run(asyncio.sleep(0))\nprint('plain code has no running loop')").ok
        assert "SyntaxError" in sandbox.exec("def f(): await x").stderr


def test_tracebacks_show_the_programs_lines_and_nothing_else(runner: Runner) -> None:
    with runner.open() as sandbox:
        sandbox.exec("def f():\n    return 1 / 0")
        sandbox.exec("async def g():\n    f()")
        for code, line in (("\nf()", 'File "<agent-3>", line 2, in <module>\n    f()'), ("await g()", "await g()")):
            text = sandbox.exec(code).stderr
            assert text.startswith('Traceback (most recent call last):\n  File "<agent-') and line in text
            assert 'File "<agent-1>", line 2, in f\n    return 1 / 0' in text
            assert "asyncio" not in text and "fumehood" not in text and "agent.py" not in text
        text = sandbox.exec("try: f()\nexcept ZeroDivisionError as e: raise KeyError('k') from e").stderr
        assert "direct cause" in text and "fumehood" not in text and "agent.py" not in text
        text = sandbox.exec("x = (").stderr
        assert "SyntaxError" in text and 'File "<agent-6>", line 1' in text and "Traceback" not in text
        text = sandbox.exec(Code("f()", name="cell.py")).stderr
        assert 'File "cell.py", line 1, in <module>\n    f()' in text
        assert sandbox.exec("import inspect\nprint(inspect.getsource(f))").stdout == "def f():\n    return 1 / 0\n"
        assert "<agent>" in runner.run("1/0").stderr


#: What tells that it can be interrupted, and goes on until it is. A program that awaits tells it from its event loop:
#: before that, asyncio itself would be what is interrupted, and its lines in the traceback.
ENDLESS = """
import asyncio, time
def on():
    print('on', flush=True)
async def spin():
    on()
    while True: pass
async def wait():
    asyncio.get_running_loop().call_soon(on)
    await asyncio.sleep(600)
"""


@pytest.mark.parametrize(
    "loop",
    ["on()\nwhile True: pass", "await wait()", "await spin()", "on()\ntime.sleep(600)"],
    ids=["loop", "await wait", "await spin", "sleep"],
)
def test_interrupt_keeps_the_state(async_runner_factory: Callable[..., AsyncRunner], loop: str) -> None:
    async def main() -> None:
        async with async_runner_factory() as runner, runner.open() as sandbox:
            await sandbox.exec(Code(ENDLESS + "x = 7"))
            seen = asyncio.Event()
            running = asyncio.create_task(sandbox.exec(Code(loop), sink=lambda *_: seen.set()))
            await seen.wait()
            await sandbox.interrupt()
            result = await running
            assert result.outcome is Outcome.CANCELLED and not result.interpreter_lost
            assert "KeyboardInterrupt" in result.stderr and "asyncio/" not in result.stderr
            assert (await sandbox.exec(Code("await asyncio.sleep(0)\nprint(x)"))).stdout == "7\n"

    asyncio.run(main())


#: An interrupt just when the event loop has taken the program's next step off its queue and not begun it.
LOST = """
run = asyncio.Handle._run
def lose(handle):
    asyncio.Handle._run = run
    raise KeyboardInterrupt
asyncio.Handle._run = lose
await asyncio.sleep(0)
print("not reached")
"""


def test_an_interrupt_that_takes_a_step_of_the_event_loop_along(runner: Runner) -> None:
    with runner.open() as sandbox:
        sandbox.exec("import asyncio\nx = 7")
        result = sandbox.exec(LOST)
        assert "KeyboardInterrupt" in result.stderr and "never" not in result.stderr
        assert (result.stdout, result.timed_out, result.interpreter_lost) == ("", False, False)
        assert sandbox.exec("await asyncio.sleep(0.01)\nimport gc; gc.collect()\nprint(x)").stderr == ""


STUBBORN = (
    "while True:\n    try:\n        print('on', flush=True)\n        while True: pass\n    except BaseException: pass"
)


def test_a_program_that_will_not_be_interrupted_loses_its_interpreter(
    async_runner_factory: Callable[..., AsyncRunner],
) -> None:
    async def main() -> None:
        policy = Policy(limits=Limits(wall_s=60, cpu_s=60))
        async with async_runner_factory(policy) as runner, runner.open() as sandbox:
            await sandbox.exec(Code("x = 7\nopen('f', 'w').write('kept')"))
            seen = asyncio.Event()
            running = asyncio.create_task(sandbox.exec(Code(STUBBORN), sink=lambda *_: seen.set()))
            await seen.wait()
            await sandbox.interrupt()
            result = await running
            assert result.outcome is Outcome.CANCELLED and result.interpreter_lost
            result = await sandbox.exec(Code("print(open('f').read())\nx"))
            assert result.stdout == "kept\n" and "NameError" in result.stderr and not result.interpreter_lost

    asyncio.run(main())


@pytest.mark.parametrize(
    ("code", "lost"),
    [("import time\ntime.sleep(600)", False), (STUBBORN, True), ("import os\nos.kill(os.getpid(), 19)", True)],
    ids=["interruptible", "stubborn", "stopped"],
)
def test_the_deadline_of_a_live_exec_costs_what_it_must(runner_factory: RunnerFactory, code: str, lost: bool) -> None:
    with runner_factory(Policy(limits=Limits(wall_s=1.5, cpu_s=60))).open() as sandbox:
        sandbox.exec("x = 7\nopen('f', 'w').write('kept')")
        result = sandbox.exec(code)
        assert (result.outcome, result.exit_code, result.interpreter_lost) == (Outcome.WALL, None, lost)
        assert sandbox.exec("print(open('f').read())").stdout == "kept\n"
        assert sandbox.exec("x").ok is not lost


def test_displays_stream_to_the_sink(async_runner_factory: Callable[..., AsyncRunner]) -> None:
    class Sink:
        def __init__(self) -> None:
            self.seen: list[object] = []
            self.third = asyncio.Event()

        def __call__(self, stream: str, data: bytes) -> None:
            self.seen.append((stream, data))
            if len(self.seen) == 3:
                self.third.set()

        def display(self, display: Display) -> None:
            self("display", display.data["text/plain"])

    async def main() -> None:
        async with async_runner_factory() as runner, runner.open() as sandbox:
            sink = Sink()
            code = (
                "import sys, time\nprint('a', flush=True); time.sleep(0.2); display(1); time.sleep(0.2)\n"
                "print('c', file=sys.stderr); time.sleep(600)"
            )
            running = asyncio.create_task(sandbox.exec(Code(code), sink=sink))
            await sink.third.wait()
            assert not running.done()  # it still sleeps
            assert sink.seen == [("stdout", b"a\n"), ("display", b"1"), ("stderr", b"c\n")]
            await sandbox.interrupt()
            assert (await running).outcome is Outcome.CANCELLED

    asyncio.run(main())
