"""What of tier microvm needs no machine: what comes from a guest, what is kept on disk, what is asked of QEMU."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import fcntl
import io
import json
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fumehood.errors import PolicyError, StartError
from fumehood.model import Boundary, GiB, KiB, Limits, MiB, Policy, Receipt
from fumehood.tiers.microvm import accelerator, images, monitor, posture, qemu, template, tier
from fumehood.tiers.microvm.control import Control
from fumehood.tiers.microvm.cpio import Archive
from fumehood.tiers.microvm.export import receive_folder
from fumehood.tiers.microvm.images import Image
from fumehood.tiers.microvm.qemu import Program, Shape
from fumehood.tiers.microvm.template import Recipe, Template

IMAGE = Image("python", Path("/nowhere"), "d" * 64, "6.1.0", "3.11", (), 60 * MiB, "")
LIMITS = Limits(disk_bytes=64 * KiB, files=20)


def entry(raw: bytes, kind: str = "f", data: bytes = b"", **fields: object) -> bytes:
    """A line as the guest's init sends it, with its content."""
    line: dict[str, object] = {"op": "entry", "path": raw.hex(), "kind": kind, "mode": 0o644, "size": len(data)}
    line |= {"target": "", "same": "", "runs": [[0, len(data)]] if data else []}
    return json.dumps(line | fields).encode() + b"\n" + data


END = b'{"op":"exported","truncated":false}\n'


def receive(sent: bytes, target: Path, limits: Limits = LIMITS) -> str:
    """What receive_folder() says is missing."""

    async def main() -> str:
        ours, theirs = socket.socketpair()
        control = Control(ours)
        try:
            theirs.sendall(sent)
            theirs.close()
            return await asyncio.wait_for(receive_folder(control, str(target), limits), 10)
        finally:
            control.close()

    return asyncio.run(main())


class TestExport:
    def test_every_kind_arrives_as_what_it_is(self, tmp_path: Path) -> None:
        sparse = entry(b"d/sparse", size=50_000, runs=[[40_000, 3]]) + b"end"
        receive(
            entry(b"d", "d")
            + entry(b"f", data=b"hello", mode=0o4755)
            + entry(b"g", same=b"f".hex())
            + entry(b"l", "l", target=b"/etc/passwd".hex())
            + entry(b"p", "p")
            + entry(b"s", "s")
            + sparse
            + entry(b"unsent", "x", size=1 << 40)
            + END,
            tmp_path,
        )
        assert sorted(os.listdir(tmp_path)) == ["d", "f", "g", "l", "p", "s"]
        assert (tmp_path / "f").read_bytes() == b"hello" and stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o700
        assert (tmp_path / "g").stat().st_ino == (tmp_path / "f").stat().st_ino
        assert os.readlink(tmp_path / "l") == "/etc/passwd"
        assert stat.S_ISFIFO((tmp_path / "p").stat().st_mode) and stat.S_ISSOCK((tmp_path / "s").stat().st_mode)
        content = (tmp_path / "d/sparse").read_bytes()
        assert len(content) == 50_000 and content[40_000:40_003] == b"end" and content.count(0) == 49_997

    @pytest.mark.parametrize(
        "sent",
        [
            entry(b"../x", data=b"x"),
            entry(b"/x", data=b"x"),
            entry(b"a//x", data=b"x"),
            entry(b"", data=b"x"),
            entry(b".", data=b"x"),
            entry(b"nul\0", data=b"x"),
            entry(b"x", path="zz"),
            entry(b"x", path=7),
            entry(b"x", "l", target=b"a\0b".hex()),
            entry(b"x", data=b"x" * 70_000),
            entry(b"x", size=1 << 50),
            entry(b"x", size=-1),
            entry(b"x", data=b"xx", size=1),
            entry(b"x", runs=[[0, 1 << 60]]),
            entry(b"x", runs=[[0]]),
            entry(b"x", runs=[[0, True]]),
            entry(b"x", runs="all"),
            b"no json\n",
            b"[" * 70_000,
            b"x" * 70_000,
            b"",
            b"".join(entry(b"%d" % i) for i in range(30)),
        ],
        ids=range(22),
    )
    def test_what_breaks_a_rule_is_refused(self, sent: bytes, tmp_path: Path) -> None:
        inner = tmp_path / "inner"
        inner.mkdir()
        with pytest.raises(StartError):
            receive(sent + (END if sent else b""), inner)
        assert sorted(os.listdir(tmp_path)) == ["inner"]
        assert sum(f.lstat().st_blocks for f in inner.rglob("*")) * 512 <= 1 * MiB

    def test_what_is_missing_is_told_and_half_a_file_is_none(self, tmp_path: Path) -> None:
        whole = entry(b"whole", data=b"w")
        assert receive(whole + END, tmp_path) == ""
        (tmp_path / "whole").unlink()
        assert "too large" in receive(whole + entry(b"unsent", "x", size=1 << 40) + END, tmp_path)
        (tmp_path / "whole").unlink()
        assert "too long" in receive(whole + b'{"op":"exported","truncated":true}\n', tmp_path)
        (tmp_path / "whole").unlink()
        with pytest.raises(StartError):
            receive(whole + entry(b"half", data=b"x" * 1000)[:-1], tmp_path)
        assert os.listdir(tmp_path) == ["whole"]

    def test_no_link_is_followed(self, tmp_path: Path) -> None:
        inner, outside = tmp_path / "inner", tmp_path / "outside"
        inner.mkdir()
        outside.mkdir()
        for second in (entry(b"l/x", data=b"x"), entry(b"l", data=b"x"), entry(b"l/x", same=b"f".hex())):
            with pytest.raises(OSError):
                receive(entry(b"f", data=b"y") + entry(b"l", "l", target=os.fsencode(outside).hex()) + second, inner)
            for path in inner.iterdir():
                path.unlink()
        assert os.listdir(outside) == []


