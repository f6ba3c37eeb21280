"""Whose a container is: a label names the supervisor, so that what a dead one left can be told and removed."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from fumehood.images.engine import Engine, EngineError, EngineGoneError
from fumehood.linux import process

LABEL = "fumehood.owner"


def ours() -> str:
    """This process's name: pid, start time, PID namespace and boot, which no other process ever shares."""
    pid = os.getpid()
    return f"{pid}-{process.start_time(pid)}-{_pid_namespace()}-{_boot()}"


def is_gone(owner: str) -> bool:
    """Whether the supervisor of that name has ended: certain, or False.

    One of an earlier boot has. One of another PID namespace cannot be seen from here.
    """
    parts = owner.split("-")
    if len(parts) != 4 or not all(part.isdecimal() for part in parts[:3]):
        return False
    pid, start, namespace = map(int, parts[:3])
    if parts[3] != _boot():
        return True
    return namespace == _pid_namespace() and not process.alive(pid, start)


async def prune(engine: Engine) -> list[str]:
    """Remove the containers of supervisors that are gone, running or not; the ids of those removed.

    Raises EngineError, EngineGoneError if they cannot be listed; one that cannot be removed is left.
    """
    query = {"all": "true", "filters": json.dumps({"label": [LABEL]})}
    removed = []
    for item in await engine.call("GET", "/containers/json", query=query):
        owner = str((item.get("Labels") or {}).get(LABEL, ""))
        ident = str(item.get("Id", ""))
        if ident and is_gone(owner):
            with contextlib.suppress(EngineError, EngineGoneError):
                await remove(engine, ident)
                removed.append(ident)
    return removed


async def remove(engine: Engine, ident: str) -> None:
    """Kill and remove a container with its volumes; fine if it is gone. Raises EngineError, EngineGoneError."""
    try:
        await engine.call("DELETE", f"/containers/{ident}", query={"force": "true", "v": "true"})
    except EngineError as error:
        if error.status not in (404, 409):  # gone, or a removal is under way already
            raise


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _boot() -> str:
    # The kernel's own id of this boot, shortened: the parts of a name are divided by "-".
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
