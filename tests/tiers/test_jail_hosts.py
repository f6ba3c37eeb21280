"""Hosts that forbid what the jail needs: the probe says so, names the remedy, and leaves nothing running."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from support.needs import need_tier

from fumehood.linux import syscalls

PROBE = """
import json, os
from fumehood import registry
from fumehood.errors import FumehoodError
from fumehood.runner import Runner
tier = registry.make({tier!r})
probe = tier.probe()
again = tier.probe()
try:
    Runner(tier={tier!r})
    error = ""
except FumehoodError as e:
    error = type(e).__name__ + ": " + str(e)
children = open(f"/proc/self/task/{{os.getpid()}}/children").read().split()
print(json.dumps([probe.available, probe.reason, probe.remedy, again == probe, error, children]))
"""

#: In a user namespace of its own, where that limit is its own too (namespaces(7)).
NO_USER_NAMESPACES = """
import os
from fumehood.linux.libc import unshare
from fumehood.linux.namespaces import CLONE_NEWUSER, write_id_maps
uid, gid = os.geteuid(), os.getegid()
unshare(CLONE_NEWUSER)
write_id_maps("self", f"{uid} {uid} 1", f"{gid} {gid} 1", deny_setgroups=True)
with open("/proc/sys/user/max_user_namespaces", "w") as f: f.write("0")
"""

#: What a container engine's own profile does: no unshare, and clone3 "does not exist".
NO_UNSHARE = """
import struct
from fumehood.linux import capabilities, seccomp
from fumehood.linux.steps import at_once
at_once(capabilities.no_new_privs)
def step(code, jump_true, jump_false, value): return struct.pack("HBBI", code, jump_true, jump_false, value)
at_once(seccomp.load, b"".join((
    step(0x20, 0, 0, 0), step(0x15, 2, 0, {unshare}), step(0x15, 2, 0, {clone3}), step(0x06, 0, 0, 0x7FFF0000),
    step(0x06, 0, 0, 0x00050001), step(0x06, 0, 0, 0x00050026),
)))
"""


def probed(before: str, tier: str) -> tuple[bool, str, str, bool, str, list[str]]:
    numbers = syscalls.numbers()
    code = before.replace("{unshare}", str(numbers["unshare"])).replace("{clone3}", str(numbers["clone3"]))
    done = subprocess.run(
        [sys.executable, "-c", code + PROBE.format(tier=tier)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    answer: tuple[bool, str, str, bool, str, list[str]] = tuple(json.loads(done.stdout))
    return answer


@pytest.mark.parametrize("tier", ["jail", "subprocess"])
def test_nothing_forbidden(tier: str) -> None:
    need_tier(tier)
    available, reason, remedy, same, error, _ = probed("", tier)
    assert (available, reason, remedy, same, error) == (True, "", "", True, "")


def test_user_namespaces_forbidden() -> None:
    need_tier("jail")
    available, reason, remedy, same, error, children = probed(NO_USER_NAMESPACES, "jail")
    assert not available and same and reason
    assert "user.max_user_namespaces" in remedy
    assert error.startswith("UnavailableError") and remedy in error
    assert children == []


@pytest.mark.parametrize("tier", ["jail", "subprocess"])
def test_unshare_and_clone3_forbidden(tier: str) -> None:
    need_tier(tier)
    available, reason, remedy, same, error, children = probed(NO_UNSHARE, tier)
    assert not available and same and reason and remedy
    assert error.startswith("UnavailableError") and remedy in error
    assert children == []
