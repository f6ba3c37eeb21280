"""The measure of all: ``python3 -I -c pass`` as a process, at the real path of the jail's own interpreter."""

from __future__ import annotations

import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

from fumehood.tiers.jail.runtime import base_python

ARGUMENTS = ("-I", "-c", "pass")


def once(arguments: tuple[str, ...] = ARGUMENTS) -> float:
    """Start it and wait for its end; the seconds that took. Raises CalledProcessError."""
    began = time.perf_counter()
    nowhere = subprocess.DEVNULL
    subprocess.run([base_python(), *arguments], stdin=nowhere, stdout=nowhere, check=True)
    return time.perf_counter() - began


def per_second(callers: int, seconds: float) -> float:
    """Processes started and ended a second, by so many threads, for so long."""
    end = time.perf_counter() + seconds

    def caller() -> int:
        done = 0
        while time.perf_counter() < end:
            once()
            done += 1
        return done

    began = time.perf_counter()
    with ThreadPoolExecutor(callers) as pool:
        done = sum(pool.map(lambda _: caller(), range(callers)))
    return done / (time.perf_counter() - began)
