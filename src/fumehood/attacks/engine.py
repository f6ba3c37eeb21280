"""Carries out one attack on one tier, in this process, and judges it by what was seen from outside.

The order: targets are built; an ordinary program runs (the tier works, and its template is there); the attack runs
while the host looks every few milliseconds; the sandbox is destroyed; what lives on is noted; an ordinary program runs
again; what is left of it all is noted; the tier is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from fumehood.attacks import dialects, host, procfs
from fumehood.attacks.control import ControlTier
from fumehood.attacks.model import Attack, Finding, Verdict
from fumehood.attacks.needs import unmet
from fumehood.attacks.observe import Run
from fumehood.attacks.residue import Residue
from fumehood.attacks.stage import Stage, remove_sysv
from fumehood.errors import FileError, FumehoodError, PolicyError
from fumehood.model import Boundary, Code, Mount, Outcome, Policy
from fumehood.tier import Sandbox, Single, Tier, is_simple

LOOK_S = 0.02

#: No attack takes this long: a tier that does not return by then has failed its own limits.
GIVE_UP_S = 30.0

_MOUNTED = "/mnt/open"

#: The end of a traceback that says the attacker's program was wrong, not that it was stopped.
_MISTAKES = (b"NameError", b"SyntaxError", b"ImportError", b"ModuleNotFoundError", b"AttributeError", b"TypeError")

#: In a language runtime these say that there is nothing of that name to misuse.
_LACKS = (b"ImportError", b"ModuleNotFoundError", b"AttributeError")

#: Boundaries whose programs are processes of another kernel than the host's.
OTHER_KERNEL = (Boundary.EMULATED, Boundary.USER_KERNEL, Boundary.HARDWARE)

#: The least that an attack under emulation is given of what its own limits are, within the policy's.
_EMULATED_WALL_S = 12.0
_EMULATED_CPU_S = 6.0

MakeTier = Callable[[Attack, Stage], Tier]


def make_control(attack: Attack, stage: Stage) -> Tier:
    """The control for one attack."""
    return ControlTier(home=stage.home, throwaway=attack.throwaway)


async def face(attack: Attack, make: MakeTier, base: Policy, *, own_session: bool = False) -> Finding:
    """Carry out ``attack`` on the tier that ``make`` gives, under ``base`` with the attack's own limits.

    ``own_session`` says that this process leads a session without a terminal, so that it may be given one. Never
    raises for what a tier does: a set-up that fails is an inconclusive finding.
    """
    began = time.monotonic()
    if reason := unmet(attack.needs):
        return Finding(attack.id, "", Verdict.NOT_APPLICABLE, reason, 0.0)
    stage = Stage(terminal=attack.terminal and own_session)
    try:
        if attack.terminal and stage.terminal is None:
            return Finding(attack.id, "", Verdict.NOT_APPLICABLE, "needs a terminal for the supervisor alone", 0.0)
        with _temporary_folder(stage.work):
            return await _face(attack, make(attack, stage), base, stage, began)
    finally:
        _clean(stage)
        stage.close()


@contextlib.contextmanager
def _temporary_folder(folder: Path) -> Iterator[None]:
    """What tiers make for themselves on the host is seen there, and gone with the stage."""
    before, named = os.environ.get("TMPDIR"), tempfile.tempdir
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = named
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before


async def _face(attack: Attack, tier: Tier, base: Policy, stage: Stage, began: float) -> Finding:
    control = isinstance(tier, ControlTier)
    finding = Finding(
        attack.id, tier.name, Verdict.INCONCLUSIVE, "", 0.0,
        required=attack.must_hold(tier.name, tier.features.boundary),
        best_effort=not control and attack.limit is not None and attack.limit not in tier.probe().hard,
    )  # fmt: skip

    def end(verdict: Verdict, seen: str, residue: tuple[str, ...] = ()) -> Finding:
        return replace(finding, verdict=verdict, seen=seen, seconds=time.monotonic() - began, residue=residue)

    lacking = [name for name in attack.features if not getattr(tier.features, name)]
    if lacking:
        return end(Verdict.NOT_APPLICABLE, f"the tier has no {lacking[0].replace('_', ' ')}")
    if not control and (reason := dialects.unable(attack, tier.features)):
        return end(Verdict.NOT_APPLICABLE, reason)
    if attack.watch.marked and tier.features.boundary in OTHER_KERNEL:
        return end(Verdict.NOT_APPLICABLE, "what the attack changes is a process of another kernel than the host's")
    policy = attack.policy(base)
    if tier.features.boundary is Boundary.EMULATED:
        policy = _unhurried(policy, base)
    mounted = str(stage.open)
    if tier.features.mounts and "T.mounted" in attack.program:
        mounted = _MOUNTED
        policy = replace(policy, mounts=(*policy.mounts, Mount(str(stage.open), _MOUNTED)))
    simple = _is_simple(attack)
    nothing = Residue.take(stage)
    try:
        try:
            makers = await _ordinary(tier, policy, simple=simple)
            if not control:  # what a tier prepares because a policy came twice is there then, before as after
                await _ordinary(tier, policy, simple=simple)
            before = await Residue.settled(stage)
            run = Run(attack, policy, stage, known=makers & before.processes)
            run.own_kernel = tier.features.boundary in OTHER_KERNEL
            run.elsewhere = getattr(tier, "first_processes", tuple)
            run.control = control
            run.in_runtime = dialects.is_runtime(tier.features)
            run.full_python = tier.features.full_python
            await _attack(run, tier, stage.targets(mounted=mounted) | {"note": stage.note})
        except (FumehoodError, OSError) as error:
            return end(Verdict.INCONCLUSIVE, f"set-up failed: {type(error).__name__}: {error}")
        finding = replace(finding, receipt=run.receipt.to_dict() if run.receipt else None)
        verdict, seen = _judge(run)
        if control:
            return end(verdict, seen)
        if run.survivors:
            procfs.reap(run.mine())
        try:
            await _ordinary(tier, policy, simple=simple)
        except (FumehoodError, OSError) as error:
            return end(Verdict.BROKEN, f"the next ordinary run failed: {type(error).__name__}: {error}")
        left = await before.grown() if verdict is Verdict.HELD else []
    finally:
        await tier.close()
    if verdict is Verdict.HELD:  # what an attack that succeeded leaves is its success
        left += await nothing.left()
    return end(verdict, seen, tuple(dict.fromkeys(left)))


def _unhurried(policy: Policy, base: Policy) -> Policy:
    """At a tenth of the host's speed, an attacker's imports alone take a second: it must have the time to begin."""
    limits = policy.limits
    wall_s = min(base.limits.wall_s, max(limits.wall_s, _EMULATED_WALL_S))
    cpu_s = min(base.limits.cpu_s, max(limits.cpu_s, _EMULATED_CPU_S))
    return replace(policy, limits=replace(limits, wall_s=wall_s, cpu_s=cpu_s))


async def _ordinary(tier: Tier, policy: Policy, *, simple: bool) -> frozenset[tuple[int, int]]:
    """An ordinary run, in a sandbox such as the attack has; OSError if it is not what it should be.

    Returns the processes that were there when its sandbox was: those that outlive it make sandboxes and are none.
    """
    sandbox = await _create(tier, policy, simple=simple)
    try:
        there = frozenset((p.pid, p.started) for p in procfs.descendants().values())
        result = await sandbox.exec(Code("print(6 * 7)"), last=True)
    finally:
        await sandbox.close()
    if result.stdout.split()[:1] != ["42"]:
        raise OSError(f"an ordinary program gave {result.outcome.value}: {result.stdout!r:.100} {result.stderr!r:.300}")
    return there


async def _attack(run: Run, tier: Tier, targets: dict[str, object]) -> None:
    attack = run.attack
    text = Code(dialects.compose(attack.program, targets, tier.features))
    live = bool(attack.reuploads or attack.downloads)
    sandbox = await _create(tier, run.policy, simple=_is_simple(attack))
    run.receipt = sandbox.receipt
    try:
        await _files(run, sandbox, attack.uploads)
        await _watched(run, tier, sandbox, text, targets, last=not live)
        if live:
            await _files(run, sandbox, attack.reuploads)
            for path in attack.downloads:
                with _refused(run):
                    run.downloads[path] = await sandbox.read_file(path)
    finally:
        await _destroy(run, sandbox)
    if attack.second and attack.second_when == "after":
        await _second(run, tier, targets)
    run.look()


def _is_simple(attack: Attack) -> bool:
    """Whether a runner would have a sandbox for a single program made for it."""
    files = bool(attack.uploads or attack.reuploads or attack.downloads)
    return is_simple(Code(attack.program), files=files, stdin=bool(attack.stdin_bytes))


async def _create(tier: Tier, policy: Policy, *, simple: bool) -> Sandbox:
    """The sandbox that a runner would have for such a program."""
    if simple and isinstance(tier, Single):
        return await tier.create_single(policy)
    return await tier.create(policy)


async def _watched(
    run: Run, tier: Tier, sandbox: Sandbox, text: Code, targets: dict[str, object], *, last: bool
) -> None:
    run.supervisor_before_bytes = procfs.resident_bytes()
    run.began = time.monotonic()
    task = asyncio.ensure_future(sandbox.exec(text, stdin=bytes(run.attack.stdin_bytes), sink=run.feed, last=last))
    try:
        while not task.done():
            await asyncio.wait([task], timeout=LOOK_S)
            run.look()
            seen = None if run.attack.second else run.judge()
            if not task.done() and (run.done or seen or run.seconds > GIVE_UP_S):
                break
        if run.attack.second and run.attack.second_when == "beside":
            await _second(run, tier, targets)
        if not task.done():
            return
        run.seconds = time.monotonic() - run.began
        try:
            run.result = task.result()
        except (FumehoodError, OSError, ValueError) as error:
            run.failure = f"{type(error).__name__}: {error}"
    finally:
        if not task.done():
            run.task = task


async def _second(run: Run, tier: Tier, targets: dict[str, object]) -> None:
    """The second program: it is told all but the note."""
    told = {k: v for k, v in targets.items() if k != "note"}
    sandbox = await _create(tier, run.policy, simple=True)
    task = asyncio.ensure_future(
        sandbox.exec(Code(dialects.compose(run.attack.second, told, tier.features)), last=True)
    )
    known = {seen.pid for seen in run.done}
    try:
        while not task.done() and not run.beside:
            await asyncio.wait([task], timeout=LOOK_S)
            run.beside = run.marked(known)
        if task.done():
            run.second_output = task.result().stdout_data
    finally:
        await sandbox.close()
        if not task.done():
            task.cancel()
        await asyncio.wait([task], timeout=5)
        if not task.cancelled():
            task.exception()


@contextlib.contextmanager
def _refused(run: Run) -> Iterator[None]:
    try:
        yield
    except (PolicyError, FileError, OSError, ValueError) as error:
        run.refusals.append(f"{type(error).__name__}: {error}")


async def _files(run: Run, sandbox: Sandbox, files: Mapping[str, bytes]) -> None:
    for path, data in files.items():
        with _refused(run):
            await sandbox.write_file(path.replace("OPEN", str(run.stage.open)), data)


async def _destroy(run: Run, sandbox: Sandbox) -> None:
    task = run.task
    began = time.monotonic()
    try:
        async with asyncio.timeout(GIVE_UP_S):
            await sandbox.close(out=run.out if run.attack.collect else None)
    except (Exception, asyncio.CancelledError) as error:
        run.close_failure = f"{type(error).__name__}: {error}"
    run.close_s = time.monotonic() - began
    run.closed = True
    if task is not None and not run.control:
        done, _ = await asyncio.wait([task], timeout=5)
        if not done:
            run.close_failure = run.close_failure or "the exec did not end with its sandbox"
    if task is not None:
        task.cancel()
        with contextlib.suppress(BaseException):
            async with asyncio.timeout(0.1):
                await asyncio.shield(task)
    run.survivors = await _survivors(run)


async def _survivors(run: Run) -> list[str]:
    """Who of the program is alive once the dead had time to be counted as such.

    A process that forks and dies may slip through one look at the table, so that one empty look is not enough.
    """
    alive: list[str] = []
    empty = 0
    for _ in range(60):
        alive = run.alive()
        empty = 0 if alive else empty + 1
        if empty == 6 or (run.control and alive):
            break
        await asyncio.sleep(LOOK_S)
    return alive


def _judge(run: Run) -> tuple[Verdict, str]:
    if seen := run.judge():
        return Verdict.BROKEN, seen
    if run.unseen:
        return Verdict.INCONCLUSIVE, f"the host could not see: {run.unseen}"
    if run.closed and run.close_failure and not run.control:
        return Verdict.BROKEN, f"destroying the sandbox failed: {run.close_failure}"
    if run.attack.uploads and run.refusals:
        return Verdict.HELD, f"refused: {run.refusals[0]}"
    if run.in_runtime and not run.armed and run.result is not None and run.result.unsupported:
        return Verdict.NOT_APPLICABLE, f"the program needs what the runtime lacks: {run.result.unsupported}"
    if not run.armed and run.failure is None:
        return Verdict.INCONCLUSIVE, f"the program did not start: {_tail(run)}"
    if run.result is not None and run.result.stderr_data:
        last = run.result.stderr_data.rstrip().rpartition(b"\n")[2]
        lacking = run.in_runtime and (last.startswith(_LACKS) or run.result.unsupported is not None)
        if last.startswith(_MISTAKES) and not lacking:
            if run.in_runtime and not run.full_python:
                return (
                    Verdict.NOT_APPLICABLE,
                    f"the program is not of the runtime's subset: {last[:100].decode('utf-8', 'replace')}",
                )
            return Verdict.INCONCLUSIVE, f"the program failed by itself: {_tail(run)}"
    if run.attack.watch.marked and not run.done:
        killed = run.result is not None and run.result.outcome is Outcome.SIGNALED
        if not killed:
            return Verdict.INCONCLUSIVE, f"the host never saw the mark: {_tail(run)}"
    return Verdict.HELD, _held(run)


def _held(run: Run) -> str:
    if run.done:
        return "not seen, while the program claimed to be done"
    if run.result is not None:
        code = "" if run.result.exit_code is None else f" {run.result.exit_code}"
        last = run.result.stderr.rstrip().rpartition("\n")[2][:100] if run.in_runtime else ""
        return f"ended as {run.result.outcome.value}{code} after {run.seconds:.2f} s" + (f": {last}" if last else "")
    return run.failure or f"stopped after {run.seconds:.2f} s"


def _tail(run: Run) -> str:
    if run.result is None:
        return run.failure or "no result"
    return f"{run.result.outcome.value} {run.result.exit_code}: {run.result.stderr[-300:].strip()!r}"


def _clean(stage: Stage) -> None:
    """Remove from the host what an attack that succeeded has left, by the run's token and key."""
    remove_sysv(stage.key)
    host.mqueue_remove(f"/{stage.token}")
    host.keys_remove(stage.token)
    for folder in host.cgroup_folders():
        if stage.token in folder.name:
            with contextlib.suppress(OSError):
                folder.rmdir()
    for parent in ("/tmp", "/var/tmp", "/dev/shm", "/run"):
        with contextlib.suppress(OSError):
            for name in os.listdir(parent):
                if stage.token in name and not name.startswith("fh-"):
                    os.unlink(os.path.join(parent, name))
