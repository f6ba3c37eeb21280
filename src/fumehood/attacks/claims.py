"""The receipt against what the host measures: a claim that is not true is an attack that succeeded."""

from __future__ import annotations

from collections.abc import Callable

from fumehood.attacks import host, watch
from fumehood.attacks.model import Watch
from fumehood.attacks.observe import Run, self_namespaces
from fumehood.attacks.procfs import Posture
from fumehood.model import Control, Held

#: Takes the run, one process of the sandbox and the claim; returns what is untrue about it, or None.
Check = Callable[[Run, Posture, Control], str | None]


def _namespace(kind: str) -> Check:
    def check(_run: Run, seen: Posture, claim: Control) -> str | None:
        real = seen.namespaces.get(kind, "")
        if real == self_namespaces().get(kind):
            return f"the {kind} namespace is the host's"
        return None if not claim.value or claim.value in real else f"the {kind} namespace is {real}"

    return check


def _watched(make: Callable[[], Watch]) -> Check:
    """A claim that an existing watch refutes."""
    seen_by = make()
    return lambda run, _seen, _claim: seen_by.judge(run)


def _capabilities(_run: Run, seen: Posture, _claim: Control) -> str | None:
    sets = {k: v for k, v in seen.status.items() if k.startswith("Cap") and int(v, 16)}
    return f"capabilities are {sets}" if sets else None


def _uid(_run: Run, seen: Posture, claim: Control) -> str | None:
    real = seen.status.get("Uid", "").split()
    return None if set(real) == {claim.value} else f"Uid is {real}"


def _cgroup(controller: str) -> Check:
    def check(_run: Run, seen: Posture, claim: Control) -> str | None:
        value = host.cgroup_limit(seen.cgroup, controller)
        if value in (None, "max"):
            return f"the {controller} cgroup has no limit"
        if controller == "cpu":
            period = host.cgroup_value(seen.cgroup, "cpu", ("cpu.cfs_period_us", "cpu.max")) or "100000"
            real = int(value or 0) / int(period.split()[-1])
            return None if abs(real - float(claim.value)) < 0.01 else f"the cpu cgroup gives {real:g}"
        # The agent of the guest is one process more than the policy's.
        extra = int(value or 0) - int(claim.value)
        return None if 0 <= extra <= (1 if controller == "pids" else 0) else f"the {controller} cgroup gives {value}"

    return check


_RLIMITS = {
    "CORE": "Max core file size",
    "NOFILE": "Max open files",
    "NPROC": "Max processes",
    "MEMLOCK": "Max locked memory",
    "MSGQUEUE": "Max msgqueue size",
    "FSIZE": "Max file size",
    "CPU": "Max cpu time",
    "DATA": "Max data size",
    "AS": "Max address space",
    "NICE": "Max nice priority",
    "RTPRIO": "Max realtime priority",
    "SIGPENDING": "Max pending signals",
    "STACK": "Max stack size",
}


def _rlimits(_run: Run, seen: Posture, claim: Control) -> str | None:
    for part in claim.value.split():
        name, _, value = part.partition("=")
        if name in _RLIMITS and seen.limits.get(_RLIMITS[name]) != value:
            return f"{_RLIMITS[name]} is {seen.limits.get(_RLIMITS[name])}"
    return None


#: Name of a control, as receipts of all tiers use it -> how the host refutes the claim.
CHECKS: dict[str, Check] = {
    "user_ns": _namespace("user"),
    "mount_ns": _namespace("mnt"),
    "pid_ns": _namespace("pid"),
    "net_ns": _namespace("net"),
    "ipc_ns": _namespace("ipc"),
    "uts_ns": _namespace("uts"),
    "cgroup_ns": _namespace("cgroup"),
    "capabilities": _capabilities,
    "uid": _uid,
    "no_new_privs": _watched(lambda: watch.status_not("NoNewPrivs", "1")),
    "seccomp": _watched(lambda: watch.status_not("Seccomp", "2", threads=True)),
    "read_only": _watched(watch.writable_mount),
    "proc": _watched(watch.whole_proc),
    "disk": _watched(watch.unbounded_tmpfs),
    "environment": _watched(watch.environ_canary),
    "descriptors": _watched(watch.extra_descriptor),
    "session": _watched(watch.same_session),
    "rlimits": _rlimits,
    "memory": _cgroup("memory"),
    "pids": _cgroup("pids"),
    "cpu": _cgroup("cpu"),
}


def false_claim() -> Watch:
    """A control that the receipt says is held is not what the host measures."""

    def judge(run: Run) -> str | None:
        if run.receipt is None or run.receipt.claimed:
            return None
        for claim in run.receipt.controls:
            check = CHECKS.get(claim.name)
            if check is None or claim.held is not Held.HARD:
                continue
            for seen in run.done:
                if wrong := check(run, seen, claim):
                    return f"the receipt claims {claim.name} ({claim.held.value}, {claim.value}), but {wrong}"
        return None

    return Watch("each claim of the receipt against /proc and the cgroup", judge, marked=True)
