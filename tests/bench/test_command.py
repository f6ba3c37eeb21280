"""The plain command of a container tier asks for what the tier asks for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.needs import need_tier

from fumehood import registry
from fumehood.bench import command
from fumehood.bench.command import PlainCommand, docker_flags, plain_command, podman_flags
from fumehood.bench.figures import Report, Spread, TierFigures
from fumehood.bench.measure import Bench, Effort
from fumehood.bench.report import text
from fumehood.bench.targets import judge
from fumehood.model import Policy
from fumehood.tiers.container import spec

WANTED = spec.Container(
    name="x",
    policy=Policy(),
    image="image",
    user=1234,
    held=("memory", "cpu", "pids"),
    owner="1-2-3-4",
    runtime=None,
    binds=(),
    seccomp="/profile.json",
)
#: What `docker run` and `podman run` do by themselves, or have no flag for.
DOCKER_UNSAID = {"MaskedPaths", "ReadonlyPaths"}
DOCKER_ATTACHED = {"Image", "Cmd", "OpenStdin", "StdinOnce", "AttachStdin", "AttachStdout", "AttachStderr", "Tty"}
PODMAN_UNSAID = {"name", "image", "command", "stdin", "terminal", "no_new_privileges", "read_only_filesystem"}


class Seen(dict[str, Any]):
    """A dictionary that knows which of its keys were looked at."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.keys_seen: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.keys_seen.add(key)
        return super().__getitem__(key)


def test_nothing_that_docker_is_asked_for_is_forgotten() -> None:
    body = Seen(spec.docker_body(WANTED))
    host = body["HostConfig"] = Seen(body["HostConfig"])
    flags = docker_flags(body)
    assert set(body) - body.keys_seen == DOCKER_ATTACHED | {"NetworkDisabled"}
    assert set(host) - host.keys_seen == DOCKER_UNSAID | {"ReadonlyRootfs"}
    assert {"--network=none", "--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges"} <= set(flags)
    assert "--security-opt=seccomp=/profile.json" in flags and "--user=1234:1234" in flags
    assert f"--memory={Policy().limits.memory_bytes}" in flags
    assert sum(flag.startswith("--tmpfs=") for flag in flags) == 3


def test_nothing_that_podman_is_asked_for_is_forgotten() -> None:
    body = Seen(spec.podman_body(WANTED))
    flags = podman_flags(body)
    assert set(body) - body.keys_seen == PODMAN_UNSAID | {"unsetenvall"}
    assert {"--network=none", "--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges"} <= set(flags)
    assert {"--unsetenv-all", "--pid=private", "--cgroupns=private", "--log-driver=none"} <= set(flags)
    assert not any("nr_inodes" in flag for flag in flags)


@pytest.mark.parametrize("tier", ["docker", "podman", "gvisor"])
def test_the_command_runs_here(tier: str) -> None:
    need_tier(tier)

    async def main() -> None:
        async with plain_command(registry.make(tier)) as found:
            assert found is not None and tier in (found.title.split()[0], "gvisor")
            assert found.once() > 0 and found.once() > 0  # a name is not taken twice

    asyncio.run(main())


def test_a_tier_without_a_command_has_none() -> None:
    async def main() -> None:
        async with plain_command(registry.make("jail")) as found:
            assert found is None

    asyncio.run(main())


def test_a_command_that_does_not_print_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="it failed: no"):
        PlainCommand("it", ("/bin/sh", "-c", "echo no >&2; exit 1")).once()
    assert PlainCommand("it", ("/bin/sh", "-c", "echo 1")).once() < command._TIMEOUT_S


def test_containers_are_held_to_their_command() -> None:
    of = Spread.of
    most, more, less = of([1.09], [1.0]), of([1.11], [1.0]), of([0.2], [1.0])
    good = TierFigures("gvisor", cold_to_command=most, on_demand_to_command=most, warm_to_command=less)
    bad = TierFigures("docker", cold_to_command=more, on_demand_to_command=more, warm_to_command=of([0.21], [1.0]))
    assert [verdict.met for verdict in judge(good)] == [True, True, True, None]
    assert [verdict.met for verdict in judge(bad)] == [False, False, False, None]


def test_a_container_tier_takes_turns_with_its_command_and_the_jail() -> None:
    need_tier("gvisor")

    async def main() -> TierFigures:
        bench = Bench(lambda: registry.make("gvisor"), Effort(rounds=2, rounds_min=2), lambda line: None)
        await bench.cold()
        await bench.on_demand()
        return bench.figures

    figures = asyncio.run(main())
    assert figures.command_title.startswith("runsc run (") and figures.command is not None
    assert figures.cold is not None and figures.cold_to_command is not None
    assert figures.cold_to_command.p50 == pytest.approx(figures.cold.p50_ms / figures.command.p50_ms, rel=0.01)
    if registry.make("jail").probe().available:
        assert figures.jail["cold"].count == 2
    assert figures.on_demand is not None and figures.on_demand_to_command is not None
    machine = {"python": "3"}
    found = text(Report(machine, "2026-01-02", "0", True, [figures], {}))
    assert "the jail beside it, cold" in found and "cold as ratio to `runsc run" in found
    assert "on demand as ratio to `runsc run" in found
