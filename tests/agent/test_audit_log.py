"""The audit log shows every later change, survives its writers' deaths, and refuses to go on after damage."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fumehood import cli
from fumehood.agent import audit
from fumehood.agent.audit import AuditError, AuditLog, Head, read, read_head, verify


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
    assert cli.main(["audit", "verify", path, "--json"]) == 250
    assert json.loads(capsys.readouterr().out)["problems"] == ["line 4 was changed or is torn"]
