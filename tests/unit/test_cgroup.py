"""Control groups: the kernel's own v1 trees where they are writable, and a v2 tree that behaves like the kernel's."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from fumehood.linux import cgroup, process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")

MiB = 1 << 20
SOURCE = Path(cgroup.__file__).parents[2]


# --- the kernel's v1 trees ---------------------------------------------------------------------------------------


@pytest.fixture
def tree() -> Iterator[cgroup.Hierarchy]:
    found = cgroup.find()
    if found.version != 1:
        pytest.skip(f"no writable cgroup v1 here: {found.reason or 'v2 is used'}")
    with found.open() as hierarchy:
        folders = [branch.folder for branch in hierarchy._branches]
        assert all(os.path.isdir(folder) for folder in folders)
        yield hierarchy
    assert not any(os.path.exists(folder) for folder in folders), "groups are left behind"


@contextlib.contextmanager
def program(code: str, pass_fds: Sequence[int] = ()) -> Iterator[subprocess.Popen[bytes]]:
    """A child that waits for a line on its standard input, so that it can be put into a group before it acts."""
    argv = [sys.executable, "-I", "-S", "-c", f"import os, sys, time\nsys.stdin.readline()\n{code}"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=pass_fds) as child:
        try:
            yield child
        finally:
            child.kill()


def limited(tree: cgroup.Hierarchy, **other: Any) -> cgroup.Cgroup:
    values: dict[str, Any] = {"memory_bytes": 64 * MiB, "pids": 16, "cpus": 1.0}
    return tree.create("box", **(values | other))


def test_v1_limits_are_read_back_from_the_kernel(tree: cgroup.Hierarchy) -> None:
    group = limited(tree, memory_bytes=48 * MiB + 1, pids=7, cpus=0.25)
    values = group.read_back()
    assert values["memory_bytes"] == 48 * MiB  # whole pages
    assert values["pids"] == 7
    assert values["cpus"] == 0.25
    assert values.get("swap_bytes", 0) == 0
    assert group.fd() is None
    assert group.remove() and group.remove()


def test_v1_a_name_is_used_once_and_stays_in_the_folder(tree: cgroup.Hierarchy) -> None:
    group = limited(tree)
    with pytest.raises(FileExistsError):
        limited(tree)
    assert group.read_back()["pids"] == 16  # the failed attempt took nothing away
    for bad in ("", ".", "..", "a/b"):
        with pytest.raises(ValueError):
            tree.create(bad, memory_bytes=MiB, pids=1, cpus=1)


def test_v1_a_limit_that_the_kernel_refuses_leaves_no_group(tree: cgroup.Hierarchy) -> None:
    with pytest.raises(OSError, match=r"pids\.max"):
        limited(tree, pids=-1)
    assert limited(tree).remove()


def test_v1_beyond_the_memory_limit_a_process_is_killed_and_counted(tree: cgroup.Hierarchy) -> None:
    group = limited(tree, memory_bytes=32 * MiB)
    with program("data = bytearray(200 << 20)\nprint('survived')") as child:
        group.add(child.pid)
        assert group.populated() and group.oom_kills() == 0
        out, _ = child.communicate(b"\n", timeout=60)
    assert child.returncode == -signal.SIGKILL and out == b""
    assert group.oom_kills() == 1
    peak = group.memory_peak_bytes()
    assert peak is not None and 16 * MiB < peak <= 32 * MiB
    assert not group.populated() and group.remove()


def test_v1_a_process_moves_itself_in_and_that_can_be_seen(tree: cgroup.Hierarchy) -> None:
    group = limited(tree)
    entries = group.entries()
    code = f"for fd in {entries}: os.write(fd, {cgroup.ENTER!r})\nprint('in', flush=True)\ntime.sleep(600)"
    with program(code, pass_fds=entries) as child:
        for fd in entries:
            os.close(fd)
        assert child.stdin and child.stdout
        assert not group.holds(child.pid)
        child.stdin.write(b"\n")
        child.stdin.flush()
        assert child.stdout.readline() == b"in\n"
        assert group.holds(child.pid) and group.populated()
        assert group.kill(within_s=30) and group.remove(within_s=30)
    with pytest.raises((ProcessLookupError, FileNotFoundError)):
        group.holds(child.pid)


def test_v1_files_that_are_kept_open_say_the_same_and_are_closed_with_the_group(
    tree: cgroup.Hierarchy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mine() -> int:
        return sum(group.name in os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if exists(fd))

    def exists(fd: str) -> bool:
        return os.path.lexists(f"/proc/self/fd/{fd}")

    group = limited(tree)
    with program("x = bytearray(8 << 20)\nfor i in range(200_000): pass") as child:
        group.add(child.pid)
        monkeypatch.setattr(cgroup.resource, "getrlimit", lambda _: (0, 0))
        group.keep_open()
        assert mine() == 0  # not from the upper half of the table
        monkeypatch.undo()
        group.keep_open()
        group.keep_open()
        assert mine() == 4
        before = group.cpu_s()
        assert group.tasks() == 1
        child.communicate(b"\n", timeout=60)
    with_paths = cgroup.Cgroup(tree, group.name)
    assert group.tasks() == with_paths.tasks() == 0
    assert group.cpu_s() == with_paths.cpu_s() and (before or 0) < (group.cpu_s() or 0)
    assert group.memory_peak_bytes() == with_paths.memory_peak_bytes() and (group.memory_peak_bytes() or 0) > 8 * MiB
    assert group.remove(within_s=30) and mine() == 0
    with pytest.raises(FileNotFoundError):
        group.cpu_s()


def test_v1_a_fork_beyond_the_pids_limit_fails_and_is_counted(tree: cgroup.Hierarchy) -> None:
    group = limited(tree, pids=4)
    code = """
