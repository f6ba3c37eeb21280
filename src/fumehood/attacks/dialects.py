"""Which attacks a language runtime can face, and the prelude that its programs have.

A program for a language runtime is the same as everywhere; only what stands in front of it is shorter, and ``trying``
lets pass that a module lacks a function, which is how a runtime holds most of them. That the program itself is right
is proven on the control. What cannot be asked at all is not applicable: a call by its number where no number reaches a
kernel, and whatever the host sees only in a process that has marked itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from fumehood.attacks import prelude
from fumehood.attacks.model import Attack
from fumehood.attacks.prelude import ARMED
from fumehood.model import Boundary
from fumehood.tier import Features

#: CPython without processes (tier wasm): the modules that WASI has; the others are empty.
_WASI = """\
import contextlib, errno, glob, json, os, platform, re, signal, socket, stat, struct, sys, threading, time, traceback
from types import SimpleNamespace
T = SimpleNamespace(**{targets!r})
fcntl = mmap = resource = subprocess = SimpleNamespace()
trying = contextlib.suppress(OSError, MemoryError, AttributeError, NotImplementedError)


def hold(seconds=2):
    time.sleep(seconds)


def say(data):
    print(data.decode("ascii", "backslashreplace") if isinstance(data, bytes) else data, flush=True)


def leak(path):
    with trying:
        with open(path, "rb") as file:
            say(file.read(1 << 16))


def others():
    return []


print({armed!r}, end="", flush=True)
"""

#: A subset of Python (tier interpreter): no module but these, no generator, no exception with more than a text.
_SUBSET = """\
import json, os, re, sys, time
contextlib = fcntl = glob = mmap = resource = signal = socket = struct = subprocess = threading = None


class Trying:
    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        return True


class T:
{targets}


trying = Trying()


def hold(seconds=2):
    time.sleep(seconds)


def say(data):
    print(data.decode("ascii", "backslashreplace") if isinstance(data, bytes) else data)


def leak(path):
    with trying:
        with open(path, "rb") as file:
            say(file.read(65536))


def others():
    return []


print({armed!r}, end="")
time.sleep(0)  # what was printed is sent with the next question to the host
"""

_BY_NUMBER = re.compile(r"\b(?:ctypes|libc|syscall|call)\b")
#: Boundaries whose programs are no processes.
RUNTIMES = (Boundary.INTERPRETER, Boundary.RUNTIME)


def is_runtime(features: Features) -> bool:
    """Whether the tier's programs are values of a language runtime and no processes of their own."""
    return features.boundary in RUNTIMES or not features.full_python


def unable(attack: Attack, features: Features) -> str | None:
    """Why the attack says nothing about a tier with these features, or None if it does."""
    if not is_runtime(features):
        return "an attack on a language runtime: this tier's program is a process" if attack.runtimes_only else None
    if attack.watch.marked or attack.second_when == "beside":
        return "the host looks at a process that marks itself, and a program of this tier is none"
    if _BY_NUMBER.search(attack.program + attack.second):
        return "the program makes system calls by number, and this tier has none to make"
    return None


def compose(program: str, targets: Mapping[str, object], features: Features) -> str:
    """The whole text that a tier with these features runs."""
    if not is_runtime(features):
        return prelude.compose(program, targets)
    text = _WASI if features.full_python else _SUBSET
    told: object = dict(targets)
    if not features.full_python:
        told = "\n".join(f"    {name} = {value!r}" for name, value in targets.items()) or "    pass"
    return text.format(targets=told, armed=ARMED.decode()) + "\n" + program
