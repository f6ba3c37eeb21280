"""Collecting artifacts: what is saved, what is skipped and why, and links on either side that lead nowhere."""

from __future__ import annotations

import os
import socket
import stat
from hashlib import sha256
from pathlib import Path

import pytest

from fumehood.artifacts import collect
from fumehood.model import Artifact, ArtifactLimits


class Folders:
    def __init__(self, base: Path) -> None:
        self.base = base
        self.work = base / "work"
        self.out = base / "new" / "out"
        self.work.mkdir()

    def collect(
        self, unchanged: dict[str, tuple[int, str]] | None = None, **limits: int
    ) -> tuple[dict[str, Artifact], dict[str, str]]:
        before = set(os.listdir("/proc/self/fd"))
        fd = os.open(self.work, os.O_RDONLY | os.O_DIRECTORY)
        try:
            found = collect(fd, self.out, ArtifactLimits(**limits), unchanged or {})
        finally:
            os.close(fd)
        assert set(os.listdir("/proc/self/fd")) == before, "descriptors are left"
        leftovers = [p for p in self.out.rglob(".fumehood-*")]
        assert leftovers == []
        assert all((a.saved is None) != (a.skipped is None) for a in found)
        return {a.path: a for a in found if a.saved}, {a.path: a.skipped for a in found if a.skipped}


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return Folders(tmp_path)


def test_saves_files_and_folders(folders: Folders) -> None:
    (folders.work / "a/b").mkdir(parents=True)
    (folders.work / "a/b/data").write_bytes(b"x" * 3_000_000)
    (folders.work / "empty").touch()
    (folders.work / "empty-folder").mkdir()
    (folders.work / ".hidden").write_text("h")
    (folders.work / "-rf").write_text("dash")
    saved, skipped = folders.collect()
    assert list(saved) == ["-rf", ".hidden", "empty", "a/b/data"]
    assert skipped == {}
    assert saved["a/b/data"] == Artifact("a/b/data", 3_000_000, saved=folders.out / "a/b/data")
    assert (folders.out / "a/b/data").read_bytes() == b"x" * 3_000_000
    assert not (folders.out / "empty-folder").exists()


def test_modes_are_plain(folders: Folders) -> None:
    for name, mode in (("tool", 0o6777), ("data", 0o4666), ("secret", 0o600)):
        (folders.work / name).touch()
        (folders.work / name).chmod(mode)
    folders.collect()
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in folders.out.iterdir()}
    assert modes == {"tool": 0o755, "data": 0o644, "secret": 0o644}


def test_nothing_but_regular_files_is_opened(folders: Folders) -> None:
    secret = folders.base / "secret"
    secret.write_text("secret")
    (folders.work / "link").symlink_to(secret)
    (folders.work / "folder-link").symlink_to(folders.base)
    (folders.work / "dangling").symlink_to("nowhere")
    os.link(secret, folders.work / "hard")
    os.mkfifo(folders.work / "fifo")
    with socket.socket(socket.AF_UNIX) as server:
        home = os.open(folders.work, os.O_RDONLY)
        server.bind(f"/proc/self/fd/{home}/socket")
        os.close(home)
    saved, skipped = folders.collect()
    assert saved == {}
    assert skipped == {
        "dangling": "a link",
        "fifo": "a FIFO",
        "folder-link": "a link",
        "hard": "has several links",
        "link": "a link",
        "socket": "a socket",
    }
    assert list(folders.out.iterdir()) == []


