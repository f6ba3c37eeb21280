"""``fumehood doctor``: the facts of this host that boundaries are built from, and what each tier makes of them."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from pathlib import Path

from fumehood import __version__, environments, registry
from fumehood.cli.exits import ExitCode
from fumehood.cli.output import print_json
from fumehood.cli.terminal import escape, escape_line
from fumehood.cli.tiers import standing_to_dict, tiers_in_words
from fumehood.errors import PolicyError, UnavailableError
from fumehood.linux import cgroup, landlock
from fumehood.model import Policy

_ROOT = Path("/")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``fumehood doctor``."""
    parser.description = (
        "What this host has to build boundaries with, then each tier, with what to do where it is not available. "
        f"Exit code 0 if the default tier is available, else {ExitCode.UNAVAILABLE.value}."
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def main(args: argparse.Namespace) -> int:
    """Print the facts and the tiers."""
    facts = host_facts()
    standings = registry.survey()
    default = _default_tier()
    if args.json:
        tiers = [standing_to_dict(s) for s in standings]
        print_json({"facts": facts, "tiers": tiers, "default": default})
    else:
        width = max(map(len, facts))
        print("\n".join(f"{name:<{width}}  {escape_line(value)}" for name, value in facts.items()))
        print("\n" + escape(tiers_in_words(standings)))
        for standing in standings:
            for name, value in standing.probe.details:
                print(f"{standing.tier.name}: {escape_line(name)}: {escape_line(value)}")
        print(f"\ndefault tier: {default or f'none: nothing here meets the floor {registry.DEFAULT_FLOOR.value}'}")
    return 0 if default else ExitCode.UNAVAILABLE


def _default_tier() -> str | None:
    try:
        return registry.choose(policy=Policy()).name
    except UnavailableError:
        return None


def host_facts(root: Path = _ROOT) -> dict[str, str]:
    """Name -> value, in the order to read them. ``root`` is where /proc, /etc and /sys are looked for."""
    uname = os.uname()
    return {
        "fumehood": __version__,
        "Python": f"{platform.python_version()} ({sys.executable})",
        "system": _system_name(root),
        "kernel": f"{uname.sysname} {uname.release} {uname.machine}",
        "user": "root" if os.geteuid() == 0 else f"uid {os.geteuid()}",
        "container": _container(root),
        "user namespaces": _user_namespaces(root),
        "control groups": _control_groups(),
        "Landlock": f"ABI {version}" if (version := landlock.abi()) else "none",
        "seccomp": _read(root / "proc/sys/kernel/seccomp/actions_avail") or "none",
        "security modules": _read(root / "sys/kernel/security/lsm") or "not shown",
        "KVM": _kvm(root),
        "cache folder": _cache(),
    }


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def _system_name(root: Path) -> str:
    for line in (_read(root / "etc/os-release") or "").splitlines():
        key, _, value = line.partition("=")
        if key == "PRETTY_NAME":
            return value.strip('"')
    return "unknown"


def _container(root: Path) -> str:
    marks = {".dockerenv": "Docker", "run/.containerenv": "Podman"}
    return next((f"inside {engine}" for mark, engine in marks.items() if (root / mark).exists()), "none seen")


def _user_namespaces(root: Path) -> str:
    """What the kernel's switches say of user namespaces without privilege; each switch exists on some hosts only."""
    most = _read(root / "proc/sys/user/max_user_namespaces")
    if most is None:
        return "not in this kernel"
    if most == "0":
        return "off (user.max_user_namespaces = 0)"
    if _read(root / "proc/sys/kernel/unprivileged_userns_clone") == "0":  # Debian's patch
        return "for root only (kernel.unprivileged_userns_clone = 0)"
    if _read(root / "proc/sys/kernel/apparmor_restrict_unprivileged_userns") == "1":  # Ubuntu 23.10 and later
        return "restricted by AppArmor (kernel.apparmor_restrict_unprivileged_userns = 1)"
    return f"on, at most {most}"


def _control_groups() -> str:
    found = cgroup.find()
    if not found.version:
        return f"none usable: {found.reason}" + (f"; {found.remedy}" if found.remedy else "")
    paths = ", ".join(sorted({place.path for place in found.places}))
    return f"v{found.version}, hard limits on {', '.join(found.hard)}, below {paths}"


def _kvm(root: Path) -> str:
    path = root / "dev/kvm"
    if not path.exists():
        return "no /dev/kvm"
    return "/dev/kvm is there" if os.access(path, os.R_OK | os.W_OK) else "/dev/kvm is there, but not for this user"


def _cache() -> str:
    try:
        return str(environments.cache_folder())
    except PolicyError as error:
        return f"none: {error}"
