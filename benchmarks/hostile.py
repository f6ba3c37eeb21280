"""Ordinary programs beside hostile ones: how much later do they end than beside ones that only use the processor?

``python benchmarks/hostile.py [--neighbours 200] [--number 200]``. Two phases take turns: so many neighbours run at a
time, under limits of their own, hostile ones or ones that spin; ordinary programs come by a Poisson process and are
timed from their arrival. Exit code 1 if the hostile neighbours' p99 is over twice the others', or an ordinary program's
answer is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import sys
import time

from fumehood.bench.figures import quantile
from fumehood.errors import StartError
from fumehood.model import Limits, MiB, Policy
from fumehood.pool import Pool
from fumehood.runner import AsyncRunner
from fumehood.tiers.jail.tier import JailTier

RATIO_MAX = 2.0
SPINNING = ("while True: pass",)
HOSTILE = (
    "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
    "x = []\nwhile True: x.append(bytearray(1 << 20))",
    "import sys\nwhile True: sys.stdout.write('A' * 65536)",
    "import os\nn = 0\nwhile True:\n    n += 1\n    try:\n        open(f'/tmp/{n}', 'w').write('x' * 4096)\n"
    "    except OSError:\n        n = 0",
    "import threading\nfor _ in range(15):\n    threading.Thread(target=lambda: [0 for _ in iter(int, 1)]).start()",
    "import signal\n[signal.signal(n, signal.SIG_IGN) for n in (2, 15)]\nwhile True: pass",
    "import os\nfor _ in range(8):\n    if os.fork() == 0:\n        os.setsid()\n        while True: pass",
    "import os\nwhile True:\n    try:\n        os.open('/work', os.O_RDONLY)\n    except OSError:\n        pass",
)
ORDINARY = "import json, os\nassert os.listdir('/work') == os.listdir('/tmp') == []\nprint(json.dumps(sum(range({n}))))"


async def phase(neighbours: tuple[str, ...], at_a_time: int, number: int, rate: float) -> list[float]:
    """Latencies of ``number`` ordinary programs beside ``at_a_time`` neighbours."""
    times: list[float] = []
    limits = Limits(wall_s=2.0, cpu_s=2.0, cpus=0.2, memory_bytes=64 * MiB, pids=16, disk_bytes=4 * MiB)
    async with (
        AsyncRunner(tier=Pool(JailTier(), size=16), policy=Policy(limits=Limits(wall_s=300))) as ordinary,
        AsyncRunner(tier="jail", policy=Policy(limits=limits)) as others,
    ):
        await ordinary.fill()
        turn = itertools.cycle(neighbours)

        async def neighbour() -> None:
            while True:
                try:
                    await others.run(next(turn))
                except StartError:  # its deadline passed before it was ready
                    pass

        async def one(n: int, arrived: float) -> None:
            result = await ordinary.run(ORDINARY.format(n=n))
            times.append(time.perf_counter() - arrived)
            if result.stdout != f"{sum(range(n))}\n":
                raise SystemExit(f"a wrong answer: {result.outcome.value} {result.stdout!r} {result.stderr!r}")

        crowd = [asyncio.create_task(neighbour()) for _ in range(at_a_time)]
        await asyncio.sleep(2.0)
        chance = random.Random(1)
        calls = []
        for n in range(number):
            await asyncio.sleep(chance.expovariate(rate))
            calls.append(asyncio.create_task(one(n, time.perf_counter())))
        await asyncio.gather(*calls)
        for task in crowd:
            task.cancel()
        await asyncio.wait(crowd)
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--neighbours", type=int, default=200, help="at a time (default: 200)")
    parser.add_argument("--number", type=int, default=200, help="ordinary programs in each phase (default: 200)")
    parser.add_argument("--rate", type=float, default=20.0, help="of their arrivals, a second (default: 20)")
    parser.add_argument("--rounds", type=int, default=2, help="of the two phases (default: 2)")
    options = parser.parse_args()
    found: dict[str, list[float]] = {"spinning": [], "hostile": []}
    for _ in range(options.rounds):
        for name, programs in (("spinning", SPINNING), ("hostile", HOSTILE)):
            found[name] += asyncio.run(phase(programs, options.neighbours, options.number, options.rate))
    for name, times in found.items():
        print(f"beside {name:<9} p50 {quantile(times, 0.5) * 1e3:8.1f} ms   p99 {quantile(times, 0.99) * 1e3:8.1f} ms")
    ratio = quantile(found["hostile"], 0.99) / quantile(found["spinning"], 0.99)
    print(f"p99 ratio {ratio:.2f} (at most {RATIO_MAX:g})")
    return int(ratio > RATIO_MAX)


if __name__ == "__main__":
    sys.exit(main())
