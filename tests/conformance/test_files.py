"""Files in, artifacts out: what is saved, what is skipped and why, and that nothing leads out of the folder."""

# ruff: noqa: E501 - a program of one line stays on one line

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from support.needs import RunnerFactory

from fumehood.errors import PolicyError
from fumehood.model import Artifact, ArtifactLimits, Limits, Policy
from fumehood.runner import Runner
from fumehood.tier import Features

pytestmark = pytest.mark.usefixtures("full_python", "with_files")


@pytest.fixture
def with_files(features: Features) -> None:
    if not features.files:
        pytest.skip("the tier promises no files; test_refusals.py sees them refused")


def saved(artifacts: tuple[Artifact, ...]) -> dict[str, bytes]:
    return {a.path: a.saved.read_bytes() for a in artifacts if a.saved is not None}


def skipped(artifacts: tuple[Artifact, ...]) -> dict[str, str]:
    return {a.path: a.skipped for a in artifacts if a.skipped is not None}


def test_files_go_in_and_artifacts_come_out(runner: Runner, tmp_path: Path) -> None:
    data = bytes(range(256)) * 20_000  # more than one frame
    result = runner.run(
        "import os\nd = open('in/big.bin', 'rb').read()\nos.makedirs('a/b')\nopen('a/b/copy.bin', 'wb').write(d)\n"
        "open('naïve ☃.txt', 'w').write('ok')\nopen('.hidden', 'w').write('h')\nopen('empty', 'w')\n",
        files={"in/big.bin": data, "leer": b""},
        out=tmp_path / "new" / "out",
    )
    assert result.ok, result.stderr
    assert saved(result.artifacts) == {"a/b/copy.bin": data, "naïve ☃.txt": b"ok", ".hidden": b"h", "empty": b""}
    assert not skipped(result.artifacts)
    for artifact in result.artifacts:
        assert artifact.saved == tmp_path / "new" / "out" / artifact.path
        assert artifact.size_bytes == artifact.saved.stat().st_size


def test_only_what_is_new_or_changed_is_saved(runner: Runner, tmp_path: Path) -> None:
    result = runner.run(
        "open('changed', 'w').write('n')\nopen('same', 'w').write('s')\nopen('touched', 'r+').close()\n"
        "import os\nos.rename('moved', 'here')\nos.remove('removed')\n",
        files={n: n[0].encode() for n in ("changed", "same", "touched", "moved", "removed")} | {"changed": b"c"},
        out=tmp_path,
    )
    assert saved(result.artifacts) == {"changed": b"n", "here": b"m"}


def test_without_out_nothing_is_collected(runner: Runner) -> None:
    assert runner.run("open('f', 'w').write('x')").artifacts == ()


def test_links_and_special_files_are_skipped_by_name(runner: Runner, tmp_path: Path) -> None:
    result = runner.run(
        "import os, socket\n"
        "open('plain', 'w').write('p')\n"
        "os.symlink('/etc/passwd', 'absolute')\nos.symlink('../../etc/passwd', 'relative')\n"
        "os.symlink('plain', 'inner')\nos.symlink('/etc', 'folder')\nos.symlink('.', 'loop')\n"
        "os.link('plain', 'hard')\nos.mkfifo('fifo')\n"
        "s = socket.socket(socket.AF_UNIX)\ns.bind('socket')\n"
        "for name, mode in (('chr', 0o020666), ('blk', 0o060666)):\n"
        "    try: os.mknod(name, mode, os.makedev(1, 3))\n"
        "    except OSError: pass\n",
        out=tmp_path,
    )
    assert result.ok, result.stderr
    reasons = skipped(result.artifacts)
    assert saved(result.artifacts) == {}
    assert {n: reasons[n] for n in ("absolute", "relative", "inner", "folder", "loop")} == dict.fromkeys(
        ("absolute", "relative", "inner", "folder", "loop"), "a link"
    )
    assert reasons["fifo"] == "a FIFO" and reasons["socket"] == "a socket"
    assert reasons["plain"] == reasons["hard"] == "has several links"
    assert "chr" not in reasons and "blk" not in reasons, "a device could be made"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_becomes_a_link_leads_nowhere(runner_factory: RunnerFactory, tmp_path: Path) -> None:
    """A program that swaps a folder and a link as fast as it can, to its end."""
    runner = runner_factory(Policy(limits=Limits(wall_s=1.0)))
    result = runner.run(
        "import os\nos.mkdir('d')\nopen('d/passwd', 'w').write('mine')\nos.symlink('/etc', 'l')\n"
        "while True:\n os.rename('d', 't')\n os.rename('l', 'd')\n os.rename('d', 'l')\n os.rename('t', 'd')\n",
        out=tmp_path,
    )
    assert result.timed_out
    assert all(data == b"mine" for data in saved(result.artifacts).values())