class TestControl:
    def test_a_flood_neither_blocks_nor_grows(self) -> None:
        async def main() -> None:
            ours, theirs = socket.socketpair()
            control = Control(ours)
            theirs.setblocking(False)
            line = b'{"op":"spent","memory_peak_bytes":5,"oom_kills":1}\n'
            try:
                while True:
                    theirs.send(line * 100)
            except BlockingIOError:
                pass
            control.hear()
            assert (control.memory_peak_bytes, control.oom_kills) == (5, 1)
            for wrong in (b'{"op":"spent","memory_peak_bytes":-1,"oom_kills":1e9}\n', b"\xff\xff\n"):
                theirs.setblocking(True)
                control.hear()
                theirs.sendall(wrong)
                control.hear()
            with pytest.raises(StartError):
                await control.line()
            control.close()
            theirs.close()

        asyncio.run(main())

    def test_lines_that_nobody_asked_for_are_bounded(self) -> None:
        async def main() -> None:
            ours, theirs = socket.socketpair()
            control = Control(ours)
            theirs.sendall(b'{"op":"x"}\n' * 1000)
            control.hear()
            taken = 0
            with pytest.raises(StartError):
                while True:
                    await control.line()
                    taken += 1
            assert taken <= 100
            control.close()
            theirs.close()

        asyncio.run(main())


def test_an_archive_holds_what_was_put_in(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/run").write_bytes(b"#!")
    (tmp_path / "sub/run").chmod(0o700)
    (tmp_path / "link").symlink_to("sub")
    file = io.BytesIO()
    archive = Archive(file)
    archive.device("dev/null", 0o666, 1, 3)
    archive.tree(tmp_path, "opt")
    archive.close()
    data = file.getvalue()
    assert len(data) % 512 == 0
    found = dict(_members(data))
    assert found == {
        "dev/null": (stat.S_IFCHR | 0o666, b""),
        "opt/link": (stat.S_IFLNK | 0o777, b"sub"),
        "opt/sub": (stat.S_IFDIR | 0o755, b""),
        "opt/sub/run": (stat.S_IFREG | 0o755, b"#!"),
    }


def _members(data: bytes) -> Iterator[tuple[str, tuple[int, bytes]]]:
    at = 0
    while data[at : at + 6] == b"070701":
        fields = [int(data[at + 6 + 8 * i : at + 14 + 8 * i], 16) for i in range(13)]
        name = data[at + 110 : at + 109 + fields[11]].decode()
        if name == "TRAILER!!!":
            return
        start = at + (110 + fields[11] + 3) // 4 * 4
        yield name, (fields[1], data[start : start + fields[6]])
        at = start + (fields[6] + 3) // 4 * 4


def test_our_own_archive_carries_the_agent_as_it_is() -> None:
    members = dict(_members(images.own_archive("3.11")))
    agent = Path(images.__file__).parents[2] / "guest/agent.py"
    assert members["opt/fumehood/fumehood/guest/agent.py"][1] == agent.read_bytes()
    assert members["init"][0] == stat.S_IFREG | 0o755


def test_descriptors_get_the_numbers_asked_for() -> None:
    """Also where the numbers asked for are those of others. The pipe's own must not be 20 or 21."""
    read, low = os.pipe()
    write = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 100)
    os.close(low)
    pid = os.fork()
    if pid == 0:
        try:
            first, second = os.open("/dev/null", os.O_RDONLY), os.open("/dev/zero", os.O_RDONLY)
            os.dup2(first, 20)
            os.dup2(second, 21)
            monitor.place([20, 21], [21, 20])
            good = os.readlink("/proc/self/fd/21") == "/dev/null" and os.readlink("/proc/self/fd/20") == "/dev/zero"
            os.write(write, b"good" if good and os.get_inheritable(20) else b"bad")
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    os.close(write)
    assert os.read(read, 10) == b"good"
    os.close(read)


