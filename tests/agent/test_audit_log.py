"""The audit log shows every later change, survives its writers' deaths, and refuses to go on after damage."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fumehood import cli
from fumehood.agent import audit, audit_files
from fumehood.agent.audit import AuditLog, Head, read, read_head, verify
from fumehood.errors import AuditError, PolicyError


@pytest.fixture
def log(tmp_path: Path) -> AuditLog:
    log = AuditLog(tmp_path / "audit.jsonl")
    for number in range(5):
        log.append("started", {"run": f"r{number}", "note": "naïve \x1b[2J \udcff"})
    return log


def test_a_whole_log_is_whole_and_private(log: AuditLog) -> None:
    verdict = verify(log.path)
    assert verdict.ok and verdict.records == 5
    assert verdict.open_runs == ("r0", "r1", "r2", "r3", "r4")
    assert log.path.stat().st_mode & 0o777 == 0o600
    assert log.path.read_bytes().isascii() and b"\x1b" not in log.path.read_bytes()


def test_every_changed_byte_is_found(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "small.jsonl")
    log.append("a", {"n": 1})
    log.append("b", {"n": 2})
    whole = log.path.read_bytes()
    for at in range(len(whole)):
        changed = bytearray(whole)
        changed[at] ^= 1
        log.path.write_bytes(changed)
        assert not verify(log.path).ok, f"byte {at}"
    log.path.write_bytes(whole)
    assert verify(log.path).ok


def _lines(change: Callable[[list[bytes]], list[bytes]], log: AuditLog) -> tuple[str, ...]:
    log.path.write_bytes(b"".join(change(log.path.read_bytes().splitlines(keepends=True))))
    return verify(log.path).problems


@pytest.mark.parametrize("at", range(5))
def test_a_removed_record_is_found(log: AuditLog, at: int) -> None:
    problems = _lines(lambda lines: lines[:at] + lines[at + 1 :], log)
    assert problems
    if 0 < at < 4:
        assert f"line {at + 1} does not follow line {at}" in problems[0]


def test_reordered_and_repeated_records_are_found(log: AuditLog) -> None:
    assert any("line 2" in p for p in _lines(lambda ls: [ls[0], ls[2], ls[1], *ls[3:]], log))


def test_a_repeated_record_is_found(log: AuditLog) -> None:
    assert _lines(lambda ls: [*ls[:3], ls[2], *ls[3:]], log)


def test_a_missing_end_is_found_by_the_head(log: AuditLog) -> None:
    problems = _lines(lambda lines: lines[:-1], log)
    assert problems == ("the log does not hold record 5 of the head file: its end is missing or was rewritten",)
    with pytest.raises(AuditError, match="not what its head says"):
        log.append("more", {})


def test_an_emptied_log_is_found_and_not_written_to(log: AuditLog) -> None:
    log.path.write_bytes(b"")
    assert not verify(log.path).ok
    with pytest.raises(AuditError):
        log.append("more", {})


def test_a_log_without_its_head_is_told_and_not_written_to(log: AuditLog) -> None:
    audit.head_path(log.path).unlink()
    assert "head file is missing" in verify(log.path).problems[0]
    with pytest.raises(AuditError, match="head"):
        log.append("more", {})


def test_a_forged_log_is_found_by_a_head_kept_elsewhere(log: AuditLog, tmp_path: Path) -> None:
    kept = Head.parse(str(read_head(log.path)))
    log.path.unlink()
    audit.head_path(log.path).unlink()
    for number in range(6):
        log.append("started", {"run": f"forged{number}"})
    assert verify(log.path).ok
    assert "expected head" in verify(log.path, expected=kept).problems[0]


def test_records_behind_a_lagging_head_are_taken_in(log: AuditLog) -> None:
    old = audit.head_path(log.path).read_bytes()
    log.append("started", {"run": "r5"})
    audit.head_path(log.path).write_bytes(old)  # the writer died before it could replace the head
    assert verify(log.path).ok
    log.append("started", {"run": "r6"})
    assert verify(log.path).ok and verify(log.path).records == 7


def test_a_torn_record_is_cut_off_and_told(log: AuditLog) -> None:
    with log.path.open("ab") as file:
        file.write(b'{"seq":6,"time":"20')
    assert not verify(log.path).ok
    log.append("started", {"run": "next"})
    assert verify(log.path).ok
    assert list(read(log.path))[-1]["torn_bytes"] == 19


def test_a_record_from_elsewhere_behind_the_head_is_refused(log: AuditLog) -> None:
    line, _ = audit.seal({"seq": 6, "event": "approved", "prev": "0" * 64})
    with log.path.open("ab") as file:
        file.write(line)
    with pytest.raises(AuditError, match="does not follow"):
        log.append("more", {})


def _write_many(path: Path, count: int) -> None:
    log = AuditLog(path)
    for number in range(count):
        log.append("started", {"pid": os.getpid(), "n": number})


def test_writers_in_many_processes_make_one_chain(tmp_path: Path) -> None:
    path = tmp_path / "shared.jsonl"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write_many, args=(path, 25)) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    verdict = verify(path)
    assert verdict.ok and verdict.records == 100


def _write_for_ever(path: Path) -> None:
    log = AuditLog(path)
    while True:
        log.append("started", {"pad": "x" * 5000})


def test_a_killed_writer_leaves_a_log_that_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "killed.jsonl"
    context = multiprocessing.get_context("spawn")
    for _ in range(2):
        before = path.stat().st_size if path.exists() else 0
        writer = context.Process(target=_write_for_ever, args=(path,))
        writer.start()
        while not path.exists() or path.stat().st_size < before + 50_000:
            assert writer.is_alive()
            time.sleep(0.005)
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        AuditLog(path).append("after", {})
        assert verify(path).ok


def _append_with_a_small_limit(path: Path, room: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
    try:
        AuditLog(path).append("started", {"pad": "x" * 5000})
    except AuditError:
        os._exit(7)
    os._exit(0)


def test_a_full_disk_is_an_error_and_leaves_no_torn_record(log: AuditLog) -> None:
    room = log.path.stat().st_size + 100
    context = multiprocessing.get_context("spawn")
    writer = context.Process(target=_append_with_a_small_limit, args=(log.path, room))
    writer.start()
    writer.join()
    assert writer.exitcode == 7
    assert verify(log.path).ok and verify(log.path).records == 5


def test_a_link_in_the_place_of_the_log_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AuditError):
        AuditLog(tmp_path / "link").append("started", {})
    assert not (tmp_path / "elsewhere").exists()


def test_the_command_verifies_shows_and_exports(log: AuditLog, capsys: pytest.CaptureFixture[str]) -> None:
    log.append("ended", {"run": "r1", "outcome": "exited", "reason": "=cmd()|x"})
    path = str(log.path)
    assert cli.main(["audit", "verify", path]) == 0
    assert "whole: 6 records" in capsys.readouterr().out
    assert cli.main(["audit", "show", path, "--run", "r1"]) == 0
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) == 2 and "outcome=exited" in shown and "\x1b" not in shown
    assert cli.main(["audit", "tail", path, "-n", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["seq"] == 6
    assert cli.main(["audit", "export", path, "--format", "csv", "--event", "ended"]) == 0
    assert "'=cmd()|x" in capsys.readouterr().out
    assert cli.main(["audit", "export", path]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 6
    log.path.write_bytes(log.path.read_bytes().replace(b"r3", b"r9"))
    assert cli.main(["audit", "verify", path, "--json"]) == 252
    assert json.loads(capsys.readouterr().out)["problems"] == ["line 4 was changed or is torn"]


# --- a log that is moved aside


def _pad(number: int) -> dict[str, object]:
    return {"run": f"r{number}", "pad": "x" * 20_000}


@pytest.fixture
def small(tmp_path: Path) -> AuditLog:
    """Ten records in parts of at most 64 KiB, three in each."""
    log = AuditLog(tmp_path / "small.jsonl", rotate_bytes=1 << 16)
    for number in range(10):
        log.append("started", _pad(number))
    return log


def _moved(log: AuditLog, name: str) -> Path:
    return log.path.rename(log.path.with_name(log.path.name + name))


def test_a_full_log_is_moved_aside_and_the_chain_goes_on(small: AuditLog) -> None:
    parts = audit_files.parts_in_order(small.path)
    assert [p.name for p in parts] == [f"small.jsonl.{n:012d}" for n in (3, 6, 9)] + ["small.jsonl"]
    assert all(p.stat().st_size <= 1 << 16 and p.stat().st_mode & 0o777 == 0o600 for p in parts)
    verdict = verify(small.path)
    assert verdict.ok and verdict.records == 10 and verdict.parts == 4
    assert verdict.head == read_head(small.path)
    assert [r["seq"] for r in read(small.path)] == list(range(1, 11))


@pytest.mark.parametrize("part", range(4))
def test_a_changed_or_missing_part_is_found(small: AuditLog, part: int) -> None:
    changed = audit_files.parts_in_order(small.path)[part]
    whole = changed.read_bytes()
    changed.write_bytes(whole.replace(b"xxxx", b"xxxy", 1))
    assert f"line 1 of {changed.name} was changed" in verify(small.path).problems[0]
    changed.unlink()
    assert not verify(small.path).ok
    assert verify(small.path, pruned=True).ok is (part == 0)  # only the beginning may go


def test_a_head_kept_elsewhere_is_found_in_any_part(small: AuditLog) -> None:
    kept = read_head(small.path)
    for number in range(10, 20):
        small.append("started", _pad(number))
    assert verify(small.path, expected=kept).ok


@pytest.mark.parametrize("suffix", [".1", "-20270131", ".1.gz"])
@pytest.mark.parametrize("created", [True, False])
def test_a_log_that_was_moved_by_others_goes_on(log: AuditLog, suffix: str, created: bool) -> None:
    moved = _moved(log, suffix.removesuffix(".gz"))
    if suffix.endswith(".gz"):
        moved.with_name(moved.name + ".gz").write_bytes(gzip.compress(moved.read_bytes()))
        moved.unlink()
    if created:  # as logrotate's `create` does
        log.path.touch(0o600)
    assert log.append("started", {"run": "r5"}).seq == 6
    assert log.append("started", {"run": "r6"}).seq == 7
    verdict = verify(log.path)
    assert verdict.ok and verdict.records == 7 and verdict.parts == 2


def test_numbers_that_logrotate_shifts_do_not_confuse_the_order(log: AuditLog) -> None:
    for _ in range(3):
        for number in range(8, 0, -1):
            part = log.path.with_name(f"{log.path.name}.{number}")
            if part.exists():
                part.rename(log.path.with_name(f"{log.path.name}.{number + 1}"))
        _moved(log, ".1")
        log.append("started", {})
    assert verify(log.path).ok and verify(log.path).parts == 4
    assert [r["seq"] for r in read(log.path)] == list(range(1, 9))


def test_a_log_that_was_moved_out_of_sight_is_not_written_to(log: AuditLog) -> None:
    (log.path.parent / "away").mkdir()
    log.path.rename(log.path.parent / "away" / log.path.name)
    with pytest.raises(AuditError, match="no file beside it holds its last record"):
        log.append("more", {})
    assert not verify(log.path).ok


def test_a_writer_that_died_before_a_move_leaves_a_log_that_goes_on(log: AuditLog) -> None:
    old = audit.head_path(log.path).read_bytes()
    log.append("started", {"run": "r5"})
    audit.head_path(log.path).write_bytes(old)
    with log.path.open("ab") as file:
        file.write(b'{"seq":7,"ti')
    _moved(log, ".1")
    log.append("started", {"run": "r6"})
    assert verify(log.path).ok and verify(log.path).records == 7
    assert list(read(log.path))[-1]["torn_bytes"] == 12


def test_a_writer_that_died_in_a_move_leaves_a_log_that_goes_on(small: AuditLog) -> None:
    head = audit.head_path(small.path).read_bytes()
    small.append("started", _pad(10))
    audit.head_path(small.path).write_bytes(head)  # the record is there, and the head still the one before it
    _moved(small, ".000000000011")
    assert small.append("started", _pad(11)).seq == 12
    assert verify(small.path).ok


def test_a_part_is_never_written_over(small: AuditLog) -> None:
    taken = audit_files.full_path(small.path, 12)
    taken.write_text("of somebody else\n")
    small.append("started", _pad(10))
    small.append("started", _pad(11))
    with pytest.raises(AuditError, match="is there already"):
        small.append("started", _pad(12))
    assert taken.read_text() == "of somebody else\n"


def _write_parts(path: Path, count: int) -> None:
    log = AuditLog(path, rotate_bytes=1 << 16)
    for number in range(count):
        log.append("started", _pad(number))


def test_writers_in_many_processes_rotate_one_chain(tmp_path: Path) -> None:
    path = tmp_path / "shared.jsonl"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write_parts, args=(path, 15)) for _ in range(3)]
    for writer in writers:
        writer.start()
    for round_ in range(3):  # and somebody else moves it, too
        while not path.exists() or path.stat().st_size == 0:
            time.sleep(0.001)
        path.rename(path.with_name(f"{path.name}-{round_}"))
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    verdict = verify(path)
    assert verdict.problems == () and verdict.records == 45 and verdict.parts >= 15


def test_following_goes_on_in_the_file_that_takes_its_place(log: AuditLog) -> None:
    following = read(log.path, follow_s=0.001)
    assert [next(following)["seq"] for _ in range(5)] == [1, 2, 3, 4, 5]
    for number in range(6, 9):
        _moved(log, f".{number}")
        log.append("started", {})
        assert next(following)["seq"] == number


def test_the_command_follows_a_log_with_a_damaged_end(
    log: AuditLog, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends(path: Path, *, follow_s: float | None = None) -> Iterator[dict[str, object]]:
        yield from [*read(path), *([{"seq": 6, "event": "started"}] if follow_s else [])]

    monkeypatch.setattr(audit, "read", ends)
    log.path.write_bytes(log.path.read_bytes().replace(b"r4", b"r9"))
    assert cli.main(["audit", "tail", str(log.path), "-n", "2", "-f", "--json"]) == 0
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [r.get("seq", r["event"]) for r in shown] == [4, "damaged", 6]


def test_a_log_is_not_rotated_at_next_to_nothing(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="65536 bytes or more"):
        AuditLog(tmp_path / "a.jsonl", rotate_bytes=1000)
