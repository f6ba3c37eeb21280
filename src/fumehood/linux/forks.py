"""Forks of a process of one thread, at the price of what they need.

``os.fork`` makes a child ready for whatever its parent's threads may have held: locks are made anew, the states of
other threads thrown away. It touches some 80 pages for that, each of which is copied, and does nothing where there was
one thread. What modules have asked for by ``os.register_at_fork`` is another matter, above all that ``random`` is
seeded.
"""

from __future__ import annotations

import os

from fumehood.linux.namespaces import clone3_bare

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    Hook = Callable[[], object]


class Forks:
    """Forks this process, which has one thread and keeps the interpreter's lock, as ``PyDLL`` does.

    While ``listen`` is in force, what modules register is kept here as well as in the interpreter, whose own forks go
    on as ever. C libraries' pthread_atfork(3) is not served, nor is it by any other raw clone.
    """

    def __init__(self) -> None:
        self._before: list[Hook] = []
        self._in_parent: list[Hook] = []
        self._in_child: list[Hook] = []

    def listen(self) -> Hook:
        """Take note of what is registered from now on; returns what ends that."""
        register = os.register_at_fork

        def record(
            *, before: Hook | None = None, after_in_child: Hook | None = None, after_in_parent: Hook | None = None
        ) -> None:
            named = {"before": before, "after_in_child": after_in_child, "after_in_parent": after_in_parent}
            register(**{name: hook for name, hook in named.items() if hook is not None})
            if before is not None:
                self._before.insert(0, before)  # the last that was registered is the first to run
            if after_in_parent is not None:
                self._in_parent.append(after_in_parent)
            if after_in_child is not None:
                self._in_child.append(after_in_child)

        def end() -> None:
            os.register_at_fork = register

        os.register_at_fork = record
        return end

    def clone3(self, flags: int, *, exit_signal: int) -> tuple[int, int]:
        """As :func:`fumehood.linux.namespaces.clone3`. Raises OSError, in the parent."""
        _run(self._before)
        pid = -1
        try:
            pid, pidfd = clone3_bare(flags, exit_signal=exit_signal)
        finally:
            _run(self._in_child if pid == 0 else self._in_parent)
        return pid, pidfd


def _run(hooks: list[Hook]) -> None:
    """What a hook raises is nobody's, as around ``os.fork``: a child it took out of its way would go on in ours."""
    for hook in hooks:
        try:
            hook()
        except BaseException:
            pass
