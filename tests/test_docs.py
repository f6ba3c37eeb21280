"""The documents follow the code: generated parts are what their generators would write now."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from fumehood import policy_file
from fumehood.model import ArtifactLimits, Limits, Policy

ROOT = Path(__file__).resolve().parent.parent


def test_the_readmes_tables_are_what_they_show() -> None:
    done = subprocess.run([sys.executable, "scripts/readme.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_file_that_the_specification_names_exists() -> None:
    text = (ROOT / "SPECIFICATION.md").read_text()
    named = {part for part in text.split("`") if part.endswith((".py", "/")) and " " not in part and "(" not in part}
    assert len(named) > 10
    assert [name for name in sorted(named) if not (ROOT / "tests" / name).exists()] == []


def test_every_promise_has_a_test_a_command_or_the_word_pending() -> None:
    rows = [line for line in (ROOT / "SPECIFICATION.md").read_text().splitlines() if line.startswith("| ")]
    rows = [row for row in rows if row != "| promise | held by |"]
    assert len(rows) > 40
    held = re.compile(r"`[a-z_/0-9]+(\.py|/)`|`fumehood [a-z]+|\*\*pending\*\*|measured interleaved")
    assert [row for row in rows if not held.search(row)] == []


def test_the_list_of_layers_names_every_module() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    [shape] = re.findall(r"^## The shape\n(.*?)^## ", text, re.M | re.S)
    words = set(re.findall(r"[a-z0-9_]+", shape))
    package = ROOT / "src" / "fumehood"
    modules = {p.stem for p in package.glob("*.py")} | {p.parent.name for p in package.glob("*/__init__.py")}
    assert sorted(m for m in modules - words if not m.startswith("__")) == []


def test_the_documented_policy_is_one_and_shows_the_defaults() -> None:
    [block] = re.findall(r"^```toml\n(.*?)^```", (ROOT / "docs" / "policy.md").read_text(), re.M | re.S)
    policy = policy_file.parse(block)
    assert (policy.limits, policy.artifacts) == (Limits(), ArtifactLimits())
    assert set(tomllib.loads(block)) == {f.name for f in dataclasses.fields(Policy)}
    assert set(tomllib.loads(block)["limits"]) == {f.name for f in dataclasses.fields(Limits)}


def test_links_between_documents_lead_somewhere() -> None:
    broken = []
    for document in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", document.read_text()):
            if not (document.parent / target).exists():
                broken.append(f"{document.relative_to(ROOT)}: {target}")
    assert broken == []
