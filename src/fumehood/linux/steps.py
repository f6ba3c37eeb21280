"""System calls that are prepared ahead and then made one after another.

What a sandbox does to seal itself is known before it is born. Said in Python it would cost little more than the calls
if it were done often, but a sandbox does it once, in a process that was just forked: there each function, constant and
attribute that is touched is a page to be copied, and nothing of it is in the processor's caches. So the process that
forks prepares the calls, and what is forked goes through a list.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys

from fumehood.linux.syscalls import numbers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

if sys.platform == "linux":
    _syscall = ctypes.PyDLL(None, use_errno=True).syscall
    _syscall.restype = ctypes.c_long

AT_FDCWD = -100  # of a path that is not seen from a descriptor, <linux/fcntl.h>

#: What is known when a call is made: its result, such as a descriptor, for a later call to use.
Result = ctypes.c_int

_NUMBERS = numbers() if sys.platform == "linux" else {}


class Steps:
    """A list of system calls, each with what it is for, that any number of forked processes can go through."""

    def __init__(self) -> None:
        self._steps: list[tuple[tuple[object, ...], Result | None]] = []
        self._what: list[str] = []
        self._longs: dict[int, ctypes.c_long] = {}
        self.purpose = ""  # of the calls that are added next, for errors

    def call(self, name: str, *args: int | bytes | Result | ctypes.Structure | None, to: Result | None = None) -> None:
        """Add the call ``name``. Its result is kept in ``to``, which may be an argument of calls that come after it.

        Bytes are passed as a pointer to them, with a NUL behind; a structure as a pointer to it. Raises OSError
        (ENOSYS) for a call that this machine does not have.
        """
        if name not in _NUMBERS:
            raise OSError(errno.ENOSYS, f"{name}: {os.strerror(errno.ENOSYS)}")
        wide = tuple(self._wide(value) for value in (_NUMBERS[name], *args))
        self._steps.append((wide, to))
        paths = [os.fsdecode(value) for value in args if isinstance(value, bytes) and value.startswith(b"/")]
        self._what.append(" ".join((f"{self.purpose}: {name}" if self.purpose else name, *paths[-1:])))

    def _wide(self, value: int | bytes | Result | ctypes.Structure | None) -> object:
        if isinstance(value, int):  # one object for all that are alike
            return self._longs.setdefault(value, ctypes.c_long(value))
        return ctypes.byref(value) if isinstance(value, ctypes.Structure) else value

    def run(self) -> None:
        """Make them all, in order. Raises OSError at the first that fails, with its name and what it was for."""
        for step in self._steps:
            result = _syscall(*step[0])
            if result == -1:
                code = ctypes.get_errno()
                at = next(i for i, other in enumerate(self._steps) if other is step)
                raise OSError(code, f"{self._what[at]}: {os.strerror(code)}")
            if step[1] is not None:
                step[1].value = result


def at_once(add: Callable[..., None], *args: Any, **named: Any) -> None:
    """Make the steps that ``add(steps, *args, **named)`` adds, now. Raises OSError as ``Steps.run``."""
    steps = Steps()
    add(steps, *args, **named)
    steps.run()
