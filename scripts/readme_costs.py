"""Write the README's table of costs from docs/bench.json, which `fumehood bench --json docs/bench.json` makes.

python scripts/readme_costs.py            rewrite README.md
python scripts/readme_costs.py --check    exit 1 if it would change
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from fumehood.bench.report import markdown

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "docs" / "bench.json"
BEGIN, END = "<!-- costs:begin -->", "<!-- costs:end -->"


def table() -> str:
    """The table, or nothing while there are no figures. Raises ValueError for figures of few rounds."""
    if not FIGURES.exists():
        return ""
    found = json.loads(FIGURES.read_text())
    if found["quick"]:
        raise ValueError(f"{FIGURES.name} was made with --quick")
    return markdown(found)


def rewritten(readme: str) -> str:
    """``readme`` with the table between its markers. Raises ValueError without them."""
    head, begin, rest = readme.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md lacks the markers {BEGIN} and {END}")
    return f"{head}{BEGIN}\n{table()}{END}{tail}"


def main() -> int:
    """Rewrite or check."""
    readme = ROOT / "README.md"
    old = readme.read_text()
    new = rewritten(old)
    if "--check" in sys.argv[1:]:
        return int(old != new)
    readme.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
