"""The whole posture of a live jail from outside, against an exhaustive expectation: an item too many fails as well."""

# ruff: noqa: E501 - a program of one line stays on one line

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest
from support import posture
from support.needs import need_tier
from support.posture import Mount

from fumehood.errors import FumehoodError, StartError, UnsupportedError
from fumehood.linux.cgroup import Cgroup
from fumehood.model import Code, Held, Limits, MiB, Policy, Receipt
from fumehood.runner import Runner
from fumehood.tiers.jail.tier import JailTier

LIMITS = Limits(
    wall_s=60, cpu_s=40, cpus=0.5, memory_bytes=200 * MiB, pids=40, disk_bytes=32 * MiB, files=500, open_files=100
)

#: Threads, a child that shares the interpreter's memory image, children that executed something, one of them Python
#: with a thread of its own, and one that left the session.
PROGRAM = """
import os, subprocess, sys, threading, time
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
subprocess.Popen(["sleep", "600"])
subprocess.Popen(["sh", "-c", "sleep 600; true"], start_new_session=True)
r, w = os.pipe()
os.set_inheritable(w, True)
code = "import os, sys, threading, time\\nthreading.Thread(target=time.sleep, args=(600,)).start()\\nos.write(int(sys.argv[1]), b'x')"
subprocess.Popen([sys.executable, "-c", code, str(w)], close_fds=False)
os.read(r, 1)
os.close(r)
os.close(w)
if os.fork() == 0:
    time.sleep(600)
print("on", flush=True)
"""


@dataclass
class Scene:
    """Who is who in a sandbox, and what its receipt says."""

    cgroups: bool
    single: bool  # for one program: there is no agent, and PID 1 is idle
    launcher: int
    zygote: int
    init: int
    programs: list[int] = field(default_factory=list)  # the interpreter first
    receipt: dict[str, object] = field(default_factory=dict)

    @property
    def inside(self) -> list[int]:
        """All that is sealed: an idle PID 1 is not, see test_an_idle_first_process."""
        return self.programs if self.single else [self.init, *self.programs]

    @property
    def first(self) -> int:
        return self.inside[0]


MODES = [(cgroups, single) for single in (False, True) for cgroups in (True, False)]


@pytest.fixture(scope="module", params=MODES, ids=["cgroups", "no-cgroups", "single-cgroups", "single-no-cgroups"])
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    """A sandbox in which all kinds of processes run, and beside it one that is empty."""
    need_tier("jail")
    cgroups, single = request.param
    tier = JailTier(cgroups=cgroups)
    held = set(tier.probe().hard) & {"memory", "pids", "cpu"}
    if cgroups and not held:
        pytest.skip("this user or host has no control groups; the other parameter is this host's only mode")
    with Runner(tier=tier, policy=Policy(limits=LIMITS)) as runner, runner.open() as other:
        other.exec("pass")
        (zygote,) = tier._zygotes.values()
        inner = posture.zygote_of(zygote.pid)
        with (_single if single else _live)(runner, inner) as (new, receipt):
            interpreter = int(posture.fields(f"/proc/{new[0]}/status")["PPid"])
            if single:
                (init,) = (
                    pid for pid in posture.children(inner) if same_pids(pid, interpreter) and inner_pid(pid) == 1
                )
            else:
                init = int(posture.fields(f"/proc/{interpreter}/status")["PPid"])
            assert int(posture.fields(f"/proc/{init}/status")["PPid"]) == inner
            programs = [interpreter, *posture.children(interpreter)] if single else posture.children(init)
            seen = {c.name: c for c in receipt.controls}
            yield Scene(cgroups, single, zygote.pid, inner, init, programs, seen)


@contextmanager
def _live(runner: Runner, inner: int) -> Iterator[tuple[list[int], Receipt]]:
    """The program's processes, and the receipt, of a sandbox with an agent."""
    with runner.open() as sandbox:
        sandbox.exec("pass")
        before = set(posture.children(inner))
        result = sandbox.exec(PROGRAM)
        assert result.stdout == "on\n", result.stderr
        new = [pid for pid in posture.children(inner) if pid not in before]
        assert len(new) >= 4
        yield new, sandbox.receipt


