"""``python -m fumehood``."""

from __future__ import annotations

import sys

from fumehood.cli import main

if __name__ == "__main__":
    sys.exit(main())
