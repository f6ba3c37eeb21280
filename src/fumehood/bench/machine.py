"""The machine that a measurement was taken on, described so that somebody else can judge it."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

from fumehood.tiers.jail.runtime import base_python


def describe() -> dict[str, str]:
    """Names and values for people; nothing that names the host or its owner."""
    return {
        "processor": f"{_processor()}, {len(os.sched_getaffinity(0))} usable",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / (1 << 30):.0f} GiB",
        "system": f"{platform.system()} {platform.release()}, {_distribution()}",
        "python": f"{_version()} ({base_python()})",
        "load before": f"{os.getloadavg()[0]:.1f}",
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "an unnamed distribution")
    except OSError:
        return "an unnamed distribution"


def _version() -> str:
    asked = "import platform; print(platform.python_version())"
    found = subprocess.run([base_python(), "-I", "-S", "-c", asked], capture_output=True, text=True, check=True)
    return found.stdout.strip()
