"""The quick start of an image's Python: programs see what the usual one gives, and what is unusual starts as usual."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest
from asked import need

from fumehood import Runner
from fumehood.images.store import Image
from fumehood.tiers.gvisor import python

MAGIC = importlib.util.MAGIC_NUMBER
DEBIAN = """# install the apport exception handler if available
try:
    import apport_python_hook
except ImportError:
    pass
else:
    apport_python_hook.install()
"""

#: Told by the program, and by a Python that it starts as anybody would.
SEEN = """
import builtins, locale, os, site, sys
import json
print(json.dumps([
    [path for path in sys.path if path], sys.prefix, sys.executable, sorted(vars(builtins)),
    sys.getfilesystemencoding(),
    sys.flags.utf8_mode, locale.setlocale(locale.LC_ALL), locale.setlocale(locale.LC_CTYPE), sys.stdout.encoding,
    site.ENABLE_USER_SITE, site.getsitepackages(), str(license), str(copyright), str(exit), repr(help),
    {name: value for name, value in os.environ.items() if name not in ("HOME", "PWD")},
]))
"""


@pytest.fixture
def image(tmp_path: Path) -> Image:
    """What of Debian's Python decides how it starts."""
    for name in ("usr/bin", "usr/lib/python3.11", "usr/lib/python3/dist-packages", "etc/python3.11"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "usr/bin/python3.11").touch()
    (tmp_path / "usr/bin/python3").symlink_to("python3.11")
    (tmp_path / "etc/python3.11/sitecustomize.py").write_text(DEBIAN)
    (tmp_path / "usr/lib/python3.11/sitecustomize.py").symlink_to("/etc/python3.11/sitecustomize.py")
    return Image("x", tmp_path, str(tmp_path), "3.11", (), None, "", 0)


def test_a_program_sees_what_the_usual_start_gives() -> None:
    need("gvisor")
    inside = f"import subprocess, sys\ncode = {SEEN!r}\nexec(code)\nsys.stdout.flush()\n"
    inside += "subprocess.run([sys.executable, '-I', '-c', code])\n"
    with Runner(tier="gvisor") as runner:
        quick, usual = runner.run(inside).stdout.splitlines()
    assert json.loads(quick) == json.loads(usual)


def test_debians_python_is_started_without_site(image: Image) -> None:
    start = python.of(image, MAGIC, environment=False)
    assert start.arguments[:4] == ("/usr/bin/python3", "-I", "-S", "-c") and start.same_python
    assert start.paths == ("/usr/lib/python3/dist-packages",) and start.env == ("LC_ALL=C",)
    assert python.of(image, MAGIC, environment=True).paths == (
        "/usr/lib/python3/dist-packages",
        "/opt/env/lib/python3.11/site-packages",
    )
    inside = python.of(replace(image, environment="digest"), MAGIC, environment=False)
    assert inside.paths == ("/usr/lib/python3/dist-packages", "/opt/env/lib/python3.11/site-packages")


def test_another_python_compiles_for_itself(image: Image) -> None:
    start = python.of(image, b"old\n", environment=False)
    assert not start.same_python and start.arguments[-1] == python.usual().arguments[-1]


def test_what_the_host_does_not_know_starts_as_usual(image: Image) -> None:
    assert python.of(image, b"", environment=False) == python.usual()
    (image.rootfs / "usr/bin/python3.11").unlink()
    assert python.of(replace(image, name="y"), MAGIC, environment=False) == python.usual()


@pytest.mark.parametrize(
    "name",
    [
        "usr/pyvenv.cfg",
        "usr/bin/pyvenv.cfg",
        "usr/lib/python3/dist-packages/x.pth",
        "usr/lib/python3/dist-packages/apport_python_hook.py",
        "usr/lib/python3.11/dist-packages/sitecustomize.py",
        "etc/python3.11/sitecustomize.py",
    ],
)
def test_where_site_would_do_more_it_runs(name: str, image: Image) -> None:
    assert python.site_paths(image) is not None
    file = image.rootfs / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("import sys\n")
    assert python.site_paths(image) is None
    start = python.of(image, MAGIC, environment=False)
    assert "-S" not in start.arguments and start.paths is None


def test_a_locale_of_the_images_is_used(image: Image) -> None:
    (image.rootfs / "usr/lib/locale/C.utf8").mkdir(parents=True)
    assert python.of(image, MAGIC, environment=False).env == ()


def test_no_sitecustomize_customizes_nothing(image: Image) -> None:
    (image.rootfs / "usr/lib/python3.11/sitecustomize.py").unlink()
    assert python.site_paths(image) == ("/usr/lib/python3/dist-packages",)
