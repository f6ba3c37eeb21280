"""An output folder that cannot be written to is told before anything runs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from fumehood.errors import PolicyError
from fumehood.model import Boundary, Policy
from fumehood.runner import AsyncRunner
from fumehood.tier import Features, Probe


class NeverStarts:
    name = "never_starts"
    features = Features(Boundary.KERNEL, "fails the test if it is asked to start anything", files=True)

    def probe(self) -> Probe:
        return Probe(True)

    async def create(self, policy: Policy) -> Any:
        raise AssertionError("something was started")

    async def close(self) -> None:
        return None


def test_a_file_in_the_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("a file")
    with pytest.raises(PolicyError, match="out: cannot make the folder"):
        asyncio.run(AsyncRunner(tier=NeverStarts()).run("print(1)", out=taken / "results"))
