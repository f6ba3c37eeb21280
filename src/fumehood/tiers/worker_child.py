"""The first process of a worker on a host without the jail: ``worker_child.py CHANNEL PLAN``.

It takes rlimits, drops root for a user that nobody is, and serves. When the supervisor is gone, it removes the folder
that it was given. See :mod:`fumehood.tiers.worker`.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys

sys.path.insert(0, __file__.rsplit("/fumehood/", 1)[0])

from fumehood.linux import capabilities
from fumehood.linux.steps import at_once
from fumehood.tiers import worker_guest

CHANNEL_FD = 3
GO, SEALED, FAILED = b"G", b"S", b"F"  # as in fumehood.enclosure, which is not loaded here


def main() -> None:
    """Be the worker. Never returns."""
    plan = json.loads(sys.argv[2])
    os.dup2(int(sys.argv[1]), CHANNEL_FD, inheritable=False)
    os.closerange(CHANNEL_FD + 1, 1 << 30)
    if os.read(CHANNEL_FD, 1) != GO:
        os.rmdir(plan["folder"])
        os._exit(0)
    try:
        sys.path += plan["site"]
        module, _, function = plan["entry"].partition(":")
        serve = getattr(importlib.import_module(module), function)
        worker_guest.folder_of_host = plan["folder"]
        for name, value in plan["rlimits"].items():
            resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))
        if plan["uid"] is not None:
            os.setgroups([])
            os.setresgid(plan["uid"], plan["uid"], plan["uid"])
            os.setresuid(plan["uid"], plan["uid"], plan["uid"])
        at_once(capabilities.no_new_privs)
    except Exception as error:
        os.write(CHANNEL_FD, FAILED + f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    os.write(CHANNEL_FD, SEALED)
    serve(CHANNEL_FD, CHANNEL_FD, plan["folder"])
    os._exit(1)


if __name__ == "__main__":
    main()
