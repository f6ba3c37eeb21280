"""Write the README's table of tiers from what each tier promises.

python scripts/readme_tiers.py            rewrite README.md
python scripts/readme_tiers.py --check    exit 1 if it would change
"""

from __future__ import annotations

import sys
from pathlib import Path

from fumehood import registry

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- tiers:begin -->", "<!-- tiers:end -->"
_PROMISES = ("live", "files", "commands", "environments", "mounts")


def table() -> str:
    """One row per tier of the registry, lightest first."""
    rows = ["| tier | boundary | what it is | " + " | ".join(_PROMISES) + " |"]
    rows.append("|---|---|---|" + ":-:|" * len(_PROMISES))
    for name in registry.names():
        features = registry.make(name).features
        what = features.summary + (f" (**{features.note}**)" if features.note else "")
        marks = ["yes" if getattr(features, promise) else "" for promise in _PROMISES]
        rows.append(f"| `{name}` | `{features.boundary.value}` | {what} | " + " | ".join(marks) + " |")
    return "\n".join(rows)


def rewritten(readme: str) -> str:
    """``readme`` with the table between its markers. Raises ValueError without them."""
    head, begin, rest = readme.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md lacks the markers {BEGIN} and {END}")
    return f"{head}{BEGIN}\n{table()}\n{END}{tail}"


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
