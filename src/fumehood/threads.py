"""Blocking work beside the event loop, also while the interpreter is ending."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def in_thread(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """``asyncio.to_thread``, but at the interpreter's end, when no thread is to be had any more, done here and now.

    Sandboxes are destroyed by exit handlers too, and those run after the pool of threads has closed.
    """
    work = functools.partial(function, *args, **kwargs)
    try:
        future = asyncio.get_running_loop().run_in_executor(None, work)
    except RuntimeError:
        return work()
    return await future
