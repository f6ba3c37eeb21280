"""A sandbox for one program, whose first process is the program's: there is no agent between it and the host.

runsc hands on two pipes as the container's stdout and stderr, and the channel as its standard input, from which the
bootstrap takes the program (:func:`fumehood.tiers.container.bootstrap.become_program`). Output is read from the pipes,
and the exit status is what runsc waited for. The frames of an agent are spoken on this side, as they are for the jail.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fumehood.model import Outcome
from fumehood.session import GRACE_S
from fumehood.tiers.gvisor import runsc
from fumehood.tiers.jail.single import SingleChannel, SingleSandbox

if TYPE_CHECKING:
    from fumehood.tiers.gvisor.beginning import Begun
    from fumehood.tiers.jail.client import Exit


class GvisorSingle(SingleSandbox):
    """As :class:`SingleSandbox`, without a way to signal the program: to interrupt it is to kill it."""

    async def interrupt(self, *, grace_s: float | None = GRACE_S) -> None:
        """End the program, and the sandbox with it; nothing if ``grace_s`` lets it go on, or none runs."""
        run = self._run
        if run is not None and grace_s is not None:
            self._impose(run, Outcome.CANCELLED)


def link(begun: Begun) -> SingleChannel:
    """The way to the program's process, which has reported. Owns the channel and the pipes. Raises OSError."""
    enclosure = begun.enclosure

    def on_exit(tell: Callable[[Exit | None], object]) -> None:
        def told() -> None:
            status = runsc.ended(enclosure.folder)
            tell(None if status is None else (0.0, status))

        enclosure.on_death(told)

    stdout, stderr = begun.output
    return SingleChannel(begun.channel, stdout, stderr, enclosure.duplicate(), on_exit)
