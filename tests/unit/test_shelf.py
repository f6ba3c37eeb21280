"""The folder of built things: names, digests, one builder at a time, and who may not write there."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from fumehood.errors import PolicyError
from fumehood.images import shelf

ONE, OTHER = "1" * 64, "2" * 64


def test_a_name_means_what_it_was_last_pointed_at(tmp_path: Path) -> None:
    assert shelf.names(tmp_path) == [] and shelf.meant_by(tmp_path, "a") is None
    shelf.point(tmp_path, "b", ONE)
    shelf.point(tmp_path, "a", ONE)
    shelf.point(tmp_path, "a", OTHER)
    assert shelf.names(tmp_path) == ["a", "b"] == sorted(os.listdir(tmp_path / "names"))
    assert (shelf.meant_by(tmp_path, "a"), shelf.meant_by(tmp_path, "b")) == (OTHER, ONE)


@pytest.mark.parametrize("content", [b"", b"../../etc", b"G" * 64, ONE.encode() + b"/..", b"\xff" * 64])
def test_a_damaged_name_means_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "names").mkdir()
    (tmp_path / "names" / "a").write_bytes(content)
    assert shelf.meant_by(tmp_path, "a") is None


def test_sweeping_takes_what_no_name_means_and_nothing_else(tmp_path: Path) -> None:
    for name in (ONE, OTHER, "names", "lock"):
        (tmp_path / name / "inside").mkdir(parents=True)
    shelf.sweep(tmp_path, {OTHER})
    assert sorted(os.listdir(tmp_path)) == [OTHER, "lock", "names"]


def test_a_digest_is_of_all_archives_in_their_order(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_bytes(b"a")
    b.write_bytes(b"b")
    found = [shelf.digest_of(x) for x in ([], [a], [b], [a, b], [b, a])]
    found += [shelf.digest_of([a], head=b"1"), shelf.digest_of([a], tail=b"1")]
    assert len(set(found)) == len(found) and all(map(shelf.is_digest, found))


def test_a_second_builder_waits_and_says_so(tmp_path: Path) -> None:
    said: list[str] = []
    order: list[str] = []
    waits = threading.Event()

    def second() -> None:
        with shelf.locked(tmp_path, lambda line: (said.append(line), waits.set())):  # type: ignore[func-returns-value]
            order.append("second")

    with shelf.locked(tmp_path, said.append):
        thread = threading.Thread(target=second)
        thread.start()
        assert waits.wait(30)
        order.append("first")
    thread.join()
    assert order == ["first", "second"] and said == ["waiting for another build to end"]


def test_the_workshop_is_empty_whatever_a_build_left(tmp_path: Path) -> None:
    (tmp_path / "building" / "left").mkdir(parents=True)
    with pytest.raises(OSError, match="no space"), shelf.workshop(tmp_path) as shop:
        assert os.listdir(tmp_path / "building") == [shop.name] and os.listdir(shop) == []
        raise OSError("no space")
    assert not (tmp_path / "building").exists()


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUMEHOOD_CACHE", str(tmp_path))
    assert shelf.own_folder("things") == tmp_path / "things"
    (tmp_path / "things").mkdir()
    (tmp_path / "things").chmod(0o775)
    with pytest.raises(PolicyError, match="not this user's alone"):
        shelf.own_folder("things")


@pytest.mark.parametrize("name", ["", ".a", "A", "a/b", "a" * 65, "a\n"])
def test_a_name_is_a_plain_word(name: str) -> None:
    with pytest.raises(PolicyError, match="not a name"):
        shelf.check_name(name)