@contextmanager
def _single(runner: Runner, inner: int) -> Iterator[tuple[list[int], Receipt]]:
    """The same of one without."""
    call, loop = runner._portal.call, runner._portal._loop
    before = set(posture.children(inner))
    sandbox = call(cast(JailTier, runner.tier).create_single(runner.policy))
    (program,) = (pid for pid in posture.children(inner) if pid not in before and inner_pid(pid) == 2)
    on = threading.Event()
    run = sandbox.exec(Code(PROGRAM + "time.sleep(600)"), sink=lambda *_: on.set(), last=True)
    running = asyncio.run_coroutine_threadsafe(run, loop)
    try:
        assert on.wait(60)
        yield posture.children(program), sandbox.receipt
    finally:
        call(sandbox.close())
        with contextlib.suppress(FumehoodError):
            running.result(10)


def same_pids(one: int, other: int) -> bool:
    """Whether two processes are in one PID namespace."""
    return os.readlink(f"/proc/{one}/ns/pid") == os.readlink(f"/proc/{other}/ns/pid")


def inner_pid(pid: int) -> int:
    """Its number in the innermost PID namespace."""
    return int(posture.fields(f"/proc/{pid}/status")["NSpid"].split()[-1])


def test_the_scene_has_every_kind_of_process(scene: Scene) -> None:
    assert len(scene.programs) == 6  # interpreter, sleep, sh and its sleep, python, fork
    assert sorted(len(posture.threads(pid)) for pid in scene.programs)[-2:] == [2, 2]


def test_namespaces(scene: Scene) -> None:
    ours, zygote = posture.namespaces(os.getpid()), posture.namespaces(scene.zygote)
    inside = {pid: posture.namespaces(pid) for pid in scene.inside}
    assert all(seen == inside[scene.first] for seen in inside.values())
    assert set(inside[scene.first]) == {
        "cgroup", "ipc", "mnt", "net", "pid", "pid_for_children", "time", "time_for_children", "user", "uts",
    }  # fmt: skip
    for kind, name in inside[scene.first].items():
        if kind.startswith("time"):
            assert name == ours[kind]  # nothing is offset: a time namespace holds nothing
        else:
            assert name != ours[kind], kind
            # The zygote is in the network namespace that it handed out last, since it only enters them to clone.
            assert kind == "net" or name != zygote[kind], kind
    for kind in ("ipc", "mnt", "net", "pid", "user", "uts"):
        assert zygote[kind] != ours[kind], kind


def test_two_sandboxes_share_no_namespace(scene: Scene) -> None:
    others = [p for p in posture.children(scene.zygote) if p not in (scene.init, *scene.inside)]
    assert others
    mine = posture.namespaces(scene.first)
    for pid in others:
        theirs = posture.namespaces(pid)
        assert not [k for k in mine if not k.startswith("time") and theirs[k] == mine[k]]


def test_uid_and_gid(scene: Scene) -> None:
    root = os.geteuid() == 0
    outer = int(posture.fields(f"/proc/{scene.first}/status")["Uid"].split()[0])
    assert (outer != 0 and outer >= 0x70000000) if root else outer == os.geteuid()
    group = outer if root else os.getegid()
    for pid in scene.inside:
        assert Path(f"/proc/{pid}/uid_map").read_text().split() == ["1000", str(outer), "1"]
        assert Path(f"/proc/{pid}/gid_map").read_text().split() == ["1000", str(group), "1"]
        for thread in posture.threads(pid):
            assert thread["Uid"].split() == [str(outer)] * 4
            assert thread["Gid"].split() == [str(group)] * 4
            assert thread["Groups"] == ""
    if root:
        others = {
            posture.fields(f"/proc/{p}/status")["Uid"] for p in posture.children(scene.zygote) if p not in scene.inside
        }
        assert str(outer) not in " ".join(others).split()


def test_credentials_of_every_thread(scene: Scene) -> None:
    none = "0" * 16
    seen = 0
    for pid in scene.inside:
        for thread in posture.threads(pid):
            seen += 1
            for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
                assert thread[name] == none, (pid, name)
            assert thread["NoNewPrivs"] == "1"
            assert (thread["Seccomp"], thread["Seccomp_filters"]) == ("2", "2")
    assert seen == (8 if scene.single else 9)
    for thread in posture.threads(scene.zygote):
        assert (thread["NoNewPrivs"], thread["Seccomp"], thread["Seccomp_filters"]) == ("1", "2", "1")


