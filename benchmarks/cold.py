"""Cold, single-use runs against a bare interpreter, as a ratio: ``python benchmarks/cold.py [--tier jail] [--rounds 200]``.

Each round starts ``python3 -I -c pass`` as a process and then runs ``print(1)`` in a fresh sandbox of the tier, so that
both meet the same noise. The interpreter is the real path of the one that the jail uses, without a shim.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import time

from fumehood.runner import AsyncRunner
from fumehood.tiers.jail.runtime import base_python


async def measure(tier: str, rounds: int) -> dict[str, float]:
    """Medians in milliseconds, and their ratio."""
    python = base_python()
    plain, boxed = [], []
    async with AsyncRunner(tier=tier) as runner:
        for turn in range(rounds + 10):
            begin = time.perf_counter()
            subprocess.run([python, "-I", "-c", "pass"], check=True)
            middle = time.perf_counter()
            result = await runner.run("print(1)")
            end = time.perf_counter()
            assert result.stdout == "1\n", result
            if turn >= 10:
                plain.append(middle - begin)
                boxed.append(end - middle)
    return {
        "plain_ms": statistics.median(plain) * 1e3,
        "cold_ms": statistics.median(boxed) * 1e3,
        "cold_p90_ms": statistics.quantiles(boxed, n=10)[-1] * 1e3,
        "ratio": statistics.median(b / p for b, p in zip(boxed, plain, strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tier", default="jail", help="tier to measure (default: jail)")
    parser.add_argument("--rounds", type=int, default=200, help="rounds counted (default: 200)")
    options = parser.parse_args()
    print(json.dumps({"tier": options.tier, **asyncio.run(measure(options.tier, options.rounds))}))


if __name__ == "__main__":
    main()
