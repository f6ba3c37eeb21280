"""``fumehood map``: JSON lines in, JSON lines out, on the jail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.needs import need_tier

from fumehood import cli
from fumehood.cli.exits import ExitCode
from fumehood.cli.map import _Done


@pytest.fixture(autouse=True)
def _jail() -> None:
    need_tier("jail")


@pytest.fixture
def lines(tmp_path: Path) -> Callable[..., Path]:
    """Writes a file of JSON lines; text is taken as it is."""

    def write(*items: object) -> Path:
        path = tmp_path / "in.jsonl"
        path.write_text("".join((item if isinstance(item, str) else json.dumps(item)) + "\n" for item in items))
        return path

    return write


def results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def programs(number: int) -> list[dict[str, str]]:
    return [{"id": f"p{n}", "code": f"print({n})"} for n in range(number)]


def test_a_line_each_in_order(lines: Callable[..., Path], capfd: pytest.CaptureFixture[str]) -> None:
    asked = [
        {"code": "print('no id')"},
        {"id": "b", "code": "print(input(), open('a/b').read())", "stdin": "in\n", "files": {"a/b": "file"}},
        {"id": 7, "code": "print(open('x', 'rb').read())", "files": {"x": {"base64": "AP8="}}},
        {"id": "exit", "code": "raise SystemExit(3)"},
    ]
    assert cli.main(["map", str(lines(*asked)), "--concurrency", "3"]) == 0
    out, err = capfd.readouterr()
    told = [json.loads(line) for line in out.splitlines()]
    assert [line["id"] for line in told] == [1, "b", 7, "exit"]
    assert [line["result"]["stdout"] for line in told] == ["no id\n", "in file\n", "b'\\x00\\xff'\n", ""]
    assert told[3]["result"]["exit_code"] == 3
    assert told[0]["result"]["receipt"]["tier"] == "jail"
    assert "3 exited with 0, 1 ended otherwise" in err


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("{", "JSON"),
        ("[]", "object"),
        ('{"code": 1}', "code"),
        ("{}", "code"),
        ('{"code": "", "id": 1.5}', "id"),
        ('{"code": "", "id": true}', "id"),
        ('{"code": "", "cod": ""}', "cod"),
        ('{"code": "", "files": {"../x": ""}}', "relative path"),
        ('{"code": "", "files": {"x": {"base64": "%"}}}', "base64"),
        ("[" * 100_000, "JSON"),
    ],
)
def test_a_wrong_line_is_refused_and_the_others_run(
    line: str, word: str, lines: Callable[..., Path], tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    source = lines({"code": "print(1)"}, line, "", {"code": "print(2)"})
    assert cli.main(["map", str(source), "--out", str(out)]) == ExitCode.REQUEST
    first, wrong, last = results(out)
    assert (first["id"], wrong["id"], last["id"]) == (1, 2, 4)
    assert word in wrong["error"]["message"] and wrong["error"]["ran"] == "no"
    assert last["result"]["stdout"] == "2\n"


def test_a_torn_line_is_run_again_and_nothing_else(lines: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    source = lines(*programs(6))
    assert cli.main(["map", str(source), "--out", str(out), "--no-receipt"]) == 0
    whole = out.read_bytes()
    kept = whole.splitlines(keepends=True)[:3]
    out.write_bytes(b"".join(kept) + whole.splitlines()[3][:40])
    assert cli.main(["map", str(source), "--out", str(out), "--resume", "--no-receipt"]) == 0
    assert out.read_bytes().splitlines(keepends=True)[:3] == kept
    assert [line["id"] for line in results(out)] == [f"p{n}" for n in range(6)]
    done = out.read_bytes()
    assert cli.main(["map", str(source), "--out", str(out), "--resume"]) == 0
    assert out.read_bytes() == done, "all was there"


def test_a_file_of_something_else_is_not_overwritten(lines: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("mine\n")
    source = lines({"code": ""})
    assert cli.main(["map", str(source), "--out", str(out)]) == ExitCode.REQUEST
    assert cli.main(["map", str(source), "--out", str(out), "--resume"]) == ExitCode.REQUEST
    assert out.read_text() == "mine\n"
    assert cli.main(["map", str(source), "--resume"]) == ExitCode.REQUEST
    assert cli.main(["map", str(tmp_path / "absent")]) == ExitCode.REQUEST
    assert cli.main(["map", str(source), "--concurrency", "x"]) == ExitCode.REQUEST


def start(source: str, out: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "fumehood", "map", source, "--out", str(out), *options]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE)


def wait_for_lines(path: Path, number: int) -> None:
    deadline = time.monotonic() + 120
    while not path.exists() or path.read_bytes().count(b"\n") < number:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_and_resumed_every_program_has_one_line(
    number: signal.Signals, lines: Callable[..., Path], tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    source = lines(*programs(400))
    running = start(str(source), out, "--no-receipt", "--unordered")
    wait_for_lines(out, 20)
    running.send_signal(number)
    _, err = running.communicate(timeout=60)
    assert running.returncode == 128 + number, err
    assert b"--resume goes on" in err
    assert out.read_bytes().endswith(b"\n"), "an interruption tears no line"
    before = len(results(out))
    assert 20 <= before < 400
    again = start(str(source), out, "--no-receipt", "--resume")
    wait_for_lines(out, before + 5)
    again.kill()
    again.wait()
    assert cli.main(["map", str(source), "--out", str(out), "--resume", "--no-receipt"]) == 0
    found = results(out)
    assert sorted(line["id"] for line in found) == sorted(f"p{n}" for n in range(400))
    assert all(line["result"]["stdout"] == f"{line['id'][1:]}\n" for line in found)


def test_results_come_while_the_input_is_still_open(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    running = start("-", out)
    assert running.stdin is not None
    running.stdin.write(b'{"code": "print(1)"}\n')
    running.stdin.flush()
    wait_for_lines(out, 1)
    running.stdin.write(b'{"code": "print(2)"}')  # the last line may lack its end
    running.stdin.close()
    assert running.wait(60) == 0
    assert [line["result"]["stdout"] for line in results(out)] == ["1\n", "2\n"]
    assert running.stderr is not None
    running.stderr.close()


def test_two_at_a_time_do_not_write_to_one_file(tmp_path: Path, lines: Callable[..., Path]) -> None:
    out = tmp_path / "out.jsonl"
    first = start("-", out)
    assert first.stdin is not None
    first.stdin.write(b'{"code": "print(1)"}\n')
    first.stdin.flush()
    wait_for_lines(out, 1)
    assert cli.main(["map", str(lines({"code": ""})), "--out", str(out), "--resume"]) == ExitCode.REQUEST
    first.communicate(timeout=60)
    assert first.returncode == 0


def test_a_reader_that_goes_away(lines: Callable[..., Path]) -> None:
    source = lines(*programs(500))
    reader, writer = os.pipe()
    running = subprocess.Popen(
        [sys.executable, "-m", "fumehood", "map", str(source)], stdout=writer, stderr=subprocess.PIPE
    )
    os.close(writer)
    os.read(reader, 10)
    os.close(reader)
    _, err = running.communicate(timeout=60)
    assert running.returncode == ExitCode.BROKEN_PIPE, err
    assert b"Traceback" not in err


def test_ids_that_are_there_take_eight_bytes_each(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("".join(f'{{"id": "{n}", "result": {{}}}}\n' for n in range(1000)) + '{"id": 5, "error": {}}\n')
    done = _Done()
    with open(path, "r+b") as file:
        done.load(path, file.fileno())
    assert "999" in done and 5 in done and 999 not in done and "1000" not in done
    assert len(done) == 1001 and done._hashes.itemsize == 8