for n in range(10):
    try:
        pid = os.fork()
    except BlockingIOError:
        print("denied after", n, flush=True)
        break
    if pid == 0:
        time.sleep(600)
time.sleep(600)
"""
    with program(code) as child:
        group.add(child.pid)
        assert child.stdin and child.stdout
        child.stdin.write(b"\n")
        child.stdin.flush()
        assert child.stdout.readline() == b"denied after 3\n"
        assert group.pids_denied() == 1
        assert group.kill(within_s=30)
        assert not group.populated() and group.remove(within_s=30)


def test_v1_a_group_that_is_to_die_is_signalled_as_a_whole_and_may_use_any_processor(tree: cgroup.Hierarchy) -> None:
    group = limited(tree, cpus=0.1)
    with program("os.fork(), os.fork(), print('on', flush=True)\nwhile True: pass") as child:
        group.add(child.pid)
        assert child.stdin and child.stdout
        child.stdin.write(b"\n")
        child.stdin.flush()
        assert [child.stdout.readline() for _ in range(4)] == [b"on\n"] * 4
        group.hasten()
        assert group.read_back()["cpus"] is None and group.read_back()["pids"] == 0
        assert child.wait(timeout=60) == -signal.SIGKILL
        assert child.stdout.read() == b""  # the last of the four is dead
    assert group.remove(within_s=30)
    group.hasten()  # gone: nothing to do


def test_v1_a_group_of_one_is_left_to_its_own_death(tree: cgroup.Hierarchy) -> None:
    group = limited(tree, cpus=0.1)
    with program("time.sleep(600)") as child:
        group.add(child.pid)
        group.hasten()
        assert child.poll() is None and group.read_back()["pids"] == 16


def test_v1_the_processor_is_rationed_and_counted(tree: cgroup.Hierarchy) -> None:
    group = limited(tree, cpus=0.2)
    with program("while time.process_time() < 0.3: pass") as child:
        group.add(child.pid)
        began = time.monotonic()
        child.communicate(b"\n", timeout=60)
        took_s = time.monotonic() - began
    used_s = group.cpu_s()
    if used_s is None:
        pytest.skip("no cpuacct controller")
    # A fifth of each 0.1 s: what it used before it was put in counts for process_time() only.
    assert 0.15 < used_s < 1
    assert took_s > used_s * 3
    assert group.remove()


def test_v1_kill_overtakes_a_fork_bomb(tree: cgroup.Hierarchy) -> None:
    group = limited(tree, pids=12)
    code = """
while True:
    try:
        os.fork()
        os.write(1, b"x")
    except OSError:
        pass
