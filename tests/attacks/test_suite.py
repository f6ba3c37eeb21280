"""The suite as a whole: workers, host safety, reports, the command line."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from fumehood import registry
from fumehood.attacks import mutation, procfs, report
from fumehood.attacks.catalogue import ATTACKS, by_id
from fumehood.attacks.model import Finding, Verdict
from fumehood.attacks.suite import CONTROL, Report, Suite
from fumehood.attacks.worker import Spec
from fumehood.cli import verify
from fumehood.errors import PolicyError

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = "\x1b[31m<script>alert(1)</script>\u202e"

jail = pytest.mark.skipif(not registry.make("jail").probe().available, reason="this host has no jail")


def run(*specs: Spec) -> dict[Spec, Finding]:
    with Suite() as suite:
        return suite.run(specs, {a.id: a for a in ATTACKS})


@jail
@pytest.mark.parametrize("ident", ["A1", "B1", "B16", "C3", "D1", "E1", "F2", "G6", "P4", "P13"])
def test_the_jail_holds(ident: str) -> None:
    spec = Spec(ident, "jail")
    finding = run(spec)[spec]
    assert finding.verdict in (Verdict.HELD, Verdict.NOT_APPLICABLE), finding.seen
    assert not finding.residue


@jail
@pytest.mark.parametrize(("control", "ident"), [("proc", "B4"), ("landlock", "C16"), ("seccomp", "C18")])
def test_a_control_switched_off_lets_its_attack_through(control: str, ident: str) -> None:
    spec = Spec(ident, "jail", mutation.off(control))
    finding = run(spec)[spec]
    assert finding.verdict is Verdict.BROKEN, finding.seen


def test_the_six_of_the_article_succeed_where_nothing_stops_them() -> None:
    found = run(*(Spec(attack.id, CONTROL) for attack in ATTACKS[:6]))
    assert {s.attack: f.verdict for s, f in found.items()} == {a.id: Verdict.BROKEN for a in ATTACKS[:6]}


def test_killing_the_suite_kills_everything() -> None:
    """A suite in mid-attack is killed; its worker, the guard, the bystander and the program are gone soon."""
    procfs.become_subreaper()
    program = (
        "from fumehood.attacks.suite import Suite\nfrom fumehood.attacks.worker import Spec\n"
        "from fumehood.attacks.catalogue import ATTACKS\n"
        "with Suite() as s: s.run([Spec('C16', 'none'), Spec('A4', 'none')], {a.id: a for a in ATTACKS})"
    )
    before = set(procfs.descendants())
    folder = Path(tempfile.mkdtemp())  # a short path, so that the stages are made in it
    suite = subprocess.Popen([sys.executable, "-c", program], env={**os.environ, "TMPDIR": str(folder)})
    try:
        deadline = time.monotonic() + 20
        while len(set(procfs.descendants()) - before) < 5 and time.monotonic() < deadline:
            time.sleep(0.02)
        doomed = {(p.pid, p.started) for p in procfs.descendants().values() if p.pid not in before}
        assert len(doomed) >= 5
        os.kill(suite.pid, signal.SIGKILL)
        suite.wait()
        deadline = time.monotonic() + 20
        alive = doomed
        while alive and time.monotonic() < deadline:
            alive = {k for k in alive if (p := procfs.process(k[0])) and p.alive and p.started == k[1]}
            time.sleep(0.02)
        assert alive == set()
        assert list(folder.glob("fh-*")) == []
    finally:
        shutil.rmtree(folder)
        suite.kill()
        suite.wait()
        procfs.reap(pid for pid in procfs.descendants() if pid not in before)
        procfs.stop_subreaper()


def test_a_worker_that_fails_is_inconclusive(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = Spec("B1", "no such tier")
    finding = run(spec)[spec]
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert "no such tier" in finding.seen


# --- reports


def made(**verdicts: Verdict) -> Report:
    """A report of one attack, B1, with hostile evidence."""
    attack = by_id("B1")
    assert attack is not None
    found = Report((attack,), tuple(t for t in verdicts if t != CONTROL), facts={"kernel": HOSTILE})
    for tier, verdict in verdicts.items():
        found.findings["B1", tier] = Finding("B1", tier, verdict, HOSTILE, 0.1, required=tier != "subprocess")
    return found


@pytest.mark.parametrize(
    ("verdicts", "failed"),
    [
        ({CONTROL: Verdict.BROKEN, "jail": Verdict.HELD}, False),
        ({CONTROL: Verdict.BROKEN, "jail": Verdict.BROKEN}, True),
        ({CONTROL: Verdict.BROKEN, "jail": Verdict.INCONCLUSIVE}, True),
        ({CONTROL: Verdict.BROKEN, "subprocess": Verdict.BROKEN}, False),
        ({CONTROL: Verdict.HELD, "jail": Verdict.HELD}, True),  # faulty: it proves nothing
        ({CONTROL: Verdict.NOT_APPLICABLE, "jail": Verdict.NOT_APPLICABLE}, False),
    ],
)
def test_what_fails_the_suite(verdicts: dict[str, Verdict], failed: bool) -> None:
    assert made(**verdicts).failed() is failed


def test_residue_fails_the_suite() -> None:
    found = made(none=Verdict.BROKEN, jail=Verdict.HELD)
    found.residue["jail"] = ["/dev/shm/x"]
    assert found.failed()


def test_html_holds_no_markup_of_an_attacker_and_no_address() -> None:
    page = report.to_html(made(none=Verdict.BROKEN, jail=Verdict.HELD))
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "src=" not in page
    assert "href=" not in page
    assert "http://" not in page.replace(HOSTILE, "")


def test_junit_is_xml_that_says_what_failed() -> None:
    root = ElementTree.fromstring(report.junit(made(none=Verdict.BROKEN, jail=Verdict.BROKEN)))
    assert [(s.get("name"), s.get("failures")) for s in root] == [("none", "0"), ("jail", "1")]


def test_json_can_be_read_back() -> None:
    data: dict[str, Any] = json.loads(report.to_json(made(none=Verdict.BROKEN, jail=Verdict.HELD)))
    again = [Finding.from_dict(f) for f in data["findings"]]
    assert [f.verdict for f in again] == [Verdict.BROKEN, Verdict.HELD]
    assert data["failed"] is False


def test_the_documented_catalogue_is_the_suites() -> None:
    assert (ROOT / "docs" / "attacks.md").read_text() == verify.catalogue_page()
    ids = [row["id"] for row in json.loads((ROOT / "docs" / "verify.json").read_text())["attacks"]]
    assert ids == [attack.id for attack in ATTACKS]


def test_the_documented_mutants_are_the_jails_controls_and_all_are_proven() -> None:
    text = (ROOT / "docs" / "mutation.md").read_text()
    rows = [line.split(" | ")[0].lstrip("| ") for line in text.splitlines() if line.startswith("| ")][1:]
    assert rows == list(mutation.plan())
    assert "unproven**" not in text


# --- the command line


def call(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    verify.configure(parser)
    return verify.main(parser.parse_args(argv))


def test_one_attack_alone_with_every_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / name for name in ("r.json", "r.html", "r.xml")]
    code = call(
        "--attack", "e1", "--tier", "subprocess", "--json", str(files[0]), "--html", str(files[1]), "--junit",
        str(files[2]),
    )  # fmt: skip
    out = capsys.readouterr().out
    assert code == 0, out
    assert "subprocess: 1 held of 1 applicable" in out
    assert json.loads(files[0].read_text())["attacks"][0]["id"] == "E1"
    assert all(file.stat().st_size > 200 for file in files)


@pytest.mark.parametrize("argv", [("--attack", "Z9"), ("--tier", "none"), ("--group", "nonsense"), ("--show", "Z9")])
def test_unknown_names_are_refused(argv: tuple[str, ...]) -> None:
    with pytest.raises(PolicyError):
        call(*argv)


def test_an_attack_can_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--show", "B16") == 0
    assert "os.pread" in capsys.readouterr().out
    assert call("--list", "--group", "network") == 0
    assert "loopback" in capsys.readouterr().out
