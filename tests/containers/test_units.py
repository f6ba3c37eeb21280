"""The parts that need no engine: the profile, the request, the stream, versions, unpacking."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import os
import random
import socket
import struct
import tarfile
from pathlib import Path

import pytest

from fumehood.errors import PolicyError, StartError
from fumehood.images import packages, store
from fumehood.images.engine import Engine, EngineError, EngineGoneError
from fumehood.linux import seccomp, syscalls
from fumehood.model import Boundary, Limits, MiB, Policy
from fumehood.tiers.container import advice, payload, posture, profile, spec
from fumehood.tiers.container.stream import Pump
from fumehood.tiers.gvisor.runsc import Runsc

# --- the seccomp profile


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_profile_allows_what_the_jail_allows_and_what_starts_it(machine: str) -> None:
    made = profile.profile(machine)
    assert made["defaultAction"] == "SCMP_ACT_ERRNO" and len(made["architectures"]) == 1
    allowed = {name for rule in made["syscalls"] if rule["action"] == "SCMP_ACT_ALLOW" for name in rule["names"]}
    assert set(seccomp.allowed(machine)) <= allowed <= set(syscalls.numbers(machine))
    assert allowed - set(seccomp.allowed(machine)) <= {"capget"}
    refused = (
        "ptrace unshare setns mount bpf keyctl perf_event_open io_uring_setup userfaultfd process_vm_readv clone3 "
        "splice vmsplice memfd_create kexec_load init_module"
    )
    for name in refused.split():
        assert name not in allowed


def test_calls_with_arguments_are_never_allowed_bare() -> None:
    made = profile.profile("x86_64")
    checked = {name for group in seccomp.ARGUMENTS for name in group.split()}
    for rule in made["syscalls"]:
        if rule["action"] == "SCMP_ACT_ALLOW" and checked & set(rule["names"]):
            assert rule["args"] and all(arg["op"] == "SCMP_CMP_MASKED_EQ" for arg in rule["args"])
    families = {rule["args"][0]["valueTwo"] for rule in made["syscalls"] if "socket" in rule["names"]}
    assert families == set(seccomp.SOCKET_FAMILIES.values())
    requests = {rule["args"][0]["valueTwo"] for rule in made["syscalls"] if rule["names"] == ["ioctl"]}
    assert 0x5412 not in requests and 0x541C not in requests and 0x5401 in requests


# --- what an engine is asked for


def container(policy: Policy) -> spec.Container:
    return spec.Container(
        name="fumehood-1",
        policy=policy,
        image="image",
        user=1000,
        held=("memory", "pids", "cpu"),
        owner="owner",
        runtime=None,
        binds=(("/srv/data", "/mnt/data"),),
        seccomp="PROFILE",
    )


def test_no_door_is_opened_in_either_spelling() -> None:
    policy = Policy(limits=Limits(memory_bytes=100 * MiB, pids=10, cpus=0.5), env={"TOKEN": "of-the-program"})
    docker, podman = spec.docker_body(container(policy)), spec.podman_body(container(policy))
    host = docker["HostConfig"]
    assert host["NetworkMode"] == "none" and host["ReadonlyRootfs"] and host["CapDrop"] == ["ALL"]
    assert host["Memory"] == host["MemorySwap"] == 100 * MiB and host["PidsLimit"] == 11
    assert all(m["ReadOnly"] and m["Type"] == "bind" for m in host["Mounts"]) and len(host["Mounts"]) == 1
    assert podman["netns"] == {"nsmode": "none"} and podman["read_only_filesystem"] and podman["cap_drop"] == ["ALL"]
    assert podman["resource_limits"]["memory"] == {"limit": 100 * MiB, "swap": 100 * MiB}
    for body in (docker, podman):
        text = json.dumps(body)
        for word in (
            "Privileged",
            "privileged",
            "CapAdd",
            "cap_add",
            "Devices",
            "devices",
            '"host"',
            "docker.sock",
            "TOKEN",
        ):
            assert word not in text


@pytest.mark.parametrize("disk", [64 << 10, 1 << 20, 64 << 20, (64 << 20) + 12345])
@pytest.mark.parametrize("files", [16, 100, 4096])
def test_the_scratch_is_never_more_than_the_limits(disk: int, files: int) -> None:
    scratch = spec.Scratch.of(Limits(disk_bytes=disk, files=files))
    assert 0 < scratch.work_bytes + 2 * scratch.side_bytes <= disk
    assert 0 < scratch.work_files + 2 * scratch.side_files <= files
    assert scratch.work_bytes >= disk // 2


@pytest.mark.parametrize(
    ("runtime", "boundary"),
    [("", Boundary.KERNEL), ("runc", Boundary.KERNEL), ("/usr/bin/crun", Boundary.KERNEL),
     ("runsc", Boundary.USER_KERNEL), ("kata-runtime", Boundary.HARDWARE), ("io.containerd.kata.v2",
     Boundary.HARDWARE)],
)  # fmt: skip
def test_the_boundary_comes_from_the_runtime(runtime: str, boundary: Boundary) -> None:
    assert spec.boundary_of(runtime) is boundary


def test_a_socket_behind_a_link_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/engine.sock").touch()
    (tmp_path / "link").symlink_to("run")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/run/engine.sock")
    with pytest.raises(PolicyError, match="socket"):
        spec.refuse_sockets(str(tmp_path / "link"))
    (tmp_path / "data").mkdir()
    spec.refuse_sockets(str(tmp_path / "data"))


def test_a_value_that_was_not_applied_refuses_the_sandbox() -> None:
    policy = Policy()
    host = {"NetworkMode": "bridge", "Privileged": True, "CapAdd": ["SYS_ADMIN"], "PidMode": "host", "Memory": 0,
            "MemorySwap": 0, "PidsLimit": None, "NanoCpus": 0}  # fmt: skip
    reading = posture.Reading("docker")
    posture.engine_view(reading, {"HostConfig": host}, policy, ("memory", "pids", "cpu"))
    with pytest.raises(StartError) as caught:
        reading.receipt(Boundary.KERNEL, host="")
    for name in ("network", "privileged", "added_capabilities", "host_namespaces", "memory", "pids", "cpu"):
        assert f"{name} is" in str(caught.value)


def test_the_bootstrap_holds_no_line_that_differs_between_runs() -> None:
    assert payload.bootstrap() == payload.bootstrap() and "become_agent()" in payload.bootstrap()
    first = payload.message(python=None, rlimits={"CORE": 0}, preload=())
    lengths = struct.unpack(">IIIII", first[:20])
    assert len(first) == 20 + sum(lengths)


# --- the attached stream


def pieces(data: bytes, seed: int) -> list[bytes]:
    cuts = random.Random(seed)
    out = []
    while data:
        size = cuts.randint(1, 50)
        out.append(data[:size])
        data = data[size:]
    return out


@pytest.mark.parametrize("seed", range(5))
def test_stdout_comes_out_whole_however_it_was_cut(seed: int) -> None:
    sent = random.Random(seed).randbytes(5000)
    framed = b"".join(
        struct.pack(">BxxxI", kind, len(part)) + part
        for part in pieces(sent, seed)
        for kind, part in ((1, part), (2, b"noise"))
    )

    async def main() -> tuple[bytes, bytes]:
        far, near = socket.socketpair()
        near.setblocking(False)
        far.setblocking(False)
        loop = asyncio.get_running_loop()
        pump = Pump(near, framed[:3])
        got = b""

        async def write() -> None:
            for part in pieces(framed[3:], seed + 1):
                await loop.sock_sendall(far, part)
                await asyncio.sleep(0)
            far.close()

        writer = asyncio.create_task(write())
        while piece := await loop.sock_recv(pump.stream, 100):
            got += piece
        await writer
        pump.close()
        pump.close()
        return got, pump.stderr

    got, stderr = asyncio.run(main())
    assert got == sent and stderr.startswith(b"noisenoise")


def test_a_reader_that_stops_stops_the_pump_and_nothing_is_lost() -> None:
    sent = os.urandom(4 << 20)

    async def main() -> bytes:
        far, near = socket.socketpair()
        far.setblocking(False)
        near.setblocking(False)
        loop = asyncio.get_running_loop()
        pump = Pump(near, b"")
        writer = asyncio.create_task(loop.sock_sendall(far, struct.pack(">BxxxI", 1, len(sent)) + sent))
        await asyncio.sleep(0.1)
        assert not writer.done()
        got = bytearray()
        while len(got) < len(sent):
            got += await loop.sock_recv(pump.stream, 1 << 20)
        await writer
        pump.close()
        far.close()
        return bytes(got)

    assert asyncio.run(main()) == sent


def test_a_header_that_is_none_ends_the_stream() -> None:
    async def main() -> bytes:
        far, near = socket.socketpair()
        near.setblocking(False)
        pump = Pump(near, b"")
        reader = pump.stream.dup()
        reader.setblocking(False)
        far.sendall(b"HTTP/1.1 500 what?")
        try:
            return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(reader, 10), 10)
        finally:
            pump.close()
            far.close()
            reader.close()

    assert asyncio.run(main()) == b""


# --- the API's client


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"", EngineGoneError),
        (b"nonsense\r\n\r\n", EngineGoneError),
        (b'HTTP/1.0 500 No\r\n\r\n{"message": "no"}', EngineError),
        (b"HTTP/1.0 404 No\r\n\r\nplain words", EngineError),
    ],
)
def test_answers_that_are_none(tmp_path: Path, answer: bytes, error: type[Exception]) -> None:
    path = str(tmp_path / "s")

    async def main() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            writer.close()

        async with await asyncio.start_unix_server(serve, path):
            with pytest.raises(error):
                await Engine("docker", path).call("GET", "/info")

    asyncio.run(main())


# --- versions


@pytest.mark.parametrize(
    ("version", "old"),
    [("1.1.5+ds1", True), ("1.2.7", True), ("1.2.8", False), ("1.3.2", True), ("1.3.3", False), ("1.4.0-rc.2", False),
     ("1.4.1", False), ("2.0", False), ("", False), ("unknown", False)],
)  # fmt: skip
def test_runc_with_known_escapes_is_told(version: str, old: bool) -> None:
    assert advice.runc_is_old(version) is old
    assert bool(advice.notes({"runc": version})) is old
    assert bool(advice.notes({"OCI Runtime (runc)": f"runc version {version}\ncommit: x"})) is old


def test_the_age_of_runsc_is_read_from_its_version() -> None:
    assert Runsc("/x", "0.0~20221219.0").released == "2022-12-19"
    assert Runsc("/x", "release-20251110.0").released == "2025-11-10"
    assert Runsc("/x", "unknown").released == ""


# --- images


@pytest.mark.parametrize("name", ["-oDir=/", "Python3", "a b", "x;y", "", "a", "../x"])
def test_what_is_no_package_never_reaches_apt(name: str) -> None:
    with pytest.raises(PolicyError):
        packages.check((name,))


@pytest.mark.parametrize("name", ["../up", "-x", "", "A", "a/b", "a" * 65])
def test_names_of_images_are_plain(name: str) -> None:
    with pytest.raises(PolicyError):
        store.find(name)


def test_a_cache_that_others_may_write_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUMEHOOD_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache/images").mkdir(parents=True)
    assert store.list_all() == () and store.find("python") is None
    (tmp_path / "cache/images").chmod(0o777)
    with pytest.raises(PolicyError, match="alone"):
        store.find("python")


def test_an_archive_stays_inside_its_root_and_brings_no_setuid(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for folder in ("usr/bin", "usr/lib"):
        (root / folder).mkdir(parents=True)
    (root / "bin").symlink_to("usr/bin")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, mode in (("./bin/su", 0o4755), ("./../escaped", 0o644), ("/abs", 0o644), ("./usr/bin/plain", 0o600)):
            member = tarfile.TarInfo(name)
            member.size, member.mode = 2, mode
            tar.addfile(member, io.BytesIO(b"hi"))
        hard = tarfile.TarInfo("./usr/bin/hard")
        hard.type, hard.linkname = tarfile.LNKTYPE, "./../../secret"
        tar.addfile(hard)
    buffer.seek(0)
    with tarfile.open(fileobj=buffer) as tar:
        for member in tar:
            packages._place(member, tar, root)
    found = {str(p.relative_to(tmp_path)): p.lstat().st_mode & 0o7777 for p in tmp_path.rglob("*") if p.is_file()}
    assert found == {"root/usr/bin/su": 0o755, "root/abs": 0o644, "root/usr/bin/plain": 0o644}
    assert not list(itertools.chain(tmp_path.glob("escaped"), tmp_path.parent.glob("escaped")))
