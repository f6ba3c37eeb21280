"""What stands in front of every attacker's program.

It imports all that the programs use, so that a failed import is a failed set-up and not a defence, then says
``armed`` on stdout. The host takes nothing else on the program's word. ``T`` holds what an attacker is told: names,
paths, ports and process ids of the targets, never the canaries behind them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

ARMED = b"fumehood: armed\n"

#: How the names begin that programs give themselves, which their forks inherit, for the host to know them by.
MARK = "fh-"

#: The name that a process gives itself when its attempt is over, for the host to look at it.
DONE = "fh-done"

_TEXT = """\
import contextlib, ctypes, errno, fcntl, glob, json, mmap, os, platform, re, resource, signal, socket, stat, struct
import subprocess, sys, threading, time
from types import SimpleNamespace
T = SimpleNamespace(**json.loads({targets!r}))
libc = ctypes.CDLL(None, use_errno=True)
trying = contextlib.suppress(OSError, MemoryError)
NR = dict(x86_64=dict(clone=56, ptrace=101, add_key=248, perf=298, name_to_handle=303, open_by_handle=304,
                      process_vm_readv=310, bpf=321, userfaultfd=323),
          aarch64=dict(clone=220, ptrace=117, add_key=217, perf=241, name_to_handle=264, open_by_handle=265,
                       process_vm_readv=270, bpf=280, userfaultfd=282))[platform.machine()]
NR.update(pidfd_send_signal=424, io_uring_setup=425, open_tree=428, move_mount=429, fsopen=430, fsconfig=431,
          fsmount=432, pidfd_open=434, clone3=435, pidfd_getfd=438)


def syscall(number, *args):
    wide = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    value = libc.syscall(ctypes.c_long(NR.get(number, number)), *wide)
    if value == -1:
        raise OSError(ctypes.get_errno(), "syscall %s" % number)
    return value


def call(name, *args):
    if getattr(libc, name)(*args) == -1:
        raise OSError(ctypes.get_errno(), name)


def mark(name):
    libc.prctl(15, ctypes.c_char_p(name.encode()), 0, 0, 0)  # PR_SET_NAME


def hold(seconds=7):
    mark({done!r})
    time.sleep(seconds)


def say(data):
    text = data.decode("ascii", "backslashreplace") if isinstance(data, bytes) else data
    sys.stdout.buffer.write(text.encode("utf-8", "replace") + b"\\n")
    sys.stdout.flush()


def leak(path):
    with trying:
        with open(path, "rb") as file:
            say(file.read(1 << 16))


def others():
    return [int(p) for p in os.listdir("/proc") if p.isdigit() and int(p) != os.getpid()]


mark("fh-run")
sys.stdout.write({armed!r})
sys.stdout.flush()
"""


def compose(program: str, targets: Mapping[str, object]) -> str:
    """The whole text that a tier runs: the prelude with ``targets``, then ``program``."""
    head = _TEXT.format(targets=json.dumps(dict(targets)), done=DONE, armed=ARMED.decode())
    return head + "\n" + program


#: The prelude as documentation shows it.
PRELUDE = _TEXT
