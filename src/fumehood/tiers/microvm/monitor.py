"""Runs in the jail, sealed: takes a command line and descriptors from the supervisor and becomes QEMU.

The message on the channel is a JSON object ``{"argv": [...], "fds": [numbers]}`` with the descriptors beside it, in
that order. The channel itself stays open in QEMU under its own number, as its monitor socket and its stderr. Where the
program cannot be executed, one line ``{"error": text}`` is sent instead.
"""

from __future__ import annotations

import array
import json
import os
import socket

_MESSAGE_MAX = 64 << 10
_FDS_MAX = 16
_PARKED_FROM = 32  # above every number that a message asks for, below the limit on open files


def serve(read_fd: int, write_fd: int, workdir: str) -> None:
    """Never returns but on failure."""
    with socket.socket(fileno=os.dup(read_fd)) as channel:
        message, ancillary, _, _ = channel.recvmsg(_MESSAGE_MAX, socket.CMSG_SPACE(4 * _FDS_MAX))
    try:
        plan = json.loads(message)
        received = array.array("i", ancillary[0][2] if ancillary else b"")
        place(list(received), plan["fds"])
        os.set_inheritable(read_fd, True)
        os.dup2(read_fd, 2)  # its last words come that way too
        os.execve(plan["argv"][0], plan["argv"], {})
    except (OSError, ValueError, KeyError) as error:
        os.write(write_fd, json.dumps({"error": f"execute the machine monitor: {error}"}).encode() + b"\n")


def place(received: list[int], wanted: list[int]) -> None:
    """Give each received descriptor its number, inheritable; all others stay closed on exec."""
    parked = []
    for offset, fd in enumerate(received):
        parked.append(os.dup2(fd, _PARKED_FROM + offset, inheritable=False))
        os.close(fd)
    for fd, number in zip(parked, wanted, strict=True):
        os.dup2(fd, number, inheritable=True)
        os.close(fd)
