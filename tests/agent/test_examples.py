"""The examples in the documentation are Python, and what they import and call of us is there."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "agent.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_examples_are_python_and_import_what_there_is(block: str) -> None:
    tree = compile(block, str(PAGE), "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fumehood"):
            module = _import(str(node.module))
            assert [a.name for a in node.names if not hasattr(module, a.name)] == []
        if isinstance(node, ast.Import):
            for alias in node.names:
                _import(alias.name)


def _import(name: str) -> object:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if (error.name or "").startswith("fumehood"):
            raise
        pytest.skip(f"the extra that brings {error.name} is not installed")


def test_every_adapter_has_an_example() -> None:
    adapters = Path(importlib.import_module("fumehood.agent.adapters").__path__[0]).glob("[a-z]*.py")
    text = "\n".join(BLOCKS)
    assert [a.stem for a in adapters if f"fumehood.agent.adapters.{a.stem}" not in text] == []