def test_the_zygote_has_no_privilege_over_the_host(scene: Scene) -> None:
    outer = posture.fields(f"/proc/{scene.zygote}/status")["Uid"].split()
    assert "0" not in outer
    inside, outside, count = Path(f"/proc/{scene.zygote}/uid_map").read_text().split()
    assert (inside, outside) == ("0", outer[0]) and count == ("65536" if os.geteuid() == 0 else "1")
    assert posture.descriptors(scene.zygote).keys() >= {0, 1, 2, 3}
    assert {kind for fd, kind in posture.descriptors(scene.zygote).items() if fd > 3} <= {"anon_inode:", "net:", "pid:"}
    assert posture.descriptors(scene.zygote)[3] == "socket:"


def test_descriptors_of_every_process(scene: Scene) -> None:
    if not scene.single:
        init = posture.descriptors(scene.init)
        assert {fd: kind for fd, kind in init.items() if fd < 3} == dict.fromkeys(range(3), "/dev/null")
        # The stream, the work folder, the wake-up pipe, the private socket to the interpreter and its output pipes.
        assert sorted(kind for fd, kind in init.items() if fd >= 3) == ["/work", *["pipe:"] * 4, *["socket:"] * 2]
    standard = dict.fromkeys(range(3), "pipe:")
    interpreter, *rest = (posture.descriptors(pid) for pid in scene.programs)
    private = {} if scene.single else {3: "socket:"}  # which reaches the agent and nobody else
    assert interpreter == standard | private
    for pid, seen in zip(scene.programs[1:], rest, strict=True):
        forked = posture.command(pid) == posture.command(scene.programs[0])
        extra = private if forked else {}
        passed = {fd: kind for fd, kind in seen.items() if fd > 2 and fd not in extra}
        assert seen == standard | extra | passed
        assert set(passed.values()) <= {"pipe:"}, "only what the program itself passed on"


#: Of the namespaces around the zygote's: one more where root started it, see the launcher.
PROCS = 2 if os.geteuid() == 0 else 1


def expected_mounts(outer: int, group: int) -> list[Mount]:
    """Everything that a sandbox of LIMITS sees, in the order of the code that mounts it; options as sets."""
    read_only = "nosuid,nodev,relatime,ro"
    device = "noexec,nosuid,relatime,ro"
    scratch = "nodev,nosuid,relatime,rw"
    found = [("/", "tmpfs", read_only)]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32", "libexec", "share"):
        if Path("/usr", name).is_dir():
            found.append((f"/usr/{name}", "", read_only))
        if Path("/", name).is_dir() and not Path("/", name).is_symlink() and name != "share":
            found.append((f"/{name}", "", read_only))
    prefix = os.path.realpath(sys.base_prefix)
    if prefix != "/usr":
        found.append((prefix if prefix.startswith("/usr/") else "/opt/python", "", read_only))
    if Path("/etc/alternatives").is_dir():
        found.append(("/etc/alternatives", "", read_only))
    found += [(f"/dev/{name}", "", device) for name in ("null", "zero", "full", "random", "urandom")]
    found += [("/proc", "proc", "nodev,noexec,nosuid,relatime,rw")] * (PROCS + 1)
    found += [(point, "tmpfs", scratch) for point in ("/tmp", "/tmp", "/work", "/dev/shm")]
    return [Mount(point, kind, "", ",".join(sorted(options.split(","))), "") for point, kind, options in found]


def test_mounts(scene: Scene) -> None:
    status = posture.fields(f"/proc/{scene.first}/status")
    outer, group = (int(status[name].split()[0]) for name in ("Uid", "Gid"))
    seen = posture.mounts(scene.first)
    for pid in scene.programs:
        assert posture.mounts(pid) == seen
    plain = [
        Mount(m.point, m.kind if m.kind in ("tmpfs", "proc") and m.point in ("/", "/proc", "/tmp", "/work", "/dev/shm")
              else "", "", ",".join(sorted(m.options.split(","))), "")
        for m in seen
    ]  # fmt: skip
    assert sorted(plain) == sorted(expected_mounts(outer, group))
    scratch = [m for m in seen if m.point in ("/tmp", "/work", "/dev/shm")]
    assert {m.super_options for m in scratch} == {
        f"rw,size={LIMITS.disk_bytes // 1024}k,nr_inodes={LIMITS.files + 4},mode=755,uid={outer},gid={group}"
    }
    assert [(m.point, m.root) for m in scratch] == [
        ("/tmp", "/"), ("/work", "/work"), ("/dev/shm", "/shm"), ("/tmp", "/tmp"),
    ]  # fmt: skip
    assert [m.super_options for m in seen if m.point == "/proc"] == ["rw"] * PROCS + ["rw,hidepid=invisible,subset=pid"]
    assert [m.point for m in seen if "rw" in m.options.split(",")] == [
        *["/proc"] * PROCS, "/tmp", "/work", "/dev/shm", "/tmp", "/proc",
    ]  # fmt: skip


