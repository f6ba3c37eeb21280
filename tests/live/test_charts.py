"""What the packages of a data scientist show, the same in every tier: a chart, a frame, an image, a formula."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from support.needs import need_tier

from fumehood import environments, registry
from fumehood.errors import FumehoodError
from fumehood.model import Limits, MiB, Policy
from fumehood.runner import Runner

PACKAGES = ("numpy", "pandas", "matplotlib")
LIMITS = Limits(wall_s=300, cpu_s=300, cpus=2, memory_bytes=1024 * MiB, disk_bytes=256 * MiB, pids=64)

TIERS = [n for n in registry.names() if (f := registry.make(n).features).live and f.displays and f.environments]

CHARTS = """
import matplotlib
import matplotlib.pyplot as plt
for name in ("first", "second"):
    plt.plot([1, 2, 3], label=name)
    plt.title(rf"{name} $\\frac{{1}}{{2}}$")
    plt.legend()
    plt.show()
fig, ax = plt.subplots()
ax.bar(["a", "b"], [1, 2])
None
"""
AGG = "matplotlib.use('Agg')\nplt.plot([1])\nplt.show()\nplt.plot([2]);"
FRAME = "import pandas as pd\npd.DataFrame({'a': [1, 2], 'b': ['x', '<y>']})"
IMAGE = "from PIL import Image\nImage.linear_gradient('L').resize((40, 40))"
FORMULA = r"""
class Formula:
    def _repr_latex_(self): return r"$\int_0^1 x^2 \, dx = \frac{1}{3}$"
    def __repr__(self): return "1/3"
Formula()
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An environment with the packages, built once; kept where FUMEHOOD_CACHE or the home folder is."""
    if not TIERS:
        pytest.skip("no tier promises displays and environments")
    keep = os.environ.get("FUMEHOOD_CACHE")
    home = os.environ.get("HOME", "/nonexistent")
    if keep is None and not (os.path.isdir(home) and os.access(home, os.W_OK)):
        os.environ["FUMEHOOD_CACHE"] = str(tmp_path_factory.getbasetemp().parent / "environments")
    try:
        try:
            yield environments.find("fumehood-tests").name
        except FumehoodError:
            yield environments.build("fumehood-tests", PACKAGES).name
    finally:
        if keep is None:
            os.environ.pop("FUMEHOOD_CACHE", None)


@pytest.fixture(scope="module")
def reference() -> dict[str, list[dict[str, bytes]]]:
    """What the first tier showed, by program: every other one must show the same bytes."""
    return {}


@pytest.mark.parametrize("preload", [(), ("matplotlib.pyplot", "pandas")], ids=["imported", "preloaded"])
@pytest.mark.parametrize("name", TIERS)
@pytest.mark.xdist_group("charts")
def test_every_tier_shows_the_same(
    name: str, environment: str, preload: tuple[str, ...], reference: dict[str, list[dict[str, bytes]]]
) -> None:
    need_tier(name)
    policy = Policy(limits=LIMITS, environment=environment, preload=preload)
    with Runner(tier=name, policy=policy) as runner, runner.open() as sandbox:
        if "ModuleNotFoundError" in sandbox.exec("import numpy").stderr:
            pytest.skip("this tier runs as a user who may not enter the folder of environments; set FUMEHOOD_CACHE")
        shown = {}
        for title, code, kinds in (
            ("charts", CHARTS, [{"image/png", "text/plain"}] * 3),
            ("once", "fig", [{"image/png", "text/plain"}]),
            ("closed", "plt.get_fignums()", [{"text/plain"}]),
            (
                "agg",
                "matplotlib.use('Agg')\nplt.plot([1])\nplt.show()\nplt.plot([2]);",
                [{"image/png", "text/plain"}] * 2,
            ),
            ("frame", FRAME, [{"text/html", "text/plain"}]),
            ("image", IMAGE, [{"image/png", "text/plain"}]),
            ("formula", FORMULA, [{"text/latex", "text/plain"}]),
        ):
            result = sandbox.exec(code)
            assert result.ok and "Warning" not in result.stderr, result.stderr[-2000:]
            assert [set(d.data) for d in result.displays] == kinds, title
            assert not any(d.dropped for d in result.displays)
            shown[title] = [{m: f for m, f in d.data.items() if m != "text/plain"} for d in result.displays]
        assert shown["charts"][0] != shown["charts"][1] and shown["once"] == shown["charts"][2:]
        assert b"&lt;y&gt;" in shown["frame"][0]["text/html"]
        result = runner.run("import matplotlib.pyplot as plt\nplt.plot([1, 2])", displays=True)
        assert [set(d.data) for d in result.displays] == [{"text/plain"}, {"image/png", "text/plain"}], result.stderr
    for title, forms in shown.items():
        assert reference.setdefault(title, forms) == forms, f"{title} differs between tiers"
