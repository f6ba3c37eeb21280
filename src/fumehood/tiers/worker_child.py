"""The first process of a worker on a host without the jail: ``worker_child.py CHANNEL PLAN``.

It takes rlimits, drops root for a user that nobody is, reports, and serves. See :mod:`fumehood.tiers.worker`.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import socket
import sys

sys.path.insert(0, __file__.rsplit("/fumehood/", 1)[0])

from fumehood.linux import capabilities

CHANNEL_FD = 3


def main() -> None:
    """Be the worker. Never returns."""
    plan = json.loads(sys.argv[2])
    os.dup2(int(sys.argv[1]), CHANNEL_FD, inheritable=False)
    os.closerange(CHANNEL_FD + 1, 1 << 30)
    if os.read(CHANNEL_FD, 1) != b"G":
        os._exit(0)
    report: dict[str, object] = {}
    serve = None
    try:
        sys.path += plan["site"]
        module, _, function = plan["entry"].partition(":")
        serve = getattr(importlib.import_module(module), function)
        for name, value in plan["rlimits"].items():
            resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))
        if plan["uid"] is not None:
            os.setgroups([])
            os.setresgid(plan["uid"], plan["uid"], plan["uid"])
            os.setresuid(plan["uid"], plan["uid"], plan["uid"])
        capabilities.no_new_privs()
        report["rlimits"] = {n: list(resource.getrlimit(getattr(resource, "RLIMIT_" + n))) for n in plan["rlimits"]}
    except Exception as error:
        report["error"] = f"{type(error).__name__}: {error}"
    text = json.dumps(report).encode()
    with socket.socket(fileno=os.dup(CHANNEL_FD)) as end:
        end.sendall(len(text).to_bytes(4, "big") + text)
    if serve is not None and "error" not in report:
        serve(CHANNEL_FD, CHANNEL_FD, plan["folder"])
    os._exit(1)


if __name__ == "__main__":
    main()
