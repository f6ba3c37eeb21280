"""When the engine fails: a typed error with its remedy, nothing weaker, nothing left."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from asked import labelled
from containers_proxy import Proxy

from fumehood import AsyncRunner, Mount, Policy, Runner
from fumehood.errors import OutcomeUnknownError, PolicyError, StartError, UnavailableError
from fumehood.images.engine import Word, socket_paths
from fumehood.images.service import reach
from fumehood.tiers.container.tier import ContainerTier, DockerTier, PodmanTier


@pytest.fixture
def proxied(engine_tier: Word, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Word, Proxy]]:
    """An engine behind a proxy that the tier is pointed to."""
    service = reach(engine_tier)
    folder = tempfile.mkdtemp(prefix="fumehood-test-")
    proxy = Proxy(service.engine.path, f"{folder}/engine.sock")
    variable = "DOCKER_HOST" if engine_tier == "docker" else "CONTAINER_HOST"
    monkeypatch.setenv(variable, f"unix://{proxy.path}")
    assert socket_paths(engine_tier)[0] == [proxy.path]
    try:
        yield engine_tier, proxy
    finally:
        proxy.close()
        service.close()
        Path(proxy.path).unlink()
        os.rmdir(folder)


def tier(word: Word, **options: str) -> ContainerTier:
    return DockerTier(**options) if word == "docker" else PodmanTier(**options)


def refusal(status: int, message: str) -> bytes:
    body = json.dumps({"message": message, "cause": message}).encode()
    return b"HTTP/1.0 %d Refused\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


def test_a_missing_image_names_the_command(engine_tier: Word) -> None:
    probe = tier(engine_tier, image="no-such-image").probe()
    assert not probe.available and "no-such-image" in probe.reason
    assert f"fumehood image build no-such-image --engine {engine_tier}" in probe.remedy
    with (
        Runner(tier=tier(engine_tier, image="example.org/no/such:1")) as runner,
        pytest.raises(UnavailableError) as told,
    ):
        runner.run("print(1)")
    assert "fumehood image pull example.org/no/such:1" in str(told.value)


def test_a_missing_runtime_is_named(engine_tier: Word) -> None:
    with Runner(tier=tier(engine_tier, runtime="no-such-runtime")) as runner, pytest.raises(UnavailableError) as told:
        runner.run("print(1)")
    assert "no-such-runtime" in str(told.value)
    assert labelled(engine_tier) == []


def test_no_engine_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")
    probe = DockerTier().probe()
    assert not probe.available and "/nonexistent/docker.sock" in probe.reason and probe.remedy


def test_an_engine_over_tcp_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:2375")
    probe = DockerTier().probe()
    assert not probe.available and "Unix socket" in probe.reason


@pytest.mark.parametrize(
    ("status", "message", "error", "told"),
    [
        (500, "no space left on device", StartError, "no space left"),
        (403, "authorization denied by plugin", StartError, "authorization denied"),
        (404, "No such image: localhost/fumehood/python:latest", UnavailableError, "fumehood image build"),
    ],
)
def test_the_engine_refuses(
    proxied: tuple[Word, Proxy], status: int, message: str, error: type[Exception], told: str
) -> None:
    word, proxy = proxied
    with Runner(tier=tier(word)) as runner:
        assert runner.run("print(1)").ok
        proxy.answers.append((b"/containers/create", refusal(status, message)))
        with pytest.raises(error, match=told):
            runner.run("print(2)")
        proxy.answers.clear()
        assert runner.run("print(3)").stdout == "3\n"
    assert labelled(word) == []


def test_what_answers_is_no_engine(proxied: tuple[Word, Proxy]) -> None:
    word, proxy = proxied
    proxy.answers.append((b"", b"SSH-2.0-OpenSSH_9.2\r\n\r\n"))
    probe = tier(word).probe()
    assert not probe.available and probe.reason


def test_the_engine_ends_in_the_middle_of_a_run(proxied: tuple[Word, Proxy]) -> None:
    word, proxy = proxied
    started = threading.Event()
    with Runner(tier=tier(word)) as runner:
        failure: list[BaseException] = []

        def run() -> None:
            try:
                runner.run(
                    "import time\nprint('on', flush=True)\ntime.sleep(600)", sink=lambda stream, data: started.set()
                )
            except BaseException as error:
                failure.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        assert started.wait(60)
        proxy.cut()
        thread.join(60)
        assert not thread.is_alive()
        assert isinstance(failure[0], OutcomeUnknownError), failure
        with pytest.raises(UnavailableError):
            runner.run("print(1)")
        deadline = time.monotonic() + 60  # the engine learns of the death from its monitor of the container
        while running := [c for c in labelled(word, path=proxy.target) if c["State"] == "running"]:
            assert time.monotonic() < deadline, running
            time.sleep(0.1)
        proxy.cut_off = False
        assert runner.run("print(2)").stdout == "2\n"
    assert labelled(word) == []


def test_a_run_given_up_while_its_container_is_made_leaves_none(proxied: tuple[Word, Proxy]) -> None:
    word, proxy = proxied
    came, go = proxy.held[b"/containers/create"] = (threading.Event(), threading.Event())

    async def main() -> None:
        async with AsyncRunner(tier=tier(word)) as runner:
            task = asyncio.create_task(runner.run("print(1)"))
            assert await asyncio.to_thread(came.wait, 60)
            task.cancel()
            await asyncio.sleep(0.05)
            assert not task.done()  # the engine was asked, and will do it
            go.set()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(asyncio.shield(task), 60)
            assert await asyncio.to_thread(labelled, word, path=proxy.target) == []

    try:
        asyncio.run(main())
    finally:
        go.set()


def test_a_run_given_up_twice_is_undone_before_its_tier_is_closed(proxied: tuple[Word, Proxy]) -> None:
    word, proxy = proxied
    came, go = proxy.held[b"/containers/create"] = (threading.Event(), threading.Event())

    async def main() -> None:
        async with AsyncRunner(tier=tier(word)) as runner:
            task = asyncio.create_task(runner.run("print(1)"))
            assert await asyncio.to_thread(came.wait, 60)
            while not task.done():
                task.cancel()
                await asyncio.sleep(0.05)
            asyncio.get_running_loop().call_later(0.1, go.set)

    try:
        asyncio.run(main())
    finally:
        go.set()
    assert labelled(word, path=proxy.target) == []


@pytest.mark.parametrize("source", ["/", "/run", "/var/run", "/run/docker.sock"])
def test_the_engines_socket_is_never_mounted(container_tier: str, source: str) -> None:
    policy = Policy(mounts=(Mount(source, "/mnt/it"),))
    with Runner(tier=container_tier, policy=policy) as runner, pytest.raises(PolicyError, match="socket"):
        runner.run("print(1)")


def test_two_runtimes_that_are_there(engine_tier: Word) -> None:
    async def receipt(chosen: ContainerTier) -> str:
        sandbox = await chosen.create(Policy())
        try:
            control = sandbox.receipt.control("runtime")
            assert control is not None
            return control.value
        finally:
            await sandbox.close()
            await chosen.close()

    assert asyncio.run(receipt(tier(engine_tier, runtime="runc"))) == "runc"
