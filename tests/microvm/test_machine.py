"""Tier microvm on this host: what makes clones different, what holds them, how they end, and that nothing stays.

Every test here starts machines, so there are few, and the first of a process may boot a template, which takes seconds
under hardware virtualisation and up to a minute on a busy host without it.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.needs import need_tier
from support.residue import Look

from fumehood import environments
from fumehood.errors import FumehoodError, OutcomeUnknownError, StartError, UnsupportedError
from fumehood.linux import process
from fumehood.model import ArtifactLimits, Boundary, Code, Command, Held, Limits, MiB, Outcome, Policy
from fumehood.tier import require
from fumehood.tiers.microvm import images, machine, qemu, template
from fumehood.tiers.microvm.machine import MachineSandbox
from fumehood.tiers.microvm.tier import MicrovmTier

Body = Callable[[MicrovmTier], Awaitable[None]]

#: A program's deadline where the emulator must not be raced.
PATIENT = Policy(limits=Limits(wall_s=60, cpu_s=60))


@pytest.fixture(autouse=True)
def there() -> None:
    """Skip, or fail where the tier is required."""
    need_tier("microvm")


def with_tier(body: Body, **options: bool) -> None:
    """Run ``body`` with a tier, which is closed whatever happens."""

    async def main() -> None:
        tier = MicrovmTier(**options)  # type: ignore[arg-type]
        try:
            await body(tier)
        finally:
            await tier.close()

    asyncio.run(main())


async def run(tier: MicrovmTier, source: str, policy: Policy = PATIENT) -> str:
    """What a program prints in a sandbox of its own."""
    sandbox = await tier.create(policy)
    try:
        result = await sandbox.exec(Code(source), last=True)
        assert result.ok, (result.outcome, result.stderr)
        return result.stdout
    finally:
        await sandbox.close()


def qemu_pid(sandbox: object) -> int:
    """The process of a sandbox's machine, as the host counts."""
    assert isinstance(sandbox, MachineSandbox)
    return sandbox.monitor_pid


DICE = """
import os, random, secrets, tempfile, time, uuid
print(os.urandom(16).hex(), uuid.uuid4(), random.random(), secrets.token_hex(8), tempfile.mktemp())
print(time.time())
"""


def test_clones_share_no_randomness_and_have_the_hosts_clock() -> None:
    async def body(tier: MicrovmTier) -> None:
        seen: list[str] = []
        await run(tier, "pass")
        for _ in range(3):
            before = time.time()
            values, clock = (await run(tier, DICE)).splitlines()
            # The time is told once; a host that is too busy to deliver it at once makes the guest late by as much.
            assert before - 0.2 <= float(clock) <= time.time() + 0.2
            seen += values.split()
        assert len(set(seen)) == len(seen) == 15

    with_tier(body)


def test_a_sandbox_that_waited_has_the_hosts_clock() -> None:
    async def body(tier: MicrovmTier) -> None:
        await run(tier, "pass")
        began = time.monotonic()
        sandbox = await tier.create_warm(PATIENT)
        delivery_s = time.monotonic() - began
        await asyncio.sleep(2)
        before = time.time()
        told = float((await sandbox.exec(Code("import time; print(time.time())"))).stdout)
        assert before - 0.2 - delivery_s <= told <= time.time() + 0.2
        assert (await sandbox.exec(Code("print(sorted(n for n in globals() if n[0] != '_'))"))).stdout == "['time']\n"
        await sandbox.close()

    with_tier(body)


def test_a_warm_single_run_finds_nothing_of_the_rehearsals() -> None:
    program = """
import os, sys
print(sorted(n for n in globals() if n[0] != '_'), sorted(os.environ), os.listdir('/proc/self/fd'), os.nice(0))
sys.exit(3)
"""

    async def body(tier: MicrovmTier) -> None:
        sandbox = await tier.create_warm(PATIENT)
        result = await sandbox.exec(Code(program), last=True)
        assert result.stdout == "['os', 'sys'] ['LANG', 'PATH'] ['0', '1', '2', '3'] 0\n", result.stderr
        assert (result.exit_code, result.usage.memory_peak_bytes or 0) > (3, 0)
        await sandbox.close()

    with_tier(body)


def test_a_fresh_interpreter_has_a_layout_and_a_hash_seed_of_its_own() -> None:
    program = "print(hash('a string'), id(object()) >> 20)"

    async def cloned(tier: MicrovmTier) -> None:
        assert await run(tier, program) == await run(tier, program)

    async def fresh(tier: MicrovmTier) -> None:
        first, second = await run(tier, program), await run(tier, program)
        assert not set(first.split()) & set(second.split())

    with_tier(cloned)
    with_tier(fresh, fresh=True)


