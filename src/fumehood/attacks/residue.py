"""What a sandbox may not leave behind, as one look at the host to be compared with a later one."""

from __future__ import annotations

import asyncio
import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from fumehood.attacks import procfs
from fumehood.attacks.stage import Stage

#: How long the kernel may take to finish tearing down what was killed.
PATIENCE_S = 3.0
#: The part of a path that differs from one sandbox to the next: its owner's name and a random one.
_BUNDLE = re.compile(r"(?<=/fumehood-gvisor-)[^/]+")


@dataclass(frozen=True, slots=True)
class Residue:
    """Processes below this one, its descriptors and mounts, and files where sandboxes keep theirs."""

    stage: Stage
    processes: frozenset[tuple[int, int]]
    comms: tuple[str, ...]  # names of those that lived
    descriptors: frozenset[tuple[int, str]]
    mounts: frozenset[str]
    files: frozenset[str]

    @classmethod
    def take(cls, stage: Stage) -> Residue:
        """Look now."""
        below = procfs.descendants()
        return cls(
            stage,
            frozenset((p.pid, p.started) for p in below.values()),
            tuple(p.comm for p in below.values() if p.alive),
            frozenset((f.fd, f.link) for f in procfs.open_files(os.getpid()) if not f.link.startswith("/proc/")),
            frozenset(_mounts(stage)),
            frozenset(_files(stage)),
        )

    @classmethod
    async def settled(cls, stage: Stage) -> Residue:
        """Look when nothing changes any more: a tier may be preparing its next sandbox beside us."""
        last = cls.take(stage)
        same = 0
        for _ in range(20):
            await asyncio.sleep(0.04)
            now = cls.take(stage)
            same = same + 1 if now._kinds() == last._kinds() else 0
            last = now
            if same == 3:
                break
        return last

    async def left(self) -> list[str]:
        """What is there now and was not then, described; waits a little for what is about to go."""
        return await _patiently(self._left)

    async def grown(self) -> list[str]:
        """Of what there is more now than then, by kind: sandboxes prepared for later may have changed places."""
        return await _patiently(self._grown)

    def _grown(self) -> list[str]:
        now = Residue.take(self.stage)
        more = now._kinds() - self._kinds()
        found = [f"{count} more: {kind}" for kind, count in sorted(more.items())]
        return found + [f"mount {line.split()[4]}" for line in sorted(now.mounts - self.mounts)]

    def _kinds(self) -> Counter[str]:
        """How many there are of each kind of process, descriptor and file, without numbers and random names."""
        kinds = Counter(f"process {comm}" for comm in self.comms)
        kinds.update(f"descriptor {_BUNDLE.sub('', link.split(':')[0])}" for _, link in self.descriptors)
        kinds.update(f"file in {os.path.dirname(path)}" for path in self.files)
        return kinds

    def _left(self) -> list[str]:
        below = procfs.descendants()
        new = [p for p in below.values() if (p.pid, p.started) not in self.processes]
        procfs.reap(p.pid for p in new if not p.alive and p.ppid == os.getpid())
        now = Residue.take(self.stage)
        found = [f"process {p.comm} (pid {p.pid}, state {p.state})" for p in new if p.alive]
        found += [
            f"descriptor {fd} of the supervisor: {link}" for fd, link in sorted(now.descriptors - self.descriptors)
        ]
        found += [f"mount {line.split()[4]}" for line in sorted(now.mounts - self.mounts)]
        found += [f"file {path}" for path in sorted(now.files - self.files)]
        return found


async def _patiently(look: Callable[[], list[str]]) -> list[str]:
    found: list[str] = []
    for _ in range(int(PATIENCE_S / 0.05)):
        found = look()
        if not found:
            break
        await asyncio.sleep(0.05)
    return found


#: Where sandboxes mount: whoever else mounts elsewhere on this host meanwhile is none of ours.
_MOUNT_POINTS = ("/tmp", "/work", "/mnt", "/dev/shm", "/proc", "/")


def _mounts(stage: Stage) -> list[str]:
    lines = procfs.read_text("/proc/self/mountinfo").splitlines()
    return [line for line in lines if line.split()[4] in _MOUNT_POINTS or stage.token in line]


def _files(stage: Stage) -> list[str]:
    shared = ("/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue")
    found = [os.path.join(stage.work, name) for name in os.listdir(stage.work)]
    for folder in shared:
        try:
            names = os.listdir(folder)
        except OSError:
            continue
        # Names of the run only: others on this host come and go. The whole folders are compared at the suite's end.
        found += [f"{folder}/{name}" for name in names if stage.token in name]
    return found