EVERY_LIMIT = {
    "cpu time", "file size", "data size", "stack size", "core file size", "resident set", "processes", "open files",
    "locked memory", "address space", "file locks", "pending signals", "msgqueue size", "nice priority",
    "realtime priority", "realtime timeout",
}  # fmt: skip


def test_rlimits(scene: Scene) -> None:
    ours = posture.limits(os.getpid())
    memory = scene.receipt["memory"]
    data = str(LIMITS.memory_bytes) if memory.held is not Held.HARD else ours["data size"][0]  # type: ignore[attr-defined]
    expected = {
        "cpu time": ("41", "41"),
        "file size": (str(LIMITS.disk_bytes),) * 2,
        "data size": (data, data),
        "core file size": ("0", "0"),
        "processes": (str(LIMITS.pids + beside(scene, by_uid=True)),) * 2,
        "open files": ("100", "100"),
        "locked memory": ("0", "0"),
        "msgqueue size": ("0", "0"),
        "nice priority": ("0", "0"),
        "realtime priority": ("0", "0"),
        "pending signals": ("1024", "1024"),
        # Left as they are, since other limits hold what they would: memory and CPU time.
        **{
            name: ours[name]
            for name in ("stack size", "resident set", "address space", "file locks", "realtime timeout")
        },
    }
    assert set(expected) == EVERY_LIMIT == set(ours)
    for pid in scene.inside:
        assert posture.limits(pid) == expected


def beside(scene: Scene, *, by_uid: bool) -> int:
    """Processes of ours that a limit counts with the program's: the agent, or an idle PID 1 of the same user."""
    return int(not scene.single or (by_uid and os.geteuid() != 0))


def test_an_idle_first_process(scene: Scene) -> None:
    """It waits in pause(2) for ever, hears no signal, and belongs to the zygote, whose memory it shares."""
    if not scene.single:
        pytest.skip("PID 1 is the agent here")
    status, zygote = (posture.fields(f"/proc/{pid}/status") for pid in (scene.init, scene.zygote))
    assert status["Threads"] == "1" and status["State"].startswith("S")
    number = Path(f"/proc/{scene.init}/syscall").read_text().split()[0]
    assert number == {"x86_64": "34", "aarch64": "73"}[os.uname().machine]  # pause; on aarch64 the library's ppoll
    unblockable = 1 << (signal.SIGKILL - 1) | 1 << (signal.SIGSTOP - 1)
    every = (1 << 64) - 1 & ~(1 << 31 | 1 << 32)  # the C library keeps two for itself
    assert int(status["SigBlk"], 16) | unblockable | 1 << 31 | 1 << 32 == every | 1 << 31 | 1 << 32
    assert int(status["SigIgn"], 16) & 1 << (signal.SIGCHLD - 1), "the kernel reaps its orphans"
    assert int(status["SigCgt"], 16) == 0, "no handler could run in it"
    # Where Landlock scopes no signals, an ordinary user's sandbox may send it some: none is kept in a queue.
    assert posture.limits(scene.init)["pending signals"][0] == "0"
    assert status["Uid"] == zygote["Uid"] and status["Gid"] == zygote["Gid"]
    assert (status["NoNewPrivs"], status["Seccomp"], status["Seccomp_filters"]) == ("1", "2", "1")
    assert status["VmSize"] == zygote["VmSize"]
    mine, programs = posture.namespaces(scene.init), posture.namespaces(scene.first)
    assert {kind for kind in mine if mine[kind] != programs[kind]} <= {"cgroup"}
    # Not dumpable: its entries belong to the root of the zygote's user namespace, and so not to the sandbox's id.
    root = Path(f"/proc/{scene.zygote}/uid_map").read_text().split()[1]
    assert os.stat(f"/proc/{scene.init}/fd").st_uid == int(root)


