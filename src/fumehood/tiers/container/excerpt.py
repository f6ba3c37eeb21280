"""The part of a module that some of its names need, for a place in which every page of code costs time."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator


def excerpt(text: str, wanted: Iterable[str]) -> ast.Module:
    """The statements of a module's ``text`` that bind the names ``wanted``, and those that these refer to.

    Statements that bind nothing are left out, so what the module does when it is imported must not matter to them. So
    are annotations, which it must not evaluate. Raises KeyError for a name that the module does not bind.
    """
    tree = _NoAnnotations().visit(ast.parse(text))
    makers: dict[str, list[ast.stmt]] = {}
    for statement in tree.body:
        for name in _bound(statement):
            makers.setdefault(name, []).append(statement)
    names = list(wanted)
    for name in names:
        if name not in makers:
            raise KeyError(name)
    kept: set[ast.stmt] = set()
    while names:
        for statement in makers.get(names.pop(), ()):
            if statement not in kept:
                kept.add(statement)
                names += (node.id for node in ast.walk(statement) if isinstance(node, ast.Name))
    return ast.Module([each for each in tree.body if each in kept], [])


def _bound(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement of a module's binds."""
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        yield statement.name
    elif isinstance(statement, (ast.Import, ast.ImportFrom)):
        for alias in statement.names:
            yield alias.asname or alias.name.partition(".")[0]
    elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
        for target in statement.targets if isinstance(statement, ast.Assign) else [statement.target]:
            yield from (node.id for node in ast.walk(target) if isinstance(node, ast.Name))


class _NoAnnotations(ast.NodeTransformer):
    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.returns = None
        self.generic_visit(node)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        if node.value is None:
            return ast.copy_location(ast.Pass(), node)
        return ast.copy_location(ast.Assign([node.target], self.visit(node.value)), node)
