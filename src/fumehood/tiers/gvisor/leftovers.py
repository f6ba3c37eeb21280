"""Bundles of supervisors that were killed. Their processes are dead, for each ends with its supervisor's socket."""

from __future__ import annotations

import contextlib
import os
import tempfile

from fumehood.folders import remove_tree
from fumehood.tiers.container import owners

_PREFIX = "fumehood-gvisor-"


def make() -> str:
    """A fresh folder for a bundle, with its owner's name in its own. Raises OSError."""
    return tempfile.mkdtemp(prefix=f"{_PREFIX}{owners.ours()}-")


def sweep() -> list[str]:
    """Remove the bundles of owners that are gone; their names. Never raises."""
    gone = []
    folder = tempfile.gettempdir()
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            owner = name.removeprefix(_PREFIX).rpartition("-")[0]
            path = f"{folder}/{name}"
            if name.startswith(_PREFIX) and owners.is_gone(owner):
                with contextlib.suppress(OSError):
                    if os.lstat(path).st_uid == os.geteuid():
                        remove_tree(path)
                        gone.append(name)
    return gone
