"""Group P: what the kernel says of a running program's process, read from outside, control by control.

Defence in depth hides the loss of one layer from every other attack. These rows do not attack: the program only holds
still, and the host reads what holds it. After gVisor's ``sandboxposture_test.go``.
"""

from __future__ import annotations

from collections.abc import Callable

from fumehood.attacks import watch
from fumehood.attacks.claims import false_claim
from fumehood.attacks.model import Attack, Watch
from fumehood.attacks.observe import Run
from fumehood.attacks.procfs import NAMESPACES
from fumehood.model import Boundary

_G = "posture"
_SOURCE = "gVisor sandboxposture_test.go"
_CONTROL_OF = {"mnt": "mount_ns"}
#: A container of an engine that runs as root is in the host's user namespace: docs/containers.md says what holds there.
_ONLY = {"user": "jail"}


def _row(
    ident: str,
    title: str,
    seen: Watch,
    *proves: str,
    needs: tuple[str, ...] = (),
    holds: Boundary = Boundary.KERNEL,
    limit: str | None = None,
    program: str = "hold()",
    only: str = "",
) -> Attack:
    return Attack(
        ident, _G, title, program, seen, _SOURCE, holds, only=only, proves=proves, needs=needs, limit=limit
    )  # fmt: skip


def _limit(
    ident: str, name: str, wanted: Callable[[Run], int], holds: Boundary = Boundary.KERNEL, *needs: str, only: str = ""
) -> Attack:
    seen = watch.limit_over(name, wanted)
    return _row(ident, f"resource limit: {name}", seen, "rlimits", holds=holds, needs=needs, only=only)


ATTACKS = (
    *(
        _row(f"P1{letter}", f"in the host's {kind} namespace", watch.shares_namespace(kind),
             _CONTROL_OF.get(kind, f"{kind}_ns"), only=_ONLY.get(kind, ""))
        for letter, kind in zip("abcdefg", NAMESPACES, strict=True)
    ),
    *(
        Attack(
            f"P1{letter}2", _G, f"two sandboxes in one {kind} namespace", "hold()",
            watch.beside_shares_namespace(kind), _SOURCE, only=_ONLY.get(kind, ""), second="hold()",
            second_when="beside",
        )
        for letter, kind in zip("abcdefg", NAMESPACES, strict=True)
    ),
    _row("P2", "an effective capability", watch.capable("CapEff"), "capabilities", needs=("root",)),
    _row("P2b", "a permitted capability", watch.capable("CapPrm"), "capabilities", needs=("root",)),
    _row("P2c", "a capability in the bounding set", watch.capable("CapBnd"), "capabilities"),
    _row("P3", "new privileges to be had from a set-uid program", watch.status_not("NoNewPrivs", "1"), "no_new_privs",
         holds=Boundary.KERNEL),
    _row("P4", "a thread without a system-call filter", watch.status_not("Seccomp", "2", threads=True), "seccomp",
         program="threading.Thread(target=time.sleep, args=(8,), daemon=True).start()\nhold()"),
    _row("P4b", "a filter fewer than the ordinary program has", watch.filters_under(2), "seccomp", only="jail"),
    _row("P5", "a user who owns processes outside the sandbox", watch.same_user(), "uid", needs=("root",)),
    _row("P5b", "a root of some namespace", watch.maps_to_root(), "uid", needs=("root",)),
    _row("P6", "the supervisor's session", watch.same_session(), "session", holds=Boundary.LIMITS),
    _row("P6b", "no session of its own", watch.no_own_session(), "session", holds=Boundary.LIMITS),
    _row("P7", "the host's root folder", watch.same_root(), "mount_ns"),
    _row("P7b", "a file system of the host mounted writable", watch.writable_mount(), "read_only"),
    _row("P7c", "a mount that honours set-uid bits", watch.mount_without("nosuid"), "read_only", only="jail"),
    _row("P7d", "a whole proc", watch.whole_proc(), "proc", only="jail"),
    _row("P7e", "the kernel's sysfs", watch.sees_system("sysfs"), only="jail"),
    _row("P7f", "the cgroup tree", watch.sees_system("cgroup"), only="jail"),
    _row("P7g", "writable files without a bound", watch.unbounded_tmpfs(), "disk"),
    _row("P8", "a descriptor of the supervisor", watch.holds_inherited(), "descriptors", holds=Boundary.LIMITS),
    _row("P8b", "a descriptor besides the three standard ones", watch.extra_descriptor(), "descriptors",
         holds=Boundary.LIMITS),
    _row("P8c", "a descriptor shared with what prepares sandboxes", watch.shares_descriptor(), "descriptors"),
    _row("P9", "the supervisor's environment", watch.environ_canary(), "environment", holds=Boundary.LIMITS),
    _limit("P10a", "Max core file size", watch.bounded_by("none at all", 0), Boundary.LIMITS),
    _limit("P10b", "Max open files", lambda run: run.policy.limits.open_files, Boundary.LIMITS),
    _limit("P10c", "Max processes", lambda run: run.policy.limits.pids + 4, only="jail"),
    _limit("P10d", "Max locked memory", watch.bounded_by("none at all", 0)),
    _limit("P10e", "Max msgqueue size", watch.bounded_by("none at all", 0)),
    _limit("P10f", "Max file size", lambda run: run.policy.limits.disk_bytes, Boundary.LIMITS),
    _limit("P10g", "Max cpu time", lambda run: int(run.policy.limits.cpu_s) + 3, Boundary.LIMITS),
    _limit("P10h", "Max realtime priority", watch.bounded_by("none at all", 0), Boundary.KERNEL, "rtprio"),
    _row("P11a", "no limit on the memory of all processes together", watch.unbounded_cgroup("memory"),
         "memory", limit="memory"),
    _row("P11b", "no limit on the number of processes together", watch.unbounded_cgroup("pids"), "pids", limit="pids"),
    _row("P11c", "no limit on CPU per second", watch.unbounded_cgroup("cpu"), "cpu", limit="cpu"),
    _row("P13", "a receipt that claims what is not so", false_claim(), holds=Boundary.LIMITS),
)  # fmt: skip
