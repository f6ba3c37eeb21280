"""The end of a tier while sandboxes run: they die at once, and who waits for them is told before the tier is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Protocol

#: How long the owners of killed sandboxes have to release them, before that is done for them.
_OWNERS_TIMEOUT_S = 5.0
_LOOK_S = 0.01


class _Ending(Protocol):
    def kill(self) -> None: ...

    async def discard(self) -> None: ...


async def end_all(live: Collection[_Ending]) -> None:
    """Kill all of ``live``, which shrinks as they are released, and return when it is empty."""
    if not live:
        return
    for enclosure in list(live):
        enclosure.kill()
    loop = asyncio.get_running_loop()
    until = loop.time() + _OWNERS_TIMEOUT_S
    while live and loop.time() < until:
        await asyncio.sleep(_LOOK_S)
    await asyncio.gather(*(enclosure.discard() for enclosure in list(live)))
    await asyncio.sleep(_LOOK_S)  # the owners' own last steps: the loop may be stopped next
