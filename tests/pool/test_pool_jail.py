"""The pool over the jail: what a warm run does on the request's path, in counts, and that nothing is left for the next.

Counts, because they are the same on a busy machine: page faults, messages, cgroup migrations, requests to the zygote.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.needs import need_tier
from support.residue import Look

from fumehood import pool as pool_module
from fumehood.errors import StartError
from fumehood.linux import process
from fumehood.linux.cgroup import Cgroup
from fumehood.model import Code, Limits, Outcome, Policy, Result
from fumehood.pool import Pool
from fumehood.runner import AsyncRunner, Runner
from fumehood.tier import Sandbox
from fumehood.tiers.jail import tier as tier_module
from fumehood.tiers.jail.client import Zygote
from fumehood.tiers.jail.single import SingleChannel
from fumehood.tiers.jail.tier import JailTier

#: Page faults of agent and interpreter together in a warm run, from the call to its first output, with ample room.
FAULTS_MAX = 60

#: The same of a single program's process, which is all that runs.
SINGLE_FAULTS_MAX = 25


@pytest.fixture(autouse=True)
def _jail() -> None:
    need_tier("jail")


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keeper does nothing while a program runs, so that every count is the run's own."""
    monkeypatch.setattr(pool_module, "PACE_S", 60.0)


def faults(pids: list[int]) -> int:
    """Minor page faults so far, field 10 of proc_pid_stat(5)."""
    return sum(int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[7]) for pid in pids)


async def faults_of_a_run(sandbox: Sandbox, pids: list[int]) -> int:
    """Those of ``pids`` from the call to a program's first output. The sandbox is closed then."""
    before = faults(pids)
    seen: list[int] = []
    program = "print(1, flush=True)\nimport time; time.sleep(0.5)"
    result = await sandbox.exec(Code(program), sink=lambda *_: seen.append(faults(pids)), last=True)
    assert result.ok
    await sandbox.close()
    return seen[0] - before


def first_process(sandbox: object) -> int:
    pid: int = sandbox._enclosure._pid  # type: ignore[attr-defined]
    return pid


@pytest.mark.usefixtures("still")
def test_a_warm_run_is_one_message_and_no_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: dict[str, int] = {}

    def count(owner: type, name: str) -> None:
        kept = getattr(owner, name)

        def counting(*args: object, **options: object) -> object:
            calls[name] = calls.get(name, 0) + 1
            return kept(*args, **options)

        monkeypatch.setattr(owner, name, counting)

    async def main() -> None:
        async with AsyncRunner(tier="jail", warm=1) as runner:
            await runner.fill()
            count(Cgroup, "add")
            count(Zygote, "request")
            count(SingleChannel, "post")
            result = await runner.run("print(1)")
            seen = dict(calls)
            assert result.stdout == "1\n"
            assert seen == {"post": 1}, "no cgroup migration, nothing asked of the zygote, one frame sent"
            assert isinstance(runner.tier, Pool) and runner.tier.metrics().warm == 1

    asyncio.run(main())


def test_a_warm_sandbox_stands_in_its_cgroup_and_namespaces_beforehand() -> None:
    async def main() -> None:
        tier = JailTier()
        sandbox = await tier.create_warm(Policy())
        try:
            pid = first_process(sandbox)
            (interpreter,) = process.descendants(pid)
            before = [(process.namespaces(p), Path(f"/proc/{p}/cgroup").read_text()) for p in (pid, interpreter)]
            assert (await sandbox.exec(Code("print(1)"))).ok
            assert list(process.descendants(pid)) == [interpreter], "the interpreter was there before the program"
            after = [(process.namespaces(p), Path(f"/proc/{p}/cgroup").read_text()) for p in (pid, interpreter)]
            assert before == after
            assert before[0][1] == before[1][1]
            assert before[0][0]["net"] != process.namespaces(os.getpid())["net"]
        finally:
            await sandbox.close()
            await tier.close()

    asyncio.run(main())


def test_a_warm_run_meets_its_pages_in_place() -> None:
    async def main() -> None:
        tier = JailTier()
        counts = {}
        for warm in (True, False):
            sandbox = await (tier.create_warm if warm else tier.create)(Policy())
            await sandbox.ready(30)
            pids = [first_process(sandbox), *process.descendants(first_process(sandbox))]
            assert len(pids) == 2
            counts[warm] = await faults_of_a_run(sandbox, pids)
        await tier.close()
        assert counts[True] <= FAULTS_MAX, counts
        assert counts[True] < counts[False] / 2, counts

    asyncio.run(main())


def test_a_warm_run_of_a_single_program_meets_its_pages_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_module, "AHEAD", 0)
    monkeypatch.setattr(JailTier, "_make_half", lambda *_: None)  # it would have gone through a run as well

    async def main() -> None:
        tier = JailTier()
        counts = {}
        for warm in (True, False):
            sandbox = await tier.create_single(Policy(), warm=warm)
            program: int = sandbox._enclosure._program  # type: ignore[attr-defined]
            while process_state(program) != "S":
                await asyncio.sleep(0.01)
            counts[warm] = await faults_of_a_run(sandbox, [program])
        await tier.close()
        assert counts[True] <= SINGLE_FAULTS_MAX, counts
        assert counts[True] < counts[False] / 2, counts

    asyncio.run(main())


