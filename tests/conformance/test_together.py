"""Many runs at once, runs that are given up, and runners that close under a run: nothing stays behind, nobody hangs."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.needs import RunnerFactory
from support.residue import Look

from fumehood.errors import ClosedError, FumehoodError, OutcomeUnknownError, StartError
from fumehood.model import Code, Limits, Outcome, Policy
from fumehood.runner import AsyncRunner
from fumehood.tier import Features

pytestmark = pytest.mark.usefixtures("full_python")

Factory = Callable[..., AsyncRunner]

#: Nobody waits longer than this for anything here: what hangs fails instead.
PATIENCE_S = 60.0

#: Runs at once. Containers and machines start no more than two per processor at a time, and the others wait: many more
#: than those tell nothing new there.
AT_ONCE = 100
AT_ONCE_BY_TIER = {"docker": 40, "podman": 40, "gvisor": 40, "microvm": 40}


def test_many_runs_at_once(tier_name: str, async_runner_factory: Factory, private_tmp: Path) -> None:
    count = AT_ONCE_BY_TIER.get(tier_name, AT_ONCE)
    whole = Look.take(private_tmp)

    async def main() -> None:
        async with async_runner_factory(Policy(limits=Limits(wall_s=120, cpu_s=60))) as runner:
            await runner.run(Code("pass"))
            before = Look.take(private_tmp)
            program = "import os\nopen('f', 'w').write('{0}')\nprint({0}, len(os.listdir()))"
            results = await asyncio.gather(*(runner.run(Code(program.format(i))) for i in range(count)))
            assert [r.stdout for r in results] == [f"{i} 1\n" for i in range(count)]
            assert await asyncio.to_thread(before.left, private_tmp, kept=1) == []

    asyncio.run(main())
    assert whole.left(private_tmp) == []


def test_a_run_that_is_cancelled_at_any_point_leaves_nothing(async_runner_factory: Factory, private_tmp: Path) -> None:
    dice = random.Random(2)

    whole = Look.take(private_tmp)

    async def main() -> None:
        async with async_runner_factory(Policy(limits=Limits(wall_s=60))) as runner:
            started = asyncio.get_running_loop().time()
            await runner.run(Code("pass"))
            await runner.run(Code("pass"))
            span = asyncio.get_running_loop().time() - started
            before = Look.take(private_tmp)
            program = Code("import os, time\nos.fork()\nos.setsid() if os.fork() == 0 else 0\ntime.sleep(600)")
            for _ in range(40):
                task = asyncio.create_task(runner.run(program, files={"f": b"x"}))
                await asyncio.sleep(dice.random() * span)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asyncio.wait_for(asyncio.shield(task), PATIENCE_S)
            # On every turn of the event loop, too, where a time would miss.
            for turns in range(30):
                task = asyncio.create_task(runner.run(program))
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asyncio.wait_for(asyncio.shield(task), PATIENCE_S)
            assert (await runner.run(Code("print(1)"))).stdout == "1\n"
            assert await asyncio.to_thread(before.left, private_tmp, kept=1) == []

    asyncio.run(main())
    assert whole.left(private_tmp) == []


def test_a_run_that_times_out_outside_leaves_nothing(async_runner_factory: Factory, private_tmp: Path) -> None:
    whole = Look.take(private_tmp)

    async def main() -> None:
        async with async_runner_factory(Policy(limits=Limits(wall_s=60))) as runner:
            await runner.run(Code("pass"))
            before = Look.take(private_tmp)
            for _ in range(5):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.3):
                        await runner.run(Code("while True: pass"))
            assert await asyncio.to_thread(before.left, private_tmp, kept=1) == []

    asyncio.run(main())
    assert whole.left(private_tmp) == []


def test_closing_an_asynchronous_runner_ends_what_runs(async_runner_factory: Factory, private_tmp: Path) -> None:
    async def main() -> None:
        warm = async_runner_factory()
        await warm.run(Code("pass"))
        await warm.close()
        before = Look.take(private_tmp)
        runner = async_runner_factory(Policy(limits=Limits(wall_s=60)))
        seen = asyncio.Event()
        task = asyncio.create_task(
            runner.run(Code("print(1, flush=True)\nwhile True: pass"), sink=lambda *_: seen.set())
        )
        await asyncio.wait_for(seen.wait(), PATIENCE_S)
        await asyncio.wait_for(runner.close(), PATIENCE_S)
        done, _ = await asyncio.wait({task}, timeout=10)
        assert done, "the run goes on although its runner is closed"
        assert isinstance(task.exception(), (OutcomeUnknownError, ClosedError))
        assert before.left(private_tmp) == []

    asyncio.run(main())


def test_closing_a_runner_ends_what_other_threads_run(runner_factory: RunnerFactory, private_tmp: Path) -> None:
    first = runner_factory()
    first.run("pass")
    first.close()  # so that it makes nothing ahead meanwhile
    before = Look.take(private_tmp)
    runner = runner_factory(Policy(limits=Limits(wall_s=30)))
    seen, ended = threading.Event(), []

    def run() -> None:
        try:
            ended.append(runner.run("print(1, flush=True)\nwhile True: pass", sink=lambda *_: seen.set()))
        except FumehoodError as error:
            ended.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert seen.wait(PATIENCE_S)
    runner.close()
    thread.join(15)
    assert not thread.is_alive(), "a thread waits for ever for a runner that is closed"
    assert isinstance(ended[0], (OutcomeUnknownError, ClosedError, StartError))
    assert before.left(private_tmp) == []


def test_threads_share_a_runner(runner_factory: RunnerFactory) -> None:
    runner = runner_factory(Policy(limits=Limits(wall_s=60)))
    seen: dict[int, str] = {}

    def work(number: int) -> None:
        for i in range(5):
            seen[number * 10 + i] = runner.run(f"print({number * 10 + i})").stdout

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(seen) == 30 and all(out == f"{number}\n" for number, out in seen.items())


INTERRUPTED = """
import sys, time
sys.path[:0] = {path!r}
from pathlib import Path
from fumehood import Limits, Policy, Runner
from support.residue import Look
import tempfile
tempfile.tempdir = sys.argv[2]
with Runner(tier=sys.argv[1], policy=Policy(limits=Limits(wall_s=60))) as runner:
    runner.run("pass")
    before = Look.take(Path(sys.argv[2]))
    try:
        runner.run("print('on', flush=True)\\nwhile True: pass", sink=lambda s, d: print("on", flush=True))
        print("it ended", flush=True)
    except KeyboardInterrupt:
        print("interrupted", before.left(Path(sys.argv[2]), kept=1), flush=True)
    print(runner.run("print('next')").stdout, flush=True)
