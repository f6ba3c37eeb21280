"""An excerpt of a module holds all that its names need, and nothing else."""

from __future__ import annotations

import ast

import pytest

from fumehood.tiers.container import payload
from fumehood.tiers.container.excerpt import excerpt

MODULE = '''
"""Its documentation."""
from __future__ import annotations
import os, sys as system
from typing import Any
A, (B, C) = 1, (2, 3)
annotated: int = 4
unbound: Any
class Kept(Exception):
    field: Any = None
    lone: Any
    def method(self, value: Any) -> Any:
        return helper(value)
def helper(value: Dropped) -> Dropped:
    return value + C + annotated
class Dropped:
    pass
def unrelated():
    return system
print("imported")
'''


def test_what_a_name_needs_is_kept_in_its_order() -> None:
    found = excerpt(MODULE, ["Kept"])
    assert [type(each).__name__ for each in found.body] == ["Assign", "Assign", "ClassDef", "FunctionDef"]
    names: dict[str, object] = {}
    exec(compile(ast.fix_missing_locations(found), "x", "exec", dont_inherit=True), names)
    assert names["Kept"]().method(1) == 8  # type: ignore[operator]
    assert not names.keys() & {"Any", "Dropped", "os", "system", "unrelated"}


def test_an_import_is_kept_by_the_name_that_it_binds() -> None:
    assert "import os, sys as system" in ast.unparse(excerpt(MODULE, ["unrelated"]))


def test_a_name_that_is_not_there_is_an_error() -> None:
    with pytest.raises(KeyError):
        excerpt(MODULE, ["missing"])


def test_what_a_single_program_gets_of_bootstrap_and_agent_lacks_no_name() -> None:
    """Every global name that its code loads is bound in it, or built in."""
    import builtins

    _, source = payload._agent(True)
    for text in (payload.program_bootstrap(), source.decode()):
        tree = ast.parse(text)
        bound = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        bound |= {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        bound |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
        bound |= {node.name for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler) and node.name}
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                bound |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        loaded = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        assert loaded <= bound | set(dir(builtins)), sorted(loaded - bound - set(dir(builtins)))
    assert "serve" not in payload.program_bootstrap()
    assert len(payload._agent(True)[0]) < len(payload._agent(False)[0]) / 4
