"""A zygote that dies or turns hostile is noticed and replaced, and no caller waits for it longer than it must."""

from __future__ import annotations

import array
import asyncio
import contextlib
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support import posture
from support.needs import need_tier
from support.residue import SEAT, Look

from fumehood.errors import FumehoodError, OutcomeUnknownError, StartError
from fumehood.model import Code, Limits, Policy
from fumehood.runner import AsyncRunner
from fumehood.tiers.jail import client
from fumehood.tiers.jail.tier import AHEAD, JailTier


@pytest.fixture
def tier() -> JailTier:
    need_tier("jail")
    return JailTier()


@pytest.mark.parametrize("victim", ["launcher", "its child", "zygote"])
def test_a_dead_zygote_is_replaced(tier: JailTier, private_tmp: Path, victim: str) -> None:
    whole = Look.take(private_tmp)

    async def main() -> None:
        async with AsyncRunner(tier=tier) as runner:
            for _ in range(3):
                assert (await runner.run(Code("print(1)"))).stdout == "1\n"
                before = Look.take(private_tmp)
                (zygote,) = tier._zygotes.values()
                below = posture.children(zygote.pid)
                pids = {"launcher": zygote.pid, "its child": below[0], "zygote": posture.zygote_of(zygote.pid)}
                os.kill(pids[victim], signal.SIGKILL)
                while not zygote.lost:  # what it made is only dying: the run works, or says what is known of it
                    with contextlib.suppress(StartError, OutcomeUnknownError):
                        assert (await runner.run(Code("print(2)"))).stdout == "2\n"
                assert (await runner.run(Code("print(3)"))).stdout == "3\n"
                now = Look.take(private_tmp)
                assert len(now.descriptors) <= len(before.descriptors) + AHEAD * SEAT["descriptors"]
                assert (now.mounts, now.files) == (before.mounts, before.files)

    asyncio.run(main())
    assert whole.left(private_tmp) == []


def test_who_waits_to_hear_what_a_sandbox_used_is_told_that_nobody_knows_when_the_zygote_is_lost() -> None:
    need_tier("jail")

    async def main() -> None:
        tier = JailTier(cgroups=False)
        sandbox = await tier.create(Policy())
        (zygote,) = tier._zygotes.values()
        (ident,) = zygote._exits
        waiting = asyncio.create_task(zygote.exited(ident))
        await asyncio.sleep(0)
        zygote._lose("the test says so")
        assert await waiting is None
        await sandbox.close()
        await tier.close()

    asyncio.run(main())


def test_a_zygote_that_dies_under_a_run_is_an_unknown_outcome(tier: JailTier) -> None:
    async def main() -> None:
        async with AsyncRunner(tier=tier, policy=Policy(limits=Limits(wall_s=60))) as runner:
            seen = asyncio.Event()
            task = asyncio.create_task(
                runner.run(Code("print(1, flush=True)\nwhile True: pass"), sink=lambda *_: seen.set())
            )
            await asyncio.wait_for(seen.wait(), 30)
            (zygote,) = tier._zygotes.values()
            os.kill(posture.children(zygote.pid)[0], signal.SIGKILL)
            with pytest.raises(OutcomeUnknownError):
                await asyncio.wait_for(task, 30)
            assert (await runner.run(Code("print(2)"))).stdout == "2\n"

    asyncio.run(main())


