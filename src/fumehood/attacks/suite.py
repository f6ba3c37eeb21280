"""Runs attacks on tiers: the control first, then each tier, several workers at a time where they do not disturb.

Killing the suite kills every worker: each holds the read end of a pipe whose write end is here.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from fumehood import __version__, registry
from fumehood.attacks import host
from fumehood.attacks.model import Attack, Finding, Verdict
from fumehood.attacks.stage import ENV_NAME, new_canary
from fumehood.attacks.worker import WORKER_S, Spec

CONTROL = "none"
#: Workers at a time for each processor. Most of an attack is waiting, but for tiers that start an engine or a machine.
AT_ONCE = {CONTROL: 2, "jail": 2, "subprocess": 2}

Progress = Callable[[Finding, int, int], None]


@dataclass(slots=True)
class Report:
    """All findings of one call of the suite, and the facts of the host under which they hold."""

    attacks: tuple[Attack, ...]
    tiers: tuple[str, ...]  # without the control
    findings: dict[tuple[str, str], Finding] = field(default_factory=dict)  # (attack id, tier)
    skipped: dict[str, str] = field(default_factory=dict)  # tier -> why this host lacks it
    residue: dict[str, list[str]] = field(default_factory=dict)  # tier -> what was left at the end
    facts: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def faulty(self) -> list[str]:
        """Attacks that break nothing where nothing stops them, so that they prove nothing."""
        return [
            a.id
            for a in self.attacks
            if (f := self.findings.get((a.id, CONTROL))) is not None and f.verdict not in _PROVEN
        ]

    def count(self, tier: str, *verdicts: Verdict) -> int:
        """How many attacks ended so on ``tier``."""
        return sum(1 for a in self.attacks if (f := self.findings.get((a.id, tier))) and f.verdict in verdicts)

    def failed(self) -> bool:
        """Whether a boundary did not hold what it must, or something is not proven."""
        found = any(f.failed for (_, tier), f in self.findings.items() if tier != CONTROL)
        return bool(found or self.faulty() or any(self.residue.values()))


_PROVEN = (Verdict.BROKEN, Verdict.NOT_APPLICABLE)


class Suite:
    """Starts workers and collects their findings. Use as a context manager: leaving it kills what still runs."""

    def __init__(self, progress: Progress | None = None) -> None:
        self._progress = progress
        self._workers: set[subprocess.Popen[bytes]] = set()
        self.supervisors: list[int] = []  # process ids of all workers so far

    def __enter__(self) -> Suite:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in list(self._workers):
            if worker.stdin is not None:
                worker.stdin.close()  # the lifeline

    def run(self, specs: Sequence[Spec], attacks: dict[str, Attack]) -> dict[Spec, Finding]:
        """The finding of each spec; those that need the machine to themselves come last."""
        together = [s for s in specs if not attacks[s.attack].alone]
        alone = [s for s in specs if attacks[s.attack].alone]
        findings: dict[Spec, Finding] = {}
        cores = len(os.sched_getaffinity(0))
        at_once = cores * min((AT_ONCE.get(spec.tier, 1) for spec in specs), default=1)
        for group, count in ((together, at_once), (alone, 1)):
            self._some(group, count, findings, len(specs))
        return findings

    def _some(self, specs: Iterable[Spec], at_once: int, findings: dict[Spec, Finding], total: int) -> None:
        with ThreadPoolExecutor(at_once) as pool:
            pending: dict[Future[Finding], Spec] = {pool.submit(self._one, spec): spec for spec in specs}
            try:
                while pending:
                    done, _ = wait(pending, return_when=FIRST_COMPLETED)
                    for future in done:
                        spec = pending.pop(future)
                        findings[spec] = future.result()
                        if self._progress is not None:
                            self._progress(findings[spec], len(findings), total)
            except BaseException:
                for future in pending:
                    future.cancel()
                self.__exit__()
                raise

    def _one(self, spec: Spec) -> Finding:
        began = time.monotonic()
        text = json.dumps({"attack": spec.attack, "tier": spec.tier, "disabled": list(spec.disabled)})
        worker = subprocess.Popen(
            [sys.executable, "-m", "fumehood.attacks.worker", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, start_new_session=True, env={**os.environ, ENV_NAME: new_canary("env")},
        )  # fmt: skip
        self._workers.add(worker)
        self.supervisors.append(worker.pid)
        try:
            out, err = _communicate(worker)
        finally:
            self._workers.discard(worker)
        try:
            return Finding.from_dict(json.loads(out.splitlines()[-1]))
        except (ValueError, IndexError, TypeError, KeyError):
            why = err.decode(errors="replace").strip().splitlines()[-1:] or [f"exit code {worker.returncode}"]
            return Finding(
                spec.attack, spec.tier, Verdict.INCONCLUSIVE, f"the worker failed: {why[0]}", time.monotonic() - began
            )


def _communicate(worker: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """Both streams of a worker; its stdin stays open until then, since its end means that the suite is gone."""
    assert worker.stdin and worker.stdout and worker.stderr
    timer = threading.Timer(WORKER_S, worker.stdin.close)
    timer.start()
    err: list[bytes] = []
    reader = threading.Thread(target=lambda: err.append(worker.stderr.read()), daemon=True)  # type: ignore[union-attr]
    reader.start()
    try:
        out = worker.stdout.read()
        worker.wait()
        reader.join(5)
    finally:
        timer.cancel()
        for stream in (worker.stdin, worker.stdout, worker.stderr):
            stream.close()
    return out, b"".join(err)


def leftovers(supervisors: Iterable[int]) -> list[str]:
    """cgroups of workers that have ended. A cgroup of a sandbox is named after the process that is its supervisor."""
    ended = tuple(f"{pid}-" for pid in supervisors)
    return sorted(
        str(folder) for folder in host.cgroup_folders() if "fumehood" in folder.parts and folder.name.startswith(ended)
    )


def verify(attacks: Sequence[Attack], tiers: Sequence[str], progress: Progress | None = None) -> Report:
    """The whole suite: ``attacks`` on the control and on each of ``tiers``; a tier this host lacks is skipped by name.

    Raises PolicyError for an unknown tier.
    """
    report = Report(tuple(attacks), tuple(tiers), facts=facts())
    known = {a.id: a for a in attacks}
    with Suite(progress) as suite:
        for tier in (CONTROL, *tiers):
            if tier != CONTROL and not (probe := registry.make(tier).probe()).available:
                report.skipped[tier] = probe.reason
                continue
            began = time.monotonic()
            suite.supervisors.clear()
            found = suite.run([Spec(a.id, tier) for a in attacks], known)
            report.seconds[tier] = time.monotonic() - began
            report.findings.update({(f.attack, tier): f for f in found.values()})
            if tier != CONTROL:
                report.residue[tier] = leftovers(suite.supervisors)
    return report


def facts() -> dict[str, str]:
    """What the findings depend on: kernel, runtimes and their ages, the user, the suite."""
    system = os.uname()
    found = {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "fumehood": __version__,
        "kernel": f"{system.sysname} {system.release} {system.machine}",
        "kernel built": system.version,
        "python": f"{platform.python_version()} ({', '.join(platform.python_build())})",
        "user": "root" if os.geteuid() == 0 else f"uid {os.geteuid()}",
        "cores": str(len(os.sched_getaffinity(0))),
        "system": " ".join(platform.freedesktop_os_release().get(k, "") for k in ("NAME", "VERSION_ID")),
    }
    for name in registry.names():
        probe = registry.make(name).probe()
        found |= {f"{name}: {key}": value for key, value in probe.details}
        found[f"{name}: held exactly"] = ", ".join(probe.hard) or "nothing"
    return found
