"""Modules that are sent along are those of the image, and a program cannot tell that they were sent."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fumehood.images.store import Image
from fumehood.tiers.container import payload
from fumehood.tiers.gvisor import library

PYTHON = "/usr/bin/python3"

#: What a program can see of its modules, before and after it has used those that wait, in the place of serving.
LOOK = """
    begun = [n for n, m in sys.modules.items()
             if m.__spec__ is not None and m.__spec__.has_location and "__getattr__" not in vars(m)]
    import importlib, json, linecache, traceback
    linecache.cache["<x>"] = (1, None, ["first"], "<x>")
    assert linecache.getline("<x>", 1) == "first"
    traceback.print_exception, importlib.import_module("ctypes"), importlib.import_module("ctypes._endian")
    for name in NAMES:
        parent = sys.modules.get(name.rpartition(".")[0])
        if importlib._bootstrap._find_spec(name, parent and parent.__path__):
            importlib.import_module(name)
    seen = {n: [getattr(m, "__file__", None), getattr(m, "__cached__", None), type(m.__spec__.loader).__name__,
                m.__spec__.origin, sorted(vars(m.__spec__.loader)), sorted(vars(m))]
            for n, m in sys.modules.items() if n in NAMES}
    locks = sys.modules["_frozen_importlib"]
    finders = [getattr(f, "__name__", type(f).__name__) for f in sys.meta_path]
    state = [finders, locks._ModuleLockManager.__module__, locks._ImportLockContext.__module__]
    print(json.dumps([seen, begun, state, len(getattr(sys.meta_path[0], "modules", ()))]))
    sys.stdout.flush()
    os._exit(0)
"""
NAMES = (*library._MODULES.split(), *library._SHARED_OBJECTS.split())


def host_image() -> Image:
    """This host's own Python as an image, if it is laid out like Debian's."""
    if not Path(PYTHON).exists():
        pytest.skip("there is no Python of the distribution's")
    version = subprocess.run(
        [PYTHON, "-I", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], capture_output=True, text=True
    ).stdout.strip()
    return Image("host", Path("/"), f"digest-{os.getpid()}", version, (), None, "", 0)


def look(sent: payload.Library) -> Any:
    """What a Python that takes ``sent`` sees of itself."""
    text = payload.bootstrap().replace('    agent.serve(0, 1, "/work")', LOOK)
    assert LOOK in text
    text = f"NAMES = {NAMES}\n{text}"
    message = payload.message(python=None, rlimits={"CORE": 0}, preload=(), library=sent)
    done = subprocess.run([PYTHON, "-I", "-c", text], input=message, capture_output=True, timeout=30)
    assert done.stdout[:1] == b"R", done.stderr
    size = int.from_bytes(done.stdout[1:5], "big")
    report = {"python": host_image().python, "rlimits": {"CORE": [0, 0]}, "error": ""}
    assert json.loads(done.stdout[5 : 5 + size]) == report
    assert done.stdout[5 + size :], done.stderr
    return json.loads(done.stdout[5 + size :])


def test_every_module_looks_as_if_it_had_been_found_as_usual() -> None:
    sent = library.of(host_image())
    usual, _, usual_state, none = look(payload.pack(b"", {}))
    seen, _, state, count = look(sent)
    assert none == 0 and count > 20, "nothing was sent"
    assert seen == usual
    assert [len(usual_state[0]), *usual_state[1:]] == [len(state[0]), "_frozen_importlib", "_frozen_importlib"]


def test_the_agent_opens_no_file_for_its_imports() -> None:
    """The list is complete: what the agent imports beyond what every Python starts with was sent, or waits."""
    _, begun, _, _ = look(library.of(host_image()))
    start = subprocess.run([PYTHON, "-I", "-c", "import sys; print(*sys.modules)"], capture_output=True, text=True)
    found = set(begun) - set(start.stdout.split())
    assert found <= set(NAMES), f"not in the list: {sorted(found - set(NAMES))}"
    assert not found & {"re", "enum", "tokenize"}, "what only errors need was loaded"


def test_what_does_not_fit_its_source_is_not_sent(tmp_path: Path) -> None:
    folder = tmp_path / "usr/lib/python3.11"
    cache = folder / "__pycache__"
    cache.mkdir(parents=True)
    source = folder / "enum.py"
    source.write_text("x = 1\n")
    compiled = cache / "enum.cpython-311.pyc"
    image = Image("x", tmp_path, str(tmp_path), "3.11", (), None, "", 0)

    def sent(head: bytes) -> bool:
        compiled.write_bytes(head + b"code")
        library.of.cache_clear()
        return b"code" in library.of(image).code

    def number(value: int) -> bytes:
        return value.to_bytes(4, "little")

    info = source.stat()
    assert sent(b"mag\n" + number(0) + number(int(info.st_mtime)) + number(info.st_size))
    assert not sent(b"mag\n" + number(0) + number(int(info.st_mtime) + 1) + number(info.st_size))
    assert not sent(b"mag\n" + number(0) + number(int(info.st_mtime)) + number(info.st_size + 1))
    assert not sent(b"mag\n" + number(3) + bytes(8)), "its Python would look at the source's hash"
    assert sent(b"mag\n" + number(1) + bytes(8))
    source.unlink()
    assert not sent(b"mag\n" + number(1) + bytes(8))


def test_an_image_with_another_layout_gets_nothing(tmp_path: Path) -> None:
    sent = library.of(Image("x", tmp_path, str(tmp_path), "3.12", (), None, "", 0))
    assert sent == payload.pack(b"", {})


def test_a_library_of_another_python_is_not_used() -> None:
    packed = payload.pack(b"old\n", {"enum": ("/nowhere/enum.py", False, b"no code at all")})
    seen, _, _, count = look(packed)
    assert count == 0 and seen["enum"][0] != "/nowhere/enum.py"
