"""Runs attacks on tiers: the control first, then each tier, several workers at a time where they do not disturb.

Killing the suite kills every worker: each holds the read end of a pipe whose write end is here. All workers of a suite
are forks of one process (:mod:`fumehood.attacks.nursery`).
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from fumehood import __version__, registry
from fumehood.attacks import host
from fumehood.attacks.model import Attack, Finding, Verdict
from fumehood.attacks.nursery import Nursery
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
        self._lifelines: set[int] = set()  # write ends of the workers' standard inputs
        self._lock = threading.Lock()
        self._nursery: Nursery | None = None
        self.supervisors: list[int] = []  # process ids of all workers so far

    def __enter__(self) -> Suite:
        self._nursery = Nursery({**os.environ, ENV_NAME: new_canary("env")})
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            for lifeline in self._lifelines:
                os.close(lifeline)
            self._lifelines.clear()
            if self._nursery is not None:
                self._nursery.close()
                self._nursery = None

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
        out, err = self._hear(text)
        try:
            return Finding.from_dict(json.loads(out.splitlines()[-1]))
        except (ValueError, IndexError, TypeError, KeyError):
            why = err.decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
            return Finding(
                spec.attack, spec.tier, Verdict.INCONCLUSIVE, f"the worker failed: {why[0]}", time.monotonic() - began
            )

    def _hear(self, spec: str) -> tuple[bytes, bytes]:
        """Both streams of a worker; its stdin stays open until then, since its end means that the suite is gone."""
        stdin, lifeline = os.pipe()
        ends = [os.pipe(), os.pipe()]
        with self._lock:
            self._lifelines.add(lifeline)
            assert self._nursery is not None
            try:
                self.supervisors.append(self._nursery.worker(spec, (stdin, ends[0][1], ends[1][1])))
            finally:
                for fd in (stdin, ends[0][1], ends[1][1]):
                    os.close(fd)
        timer = threading.Timer(WORKER_S, self._let_go, (lifeline,))
        timer.start()
        err: list[bytes] = []
        reader = threading.Thread(target=lambda: err.append(_read_all(ends[1][0])), daemon=True)
        reader.start()
        try:
            out = _read_all(ends[0][0])
            reader.join(5)
        finally:
            timer.cancel()
            self._let_go(lifeline)
        return out, b"".join(err)

    def _let_go(self, lifeline: int) -> None:
        with self._lock:
            if lifeline in self._lifelines:
                self._lifelines.discard(lifeline)
                os.close(lifeline)


def _read_all(fd: int) -> bytes:
    with open(fd, "rb") as stream:
        return stream.read()


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