@pytest.mark.parametrize("half", [False, True])
def test_a_zygote_that_died_unnoticed_is_replaced_within_the_run(
    half: bool, tier: JailTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the run asks it for a sandbox or has one that was asked for before: nothing has run, so all is well."""
    monkeypatch.setattr("fumehood.tiers.jail.tier.AHEAD", 0)
    if not half:
        monkeypatch.setattr(JailTier, "_make_half", lambda *_: None)

    async def main() -> None:
        async with AsyncRunner(tier=tier) as runner:
            for number in range(5):
                assert (await runner.run(Code("pass"))).ok
                await asyncio.sleep(0.02)
                (zygote,) = tier._zygotes.values()
                inner = posture.zygote_of(zygote.pid)
                pidfd = os.pidfd_open(inner)
                os.kill(inner, signal.SIGKILL)
                select.select([pidfd], [], [], 10)  # without the event loop's knowledge
                os.close(pidfd)
                assert (await runner.run(Code(f"print({number})"))).stdout == f"{number}\n"
                assert zygote.lost

    asyncio.run(main())


def test_a_stopped_zygote_is_given_up(tier: JailTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_SPAWN_TIMEOUT_S", 0.5)

    async def main() -> None:
        async with AsyncRunner(tier=tier) as runner:
            await runner.run(Code("pass"))
            (zygote,) = tier._zygotes.values()
            inner = posture.zygote_of(zygote.pid)
            os.kill(inner, signal.SIGSTOP)
            assert (await asyncio.wait_for(runner.run(Code("print(2)")), 30)).stdout == "2\n"
            assert posture.seconds_until_gone([inner], 10) is not None

    asyncio.run(main())


def send(control: socket.socket, data: bytes, *fds: int) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    control.sendmsg([data], rights)


def answers() -> dict[str, Callable[[socket.socket, int], None]]:
    """What a hostile zygote may answer to the request with this id."""
    null = os.open("/dev/null", os.O_RDONLY)

    def said(kind: bytes, ident: int, status: int = 0, cpu_s: float = 0.0) -> bytes:
        return client.ANSWER.pack(kind, ident, status, cpu_s)

    def spawned(ident: int) -> bytes:
        return said(client.SPAWNED, ident)

    def exited(status: int, cpu_s: float) -> Callable[[socket.socket, int], None]:
        return lambda c, i: send(c, said(client.EXITED, i, status, cpu_s))

    return {
        "nothing, and it hangs up": lambda c, i: c.shutdown(socket.SHUT_RDWR),
        "garbage": lambda c, i: send(c, b"\xff\x00garbage" * 9),
        "a short message": lambda c, i: send(c, spawned(i)[:-1], null),
        "an unknown kind": lambda c, i: send(c, said(b"?", i)),
        "an unknown kind with a descriptor": lambda c, i: send(c, said(b"?", i), null),
        "an oversized message": lambda c, i: send(c, spawned(i) + b"x" * 150_000),
        "another id": lambda c, i: send(c, spawned(i + 1000), null),
        "no pidfd": lambda c, i: send(c, spawned(i)),
        "a descriptor that is no pidfd": lambda c, i: send(c, spawned(i), null),
        "three descriptors": lambda c, i: send(c, spawned(i), null, null, null),
        "nine descriptors": lambda c, i: send(c, spawned(i), *[null] * 9),
        "a pidfd of a dead process": lambda c, i: dead(c, spawned(i)),
        "an exit of a sandbox that does not run": lambda c, i: (
            send(c, said(client.EXITED, 999)),
            c.shutdown(socket.SHUT_RDWR),
        )[0],
        "CPU seconds that are no number": exited(0, math.nan),
        "CPU seconds that have no end": exited(0, math.inf),
        "CPU seconds before the beginning": exited(0, -1.0),
        "a status that cannot be": exited(1 << 40, 0.0),
        "an exit with a descriptor": lambda c, i: send(c, said(client.EXITED, 1), null),
        "a refusal with a descriptor": lambda c, i: send(c, said(client.REFUSED, i) + b"no", null),
        "a refusal that is no text": lambda c, i: send(c, said(client.REFUSED, i) + b"\xff\xfe\x00\x1b[31m"),
        "a refusal of a megabyte": lambda c, i: send(c, said(client.REFUSED, i) + b"e" * 150_000),
    }


def dead(control: socket.socket, message: bytes) -> None:
    child = subprocess.Popen(["true"])
    fd = os.pidfd_open(child.pid)
    child.wait()
    send(control, message, fd)
    os.close(fd)


@pytest.mark.parametrize("name", list(answers()))
def test_a_hostile_answer_is_an_error_that_allows_another_try(
    name: str, tier: JailTier, monkeypatch: pytest.MonkeyPatch, private_tmp: Path
) -> None:
    """The request of a hostile zygote fails as StartError; no descriptor of its stays; a real one serves the next."""
    answer = answers()[name]
    monkeypatch.setattr(client, "_SPAWN_TIMEOUT_S", 2.0)

    def serve(control: socket.socket) -> None:
        with control:
            data, ancillary, _, _ = control.recvmsg(1 << 18, socket.CMSG_SPACE(4))
            for _, _, raw in ancillary:
                os.close(array.array("i", raw[:4])[0])
            answer(control, client.REQUEST.unpack_from(data)[0])
            control.settimeout(10)
            try:
                control.recv(1)  # until the supervisor hangs up
            except OSError:
                pass

    whole = Look.take(private_tmp)

    async def main() -> None:
        async with AsyncRunner(tier=tier) as runner:
            assert (await runner.run(Code("print(1)"))).stdout == "1\n"
            before = Look.take(private_tmp)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            thread = threading.Thread(target=serve, args=(theirs,))
            thread.start()
            hostile = client.Zygote(child, ours, {"ready": True, "seccomp": "", "landlock": ""}, 0)
            hostile.attach(asyncio.get_running_loop())
            (key,) = tier._zygotes
            real, tier._zygotes[key] = tier._zygotes[key], hostile
            try:
                # It is replaced within the call, or the call fails in the way that says: nothing ran.
                result = await asyncio.wait_for(runner.run(Code("print(2)")), 60)
                assert result.stdout == "2\n"
            except FumehoodError as error:
                assert isinstance(error, StartError) and len(str(error)) < 1000
            hostile.close()
            assert child.wait(10) == -signal.SIGKILL
            thread.join(10)
            replaced = tier._zygotes[key]
            if replaced is not hostile:
                replaced.close()
            tier._zygotes[key] = real
            assert (await runner.run(Code("print(3)"))).stdout == "3\n"
            assert (
                await asyncio.to_thread(before.left, private_tmp, kept=2) == []
            )  # one may be waiting at either zygote

    asyncio.run(main())
    assert whole.left(private_tmp) == []


def test_a_host_on_which_it_cannot_start_says_which_step_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    need_tier("jail")
    from fumehood.errors import UnavailableError

    for mounts, word in (((("/no/such/folder", "/mnt/x"),), "/no/such/folder"),):
        before = set(posture.children(os.getpid()))
        with pytest.raises(UnavailableError, match=word):
            client.start(mounts=mounts)
        after = [pid for pid in posture.children(os.getpid()) if pid not in before]
        assert posture.seconds_until_gone(after, 10) is not None
    monkeypatch.setattr(client.runtime, "base_python", lambda: "/no/such/python")
    with pytest.raises(UnavailableError, match="/no/such/python"):
        client.start()


def test_a_module_that_cannot_be_preloaded_is_named() -> None:
    need_tier("jail")
    from fumehood.runner import Runner

    policy = Policy(preload=("no_such_module",))
    with Runner(tier="jail", policy=policy) as runner, pytest.raises(FumehoodError, match="no_such_module"):
        runner.run("print(1)")