@pytest.mark.skipif(os.getuid() != 0, reason="making a device takes root")
def test_devices_are_not_opened(folders: Folders) -> None:
    try:
        os.mknod(folders.work / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("making a device takes CAP_MKNOD")
    assert folders.collect() == ({}, {"null": "a device"})


def test_names(folders: Folders) -> None:
    work = os.fsencode(folders.work)
    for name in (b"\xff\xfe", b"a\nb", b"esc\x1b[2J", "\u202egnp.exe".encode(), "\u2028".encode(), "naïve 😀".encode()):
        Path(os.fsdecode(work + b"/" + name)).touch()
    for name in (".git", ".GIT", "sub/.hg", ".vscode"):
        (folders.work / name).mkdir(parents=True)
        (folders.work / name / "hook").touch()
    (folders.work / ".envrc").touch()
    (folders.work / ".github").touch()
    saved, skipped = folders.collect()
    assert sorted(saved) == [".github", "naïve 😀"]
    assert skipped == {
        "\\xff\\xfe": "its name is not UTF-8",
        "a\\x0ab": "its name holds control characters",
        "esc\\x1b[2J": "its name holds control characters",
        "\\xe2\\x80\\xaegnp.exe": "its name holds control characters",
        "\\xe2\\x80\\xa8": "its name holds control characters",
        ".git": "a tool on the host would act upon it",
        ".GIT": "a tool on the host would act upon it",
        "sub/.hg": "a tool on the host would act upon it",
        ".vscode": "a tool on the host would act upon it",
        ".envrc": "a tool on the host would act upon it",
    }


def test_unchanged_inputs_are_not_artifacts(folders: Folders) -> None:
    known = {name: (3, sha256(b"abc").hexdigest()) for name in ("same", "longer", "other", "gone")}
    (folders.work / "same").write_bytes(b"abc")
    (folders.work / "longer").write_bytes(b"abcd")
    (folders.work / "other").write_bytes(b"abd")
    saved, skipped = folders.collect(known)
    assert (sorted(saved), skipped) == (["longer", "other"], {})
    assert (folders.out / "other").read_bytes() == b"abd"


def test_bytes_are_capped_together(folders: Folders) -> None:
    for name, size in (("a", 60), ("b", 60), ("c", 40)):
        (folders.work / name).write_bytes(b"x" * size)
    saved, skipped = folders.collect(total_bytes=100)
    assert (sorted(saved), skipped) == (["a", "c"], {"b": "more than 100 bytes together"})


def test_sparse_terabyte_costs_nothing(folders: Folders) -> None:
    with open(folders.work / "huge", "wb") as file:
        file.truncate(1 << 40)
    saved, skipped = folders.collect()
    assert (saved, list(skipped)) == ({}, ["huge"])
    assert list(folders.out.iterdir()) == []


def test_count_is_capped_and_so_is_the_listing(folders: Folders) -> None:
    for number in range(100):
        (folders.work / f"{number:03}").touch()
    saved, skipped = folders.collect(count=5)
    assert sorted(saved) == ["000", "001", "002", "003", "004"]
    assert len(skipped) == 11
    assert list(skipped)[-1] == ""
    assert skipped["005"] == "more than 5 files"


def test_a_forest_of_folders_ends_the_walk(folders: Folders) -> None:
    for number in range(4200):
        (folders.work / f"{number}").mkdir()
    assert folders.collect(count=1) == ({}, {"": "more was left behind than is listed"})


def test_depth_is_capped(folders: Folders) -> None:
    (folders.work / "1/2/3").mkdir(parents=True)
    for folder in ("1", "1/2", "1/2/3"):
        (folders.work / folder / "f").touch()
    saved, skipped = folders.collect(depth=2)
    assert (sorted(saved), skipped) == (["1/2/f", "1/f"], {"1/2/3": "more than 2 folders deep"})


def test_links_planted_on_the_host_lead_nowhere(folders: Folders) -> None:
    elsewhere = folders.base / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "f").write_text("mine")
    folders.out.mkdir(parents=True)
    (folders.out / "link").symlink_to(elsewhere / "f")
    (folders.out / "dangling").symlink_to(elsewhere / "made")
    (folders.out / "folder").symlink_to(elsewhere)
    (folders.out / "taken").mkdir()
    (folders.out / "file").write_text("in the way")
    for name in ("link", "dangling", "folder/f", "taken", "file/below"):
        (folders.work / name).parent.mkdir(exist_ok=True)
        (folders.work / name).write_text("theirs")
    saved, skipped = folders.collect()
    assert saved == {}
    assert sorted(skipped) == ["dangling", "file/below", "folder/f", "link", "taken"]
    assert [p.name for p in elsewhere.iterdir()] == ["f"]
    assert (elsewhere / "f").read_text() == "mine"


def test_an_existing_file_is_replaced_and_its_other_link_is_not(folders: Folders) -> None:
    folders.out.mkdir(parents=True)
    (folders.out / "f").write_text("old")
    os.link(folders.out / "f", folders.base / "other")
    (folders.work / "f").write_text("new")
    folders.collect()
    assert (folders.out / "f").read_text() == "new"
    assert (folders.base / "other").read_text() == "old"


def test_unusable_output_folder_is_an_error(folders: Folders) -> None:
    folders.out.parent.mkdir()
    folders.out.write_text("a file")
    fd = os.open(folders.work, os.O_RDONLY)
    try:
        with pytest.raises(OSError):
            collect(fd, folders.out, ArtifactLimits(), {})
    finally:
        os.close(fd)


@pytest.mark.skipif(os.getuid() == 0, reason="root reads everything")
def test_unreadable_entries_are_listed(folders: Folders) -> None:
    (folders.work / "locked").mkdir()
    (folders.work / "f").touch()
    (folders.work / "f").chmod(0)
    (folders.work / "locked").chmod(0)
    saved, skipped = folders.collect()
    (folders.work / "locked").chmod(0o700)
    assert (saved, sorted(skipped)) == ({}, ["f", "locked"])