def program(version: str = "7.2") -> Program:
    return Program("/usr/bin/env", version, (("/usr/bin/env", "/usr/bin/env"),))


def recipe(**changes: object) -> Recipe:
    base = Recipe(program(), Shape("tcg", 512 * MiB), IMAGE, None, ())
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


class TestTemplate:
    def test_the_key_changes_with_all_that_matters(self) -> None:
        others = [
            recipe(program=program("9.0")),
            recipe(shape=Shape("kvm", 512 * MiB)),
            recipe(shape=Shape("tcg", 1 * GiB)),
            recipe(image=dataclasses.replace(IMAGE, digest="e" * 64)),
            recipe(preload=("json",)),
        ]
        assert len({recipe().key(), *(other.key() for other in others)}) == 1 + len(others)
        assert recipe().key() == recipe().key()

    def test_few_sizes_serve_many_limits(self) -> None:
        def size(memory_bytes: int) -> int:
            return template.shape_for(Limits(memory_bytes=memory_bytes), IMAGE, None, "tcg").memory_bytes

        assert size(16 * MiB) == size(256 * MiB) >= 256 * MiB + 2 * IMAGE.initramfs_bytes
        assert size(257 * MiB) == size(512 * MiB) >= size(256 * MiB) + 256 * MiB
        assert all(size(n * MiB) % (32 * MiB) == 0 for n in (16, 300, 5000))

    @pytest.fixture
    def kept(self, tmp_path: Path) -> Path:
        """A template on disk: 1 MiB of memory with a hole in the middle."""
        memory, state = template._memfd("memory", 512 * MiB), template._loaded("state", [b"state" * 1000])
        os.pwrite(memory, b"begin", 0)
        os.pwrite(memory, b"end", 400 * MiB)
        made = Template(recipe(), memory, state, time.time())
        template._save(made, state, tmp_path / "t")
        made.close()
        return tmp_path / "t"

    def test_it_comes_back_whole_and_sealed(self, kept: Path) -> None:
        made = template._load(recipe(), kept)
        assert made is not None
        assert os.pread(made.memory_fd, 5, 0) == b"begin" and os.pread(made.memory_fd, 3, 400 * MiB) == b"end"
        assert os.stat(kept / "memory").st_blocks * 512 < 1 * MiB, "holes are not kept"
        for change in (lambda: os.pwrite(made.memory_fd, b"x", 0), lambda: os.ftruncate(made.memory_fd, 0)):
            with pytest.raises(PermissionError):
                change()
        with made.state() as first, made.state() as second:
            assert os.read(first, 5) == os.read(second, 5) == b"state"
        made.close()

    @pytest.mark.parametrize("name", ["memory", "state", "manifest.json"])
    def test_a_damaged_file_is_not_used(self, kept: Path, name: str) -> None:
        before = len(os.listdir("/proc/self/fd"))
        with (kept / name).open("r+b") as file:
            file.seek(2)
            file.write(b"!")
        assert template._load(recipe(), kept) is None
        assert len(os.listdir("/proc/self/fd")) == before

    def test_an_old_one_is_not_used(self, kept: Path) -> None:
        manifest = json.loads((kept / "manifest.json").read_bytes())
        for age in (template.AGE_MAX_S + 1, -1000):
            (kept / "manifest.json").write_text(json.dumps(manifest | {"made_at": time.time() - age}))
            assert template._load(recipe(), kept) is None

    def test_a_full_disk_leaves_nothing_half_done(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        memory, state = template._memfd("memory", 1 * MiB), template._loaded("state", [b"state"])
        os.pwrite(memory, b"x", 0)
        made = Template(recipe(), memory, state, time.time())
        with monkeypatch.context() as patch, pytest.raises(OSError):
            patch.setattr(os, "pwrite", full)
            template._save(made, state, tmp_path / "t")
        made.close()
        assert os.listdir(tmp_path) == []

    def test_the_least_recently_used_ones_go(self, tmp_path: Path) -> None:
        for number in range(12):
            folder = tmp_path / f"{number:02}"
            folder.mkdir()
            os.utime(folder, (number, number))
        template._forget_old(tmp_path, tmp_path / "00")
        assert sorted(os.listdir(tmp_path)) == ["00", *(f"{n:02}" for n in range(5, 12))]


def test_a_kernel_of_the_operators_tells_its_release(tmp_path: Path) -> None:
    kernel = tmp_path / "any-name"
    head = bytearray(0x500)
    head[0x202:0x206] = b"HdrS"
    head[0x20E:0x210] = (0x40).to_bytes(2, "little")
    head[0x240:0x260] = b"6.9.1-own (me@here) #1 SMP".ljust(32, b"\0")
    kernel.write_bytes(head)
    assert images._is_kernel(kernel) and images._kernel_release(kernel) == "6.9.1-own"
    kernel.write_bytes(head[:0x204])
    assert not images._is_kernel(kernel)


class TestQemu:
    def test_a_clone_maps_the_memory_for_itself_and_boots_nothing(self) -> None:
        line = " ".join(Shape("tcg", 512 * MiB).clone_arguments(program()))
        assert "share=off" in line and "-incoming defer" in line and " -kernel" not in line
        assert "tb-size=64" in line and "-nodefaults" in line and "-sandbox on," in line and "net" not in line

    def test_kvm_needs_no_frequency(self) -> None:
        line = " ".join(Shape("kvm", 512 * MiB).template_arguments(program(), ""))
        assert "-accel kvm -cpu host" in line and "tsc_early_khz" not in line and "tb-size" not in line


def test_a_device_that_the_jail_may_not_open_is_not_tried(tmp_path: Path) -> None:
    assert "does not exist" in accelerator.out_of_reach(str(tmp_path / "none"))
    device = tmp_path / "kvm"
    device.touch(mode=0o600)
    assert bool(accelerator.out_of_reach(str(device))) is (os.geteuid() == 0)
    device.chmod(0o666)
    assert accelerator.out_of_reach(str(device)) == ""


def test_a_limit_that_the_guest_does_not_hold_is_an_error() -> None:
    policy = Policy()
    limits = policy.limits
    answer = {"op": "adopted", "memory_bytes": limits.memory_bytes, "pids": limits.pids + 1, "rlimits": {}}
    answer |= {"disk_bytes": limits.disk_bytes, "inodes": limits.files + 4, "terminals": "none"}
    made = Template(recipe(), -1, -1, 0.0)
    outer = Receipt("jail", Boundary.KERNEL, ())
    good = posture.receipt(answer, policy, made, outer)
    assert good.boundary is Boundary.EMULATED and good.control("memory") is not None
    for name in ("memory_bytes", "pids", "disk_bytes", "inodes", "terminals", "rlimits"):
        with pytest.raises(StartError, match="not held as asked"):
            posture.receipt(answer | {name: None}, policy, made, outer)
    with pytest.raises(StartError, match="could not adopt"):
        posture.receipt({"op": "failed", "message": "why"}, policy, made, outer)


def test_there_is_one_engine() -> None:
    with pytest.raises(PolicyError, match="firecracker"):
        tier.MicrovmTier(engine="firecracker")


def test_the_program_is_looked_for_where_the_system_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/tmp")
    qemu.find.cache_clear()
    try:
        found = qemu.find()
    except Exception as error:
        assert qemu.INSTALL in str(error)
    else:
        assert found.path.startswith("/usr") and all(os.path.isabs(path) for _, path in found.files)