def test_the_monitor_sees_its_own_files_and_nothing_else() -> None:
    """From outside: root, capabilities, filters, namespaces and descriptors of QEMU, exhaustively."""

    async def body(tier: MicrovmTier) -> None:
        sandbox = await tier.create(PATIENT)
        pid = qemu_pid(sandbox)
        root = f"/proc/{pid}/root"
        files = {
            "/" + os.path.relpath(os.path.join(folder, name), root)
            for folder, folders, names in os.walk(root)
            for name in names
            if folders is not None and not folder.startswith(f"{root}/proc")
        }
        assert files == {path for _, path in qemu.find().files}
        status = process.status(pid)
        assert not any(status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"))  # type: ignore[literal-required]
        assert status["NoNewPrivs"] == 1 and status["Seccomp"] == 2
        assert status["Seccomp_filters"] is None or status["Seccomp_filters"] >= 3  # two of the jail's and QEMU's own
        assert 0 not in status["Uid"] and 0 not in status["Gid"]
        ours, its = process.namespaces(os.getpid()), process.namespaces(pid)
        assert all(its[kind] != ours[kind] for kind in ("user", "mnt", "pid", "net", "ipc", "uts"))
        targets = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
        kinds = {target.partition(":")[0] for target in targets}
        assert kinds <= {"socket", "pipe", "anon_inode", "/dev/null", "/memfd"}, targets
        assert await sandbox.exec(Code("print(1)"))
        await sandbox.close()

    with_tier(body)


def test_the_receipt_says_what_it_is() -> None:
    async def body(tier: MicrovmTier) -> None:
        sandbox = await tier.create(PATIENT)
        receipt = sandbox.receipt
        await sandbox.close()
        assert receipt.boundary is tier.features.boundary and receipt.tier == "microvm"
        for name in ("memory", "pids", "disk", "files", "monitor_seccomp", "monitor_capabilities"):
            control = receipt.control(name)
            assert control is not None and control.held is Held.HARD
        if receipt.boundary is Boundary.EMULATED:
            assert any("without KVM" in note for note in receipt.notes)
            with pytest.raises(UnsupportedError):
                require(tier, PATIENT, floor=Boundary.HARDWARE)

    with_tier(body)


def test_nothing_can_be_written_but_the_scratch() -> None:
    program = """
import os
for folder, folders, names in os.walk('/'):
    if folder.startswith(('/proc', '/work', '/tmp', '/dev/shm')):
        folders.clear()
        continue
    for name in names + ['new']:
        try:
            os.close(os.open(os.path.join(folder, name), os.O_WRONLY | (os.O_CREAT if name == 'new' else 0)))
            if not (folder == '/dev' and name in ('null', 'zero', 'full', 'random', 'urandom')): print(folder, name)
        except OSError: pass
print(sorted(os.listdir('/sys')), [l.split(':')[0].strip() for l in open('/proc/self/net/dev')][2:])
"""

    async def body(tier: MicrovmTier) -> None:
        policy = Policy(limits=Limits(wall_s=120, cpu_s=120))
        assert (await run(tier, program, policy)).splitlines()[-1].startswith("[] [")

    with_tier(body)


#: What each may end as. The forks of an interpreter write some MiB each: whether they have them all, or time is over
#: before, is for the machine to say.
ENDS = {
    "fork flood": (
        "import os\nwhile True:\n try: os.fork()\n except OSError: pass",
        (Outcome.WALL, Outcome.MEMORY),
    ),
    "memory flood": ("b = []\nwhile True: b.append(b'x' * (1 << 20))", (Outcome.MEMORY,)),
    "stopped": ("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", (Outcome.WALL,)),
    "output flood": ("import os\nwhile True: os.write(1, b'x' * 65536)", (Outcome.OUTPUT,)),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_hostile_end_is_a_typed_outcome_in_time(name: str) -> None:
    program, outcomes = ENDS[name]
    wall_s = 60 if outcomes == (Outcome.MEMORY,) else 8
    limits = Limits(wall_s=wall_s, cpu_s=60, memory_bytes=256 * MiB, output_bytes=1 * MiB)
    policy = Policy(limits=limits, overflow="stop")

    async def body(tier: MicrovmTier) -> None:
        sandbox = await tier.create(policy)
        result = await sandbox.exec(Code(program), last=True)
        began = time.monotonic()
        await sandbox.close()
        assert result.outcome in outcomes and result.seconds <= policy.limits.wall_s + 0.5
        assert time.monotonic() - began < 5

    with_tier(body)


@pytest.mark.parametrize("end", ["reset", "kill"])
def test_a_machine_that_ends_mid_run_is_not_known_to_have_done_it(end: str) -> None:
    """A guest's power-off or panic, and QEMU's death, look the same from here: the outcome is unknown, at once."""

    async def body(tier: MicrovmTier) -> None:
        sandbox = await tier.create(PATIENT)
        assert isinstance(sandbox, MachineSandbox)
        seen = asyncio.Event()
        program = Code("print(1, flush=True)\nwhile True: pass")
        task = asyncio.ensure_future(sandbox.exec(program, last=True, sink=lambda *_: seen.set()))
        await asyncio.wait_for(seen.wait(), 60)
        if end == "kill":
            os.kill(qemu_pid(sandbox), 9)
        else:
            sandbox._machine._machine.monitor.post("system_reset")
        with pytest.raises(OutcomeUnknownError):
            await asyncio.wait_for(task, 10)
        await sandbox.close()
        assert await run(tier, "print(2)") == "2\n"

    with_tier(body)


def test_a_frame_that_is_too_large_ends_the_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A guest whose agent tells the end of a program in a frame of 2 GiB: not read, and the outcome is unknown."""
    for name in images.INSIDE:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((images._PACKAGE / name).read_bytes())
    agent = tmp_path / "tiers/microvm/guest_agent.py"  # where a frame is packed for the stream
    packed = "FRAME.pack(len(header), len(body)) + header"
    assert packed in agent.read_text()
    hostile = "FRAME.pack(len(header), 1 << 31 if b'done' in header else len(body)) + header"
    agent.write_text(agent.read_text().replace(packed, hostile))
    monkeypatch.setattr(images, "_PACKAGE", tmp_path)

    async def body(tier: MicrovmTier) -> None:
        sandbox = await tier.create(PATIENT)
        try:
            with pytest.raises(OutcomeUnknownError):
                await asyncio.wait_for(sandbox.exec(Code("print(1)")), 30)
            assert "2147483648" in str(sandbox._killed)
        finally:
            await sandbox.close()

    with_tier(body)


def test_a_guest_that_panics_ends_its_machine() -> None:
    async def body(tier: MicrovmTier) -> None:
        class Panics(template.Recipe):
            @property
            def options(self) -> str:
                return "rdinit=/nothing root=/dev/nothing"

        found = tier._recipe(PATIENT)
        broken = Panics(found.program, found.shape, found.image, None, ())
        said = await template.boots(broken, tier._jailed(found), 120)
        assert "did not boot" in said and "within" not in said

    with_tier(body)


def test_eight_at_once_and_what_one_costs(capsys: pytest.CaptureFixture[str]) -> None:
    async def body(tier: MicrovmTier) -> None:
        sandboxes = await asyncio.gather(*(tier.create(PATIENT) for _ in range(8)))
        resident = [_pss(qemu_pid(sandbox)) for sandbox in sandboxes]
        got = await asyncio.gather(*(s.exec(Code(f"print({i})"), last=True) for i, s in enumerate(sandboxes)))
        assert [result.stdout for result in got] == [f"{i}\n" for i in range(8)]
        for sandbox in sandboxes:
            await sandbox.close()
        with capsys.disabled():
            print(f"\nPSS of an idle clone: {statistics.median(resident) / MiB:.0f} MiB")
        assert statistics.median(resident) < 128 * MiB

    with_tier(body)


def _pss(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024


def test_many_runs_leave_nothing(private_tmp: Path) -> None:
    count = int(os.environ.get("FUMEHOOD_MICROVM_RUNS", "200"))

    async def body(tier: MicrovmTier) -> None:
        await run(tier, "pass")
        before = Look.take(private_tmp)
        for number in range(count):
            sandbox = await tier.create(PATIENT)
            result = await sandbox.exec(Code("open('f', 'w').write('x')"), last=True)
            out = private_tmp / str(number) if number % 4 == 0 else None
            artifacts = await sandbox.close(out=out)
            assert result.ok and bool(artifacts) is (out is not None)
            if out is not None:
                (out / "f").unlink()
                out.rmdir()
        assert await asyncio.to_thread(before.left, private_tmp) == []

    with_tier(body)


def test_a_deep_tree_is_sent_as_far_as_artifacts_go(tmp_path: Path) -> None:
    program = "import os\nfor _ in range(1500): os.mkdir('d'); open('f', 'w').write('x'); os.chdir('d')"

    async def body(tier: MicrovmTier) -> None:
        policy = replace(PATIENT, artifacts=ArtifactLimits(depth=4))
        sandbox = await tier.create(policy)
        result = await sandbox.exec(Code(program), last=True)
        assert result.ok, result.stderr
        saved = await sandbox.close(out=tmp_path / "out")
        kept = {a.path for a in saved if a.skipped is None}
        assert kept == {"d/" * depth + "f" for depth in range(5)}
        assert [a.path for a in saved if a.skipped is not None] == ["d/d/d/d/d"]

    with_tier(body)


def test_files_that_do_not_come_in_time_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What came whole is saved, the last entry says that there is more, and nothing waits for it."""
    program = "open('a', 'w').write('first')\nfor i in range(3000): open('%04d' % i, 'w').write('x')"

    async def body(tier: MicrovmTier) -> None:
        sandbox = await tier.create(replace(PATIENT, limits=replace(PATIENT.limits, files=4000)))
        assert (await sandbox.exec(Code(program), last=True)).ok
        monkeypatch.setattr(machine, "EXPORT_TIMEOUT_S", 0.2)
        began = time.monotonic()
        saved = await sandbox.close(out=tmp_path / "out")
        assert time.monotonic() - began < 0.2 + 2
        assert saved[-1].path == "" and "within 0.2 s" in str(saved[-1].skipped)
        assert all(a.saved is None or a.saved.read_text() in ("x", "first") for a in saved)
        assert len(saved) < 3001

    with_tier(body)


def test_files_of_a_machine_that_is_gone_are_told(tmp_path: Path) -> None:
    async def body(tier: MicrovmTier) -> None:
        sandbox = await tier.create(PATIENT)
        await sandbox.exec(Code("open('f', 'w').write('x')"))
        os.kill(qemu_pid(sandbox), 9)
        saved = await sandbox.close(out=tmp_path / "out")
        assert [a.path for a in saved] == [""] and "gone" in str(saved[0].skipped)

    with_tier(body)


def test_cancelling_a_creation_leaves_nothing(private_tmp: Path) -> None:
    async def body(tier: MicrovmTier) -> None:
        await run(tier, "pass")
        before = Look.take(private_tmp)
        for step in range(6):
            task = asyncio.ensure_future(tier.create(PATIENT))
            await asyncio.sleep(0.02 * step)
            task.cancel()
            try:
                sandbox = await task
            except asyncio.CancelledError:
                cancelled.append(step)
            else:  # it was there already
                await sandbox.close()
        assert await asyncio.to_thread(before.left, private_tmp) == [] and cancelled

    cancelled: list[int] = []
    with_tier(body)


def test_a_preloaded_module_is_there_and_a_wrong_one_is_told() -> None:
    async def body(tier: MicrovmTier) -> None:
        policy = replace(PATIENT, preload=("xml.dom.minidom",))
        assert await run(tier, "import sys; print('xml.dom.minidom' in sys.modules)", policy) == "True\n"
        with pytest.raises(StartError, match="no_such_module"):
            await tier.create(replace(PATIENT, preload=("no_such_module",)))

    with_tier(body)


def test_commands_have_the_usual_tools() -> None:
    async def body(tier: MicrovmTier) -> None:
        sandbox = await tier.create(PATIENT)
        result = await sandbox.exec(Command(("sh", "-c", "uname -r; id -u; python3 -c 'print(6 * 7)'")))
        assert result.stdout.splitlines()[1:] == ["1000", "42"] and result.stdout.splitlines()[0] != os.uname().release
        await sandbox.close()

    with_tier(body)


def test_an_image_that_is_not_there_is_told_with_the_remedy() -> None:
    probe = MicrovmTier(image="no-such-image").probe()
    assert not probe.available and "fumehood image build" in probe.remedy

    async def main() -> None:
        tier = MicrovmTier(image="no-such-image")
        with pytest.raises(FumehoodError, match="no-such-image"):
            await tier.create(PATIENT)
        await tier.close()

    asyncio.run(main())


def test_an_environment_is_there_and_preloaded() -> None:
    name = "microvm-test"
    built = environments.build(name, ["six"])
    try:

        async def body(tier: MicrovmTier) -> None:
            policy = replace(PATIENT, environment=name, preload=("six",))
            told = await run(tier, "import sys; print('six' in sys.modules, sys.modules['six'].__file__)", policy)
            assert told == f"True /opt/env/lib/python{built.python}/site-packages/six.py\n"

        with_tier(body)
    finally:
        environments.remove(name)