def test_hostile_names_are_skipped(runner: Runner, tmp_path: Path) -> None:
    result = runner.run(
        "import os\n"
        "for raw in (b'esc\\x1b[31m', b'new\\nline', b'not\\xffutf8', 'r\\u202etxt.exe'.encode(), b'tab\\t', b'c\\xc2\\x9bd'):\n"
        "    open(raw, 'w').write('x')\n"
        "os.makedirs('.git/hooks')\nopen('.git/hooks/post-checkout', 'w').write('#!/bin/sh')\n"
        "os.makedirs('x/.GIT')\nopen('x/.GIT/config', 'w').write('x')\nopen('.envrc', 'w').write('x')\n"
        "open(('n' * 255), 'w').write('long')\nopen('fine', 'w').write('f')\n",
        out=tmp_path,
    )
    assert result.ok, result.stderr
    assert saved(result.artifacts) == {"n" * 255: b"long", "fine": b"f"}
    assert len(skipped(result.artifacts)) == 6 + 3
    assert all(a.path.isprintable() for a in result.artifacts)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fine", "n" * 255]


def test_count_is_capped(runner_factory: RunnerFactory, tmp_path: Path) -> None:
    runner = runner_factory(Policy(artifacts=ArtifactLimits(count=5)))
    result = runner.run("for i in range(300): open(f'f{i:03}', 'w').write('x')", out=tmp_path)
    assert sorted(saved(result.artifacts)) == [f"f00{i}" for i in range(5)]
    assert len(list(tmp_path.iterdir())) == 5
    assert len(result.artifacts) <= 5 + 2 * 5 + 1 and result.artifacts[-1].path == ""


def test_bytes_are_capped_also_for_sparse_files(runner_factory: RunnerFactory, tmp_path: Path) -> None:
    runner = runner_factory(Policy(artifacts=ArtifactLimits(total_bytes=1000)))
    result = runner.run(
        "open('a', 'wb').write(b'x' * 600)\nopen('b', 'wb').write(b'x' * 600)\nopen('c', 'wb').write(b'x' * 400)\n"
        "f = open('sparse', 'wb')\nf.truncate(20 << 20)\n",
        out=tmp_path,
    )
    assert result.ok, result.stderr
    assert set(saved(result.artifacts)) == {"a", "c"} and set(skipped(result.artifacts)) == {"b", "sparse"}
    assert sum(p.stat().st_size for p in tmp_path.rglob("*")) <= 1000


def test_depth_is_capped(runner: Runner, tmp_path: Path) -> None:
    result = runner.run(
        "import os\nfor i in range(300):\n open('leaf', 'w').write(str(i))\n os.mkdir('d')\n os.chdir('d')\n",
        out=tmp_path,
    )
    assert result.ok, result.stderr
    depth = ArtifactLimits().depth
    assert len(saved(result.artifacts)) == depth + 1
    assert list(skipped(result.artifacts).values()) == [f"more than {depth} folders deep"]


def test_unreadable_and_setuid_files(runner: Runner, tmp_path: Path) -> None:
    result = runner.run(
        "import os\nopen('suid', 'w').write('s')\nos.chmod('suid', 0o6777)\nopen('run', 'w').write('r')\n"
        "os.chmod('run', 0o700)\nopen('none', 'w').write('n')\nos.chmod('none', 0)\n"
        "os.mkdir('shut')\nopen('shut/f', 'w').write('f')\nos.chmod('shut', 0)\n",
        out=tmp_path,
    )
    assert result.ok, result.stderr
    modes = {a.path: stat.S_IMODE(a.saved.stat().st_mode) for a in result.artifacts if a.saved}
    assert modes["suid"] == 0o755 and modes["run"] == 0o755
    everything = saved(result.artifacts).keys() | skipped(result.artifacts).keys()
    assert "none" in everything and everything & {"shut", "shut/f"}


def test_links_planted_in_the_output_folder_are_not_followed(runner: Runner, tmp_path: Path) -> None:
    outside, out = tmp_path / "outside", tmp_path / "out"
    outside.mkdir()
    out.mkdir()
    (outside / "victim").write_text("keep")
    (out / "link").symlink_to(outside / "victim")
    (out / "folder").symlink_to(outside)
    (out / "replaced").write_text("old")
    result = runner.run(
        "import os\nopen('link', 'w').write('x')\nos.mkdir('folder')\nopen('folder/f', 'w').write('x')\n"
        "open('replaced', 'w').write('new')\n",
        out=out,
    )
    assert saved(result.artifacts) == {"replaced": b"new"} and set(skipped(result.artifacts)) == {"link", "folder/f"}
    assert (outside / "victim").read_text() == "keep" and os.listdir(outside) == ["victim"]


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../../x", "", "nul\0", "x" * 256, "\ud800"])
def test_paths_that_are_refused(runner: Runner, path: str) -> None:
    with pytest.raises(PolicyError):
        runner.run("print(1)", files={path: b""})


def test_artifacts_of_a_killed_program_are_there(runner_factory: RunnerFactory, tmp_path: Path) -> None:
    runner = runner_factory(Policy(limits=Limits(wall_s=1.0)))
    result = runner.run("open('f', 'w').write('x')\nwhile True: pass", out=tmp_path)
    assert result.timed_out and saved(result.artifacts) == {"f": b"x"}


def test_a_folder_without_permissions_is_removed(tier_name: str, private_tmp: Path) -> None:
    with Runner(tier=tier_name) as runner:
        program = "import os\nos.mkdir('shut')\nopen('shut/f', 'w').close()\nos.chmod('shut', 0)\nos.chmod('.', 0)"
        assert runner.run(program).ok
        # Beside it there may be the sandbox of the next run.
        assert [folder for folder, names, _ in os.walk(private_tmp) if "shut" in names] == []
    assert list(private_tmp.iterdir()) == []
