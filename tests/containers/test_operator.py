"""What the operator gives the containers: packages, folders, an image, a runtime, sandboxes made ahead."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from asked import labelled

from fumehood import Boundary, Mount, Policy, Runner, environments, policy_file, registry
from fumehood.cli import main
from fumehood.errors import UnavailableError, UnsupportedError
from fumehood.images.engine import Word
from fumehood.pool import Pool


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An environment with the package ``fumehood_alpha``, out of a wheel made here, in a cache beside the images."""
    index = tmp_path_factory.mktemp("index")
    info = "fumehood_alpha-1.0.dist-info"
    with zipfile.ZipFile(index / "fumehood_alpha-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("fumehood_alpha/__init__.py", "WORD = 'of the package'\n")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: fumehood_alpha\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    cache = tmp_path_factory.mktemp("cache")
    (cache / "images").symlink_to(environments.cache_folder() / "images")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUMEHOOD_CACHE", str(cache))
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("PIP_FIND_LINKS", str(index))
        patch.setenv("PIP_CONFIG_FILE", os.devnull)
        environments.build("alpha", ["fumehood_alpha"])
        yield "alpha"


def test_packages_are_there_read_only_and_nowhere_without_the_policy(container_tier: str, environment: str) -> None:
    program = (
        "import sys\nearly = 'fumehood_alpha' in sys.modules\nimport fumehood_alpha\n"
        "print(fumehood_alpha.WORD, early)\n"
        "try: open(fumehood_alpha.__file__, 'a')\nexcept OSError: print('read-only')\n"
    )
    with Runner(tier=container_tier, policy=Policy(environment=environment)) as runner:
        assert runner.run(program).stdout == "of the package False\nread-only\n"
    policy = Policy(environment=environment, preload=("fumehood_alpha",))
    with Runner(tier=container_tier, policy=policy) as runner:
        assert runner.run(program).stdout == "of the package True\nread-only\n"
    with Runner(tier=container_tier) as runner:
        assert "ModuleNotFoundError" in runner.run(program).stderr


def test_a_folder_of_the_host_is_read_as_it_is_and_never_written(container_tier: str, tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "below").mkdir(parents=True)
    (data / "below/table").write_text("1,2\n")
    (data / "up").symlink_to("../secret")
    (tmp_path / "secret").write_text("secret")
    program = (
        "print(open('/mnt/data/below/table').read(), end='')\n"
        "import os, shutil\n"
        "for act in (lambda: open('/mnt/data/below/table', 'w'), lambda: os.mkdir('/mnt/data/new'),\n"
        "            lambda: os.unlink('/mnt/data/below/table'), lambda: open('/mnt/data/up').read(),\n"
        "            lambda: os.chmod('/mnt/data/below/table', 0o777)):\n"
        "    try: print('did', act())\n"
        "    except OSError: pass\n"
    )
    for path in (data, data / "below"):
        path.chmod(0o755)  # programs are other users
    (data / "below/table").chmod(0o644)
    with Runner(tier=container_tier, policy=Policy(mounts=(Mount(str(data), "/mnt/data"),))) as runner:
        assert runner.run(program).stdout == "1,2\n"
    assert (data / "below/table").read_text() == "1,2\n" and sorted(os.listdir(data)) == ["below", "up"]


def test_the_policy_names_the_image(container_tier: str) -> None:
    policy = policy_file.parse('image = "no-such-image"')
    with pytest.raises(UnavailableError) as told:
        Runner(tier=container_tier, policy=policy)
    assert "no-such-image" in str(told.value) and "fumehood image build no-such-image" in str(told.value.remedy)
    with Runner(tier=container_tier, policy=Policy(image="python")) as runner:
        assert runner.run("print(1)").stdout == "1\n"


def test_the_policy_names_the_runtime_and_the_boundary_follows(engine_tier: Word) -> None:
    with Runner(tier=engine_tier, policy=Policy(runtime="runc")) as runner:
        control = runner.run("print(1)").receipt.control("runtime")
        assert control is not None and control.value == "runc"
    assert registry.make(engine_tier, Policy(runtime="runsc")).features.boundary is Boundary.USER_KERNEL
    with pytest.raises(UnsupportedError, match="floor"):
        Runner(tier=engine_tier, floor="user_kernel", policy=Policy(runtime="runc"))
    missing = Policy(runtime="no-such-runtime")
    with pytest.raises(UnavailableError, match="no-such-runtime"), Runner(tier=engine_tier, policy=missing) as runner:
        runner.run("print('ran')")
    assert labelled(engine_tier) == []


@pytest.mark.parametrize("name", ["image", "runtime"])
def test_a_tier_made_by_hand_does_not_pass_over_them(engine_tier: Word, name: str) -> None:
    policy = Policy(**{name: "another"})  # type: ignore[arg-type]
    with Runner(tier=registry.make(engine_tier), policy=policy) as runner, pytest.raises(UnsupportedError) as refused:
        runner.run("print('ran')")
    assert refused.value.unmet == (name,)


def test_other_tiers_refuse_them_by_name() -> None:
    for name, option in (("gvisor", "runtime"), ("jail", "runtime"), ("jail", "image")):
        with pytest.raises(UnsupportedError) as refused:
            Runner(tier=name, policy=Policy(**{option: "python"}))  # type: ignore[arg-type]
        assert refused.value.unmet == (option,)


def test_the_command_line_names_them(engine_tier: Word, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--tier", engine_tier, "--image", "python", "--runtime", "runc", "-c", "print(6 * 7)"]) == 0
    assert capfd.readouterr().out == "42\n"
    assert main(["run", "--tier", engine_tier, "--image", "no-such-image", "-c", "print('ran')"]) != 0
    said = capfd.readouterr()
    assert said.out == "" and "no-such-image" in said.err


def test_containers_made_ahead_serve_one_run_each_and_none_is_left(container_tier: str) -> None:
    with Runner(tier=container_tier, warm=2) as runner:
        runner.fill()
        assert isinstance(runner.tier, Pool)
        for number in range(4):
            result = runner.run("import os\nprint(os.listdir())\nopen('f', 'w').close()\nopen('/tmp/f', 'x').close()")
            assert result.stdout == "[]\n", number
        if container_tier != "gvisor":  # whose single program on demand has no agent
            assert runner.run("import os\nprint(os.getpid() != 1)").stdout == "True\n"
    if container_tier != "gvisor":
        word: Word = container_tier  # type: ignore[assignment]
        assert labelled(word) == []
