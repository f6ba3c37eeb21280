"""The arrows: a module imports only from layers before its own, and what must be light is."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fumehood
from fumehood.tiers.jail import runtime

ROOT = Path(fumehood.__file__).parent

#: Lowest first. A name stands for a module or for all of a package; a layer's own modules may import each other only
#: where they are of one package.
LAYERS = (
    ("errors",),
    ("model",),
    ("tier", "policy_file", "threads"),
    ("linux",),
    ("guest",),
    ("wire", "displays", "tar"),
    ("folders", "mapping", "artifacts", "environments"),
    ("execs", "guest_files"),
    ("session",),
    ("enclosure",),
    ("egress", "images"),
    ("tiers",),
    ("registry",),
    ("pool",),
    ("runner",),
    ("agent",),
    ("attacks",),
    ("bench",),
    ("cli", "mcp", "server", "e2b_server"),
    ("__main__",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

#: Long modules, each with the reason why it is one.
LONG = {
    "guest/agent.py": "one file is what every boundary with a Python needs to have inside",
    "session.py": "one state machine: an exec from its hand-over to its outcome",
    "linux/cgroup.py": "two versions of one facility behind one interface",
    "attacks/watch.py": "one observer per kind of harm, and nothing else",
}
LINES_MAX = 600


def modules() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py") if "__pycache__" not in path.parts)


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, *, runtime_only: bool = False) -> set[str]:
    """Absolute names of what a module imports anywhere in it, or only where it runs when imported."""
    found: set[str] = set()

    def visit(node: ast.AST, running: bool) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            running = False
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) and runtime_only:
            running = False
        if running or not runtime_only:
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: a relative import"
                assert node.module is not None
                found.add(node.module)
                found.update(f"{node.module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child, running)

    visit(ast.parse(path.read_text()), True)
    return found


def test_every_module_has_a_layer() -> None:
    assert {name_of(path).partition(".")[0] for path in modules()} - {""} <= set(RANK)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_arrows_point_down(path: Path) -> None:
    name = name_of(path)
    own = name.partition(".")[0]
    if not own:
        return  # the package itself names everything and imports it on demand
    for imported in imports(path):
        if imported == "fumehood" or not imported.startswith("fumehood."):
            continue
        other = imported.split(".")[1]
        if other not in RANK:
            assert hasattr(fumehood, other), f"{name} imports {imported}"
            continue
        if other != own:
            assert RANK[other] <= RANK[own] and other != own, f"{name} imports {imported}, of a higher layer"


@pytest.mark.parametrize("path", sorted((ROOT / "guest").glob("*.py")), ids=lambda path: path.name)
def test_the_guest_imports_nothing_of_fumehood(path: Path) -> None:
    assert not [name for name in imports(path) if name.partition(".")[0] not in sys.stdlib_module_names]


@pytest.mark.parametrize("name", runtime.INSIDE)
def test_what_runs_inside_the_jail_is_small(name: str) -> None:
    """Every module there is memory in each sandbox: none of the standard library's heavy ones when it is imported."""
    heavy = {
        "dataclasses",
        "enum",
        "typing",
        "re",
        "asyncio",
        "subprocess",
        "inspect",
        "logging",
        "pathlib",
        "tempfile",
    }
    assert not {n.partition(".")[0] for n in imports(ROOT / name, runtime_only=True)} & heavy


def test_what_runs_inside_the_jail_imports_only_what_is_inside() -> None:
    inside = {name_of(ROOT / name) for name in runtime.INSIDE}
    for name in runtime.INSIDE:
        for imported in imports(ROOT / name, runtime_only=True):
            if imported.startswith("fumehood."):
                short = imported.removeprefix("fumehood.")
                assert short in inside or short.rpartition(".")[0] in inside, f"{name} imports {imported}"


@pytest.mark.parametrize("tier", ["jail", "subprocess"])
def test_tiers_import_no_sibling_but_what_they_share(tier: str) -> None:
    shared = {"fumehood.tiers.jail.runtime", "fumehood.tiers.jail.hosts"}
    for path in (ROOT / "tiers" / tier).glob("*.py"):
        for imported in imports(path):
            if imported.startswith("fumehood.tiers.") and not imported.startswith(f"fumehood.tiers.{tier}"):
                assert any(imported.startswith(name) for name in shared), f"{path.name} imports {imported}"


def loaded_by(statement: str) -> set[str]:
    code = f"import sys\nbefore = set(sys.modules)\n{statement}\nprint(*sorted(set(sys.modules) - before))"
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path.insert(0, {str(ROOT.parent)!r})\n{code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.split())


def test_importing_the_package_is_light() -> None:
    loaded = loaded_by("import fumehood")
    assert loaded == {"fumehood", "__future__"}


@pytest.mark.parametrize("module", ["fumehood.runner", "fumehood.registry", "fumehood.tiers.jail.tier", "fumehood.cli"])
def test_no_third_party_module_before_it_is_needed(module: str) -> None:
    tops = {name.partition(".")[0] for name in loaded_by(f"import {module}")}
    assert tops - set(sys.stdlib_module_names) == {"fumehood"}


def test_every_public_name_is_there() -> None:
    for name in fumehood.__all__:
        assert getattr(fumehood, name) is not None
    with pytest.raises(AttributeError):
        fumehood.nonesuch  # noqa: B018


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_long_modules_have_a_reason(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    lines = len(path.read_text().splitlines())
    assert (lines > LINES_MAX) == (name in LONG), f"{name} has {lines} lines"
    assert all((ROOT / known).exists() for known in LONG)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_cancellation_can_be_lost_in_wait_for(path: Path) -> None:
    """asyncio.wait_for() before Python 3.12 drops one that comes just when what it waits for is there (bpo-42130)."""
    assert "await asyncio.wait_for(" not in path.read_text()
