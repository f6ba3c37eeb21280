"""Write the README's matrix from docs/verify.json, which `fumehood verify --docs docs` writes.

python scripts/readme_matrix.py            rewrite README.md
python scripts/readme_matrix.py --check    exit 1 if it would change
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from fumehood.attacks.report import markdown_matrix

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- matrix:begin -->", "<!-- matrix:end -->"


def rewritten(readme: str, verify_json: str) -> str:
    """``readme`` with the matrix of ``verify_json`` between the two markers. Raises ValueError without them."""
    head, begin, rest = readme.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md lacks the markers {BEGIN} and {END}")
    return f"{head}{BEGIN}\n{markdown_matrix(json.loads(verify_json))}\n{END}{tail}"


def main() -> int:
    """Rewrite or check."""
    readme = ROOT / "README.md"
    old = readme.read_text()
    new = rewritten(old, (ROOT / "docs" / "verify.json").read_text())
    if "--check" in sys.argv[1:]:
        return int(old != new)
    readme.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
