"""What an operator should know of an engine: versions with known escapes, doors left open, ways without root."""

from __future__ import annotations

import os
import re
import stat

from fumehood.images.engine import Engine

#: The first releases of each line that are without CVE-2025-31133, CVE-2025-52565 and CVE-2025-52881, in which a
#: container writes to the host's /proc through its masked paths or console: runc's advisories of 5 November 2025.
_RUNC_FIXED = ((1, 2, 8), (1, 3, 3), (1, 4, 0))
_RUNC_CVES = "CVE-2025-31133, CVE-2025-52565 and CVE-2025-52881"

_DIGITS = re.compile(r"\d+")


def version_tuple(text: str) -> tuple[int, ...]:
    """``1.1.5+ds1`` -> (1, 1, 5); () if it does not begin with a number."""
    head = re.match(r"v?(\d+(?:\.\d+)*)", text)
    return tuple(int(n) for n in _DIGITS.findall(head[1])) if head else ()


def runc_is_old(text: str) -> bool:
    """Whether the number is below the fixed release of its line. Distributions may have mended theirs all the same."""
    number = version_tuple(text)
    if not number:
        return False
    fixed = next((f for f in _RUNC_FIXED if f[:2] == number[:2]), None)
    return number < fixed if fixed is not None else number < _RUNC_FIXED[0]


def notes(components: dict[str, str]) -> tuple[str, ...]:
    """Sentences for a receipt and for ``doctor``."""
    out = []
    runc = next((text for name, text in components.items() if "runc" in name), "")
    runc = runc.partition("\n")[0].removeprefix("runc version ")  # as Podman tells it
    if runc_is_old(runc):
        out.append(f"runc {runc} is below the releases that fixed {_RUNC_CVES}: see your distribution's tracker")
    return tuple(out)


def details(engine: Engine, components: dict[str, str]) -> list[tuple[str, str]]:
    """Facts for ``doctor``."""
    out = [(name, version) for name, version in components.items() if name not in ("Engine", "docker-init") and version]
    info = os.stat(engine.path)
    who = f"{engine.path}, mode {stat.S_IMODE(info.st_mode):04o}, group {info.st_gid}"
    if info.st_mode & stat.S_IWOTH:
        who += ": EVERY USER OF THIS HOST MAY CALL IT, AND IS ROOT BY THAT; chmod 660"
    out.append(("socket", who))
    ports = _open_ports()
    if ports:
        out.append(
            ("TCP", f"something listens on port {', '.join(map(str, ports))}, an engine's: root for all who reach it")
        )
    return out


def _open_ports() -> list[int]:
    """2375 and 2376, the ports registered for Docker, if anything listens there."""
    found = set()
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(path) as file:
                lines = file.read().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            port = int(fields[1].rpartition(":")[2], 16)
            if fields[3] == "0A" and port in (2375, 2376):  # TCP_LISTEN
                found.add(port)
    return sorted(found)