def test_a_rehearsal_leaves_no_trace() -> None:
    probe = (
        "import sys, os, linecache, random\n"
        "print(sorted(globals()), sorted(os.environ), sorted(linecache.cache), os.getcwd(), sys.argv)\n"
        "print(sorted(sys.modules))"
    )
    with Runner(tier="jail") as cold, Runner(tier="jail", warm=1) as warm:
        warm.fill()
        assert warm.run(probe).stdout == cold.run(probe).stdout
        warm.fill()
        assert warm.run("print(input())", stdin=b"hej\n").stdout == "hej\n"
        warm.fill()
        assert warm.run("raise ValueError(7)").stderr == cold.run("raise ValueError(7)").stderr
        seeds = set()
        for _ in range(3):
            warm.fill()
            seeds.add(warm.run("import random; print(random.random())").stdout)
        assert len(seeds) == 3, "warm sandboxes share their random numbers"


def test_the_receipt_is_the_same_as_a_cold_one() -> None:
    def controls(result: Result) -> list[tuple[str, str, str]]:
        return [(c.name, c.held.value, c.mechanism) for c in result.receipt.controls]

    with Runner(tier="jail") as cold, Runner(tier="jail", warm=1) as warm:
        warm.fill()
        assert controls(warm.run("pass")) == controls(cold.run("pass"))


def test_one_that_was_killed_on_the_shelf_is_replaced() -> None:
    async def main() -> None:
        async with AsyncRunner(tier="jail", warm=2) as runner:
            await runner.fill()
            pool = runner.tier
            assert isinstance(pool, Pool)
            (shelf,) = pool._shelves.values()
            victims = [first_process(sandbox) for sandbox in shelf.ready]
            for pid in victims:
                os.kill(pid, 9)
            while any(Path(f"/proc/{pid}/stat").exists() and process_state(pid) not in "Z" for pid in victims):
                await asyncio.sleep(0.01)
            assert (await runner.run("print(1)")).stdout == "1\n"
            assert pool.metrics().dead == 2

    asyncio.run(main())


def process_state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_nothing_is_left(private_tmp: Path) -> None:
    Look.take(private_tmp)
    with Runner(tier="jail") as first:  # what a process keeps for its life is there then
        first.run("pass")
    before = Look.take(private_tmp)
    with Runner(tier="jail", warm=4) as runner:
        assert all(item.result for item in runner.map(["print(1)"] * 8, concurrency=8))
        runner.fill()
        for _ in range(8):
            assert runner.run("print(1)").ok
    assert before.left(private_tmp) == []
    with Runner(tier="jail", warm=4):
        pass  # closed while it is being filled
    assert before.left(private_tmp) == []


#: Each leaves something for the next, or takes what it can get, group G of the attack suite.
HOSTILE = (
    "import builtins\nbuiltins.print = lambda *a: None\nimport json\njson.dumps = lambda x: 'poisoned'",
    "for p in ('/work/left', '/tmp/left', '/dev/shm/left'):\n    open(p, 'w').write('left')",
    "import threading, time\nthreading.Thread(target=lambda: time.sleep(600), daemon=True).start()",
    "import atexit, os\natexit.register(lambda: open('/tmp/left', 'w').write('x'))\nos.environ['LEFT'] = 'x'",
    "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(600)",
    "import sys\nsys.path.insert(0, '/tmp')\nopen('/tmp/math.py', 'w').write('boom')\nsys.modules['math'] = None",
    "import signal\n[signal.signal(n, signal.SIG_IGN) for n in (2, 15)]\nwhile True: pass",
    "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
    "x = []\nwhile True: x.append(bytearray(1 << 20))",
    "import sys\nwhile True: sys.stdout.write('A' * 65536)",
)

ORDINARY = """
import os, sys, json, threading, math
assert json.dumps([1]) == '[1]' and math.sqrt(4) == 2 and 'LEFT' not in os.environ
assert os.listdir('/work') == [] and os.listdir('/tmp') == [] and os.listdir('/dev/shm') == []
assert threading.active_count() == 1 and '/tmp' not in sys.path
assert len([p for p in os.listdir('/proc') if p.isdigit()]) <= 2
print({number})
"""


@pytest.fixture
def small() -> Iterator[Policy]:
    yield Policy(limits=Limits(wall_s=2.0, cpu_s=2.0, cpus=0.2, memory_bytes=64 << 20, pids=16, disk_bytes=1 << 20))


def test_nothing_of_200_hostile_runs_reaches_200_ordinary_ones(small: Policy) -> None:
    """All are asked for at once; the pool lets 24 of them exist at a time."""
    ordinary = Policy(limits=Limits(wall_s=120))

    async def main() -> None:
        async with AsyncRunner(tier=Pool(JailTier(), size=4, live_max=24, wait_s=600), policy=ordinary) as runner:
            hostile = AsyncRunner(tier=runner.tier, policy=small)
            good = [runner.run(ORDINARY.format(number=n)) for n in range(200)]
            bad = [hostile.run(HOSTILE[n % len(HOSTILE)]) for n in range(200)]
            mixed = (run for pair in zip(bad, good, strict=True) for run in pair)
            results = await asyncio.gather(*mixed, return_exceptions=True)
            # On a machine with much else to do, a hostile one's deadline may pass before its sandbox is ready.
            assert {type(result) for result in results[::2]} <= {Result, StartError}
            for number, result in enumerate(results[1::2]):
                assert isinstance(result, Result), result
                assert (result.outcome, result.stdout) == (Outcome.EXITED, f"{number}\n"), result.stderr
            metrics = runner.tier.metrics()  # type: ignore[attr-defined]
            assert metrics.warm + metrics.cold == 400 and metrics.waiting == 0

    asyncio.run(main())
