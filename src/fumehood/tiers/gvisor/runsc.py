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


#: runsc opens one for each of its processes and puts the process's word in the place of %COMMAND%.
LOG = "log.%COMMAND%"
#: What the process writes there that the others are children of, once all is over: a status as of wait(2).
_ENDED = re.compile(rb"Exiting with status: (\d{1,5})\n\Z")
#: What it writes before that where the Sentry was gone when it was asked: it takes the Sentry's own status instead
#: (Sandbox.Wait in runsc/sandbox/sandbox.go), which on a busy host may have ended by then.
_LATE = b"Will try waiting on the sandbox process"
_GO_PANIC = 2  # what a process of Go's exits with that has panicked
_LOG_MAX = 1 << 18  # it has some fifty lines, and a guest adds none


def make_log(folder: str) -> None:
    """Prepare ``folder`` to hold what ``runsc run`` logs, and not what the others do, which a guest can bring about.

    Raises OSError.
    """
    for word in ("boot", "gofer"):
        os.symlink(os.devnull, f"{folder}/{LOG.replace('%COMMAND%', word)}")


def ended(folder: str) -> int | None:
    """The container's end as runsc heard it from the Sentry, when ``runsc run`` is dead; None if that is not known.

    Its own exit status would not tell a program that was killed from one that exits with more than 128, nor either
    from a runsc that failed.
    """
    try:
        with open(f"{folder}/{LOG.replace('%COMMAND%', 'run')}", "rb") as log:
            text = log.read(_LOG_MAX)
    except OSError:
        return None
    found = _ENDED.search(text)
    if found is None:
        return None
    status = int(found[1])
    if _LATE not in text:
        return status
    # A Sentry that ended by itself exits as its container did, or with 128 and the number of a signal.
    code = os.waitstatus_to_exitcode(status)
    return status if 0 <= code < 128 and code != _GO_PANIC else None


def command(runsc: Runsc, platform: str, *, state: str, bundle: str, ident: str, log: str | None = None) -> list[str]:
    """The command line of a sandbox. It holds no code and no secret.

    ``--ignore-cgroups``: the cgroup is ours and made already. ``--oci-seccomp``: the Sentry filters the guest's calls
    by our list as the kernel does in other tiers. ``--file-access-mounts=exclusive``: nobody but the guest changes
    its files while it lives. ``log``: see :data:`LOG`.
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
        *([f"--debug-log={log}"] if log else []),
        "run",
        f"--bundle={bundle}",
        ident,
    ]