def test_cgroup(scene: Scene) -> None:
    membership = {pid: Path(f"/proc/{pid}/cgroup").read_text() for pid in scene.inside}
    assert len(set(membership.values())) == 1
    groups = dict(line.split(":", 2)[1:] for line in membership[scene.first].splitlines())
    ours = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    moved = {name: path for name, path in groups.items() if path != ours[name]}
    if not scene.cgroups:
        assert moved == {}
        return
    controllers = {c for name in moved for c in name.split(",")} if "" not in moved else {"memory", "pids", "cpu"}
    assert controllers >= {"memory", "pids", "cpu"}
    for path in moved.values():
        assert re.search(rf"/fumehood/{os.getpid()}-\d+-\d+-\d+/s\d+$", path)
    if "" in moved:
        pytest.skip("cgroup v2: its values are in the receipt, read back")
    values = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        point, kind, options = line.split()[4], *line.partition(" - ")[2].split()[::2]
        if kind == "cgroup":
            for name, path in moved.items():
                if name in options.split(","):
                    folder = Path(point + path)
                    values |= {f.name: f.read_text().strip() for f in folder.iterdir() if f.name in WANTED}
                    assert sorted(map(int, (folder / "cgroup.procs").read_text().split())) == sorted(scene.inside)
    assert values == {
        "memory.limit_in_bytes": str(LIMITS.memory_bytes),
        "memory.memsw.limit_in_bytes": str(LIMITS.memory_bytes),
        "pids.max": str(LIMITS.pids + beside(scene, by_uid=False)),
        "cpu.cfs_quota_us": "50000",
        "cpu.cfs_period_us": "100000",
    }


WANTED = (
    "memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "pids.max", "cpu.cfs_quota_us", "cpu.cfs_period_us",
)  # fmt: skip


def test_proc_entries_belong_to_whom_they_should(scene: Scene) -> None:
    """A process that is not dumpable belongs to the root of its user namespace's parent, or nobody (proc(5))."""
    outer = int(posture.fields(f"/proc/{scene.first}/status")["Uid"].split()[0])
    for pid in scene.programs:
        assert os.stat(f"/proc/{pid}/fd").st_uid == outer
    if os.geteuid() == 0:
        assert os.stat(f"/proc/{scene.init}/fd").st_uid != outer


def test_environment_and_arguments_hold_nothing_of_the_host(scene: Scene) -> None:
    for pid in (scene.zygote, scene.init):
        block = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        assert {item.partition(b"=")[0] for item in block} <= {b"PATH", b"LANG", b"LD_LIBRARY_PATH", b""}
        assert not any("/home" in word or "/root" in word for word in posture.command(pid))


def test_the_receipt_says_what_is_so(scene: Scene) -> None:
    held = {name: control.held for name, control in scene.receipt.items()}  # type: ignore[attr-defined]
    assert [name for name, how in held.items() if how is Held.OFF] == []
    best_effort = {name for name, how in held.items() if how is Held.BEST_EFFORT}
    assert best_effort == (set() if scene.cgroups else {"memory", "pids", "cpu", "cpu_time"})


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user has no cgroup v1 here")
def test_a_sandbox_outside_of_its_cgroup_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cgroup, "entries", lambda self: [])
    monkeypatch.setattr(Cgroup, "add", lambda self, pid: None)
    with Runner(tier=JailTier()) as runner, pytest.raises(StartError, match="not in its cgroup"):
        runner.run("print(1)")


def test_without_cgroups_a_hard_limit_is_refused_before_anything_starts() -> None:
    need_tier("jail")
    tier = JailTier(cgroups=False)
    before = posture.children(os.getpid())
    for name in ("memory", "pids", "cpu"):
        with pytest.raises(UnsupportedError) as caught:
            Runner(tier=tier, policy=Policy(hard=(name,)))
        assert caught.value.unmet == (f"a hard limit on {name}",)
    assert tier._zygotes == {} and posture.children(os.getpid()) == before


AS_USER = ("posture", "single", "ahead", "lifeline", "zygote", "hosts", "census")


@pytest.mark.skipif(os.geteuid() != 0, reason="is that run itself")
def test_all_of_this_as_an_ordinary_user() -> None:
    """So that one run of the tests as root covers both."""
    here = Path(__file__).parent
    done = subprocess.run(
        ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", sys.executable, "-m", "pytest", "-q",
         "-p", "no:cacheprovider", "-p", "no:xdist", *(f"{here}/test_jail_{name}.py" for name in AS_USER)],
        cwd=here.parent.parent,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
             "HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1", "FUMEHOOD_REQUIRE_TIERS": "jail"},
        capture_output=True,
        text=True,
        timeout=600,
    )  # fmt: skip
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-5000:] + done.stderr[-2000:]
