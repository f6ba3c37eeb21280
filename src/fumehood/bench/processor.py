"""Processor time of this process and all below it, those that are dead and reaped included."""

from __future__ import annotations

import os
import time
from pathlib import Path

from fumehood.linux import process

_TICKS = os.sysconf("SC_CLK_TCK")


def used_s() -> float:
    """Seconds, user and system. A difference of two is good to a few hundredths: the kernel tells it in ticks."""
    used = os.times()
    total = time.process_time() + used.children_user + used.children_system
    for pid in process.descendants(os.getpid()):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(map(int, fields[11:15])) / _TICKS  # utime, stime, cutime, cstime: proc_pid_stat(5)
    return total
