"""Files of a live sandbox beyond the basics: streams up to the disk limit, stat, rename, folders, tar."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Iterator

import pytest
from support.needs import RunnerFactory

from fumehood.errors import FileError, PolicyError
from fumehood.model import Limits, Policy
from fumehood.runner import LiveSandbox, Runner
from fumehood.tier import Features

pytestmark = pytest.mark.usefixtures("with_live_files")


@pytest.fixture
def with_live_files(features: Features) -> None:
    if not (features.live and features.files):
        pytest.skip("the tier promises no files in live sandboxes")


def pattern(size: int) -> Iterator[bytes]:
    """``size`` bytes that repeat nowhere, in pieces of odd lengths."""
    left, number = size, 0
    while left:
        piece = hashlib.sha256(str(number).encode()).digest() * 2001
        piece = piece[: min(left, 64_000 + number % 31)]
        yield piece
        left -= len(piece)
        number += 1


def test_twenty_megabytes_both_ways(runner: Runner) -> None:
    size = 20_000_000
    expected = hashlib.sha256(b"".join(pattern(size))).hexdigest()
    with runner.open() as sandbox:
        sandbox.write_stream("big", pattern(size))
        assert sandbox.stat("big").size_bytes == size
        seen = sandbox.exec("import hashlib\nprint(hashlib.sha256(open('big', 'rb').read()).hexdigest())").stdout
        assert seen.strip() == expected
        digest, largest = hashlib.sha256(), 0
        for piece in sandbox.read_stream("big"):
            digest.update(piece)
            largest = max(largest, len(piece))
        assert digest.hexdigest() == expected and largest <= 1 << 20


def test_a_stream_that_fails_leaves_no_part(runner: Runner) -> None:
    def broken() -> Iterator[bytes]:
        yield b"x" * 100
        raise LookupError("mine")

    with runner.open() as sandbox:
        with pytest.raises(LookupError, match="mine"):
            sandbox.write_stream("f", broken())
        assert sandbox.list_files() == ()
        sandbox.write_stream("empty", [])
        assert sandbox.stat("empty").size_bytes == 0


def test_a_file_without_end_is_cut_off(runner_factory: RunnerFactory) -> None:
    with runner_factory(Policy(limits=Limits(disk_bytes=1 << 20))).open() as sandbox:
        sandbox.exec("f = open('sparse', 'wb'); f.truncate(1 << 20); f.close()")
        assert sum(map(len, sandbox.read_stream("sparse"))) == 1 << 20
        with pytest.raises(FileError):
            sandbox.write_stream("endless", (b"x" * 100_000 for _ in range(100)))


def test_stat_rename_and_folders(runner: Runner) -> None:
    with runner.open() as sandbox:
        sandbox.write_file("a/f", b"123")
        sandbox.exec("import os\nos.chmod('a/f', 0o751)\nos.utime('a/f', (5, 5))\nos.symlink('/etc/passwd', 'l')")
        info = sandbox.stat("a/f")
        assert (info.path, info.kind, info.size_bytes, info.modified_s, info.mode) == ("a/f", "file", 3, 5, 0o751)
        assert sandbox.stat("a").kind == "folder" and sandbox.stat("l").kind == "other"
        with pytest.raises(FileError):
            sandbox.stat("missing")
        sandbox.rename("a/f", "b/c/g")
        assert sandbox.read_file("b/c/g") == b"123"
        sandbox.write_file("h", b"new")
        sandbox.rename("h", "b/c/g")
        assert sandbox.read_file("b/c/g") == b"new"
        sandbox.make_folder("x/y/z")
        sandbox.make_folder("x/y/z")
        assert [f.path for f in sandbox.list_files()] == ["a", "b", "b/c", "b/c/g", "l", "x", "x/y", "x/y/z"]
        for call in (
            lambda: sandbox.rename("missing", "y"),
            lambda: sandbox.rename("b", "b/c/inside"),
            lambda: sandbox.make_folder("b/c/g/folder"),
            lambda: sandbox.rename("b/c/g", "l/there"),
        ):
            with pytest.raises(FileError):
                call()
        for path in ("/etc", "../x", ""):
            with pytest.raises(PolicyError):
                sandbox.make_folder(path)
            with pytest.raises(PolicyError):
                sandbox.rename("x", path)


def unpacked(sandbox: LiveSandbox, path: str = "") -> dict[str, bytes | None]:
    stream = io.BytesIO(b"".join(sandbox.export_tar(path)))
    with tarfile.open(fileobj=stream, mode="r:") as archive:
        return {m.name: archive.extractfile(m).read() if m.isreg() else None for m in archive}  # type: ignore[union-attr]


def test_a_folder_goes_in_and_comes_out(runner: Runner) -> None:
    deep = "/".join(["long-name-" * 9] * 4)  # beyond what ustar holds
    files = {"a.txt": b"a", "d/e.bin": bytes(1_500_000), "d/ü ☃": b"u", "empty": b"", f"{deep}/f": b"deep"}
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as archive:
        top = tarfile.TarInfo("./")
        top.type = tarfile.DIRTYPE
        archive.addfile(top)
        for name, data in files.items():
            info = tarfile.TarInfo(f"./{name}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        folder = tarfile.TarInfo("hollow")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
    with runner.open() as sandbox:
        sandbox.import_tar(iter([stream.getvalue()]), "in")
        assert {n: d for n, d in unpacked(sandbox, "in").items() if d is not None} == files
        assert unpacked(sandbox, "in")["hollow"] is None
        sandbox.import_tar(list(sandbox.export_tar("in")), "again")  # what comes out goes in
        assert unpacked(sandbox, "again") == unpacked(sandbox, "in")


def test_what_leaves_in_a_tar_is_checked(runner: Runner) -> None:
    with runner.open() as sandbox:
        sandbox.exec(
            "import os\nopen('ok', 'w').write('1')\nos.symlink('/etc/passwd', 'link')\nos.mkfifo('pipe')\n"
            "os.makedirs('.git/hooks')\nopen('.git/hooks/x', 'w')\nopen('a\\x1b[2J', 'w')\nopen(b'\\xff', 'w')"
        )
        skipped: dict[str, str] = {}
        stream = io.BytesIO(b"".join(sandbox.export_tar(skipped=skipped.__setitem__)))
        with tarfile.open(fileobj=stream) as archive:
            assert archive.getnames() == ["ok"]
        assert skipped.keys() == {"link", "pipe", ".git", ".git/hooks", ".git/hooks/x", "a\x1b[2J", "�"}
