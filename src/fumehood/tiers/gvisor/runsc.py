"""The runsc of this host: where it is, how old, and on which platform it works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass

#: In this order: systrap is today's default, ptrace what every release has. KVM is used only where it is asked for:
#: on hosts that are virtual themselves it may hang instead of failing.
PLATFORMS = ("systrap", "ptrace")
VARIABLE = "FUMEHOOD_RUNSC_PLATFORM"

_VERSION_TIMEOUT_S = 10.0
_DATE = re.compile(r"(20\d{2})(\d{2})(\d{2})")


@dataclass(frozen=True, slots=True)
class Runsc:
    """An executable and what it says of itself."""

    path: str
    version: str

    @property
    def released(self) -> str:
        """The release's date, "2022-12-19", or "" where the version does not hold one."""
        found = _DATE.search(self.version)
        return "-".join(found.groups()) if found else ""


def find() -> Runsc | None:
    """The runsc on the path, or None. Raises OSError, subprocess.TimeoutExpired if it does not run."""
    path = shutil.which("runsc")
    if path is None:
        return None
    done = subprocess.run(
        [path, "--version"], capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S, stdin=subprocess.DEVNULL
    )
    return Runsc(os.path.realpath(path), done.stdout.partition("\n")[0].removeprefix("runsc version ").strip())


def platforms() -> tuple[str, ...]:
    """The platforms to try: what the operator named, or the usual ones."""
    named = os.environ.get(VARIABLE, "")
    return (named,) if named else PLATFORMS


def command(runsc: Runsc, platform: str, *, state: str, bundle: str, ident: str) -> list[str]:
    """The command line of a sandbox. It holds no code and no secret.

    ``--ignore-cgroups``: the cgroup is ours and made already. ``--oci-seccomp``: the Sentry filters the guest's calls
    by our list as the kernel does in other tiers. ``--file-access-mounts=exclusive``: nobody but the guest changes
    its files while it lives.
    """
    return [
        runsc.path,
        f"--root={state}",
        f"--platform={platform}",
        "--network=none",
        "--ignore-cgroups",
        *(["--rootless"] if os.geteuid() else []),
        "--oci-seccomp",
        "--file-access-mounts=exclusive",
        "--log=/dev/null",
        "run",
        f"--bundle={bundle}",
        ident,
    ]
