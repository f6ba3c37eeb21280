"""The agent side's errors are in the one tree, and each has an exit code of its own."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import fumehood
from fumehood.cli import exits
from fumehood.errors import AuditError, FumehoodError, ModelError, QuotaError

SOURCE = Path(fumehood.__file__).parent


@pytest.mark.parametrize(("kind", "code"), [(QuotaError, 251), (AuditError, 252), (ModelError, 253)])
def test_each_has_its_exit_code(kind: type[FumehoodError], code: int) -> None:
    assert exits.of_error(kind("x")) == code
    assert getattr(fumehood, kind.__name__) is kind


def test_no_kind_of_error_stands_outside_the_tree() -> None:
    """A subclass of an error in the tree may stand where it is raised: it is handled as what it is."""
    outside = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and "FumehoodError" in map(ast.unparse, node.bases):
                outside += [f"{path.name}: {node.name}"] if path != SOURCE / "errors.py" else []
    assert outside == []


def test_the_tree_in_the_documentation_names_every_error() -> None:
    from fumehood import errors

    names = [n for n, v in vars(errors).items() if isinstance(v, type) and issubclass(v, FumehoodError)]
    assert [n for n in names if n not in (errors.__doc__ or "")] == []
