"""The main job on real data: analyse the Palmer penguins in a sandbox and collect a chart.

Builds the environment "demo" (numpy, pandas, matplotlib and the table) if it is not there, hands the table to the
sandbox as a file, runs examples/penguins.py under examples/penguins.toml, and shows what came of it. Options are passed
on to ``fumehood run`` (``--tier``, ``--out``).
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import time
from pathlib import Path

from fumehood import environments
from fumehood.environments import Environment

HERE = Path(__file__).parent
PACKAGES = ("numpy", "pandas", "matplotlib", "palmerpenguins")


def main(options: list[str]) -> int:
    """Returns the exit code of ``fumehood run``."""
    environment = demo_environment()
    table = penguins_csv(environment)
    out = HERE.parent / "build" / "demo"
    command = [sys.executable, "-m", "fumehood", "run", str(HERE / "penguins.py")]
    command += ["--policy", str(HERE / "penguins.toml"), "--file", f"{table}:penguins.csv"]
    command += ["--out", str(out), "--receipt", *options]
    began = time.perf_counter()
    code = subprocess.run(command).returncode
    print(f"\n{time.perf_counter() - began:.1f} s in all, starting the sandbox included")
    return code


def demo_environment() -> Environment:
    """The environment "demo", built now if it lacks one of PACKAGES."""
    found = next((e for e in environments.list_all() if e.name == "demo"), None)
    if found is None or not set(PACKAGES) <= {pin.partition("==")[0] for pin in found.resolved}:
        return environments.build("demo", PACKAGES, progress=lambda line: print(line, file=sys.stderr))
    return found


def penguins_csv(environment: Environment) -> Path:
    """The table that the package palmerpenguins carries, found without importing anything of it."""
    packages = importlib.metadata.distributions(name="palmerpenguins", path=[str(environment.site_packages)])
    for package in packages:
        for file in package.files or ():
            if file.name == "penguins.csv":
                return Path(str(package.locate_file(file)))
    raise SystemExit("palmerpenguins no longer carries penguins.csv")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