"""


def test_ctrl_c_of_the_synchronous_face(tier_name: str, private_tmp: Path) -> None:
    code = INTERRUPTED.format(path=[p for p in sys.path if p])
    with subprocess.Popen(
        [sys.executable, "-c", code, tier_name, str(private_tmp)], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == "on\n"
            time.sleep(0.1)
            child.send_signal(signal.SIGINT)
            assert child.stdout.readline() == "interrupted []\n"
            assert child.stdout.readline() == "next\n"
            assert child.wait(PATIENCE_S) == 0
        finally:
            child.kill()
    assert list(private_tmp.iterdir()) == []


def test_a_program_does_not_see_another_one(runner_factory: RunnerFactory, features: Features) -> None:
    """Two live sandboxes: no process, file or shared memory of the one is in the other."""
    if not features.live or features.boundary.rank <= 1:
        pytest.skip("needs two live sandboxes with a boundary between them")
    runner = runner_factory()
    with runner.open() as one, runner.open() as two:
        one.exec(
            "import os\nopen('f', 'w').write('x')\nopen('/tmp/f', 'w').write('x')\nopen('/dev/shm/f', 'w').write('x')"
        )
        seen = two.exec(
            "import os\nprint([os.path.exists(p) for p in ('f', '/tmp/f', '/dev/shm/f')])\n"
            "pids = [p for p in os.listdir('/proc') if p.isdigit()]\nprint(len(pids) <= 2)\n"
        )
        assert seen.stdout == "[False, False, False]\nTrue\n"


def test_a_supervisor_under_a_low_limit_of_descriptors_fails_clearly(tier_name: str, private_tmp: Path) -> None:
    """40 sandboxes where 64 descriptors are to be had: some do not start, which is StartError, and none leaks."""
    code = f"""
import asyncio, resource, sys, tempfile
sys.path[:0] = {[p for p in sys.path if p]!r}
tempfile.tempdir = sys.argv[2]
from pathlib import Path
from fumehood.errors import FumehoodError, StartError
from fumehood.model import Code
from fumehood.runner import AsyncRunner
from support.residue import Look
async def main():
    async with AsyncRunner(tier=sys.argv[1]) as runner:
        await runner.run(Code("pass"))
        before = Look.take(Path(sys.argv[2]))
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        got = await asyncio.gather(*(runner.run(Code("print(1)")) for _ in range(40)), return_exceptions=True)
        wrong = [repr(g) for g in got if isinstance(g, BaseException) and not isinstance(g, StartError)]
        assert not wrong, wrong[:3]
        again = await runner.run(Code("print(2)"))
        assert again.stdout == "2\\n"
        left = await asyncio.to_thread(before.left, Path(sys.argv[2]), kept=1)
        assert not left, left
    print("fine")
asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", code, tier_name, str(private_tmp)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S * 2,
    )
    assert done.stdout == "fine\n", done.stderr[-3000:]


def test_outcomes_do_not_mix(tier_name: str, async_runner_factory: Factory) -> None:
    """Runs of every ending side by side get their own."""
    programs = {
        "print(1)": Outcome.EXITED,
        "import os; os.kill(os.getpid(), 9)": Outcome.SIGNALED,
        "while True: pass": Outcome.WALL,
        "while True: print('x' * 10000)": Outcome.OUTPUT,
    }

    async def main() -> None:
        limits = Limits(wall_s=5, output_bytes=100_000)
        if tier_name in AT_ONCE_BY_TIER:  # twelve share the processors, three of which spin
            limits = replace(limits, wall_s=15, cpu_s=60)
        policy = Policy(limits=limits, overflow="stop")
        async with async_runner_factory(policy) as runner:
            wanted = [item for item in programs.items() for _ in range(3)]
            got = await asyncio.gather(*(runner.run(Code(program)) for program, _ in wanted))
            assert [r.outcome for r in got] == [outcome for _, outcome in wanted]

    asyncio.run(main())
