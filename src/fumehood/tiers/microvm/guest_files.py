"""Sending a work folder out of the guest, and how anything is said on the control port: see guest_init.py.

Runs inside the guest only, when no program is left; follows no link and opens nothing but regular files.
"""

from __future__ import annotations

import itertools
import json
import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

KINDS = {stat.S_IFREG: "f", stat.S_IFDIR: "d", stat.S_IFLNK: "l", stat.S_IFIFO: "p", stat.S_IFSOCK: "s"}
RUNS_MAX = 1024
_PATH_MAX = 4000


def say(control: int, line: dict[str, object]) -> None:
    """One line to the host."""
    put(control, json.dumps(line, separators=(",", ":")).encode() + b"\n")


def put(control: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(control, view) :]


def export(control: int, work: int, entries: int, left: int, depth: int) -> None:
    """Send what is below the folder ``work``: at most ``entries`` names and ``left`` bytes of content.

    Folders more than ``depth`` deep are sent without what is in them: each is a walk from the top, so a tree of
    thousands would take its square.
    """
    names: dict[int, str] = {}
    folders: list[bytes] = [b""]
    truncated = False
    while folders:
        folder = folders.pop(0)
        fd = os.open(folder or b".", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=work)
        for name in sorted(map(os.fsencode, os.listdir(fd))):
            path = folder + b"/" + name if folder else name
            if entries <= 0 or len(path) > _PATH_MAX:
                truncated = True
                continue
            entries -= 1
            info = os.stat(name, dir_fd=fd, follow_symlinks=False)
            left -= send_entry(control, fd, name, path, info, left, names)
            if stat.S_ISDIR(info.st_mode) and path.count(b"/") < depth:
                folders.append(path)
        os.close(fd)
    say(control, {"op": "exported", "truncated": truncated})


def send_entry(
    control: int, folder: int, name: bytes, path: bytes, info: os.stat_result, left: int, names: dict[int, str]
) -> int:
    """One entry with its content, holes left out; the number of bytes sent. Content over ``left`` is not sent."""
    line: dict[str, Any] = {"op": "entry", "path": path.hex(), "kind": KINDS[stat.S_IFMT(info.st_mode)]}
    line.update(mode=stat.S_IMODE(info.st_mode), size=0, target="", same="", runs=[])
    if line["kind"] == "l":
        line["target"] = os.fsencode(os.readlink(name, dir_fd=folder)).hex()
    if line["kind"] == "f" and info.st_nlink > 1:
        first = names.setdefault(info.st_ino, line["path"])
        line["same"] = "" if first == line["path"] else first
    if line["kind"] != "f" or line["same"]:
        say(control, line)
        return 0
    line["size"] = info.st_size
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    runs = list(itertools.islice(written_runs(fd, info.st_size), RUNS_MAX + 1))
    if len(runs) > RUNS_MAX:
        runs = [(0, info.st_size)]
    total = sum(length for _, length in runs)
    if total > left:
        line["kind"], runs, total = "x", [], 0
    line["runs"] = runs
    say(control, line)
    for offset, length in runs:
        for start in range(offset, offset + length, 1 << 20):
            put(control, os.pread(fd, min(1 << 20, offset + length - start), start))
    os.close(fd)
    return total


def written_runs(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """Where a file has content, as (offset, length)."""
    position = 0
    while position < size:
        try:
            start = os.lseek(fd, position, os.SEEK_DATA)
        except OSError:
            return  # nothing but a hole is left
        position = min(os.lseek(fd, start, os.SEEK_HOLE), size)
        yield start, position - start
