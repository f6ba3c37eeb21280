from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from fumehood import environments
from fumehood.environments import build, find, list_all, remove
from fumehood.errors import PolicyError, StartError

SITE = f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"


def make_wheel(folder: Path, name: str, version: str, *requires: str, source: str = "X = 1\n") -> None:
    info = f"{name}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {r}\n" for r in requires)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}/__init__.py", source)
        wheel.writestr(f"{name}/broken.py", "this is not Python\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/entry_points.txt", f"[console_scripts]\n{name} = {name}:main\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that pip takes for its only index; alpha 1.0 needs beta."""
    folder = tmp_path / "index"
    folder.mkdir()
    make_wheel(folder, "alpha", "1.0", "beta>=1")
    make_wheel(folder, "beta", "2.0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("FUMEHOOD_CACHE", str(folder))
    return folder


def leftovers(cache: Path) -> list[Path]:
    return list((cache / "building").iterdir())


# -- building


@pytest.mark.usefixtures("index")
def test_what_is_built_is_found_and_importable(cache: Path) -> None:
    lines: list[str] = []
    built = build("demo", ["alpha"], progress=lines.append)
    assert find("demo") == built
    assert built.requested == ("alpha",)
    assert built.resolved == ("alpha==1.0", "beta==2.0")
    assert built.python == f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert built.site_packages == built.path / SITE
    assert built.path == cache / "envs" / built.digest
    assert built.size_bytes > 0
    assert json.loads(json.dumps(built.to_dict()))["resolved"] == ["alpha==1.0", "beta==2.0"]
    assert any("Successfully installed" in line for line in lines)
    site = built.site_packages
    code = f"import sys; sys.path.insert(0, {str(site)!r}); import alpha, beta; print(alpha.X)"
    ran = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True)
    assert ran.stdout == "1\n"
    assert leftovers(cache) == []


@pytest.mark.usefixtures("index")
def test_it_is_compiled_readable_by_all_and_without_scripts(cache: Path) -> None:
    mask = os.umask(0o077)
    try:
        built = build("demo", ["alpha"])
    finally:
        os.umask(mask)
    site = built.site_packages
    compiled = list(site.glob("alpha/__pycache__/__init__.*.pyc"))
    assert len(compiled) == 1
    data = compiled[0].read_bytes()
    assert int.from_bytes(data[4:8], "little") == 0b01, "hash-based and unchecked (PEP 552)"
    assert f"/opt/env/{SITE}/alpha/__init__.py".encode() in data
    assert not (site / "bin").exists()
    assert not (built.path / "bin").exists()
    assert not (built.path / "pyvenv.cfg").exists()
    for path in built.path.rglob("*"):
        need = 0o555 if path.is_dir() else 0o444
        assert path.stat().st_mode & need == need, path
        assert path.stat().st_mode & 0o022 == 0, path
    assert cache.stat().st_mode & 0o777 == 0o700


@pytest.mark.usefixtures("index")
def test_the_same_packages_are_installed_once() -> None:
    first = build("one", ["alpha"])
    lines: list[str] = []
    second = build("two", ["beta", "alpha>=1"], progress=lines.append)
    assert second.digest == first.digest
    assert (first.requested, second.requested) == (("alpha",), ("beta", "alpha>=1"))
    assert not any("Successfully installed" in line for line in lines)
    assert [e.name for e in list_all()] == ["one", "two"]


def test_other_content_has_another_digest_and_the_name_moves(index: Path) -> None:
    old = build("demo", ["alpha"])
    make_wheel(index, "beta", "2.0", source="X = 2\n")  # the same version, other bytes
    new = build("demo", ["alpha"])
    assert new.resolved == old.resolved
    assert new.digest != old.digest
    assert find("demo") == new
    assert old.path.exists(), "a running sandbox may use it"


def test_remove_deletes_what_no_name_means(index: Path) -> None:
    build("keep", ["beta"])
    old = build("demo", ["alpha"])
    make_wheel(index, "alpha", "1.1", "beta")
    new = build("demo", ["alpha"])
    remove("demo")
    assert [e.name for e in list_all()] == ["keep"]
    assert not old.path.exists()
    assert not new.path.exists()
    assert find("keep").path.exists()
    with pytest.raises(PolicyError, match="no environment"):
        remove("demo")


@pytest.mark.usefixtures("index")
def test_a_failing_pip_is_told_with_its_last_lines(cache: Path) -> None:
    with pytest.raises(StartError, match="No matching distribution found for gamma"):
        build("demo", ["gamma"])
    assert list_all() == ()
    assert leftovers(cache) == []


@pytest.mark.usefixtures("index")
def test_an_interrupted_build_leaves_nothing(cache: Path) -> None:
    def interrupt(line: str) -> None:
        if line.startswith("Installing"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build("demo", ["alpha"], progress=interrupt)
    assert list_all() == ()
    assert leftovers(cache) == []
    assert list((cache / "envs").iterdir()) == []
    assert build("demo", ["alpha"]) == find("demo")


@pytest.mark.usefixtures("index")
def test_what_a_killed_build_left_is_swept_away(cache: Path) -> None:
    built = build("demo", ["alpha"])
    (cache / "building" / "left" / "env").mkdir(parents=True)
    (built.path / "manifest.json").unlink()  # removal was killed half-way
    with pytest.raises(PolicyError, match="no environment"):
        find("demo")
    assert build("demo", ["alpha"]).digest == built.digest
    assert find("demo").path.exists()
    assert leftovers(cache) == []


@pytest.mark.usefixtures("index")
def test_two_builders_take_turns(cache: Path) -> None:
    build("demo", ["alpha"])
    waiting = threading.Event()
    done = threading.Event()

    def second() -> None:
        build("other", ["alpha"], progress=lambda line: waiting.set() if line.startswith("waiting") else None)
        done.set()

    with open(cache / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=second)
        thread.start()
        assert waiting.wait(60)
        assert not done.is_set()
    thread.join(60)
    assert done.is_set()
    assert [e.name for e in list_all()] == ["demo", "other"]


def test_a_python_without_pip_says_what_to_do(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\n[ "$1" = -m ] && set -- -I -S "$@"\nexec {sys.executable} "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(StartError, match="no pip") as caught:
        build("demo", ["alpha"], python=str(bare))
    assert "python3-pip" in str(caught.value.remedy)


def test_what_is_no_python_is_said() -> None:
    for python in ("/nonexistent/python", "/bin/true"):
        with pytest.raises(StartError, match="does not run as a Python"):
            build("demo", ["alpha"], python=python)


# -- names and packages


@pytest.mark.parametrize("name", ["", ".", "..", ".x", "-x", "A", "a/b", "a b", "a\n", "é", "x" * 65, "../x"])
def test_what_is_no_name(name: str) -> None:
    for call in (lambda: build(name, ["alpha"]), lambda: find(name), lambda: remove(name)):
        with pytest.raises(PolicyError, match="is not a name of an environment"):
            call()


@pytest.mark.parametrize(
    "package",
    [
        "",
        "-r",
        "--index-url=https://example.org",
        "./alpha",
        "/srv/alpha.whl",
        "../alpha",
        "alpha @ https://example.org/a.tar.gz",
        "alpha@file:///a",
        "git+https://example.org/a",
        "https://example.org/a.whl",
        "alpha\n--pre",
        "alpha --pre",
        " alpha",
        "alpha;x\0",
    ],
)
def test_what_is_no_package(package: str, cache: Path) -> None:
    with pytest.raises(PolicyError, match="is not a package"):
        build("demo", ["numpy", package])
    assert not cache.exists()


@pytest.mark.parametrize(
    "package", ["numpy", "zope.interface", "a", "pandas>=2,<4", "pandas [excel]", "x[a,b]~=1.0; python_version<'4'"]
)
def test_what_is_a_package(package: str) -> None:
    assert environments._check_packages([package]) == (package,)


@pytest.mark.parametrize("packages", [[], "numpy", ["a"] * 257])
def test_what_is_no_list_of_packages(packages: list[str]) -> None:
    with pytest.raises(PolicyError, match="packages"):
        build("demo", packages)


def test_a_missing_environment_says_how_to_build_it(cache: Path) -> None:
    for prepared in (False, True):
        if prepared:
            (cache / "names").mkdir(parents=True, mode=0o700)
            cache.chmod(0o700)
        with pytest.raises(PolicyError, match="no environment is called 'demo'") as caught:
            find("demo")
        assert caught.value.remedy == "build it: fumehood env build demo PACKAGE…"
        assert list_all() == ()


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"digest": "../../etc", "requested": []}', "\xff", "null"])
def test_a_name_that_cannot_be_read_says_what_to_do(cache: Path, content: str) -> None:
    (cache / "names").mkdir(parents=True)
    (cache / "envs").mkdir()
    cache.chmod(0o700)
    (cache / "names" / "demo").write_text(content, encoding="latin-1")
    with pytest.raises(PolicyError, match="cannot be read") as caught:
        find("demo")
    assert "env remove demo" in str(caught.value.remedy)
    remove("demo")
    assert list_all() == ()


# -- the cache folder


def test_the_cache_folder_is_where_the_variables_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUMEHOOD_CACHE", "/srv/cache")
    assert environments.cache_folder() == Path("/srv/cache")
    monkeypatch.setenv("FUMEHOOD_CACHE", "cache")
    with pytest.raises(PolicyError, match="absolute"):
        environments.cache_folder()
    monkeypatch.delenv("FUMEHOOD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/srv/xdg")
    assert environments.cache_folder() == Path("/srv/xdg/fumehood")
    monkeypatch.setenv("XDG_CACHE_HOME", "xdg")
    monkeypatch.setenv("HOME", "/home/x")
    assert environments.cache_folder() == Path("/home/x/.cache/fumehood")


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_cache_that_others_can_write_is_refused(cache: Path, mode: int) -> None:
    cache.mkdir()
    cache.chmod(mode)
    for call in (lambda: build("demo", ["alpha"]), lambda: find("demo"), list_all, lambda: remove("demo")):
        with pytest.raises(PolicyError, match="writable by others"):
            call()


def test_a_cache_of_another_user_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: cache.stat().st_uid + 1)
    with pytest.raises(PolicyError, match="belongs to uid"):
        find("demo")


def test_a_cache_that_is_a_file_is_refused(cache: Path) -> None:
    cache.write_text("")
    with pytest.raises(PolicyError, match="not a folder"):
        find("demo")
    with pytest.raises(PolicyError, match="cannot be made"):
        build("demo", ["alpha"])
