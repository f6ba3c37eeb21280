"""What is left in an engine, asked directly."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from fumehood.images.engine import Engine, Word
from fumehood.images.service import Service, reach
from fumehood.tiers.container import owners


def labelled(word: Word, owner: str | None = None, *, path: str = "") -> list[dict[str, Any]]:
    """The containers that belong to ``owner``, by default this process, in the engine (at the socket ``path``)."""
    wanted = owners.ours() if owner is None else owner
    query = {"all": "true", "filters": json.dumps({"label": [f"{owners.LABEL}={wanted}"]})}
    service = Service(Engine(word, path)) if path else reach(word)
    try:
        found: list[dict[str, Any]] = asyncio.run(service.engine.call("GET", "/containers/json", query=query))
    finally:
        service.close()
    return found
