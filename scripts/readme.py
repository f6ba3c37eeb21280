"""Write the README's tables from what they show.

python scripts/readme.py            rewrite README.md
python scripts/readme.py --check    name the tables that would change, and exit with 1 if there are any

Each table stands between the markers ``<!-- NAME:begin -->`` and ``<!-- NAME:end -->``:

tiers     what each tier of the registry promises
matrix    docs/verify.json, which ``fumehood verify --docs docs`` writes
costs     docs/bench.json, which ``fumehood bench --json docs/bench.json`` writes; empty while there is none
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

from fumehood import registry
from fumehood.attacks.report import markdown_matrix
from fumehood.bench.report import markdown

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
_PROMISES = ("live", "files", "commands", "environments", "mounts")


def tiers() -> str:
    """One row per tier of the registry, lightest first."""
    rows = ["| tier | boundary | what it is | " + " | ".join(_PROMISES) + " |"]
    rows.append("|---|---|---|" + ":-:|" * len(_PROMISES))
    for name in registry.names():
        features = registry.make(name).features
        what = features.summary + (f" (**{features.note}**)" if features.note else "")
        marks = ["yes" if getattr(features, promise) else "" for promise in _PROMISES]
        rows.append(f"| `{name}` | `{features.boundary.value}` | {what} | " + " | ".join(marks) + " |")
    return "\n".join(rows)


def matrix() -> str:
    """What held."""
    return markdown_matrix(json.loads((ROOT / "docs" / "verify.json").read_text()))


def costs() -> str:
    """What a run costs. Raises ValueError for figures of few rounds."""
    figures = ROOT / "docs" / "bench.json"
    if not figures.exists():
        return ""
    found = json.loads(figures.read_text())
    if found["quick"]:
        raise ValueError(f"{figures.name} was made with --quick")
    return markdown(found)


TABLES: dict[str, Callable[[], str]] = {"tiers": tiers, "matrix": matrix, "costs": costs}


def between(readme: str, name: str, table: str) -> str:
    """``readme`` with ``table`` between the markers of ``name``. Raises ValueError without them."""
    begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
    head, opened, rest = readme.partition(begin)
    _, closed, tail = rest.partition(end)
    if not opened or not closed:
        raise ValueError(f"README.md lacks the markers of {name}")
    table = table.rstrip("\n")
    return f"{head}{begin}{table}{chr(10) if table else ''}{end}{tail}"


def main() -> int:
    """Rewrite or check."""
    old = readme = README.read_text()
    stale = []
    for name, table in TABLES.items():
        rewritten = between(readme, name, table())
        stale += [name] if rewritten != readme else []
        readme = rewritten
    if "--check" in sys.argv[1:]:
        if stale:
            print(f"README.md is out of date ({', '.join(stale)}): run python scripts/readme.py", file=sys.stderr)
        return int(bool(stale))
    if readme != old:
        README.write_text(readme)
    return 0


if __name__ == "__main__":
    sys.exit(main())
