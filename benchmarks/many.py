"""Many trivial programs through ``Runner.map``: is the supervisor's memory flat, and is anything left behind?

``python benchmarks/many.py [--number 50000] [--tier jail]``. Exit code 1 if memory grew or something was left.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from pathlib import Path

from fumehood.linux import process
from fumehood.runner import Runner

MIB = 1 << 20

#: From a tenth of the way to the end. Python's own arenas breathe by a few hundred KiB.
GROWTH_MAX = 2 * MIB


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def held() -> tuple[int, int, int]:
    """Processes below this one, its descriptors, and control groups that bear its pid."""
    groups = 0
    for mount in process.mounts(os.getpid()):
        if mount.fs_type in ("cgroup", "cgroup2"):
            for folder, names, _ in os.walk(mount.mount_point):
                if os.path.basename(folder) == "fumehood":
                    groups += sum(name.startswith(f"{os.getpid()}-") for name in names)
                    names.clear()
    return len(process.descendants(os.getpid())), len(os.listdir("/proc/self/fd")), groups


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--number", type=int, default=50_000, help="programs (default: 50000)")
    parser.add_argument("--tier", default="jail", help="tier (default: jail)")
    parser.add_argument("--concurrency", type=int, help="programs at a time (default: the processors)")
    options = parser.parse_args()
    with Runner(tier=options.tier) as runner:
        runner.run("pass")
    before = held()
    began = time.perf_counter()
    samples = []
    step = max(1, options.number // 20)
    with Runner(tier=options.tier) as runner:
        programs = (f"print({number})" for number in range(options.number))
        for item in runner.map(programs, concurrency=options.concurrency):
            if item.result is None or item.result.stdout != f"{item.index}\n":
                print(f"program {item.index}: {item.error or item.result}", file=sys.stderr)
                return 1
            if (item.index + 1) % step == 0:
                gc.collect()
                samples.append(resident())
                rate = (item.index + 1) / (time.perf_counter() - began)
                print(f"{item.index + 1:>8} done  {samples[-1] / MIB:7.2f} MiB  {rate:7.1f} a second", flush=True)
    left = held()
    growth = max(samples[len(samples) // 10 :]) - samples[len(samples) // 10]
    print(f"memory grew by {growth / MIB:.2f} MiB; processes, descriptors, groups: {before} before, {left} after")
    return int(growth > GROWTH_MAX or left > before)


if __name__ == "__main__":
    sys.exit(main())