"""
    with program(code) as child:
        group.add(child.pid)
        assert child.stdin and child.stdout
        child.stdin.write(b"\n")
        child.stdin.flush()
        child.stdout.read(8)
        assert group.kill(within_s=30)
        assert group.remove(within_s=30)
    assert group.kill()  # of a removed group there is nothing to kill


def test_v1_a_group_with_a_process_is_not_removed(tree: cgroup.Hierarchy) -> None:
    group = limited(tree)
    with program("") as child:
        group.add(child.pid)
        assert not group.remove(within_s=0.01)
        assert group.kill(within_s=30)
    assert group.remove(within_s=30)
    with pytest.raises(FileNotFoundError):
        group.read_back()


def test_v1_adding_a_process_that_is_gone_is_an_error(tree: cgroup.Hierarchy) -> None:
    group = limited(tree)
    with program("") as child:
        child.communicate(b"\n")
    with pytest.raises(ProcessLookupError):
        group.add(child.pid)


def test_v1_what_a_killed_supervisor_left_is_swept_and_what_lives_is_not(tree: cgroup.Hierarchy) -> None:
    mine = limited(tree)
    code = f"""
import subprocess, sys
sys.path.insert(0, {str(SOURCE)!r})
from fumehood.linux import cgroup
tree = cgroup.find().open()
child = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL)
tree.create("left", memory_bytes=64 << 20, pids=4, cpus=1).add(child.pid)
print(tree.owner, child.pid, flush=True)
sys.stdin.read()
"""
    argv = [sys.executable, "-I", "-S", "-c", code]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout
        owner, orphan = supervisor.stdout.readline().decode().split()
        start = process.start_time(int(orphan))
        folders = [os.path.join(os.path.dirname(branch.folder), owner) for branch in tree._branches]
        tree.sweep()
        assert all(map(os.path.isdir, folders)), "a living supervisor was swept"
        supervisor.kill()
    tree.sweep()
    assert not any(map(os.path.exists, folders))
    assert not process.alive(int(orphan), start)
    assert mine.read_back()["pids"] == 16


def test_v1_close_kills_what_still_runs(tree: cgroup.Hierarchy) -> None:
    with program("") as child:
        with cgroup.find().open() as other:
            limited(other).add(child.pid)
        assert child.wait(timeout=30) == -signal.SIGKILL
    other.close()


# --- finding, anywhere -------------------------------------------------------------------------------------------


def test_an_ordinary_user_learns_why_and_what_to_do(tmp_path: Path) -> None:
    mountinfo, membership = tmp_path / "mountinfo", tmp_path / "cgroup"
    for controller in ("memory", "pids"):
        (tmp_path / controller).write_text("a file, so that no group can be made below it")
    mountinfo.write_text(
        f"30 25 0:26 / {tmp_path}/memory rw - cgroup cgroup rw,memory\n"
        f"31 25 0:27 / {tmp_path}/pids rw - cgroup cgroup rw,pids\n"
    )
    membership.write_text("2:memory:/\n1:pids:/\n")
    found = cgroup.find(mountinfo=str(mountinfo), membership=str(membership))
    assert found.version == 0 and found.hard == ()
    assert "cgroup v2: not mounted" in found.reason and f"{tmp_path}/memory (Not a directory)" in found.reason
    assert found.remedy
    with pytest.raises(OSError) as caught:
        found.open()
    assert caught.value.errno == errno.EOPNOTSUPP


def test_a_host_without_proc_is_no_exception() -> None:
    found = cgroup.find(mountinfo="/nonexistent/mountinfo")
    assert found.version == 0 and "cannot be listed" in found.reason and found.remedy


def test_v1_trees_may_be_shared_and_seen_from_inside_a_container(tmp_path: Path) -> None:
    """Docker on v1: the mount's root is the container's group, and the file tree starts there."""
    (tmp_path / "cpu,cpuacct").mkdir()
    mountinfo, membership = tmp_path / "mountinfo", tmp_path / "cgroup"
    mountinfo.write_text(f"30 25 0:26 /docker/1 {tmp_path}/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n")
    membership.write_text("3:cpu,cpuacct:/docker/1\n0::/\n")
    mounts = process.parse_mountinfo(mountinfo.read_bytes())
    own = cgroup._membership(membership.read_bytes())
    assert own == {"cpu": "/docker/1", "cpuacct": "/docker/1", "": "/"}
    assert cgroup._below(mounts[0], "/docker/1") == f"{tmp_path}/cpu,cpuacct"
    assert cgroup._below(mounts[0], "/docker/1/job") == f"{tmp_path}/cpu,cpuacct/job"
    assert cgroup._below(mounts[0], "/docker/11") is None
    assert cgroup._below(mounts[0], "/docker/1/../2") is None
    # These folders are no control groups: they have no quota file, so cpu is not held.
    assert cgroup.find(mountinfo=str(mountinfo), membership=str(membership)).hard == ()


@pytest.mark.parametrize(
    ("owner", "gone"),
    [
        ("{pid}-{start}-{ns}-0", False),
        ("{pid}-{other}-{ns}-3", True),  # the pid was used again
        ("{pid}-{other}-1-3", False),  # another PID namespace: nobody here can tell
        ("{pid}-{other}-{ns}", False),
        ("notes", False),
        ("a-b-c-d", False),
    ],
)
def test_only_a_dead_owner_of_this_pid_namespace_is_gone(owner: str, gone: bool) -> None:
    pid = os.getpid()
    start = process.start_time(pid)
    name = owner.format(pid=pid, start=start, other=start + 1, ns=os.stat("/proc/self/ns/pid").st_ino)
    assert cgroup._owner_is_gone(name) is gone


def test_fields_and_limits_are_parsed() -> None:
    assert cgroup._field(b"low 0\nhigh 3\nmax 9\noom 2\noom_kill 1\n", b"oom_kill") == 1
    assert cgroup._field(b"oom_kill_disable 0\nunder_oom 0\n", b"oom_kill") == 0
    assert cgroup._number(b"max\n") is None and cgroup._number(b"4096\n") == 4096
    assert cgroup._number_v1(b"9223372036854771712\n") is None and cgroup._number_v1(b"4096\n") == 4096
    assert [cgroup._quota_us(c) for c in (0.001, 0.29, 1, 2.5)] == [1000, 29000, 100_000, 250_000]


# --- a v2 tree that behaves like the kernel's ----------------------------------------------------------------------

FILES = {
    "memory": {
        "memory.max": "max\n",
        "memory.swap.max": "max\n",
        "memory.peak": "1234567\n",
        "memory.events": "low 0\nhigh 0\nmax 5\noom 2\noom_kill 2\noom_group_kill 0\n",
    },
    "pids": {"pids.max": "max\n", "pids.events": "max 3\n"},
    "cpu": {"cpu.max": "max 100000\n"},
}


class FakeKernel:
    """Stands in for ``os`` inside the module: the rules of a cgroup2 mount over ordinary files below ``root``."""

    def __init__(self, root: Path, controllers: str = "cpu memory pids", uid: int = 0) -> None:
        self.root = root
        self.uid = uid
        self.marks: set[str] = set()
        self.stubborn: set[int] = set()  # pids that the kernel does not let move
        self.has_kill = True
        root.mkdir()
        self._fill(root, controllers.split(), top=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def geteuid(self) -> int:
        return self.uid

    def getxattr(self, path: str, attribute: str) -> bytes:
        if path in self.marks and attribute == "trusted.delegate":
            return b"1"
        raise OSError(errno.ENODATA, os.strerror(errno.ENODATA))

    def mkdir(self, path: str, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        os.mkdir(path, mode, dir_fd=dir_fd)
        folder = self._resolve(path, dir_fd)
        self._fill(folder, self.lines(folder.parent / "cgroup.subtree_control"), top=False)

    def rmdir(self, path: str, *, dir_fd: int | None = None) -> None:
        folder = self._resolve(path, dir_fd)
        if not folder.exists():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if self.lines(folder / "cgroup.procs") or any(entry.is_dir() for entry in folder.iterdir()):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)
        shutil.rmtree(folder)

    def write(self, fd: int, data: bytes) -> int:
        file = Path(os.readlink(f"/proc/self/fd/{fd}"))
        text = data.decode()
        if file.name == "cgroup.procs":
            self._move(int(text), file.parent)
        elif file.name == "cgroup.subtree_control":
            self._enable(file.parent, text.split())
        elif file.name == "cgroup.kill":
            self._set_procs(file.parent, [])
        else:
            file.write_text(text)
        return len(data)

    @staticmethod
    def lines(file: Path) -> list[str]:
        return file.read_text().split()

    def group(self, path: str, *pids: int, enable: str = "") -> Path:
        """Make a group as a service manager would, with processes in it."""
        folder = self.root / path
        self.mkdir(str(folder))
        self._set_procs(folder, [str(pid) for pid in pids])
        (folder / "cgroup.subtree_control").write_text(enable)
        return folder

    def _resolve(self, path: str, dir_fd: int | None) -> Path:
        return Path(path) if dir_fd is None else Path(os.readlink(f"/proc/self/fd/{dir_fd}")) / path

    def _fill(self, folder: Path, controllers: list[str], *, top: bool) -> None:
        files = {"cgroup.procs": "", "cgroup.controllers": " ".join(controllers), "cgroup.subtree_control": ""}
        files["cpu.stat"] = "usage_usec 2500000\nuser_usec 2000000\nsystem_usec 500000\n"
        if not top:
            files |= {"cgroup.type": "domain\n", "cgroup.events": "populated 0\nfrozen 0\n"}
            if self.has_kill:
                files["cgroup.kill"] = ""
            for controller in controllers:
                files |= FILES[controller]
        for name, text in files.items():
            (folder / name).write_text(text)

    def _set_procs(self, folder: Path, pids: list[str]) -> None:
        (folder / "cgroup.procs").write_text("\n".join(pids))
        if (folder / "cgroup.events").exists():
            (folder / "cgroup.events").write_text(f"populated {int(bool(pids))}\nfrozen 0\n")

    def _move(self, pid: int, to: Path) -> None:
        if pid in self.stubborn:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        for procs in self.root.rglob("cgroup.procs"):
            if str(pid) in self.lines(procs):
                self._set_procs(procs.parent, [p for p in self.lines(procs) if p != str(pid)])
        self._set_procs(to, [*self.lines(to / "cgroup.procs"), str(pid)])

    def _enable(self, folder: Path, wanted: list[str]) -> None:
        names = [name.removeprefix("+") for name in wanted]
        if not set(names) <= set(self.lines(folder / "cgroup.controllers")):
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        if folder != self.root and self.lines(folder / "cgroup.procs"):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))  # no internal processes
        now = sorted({*self.lines(folder / "cgroup.subtree_control"), *names})
        (folder / "cgroup.subtree_control").write_text(" ".join(now))
        for child in folder.iterdir():
            if child.is_dir():
                (child / "cgroup.controllers").write_text(" ".join(now))
                for name in names:
                    for file, text in FILES[name].items():
                        (child / file).write_text(text)


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    fake = FakeKernel(tmp_path / "cgroup")
    fake._enable(fake.root, ["+memory", "+pids", "+cpu"])
    monkeypatch.setattr(cgroup, "os", fake)
    monkeypatch.setattr(cgroup, "_owner_uid", lambda path: fake.uid)
    return fake


def look(kernel: FakeKernel, own: str, *, root: str = "/") -> cgroup.Found:
    mountinfo, membership = kernel.root.parent / "mountinfo", kernel.root.parent / "membership"
    mountinfo.write_text(f"30 25 0:26 {root} {kernel.root} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n")
    membership.write_text(f"0::{own}\n")
    return cgroup.find(mountinfo=str(mountinfo), membership=str(membership))


def test_v2_looking_changes_nothing(kernel: FakeKernel) -> None:
    kernel.uid = 1000
    scope = kernel.group("run.scope", 41, 42)
    before = sorted(map(str, kernel.root.rglob("*")))
    found = look(kernel, "/run.scope")
    assert (found.version, found.hard) == (2, ("memory", "pids", "cpu"))
    assert found.places == (cgroup.Place(str(scope), str(kernel.root), ("memory", "pids", "cpu")),)
    assert sorted(map(str, kernel.root.rglob("*"))) == before
    assert kernel.lines(scope / "cgroup.procs") == ["41", "42"]


def test_v2_processes_of_a_delegated_group_move_into_a_leaf(kernel: FakeKernel) -> None:
    kernel.uid = 1000
    scope = kernel.group("run.scope", 41, 42)
    with look(kernel, "/run.scope").open() as tree:
        assert kernel.lines(scope / cgroup.LEAF / "cgroup.procs") == ["41", "42"]
        assert kernel.lines(scope / "cgroup.subtree_control") == ["cpu", "memory", "pids"]
        assert (scope / cgroup.FOLDER / tree.owner / "memory.max").exists()
        # Found again from the leaf, by this supervisor's child or another runner: nothing more moves.
        again = look(kernel, f"/run.scope/{cgroup.LEAF}")
        assert again.places[0].path == str(scope)
        with again.open() as second:
            assert second.owner != tree.owner
        assert (scope / cgroup.FOLDER / tree.owner).exists()
    assert not (scope / cgroup.FOLDER).exists()
    assert kernel.lines(scope / cgroup.LEAF / "cgroup.procs") == ["41", "42"]


def test_v2_a_process_that_will_not_move_undoes_all(kernel: FakeKernel) -> None:
    kernel.uid = 1000
    scope = kernel.group("run.scope", 41, 42)
    kernel.stubborn = {42}
    with pytest.raises(PermissionError):
        look(kernel, "/run.scope").open()
    assert sorted(kernel.lines(scope / "cgroup.procs")) == ["41", "42"]
    assert not (scope / cgroup.LEAF).exists() and not (scope / cgroup.FOLDER).exists()


def test_v2_processes_of_another_pid_namespace_are_left_alone(kernel: FakeKernel) -> None:
    kernel.uid = 1000
    scope = kernel.group("run.scope", 0, 42)
    with pytest.raises(OSError, match="another PID namespace"):
        look(kernel, "/run.scope").open()
    assert kernel.lines(scope / "cgroup.procs") == ["0", "42"]


@pytest.mark.parametrize("marked", [False, True])
def test_v2_root_moves_processes_only_where_that_is_its_own_to_do(kernel: FakeKernel, marked: bool) -> None:
    """In a session or service without Delegate=yes root leaves the group alone and uses the top of the tree."""
    service = kernel.group("web.service", 41)
    if marked:
        kernel.marks.add(str(service))
    base = service if marked else kernel.root
    with look(kernel, "/web.service").open() as tree:
        assert (base / cgroup.FOLDER / tree.owner).is_dir()
        assert kernel.lines(service / "cgroup.procs") == ([] if marked else ["41"])


def test_v2_root_in_a_container_owns_what_its_cgroup_namespace_shows(kernel: FakeKernel) -> None:
    (kernel.root / "cgroup.type").write_text("domain\n")  # the mount's root is not the top of the tree
    (kernel.root / "cgroup.subtree_control").write_text("")
    kernel._set_procs(kernel.root, ["1", "7"])
    with look(kernel, "/").open():
        assert kernel.lines(kernel.root / cgroup.LEAF / "cgroup.procs") == ["1", "7"]
    # Without a namespace of its own, the container's group is not all there is to see: not ours.
    (kernel.root / cgroup.LEAF).rename(kernel.root / "job")
    assert "not delegated" in look(kernel, "/job").reason


def test_v2_an_ordinary_user_is_told_how_to_get_a_group(kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel.group("session.scope", 41)
    kernel.uid = 1000
    monkeypatch.setattr(cgroup, "_owner_uid", lambda path: 0)
    found = look(kernel, "/session.scope")
    assert found.version == 0 and "not delegated" in found.reason
    assert "systemd-run --user --scope -p Delegate=yes" in found.remedy


def test_v2_a_read_only_tree_is_named(kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **more: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(kernel, "mkdir", refuse)
    found = look(kernel, "/")
    assert found.version == 0 and "Read-only file system" in found.reason and "writable /sys/fs/cgroup" in found.remedy


def test_v2_controllers_that_were_not_delegated_are_not_promised(kernel: FakeKernel) -> None:
    kernel.uid = 1000
    (kernel.group("user.scope") / "cgroup.controllers").write_text("memory pids")
    assert look(kernel, "/user.scope").hard == ("memory", "pids")
    with look(kernel, "/user.scope").open() as tree:
        group = tree.create("box", memory_bytes=64 * MiB, pids=5, cpus=1)
        assert group.hard == ("memory", "pids") and "cpus" not in group.read_back()
    (kernel.root / "user.scope" / "cgroup.controllers").write_text("hugetlb")
    found = look(kernel, "/user.scope")
    assert found.version == 0 and "hugetlb" in found.reason


@pytest.mark.parametrize("has_swap", [False, True])
def test_v2_memory_is_not_hard_where_swap_is_not_held(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch, has_swap: bool
) -> None:
    monkeypatch.setattr(cgroup, "_has_swap", lambda: has_swap)
    monkeypatch.setitem(FILES, "memory", {k: v for k, v in FILES["memory"].items() if k != "memory.swap.max"})
    with look(kernel, "/").open() as tree:
        assert ("memory" in tree.hard) is not has_swap
        assert "swap_bytes" not in tree.create("box", memory_bytes=MiB, pids=1, cpus=1).read_back()


def test_v2_limits_are_written_and_read_back(kernel: FakeKernel) -> None:
    with look(kernel, "/").open() as tree:
        group = tree.create("box", memory_bytes=64 * MiB, pids=5, cpus=0.5)
        folder = kernel.root / cgroup.FOLDER / tree.owner / "box"
        expected = {"memory.max": "67108864", "memory.swap.max": "0", "pids.max": "5", "cpu.max": "50000 100000"}
        assert {name: (folder / name).read_text().strip() for name in expected} == expected
        assert group.read_back() == {"memory_bytes": 64 * MiB, "swap_bytes": 0, "pids": 5, "cpus": 0.5}
        (folder / "cpu.max").write_text("max 100000\n")
        (folder / "memory.max").write_text("max\n")
        assert group.read_back() | {"cpus": None, "memory_bytes": None} == group.read_back()


def test_v2_usage_is_parsed(kernel: FakeKernel) -> None:
    with look(kernel, "/").open() as tree:
        group = tree.create("box", memory_bytes=64 * MiB, pids=5, cpus=0.5)
        assert group.cpu_s() == 2.5
        assert group.memory_peak_bytes() == 1234567
        assert group.oom_kills() == 2
        assert group.pids_denied() == 3


def test_v2_before_5_19_there_is_no_peak(kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FILES, "memory", {k: v for k, v in FILES["memory"].items() if k != "memory.peak"})
    with look(kernel, "/").open() as tree:
        assert tree.create("box", memory_bytes=MiB, pids=5, cpus=1).memory_peak_bytes() is None


def test_v2_a_group_is_filled_killed_and_removed(kernel: FakeKernel) -> None:
    with look(kernel, "/").open() as tree:
        group = tree.create("box", memory_bytes=64 * MiB, pids=5, cpus=0.5)
        group.add(77)
        assert group.populated() and not group.remove(within_s=0)
        fd = group.fd()
        assert fd is not None and fd == group.fd() and not os.get_inheritable(fd)
        assert os.readlink(f"/proc/self/fd/{fd}").endswith("/box")
        assert group.kill() and not group.populated()
        assert group.remove() and group.remove()
        with pytest.raises(OSError):
            os.fstat(fd)


def test_v2_before_5_14_processes_are_signalled_one_by_one(kernel: FakeKernel) -> None:
    kernel.has_kill = False
    with look(kernel, "/").open() as tree, program("") as child:
        group = tree.create("box", memory_bytes=64 * MiB, pids=5, cpus=0.5)
        group.add(child.pid)
        assert not group.kill(within_s=0)  # these files do not learn that the process ended
        assert child.wait(timeout=30) == -signal.SIGKILL
        assert group.read_back()["pids"] == 0
        kernel._set_procs(kernel.root / cgroup.FOLDER / tree.owner / "box", [])
        assert group.kill()


def test_v2_a_limit_that_is_refused_leaves_no_group(kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    with look(kernel, "/").open() as tree:
        write: Callable[[int, bytes], int] = kernel.write

        def refuse(fd: int, data: bytes) -> int:
            if os.readlink(f"/proc/self/fd/{fd}").endswith("cpu.max"):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return write(fd, data)

        monkeypatch.setattr(kernel, "write", refuse)
        with pytest.raises(OSError, match=r"cpu\.max"):
            tree.create("box", memory_bytes=64 * MiB, pids=5, cpus=0.5)
        assert not (kernel.root / cgroup.FOLDER / tree.owner / "box").exists()
