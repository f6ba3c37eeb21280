"""The documents follow the code: generated parts are what their generators would write now."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_the_readmes_tables_are_what_they_show() -> None:
    done = subprocess.run([sys.executable, "scripts/readme.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_file_that_the_specification_names_exists() -> None:
    text = (ROOT / "SPECIFICATION.md").read_text()
    named = {part for part in text.split("`") if part.endswith((".py", "/")) and " " not in part and "(" not in part}
    assert len(named) > 10
    assert [name for name in sorted(named) if not (ROOT / "tests" / name).exists()] == []


def test_links_between_documents_lead_somewhere() -> None:
    import re

    broken = []
    for document in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", document.read_text()):
            if not (document.parent / target).exists():
                broken.append(f"{document.relative_to(ROOT)}: {target}")
    assert broken == []
