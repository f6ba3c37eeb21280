"""Which accelerator QEMU runs with here: KVM where a guest was seen to boot with it, or else TCG, its emulation.

That /dev/kvm exists says little: it may be another user's, and in a nested machine it may make guests that never get
anywhere. So one guest is booted, in the jail, for at most :data:`TRIAL_S`. What came of it is kept in the cache folder
until the host boots again or QEMU or the kernel changes, and for this process whatever happens, since a tier's
boundary must not change under its callers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import stat
import threading
from functools import lru_cache
from pathlib import Path

from fumehood.errors import FumehoodError
from fumehood.model import Limits
from fumehood.tiers.jail.tier import JailTier
from fumehood.tiers.microvm import images, machine, qemu, template
from fumehood.tiers.microvm.template import Recipe

#: A guest under KVM is up in less than a second.
TRIAL_S = 8.0
WORKS = "boots a guest"


def chosen() -> str:
    """ "kvm" or "tcg". The first call in a process may take :data:`TRIAL_S`."""
    return "kvm" if verdict() == WORKS else "tcg"


@lru_cache(maxsize=1)
def verdict() -> str:
    """What is known of KVM here: :data:`WORKS`, or why it is not used."""
    try:
        reason = out_of_reach(qemu.KVM)
        if reason:
            return reason
        image = images.find()
        if image is None:
            return "not tried: there is no image yet"
        known, place = _circumstances(), images.folder() / "kvm.json"
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            kept = json.loads(place.read_bytes())
            if kept["circumstances"] == known:
                return str(kept["verdict"])
        shape = template.shape_for(Limits(), image, None, "kvm")
        found = _try(Recipe(qemu.find(), shape, image, None, ())) or WORKS
        draft = place.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps({"circumstances": known, "verdict": found}))
        draft.replace(place)
        return found
    except FumehoodError as error:
        return error.message
    except OSError as error:
        return f"not tried: {error}"


def out_of_reach(device: str) -> str:
    """Why QEMU in the jail may not open ``device``, or "".

    Started by root, a sandbox is a user of the host that nobody else is, so the device must be open to all; started by
    an ordinary user, it is that user.
    """
    try:
        mode = os.stat(device).st_mode
    except OSError:
        return f"{device} does not exist"
    if os.geteuid() == 0:
        if mode & (stat.S_IROTH | stat.S_IWOTH) != stat.S_IROTH | stat.S_IWOTH:
            return f"{device} is not open to all (`chmod 0666 {device}`), and sandboxes started by root are nobody"
    elif not os.access(device, os.R_OK | os.W_OK):
        return f"{device} may not be opened by this user: join the group that may"
    return ""


def _circumstances() -> list[str]:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return [boot, os.uname().release, qemu.find().version, str(os.geteuid())]


def _try(recipe: Recipe) -> str:
    """Boot one guest, in a thread of its own: the caller may have an event loop that runs."""
    found = ["the trial failed"]

    async def trial() -> None:
        jail = JailTier(guest=machine.jail_guest(recipe.program, recipe.shape.accelerator))
        try:
            found[0] = await template.boots(recipe, jail, TRIAL_S)
        finally:
            await jail.close()

    thread = threading.Thread(target=lambda: asyncio.run(trial()))
    thread.start()
    thread.join()
    return found[0]
