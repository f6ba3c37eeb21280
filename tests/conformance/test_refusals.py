"""What a tier does not promise it refuses, by name and before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fumehood.errors import PolicyError, UnavailableError, UnsupportedError
from fumehood.model import Code, Command, Mount, Policy
from fumehood.runner import AsyncRunner, Runner
from fumehood.tier import Features

POLICIES: dict[str, tuple[Callable[[Features], bool], Policy]] = {
    "environment": (lambda f: f.environments, Policy(environment="a-name")),
    "preload": (lambda f: f.environments, Policy(preload=("json",))),
    "mounts": (lambda f: f.mounts, Policy(mounts=(Mount("/usr/share", "/mnt/share"),))),
    "egress to everywhere": (lambda f: f.egress_open, Policy(egress=("*",))),
    "egress by an allow-list": (lambda f: f.egress_list, Policy(egress=("example.org",))),
}


@pytest.mark.parametrize("part", POLICIES)
def test_a_part_of_a_policy_that_is_not_promised(tier_name: str, features: Features, part: str) -> None:
    promised, policy = POLICIES[part]
    if promised(features):
        pytest.skip(f"tier {tier_name} promises it")
    with pytest.raises(UnsupportedError) as caught:
        Runner(tier=tier_name, policy=policy)
    assert caught.value.unmet == (part,) and caught.value.tier == tier_name and caught.value.remedy


def test_all_unmet_parts_are_named_at_once(tier_name: str, features: Features) -> None:
    unmet = [part for part, (promised, _) in POLICIES.items() if not promised(features) and part != "preload"]
    unmet = [part for part in unmet if part != "egress to everywhere"]  # one policy cannot ask for both kinds
    policy = Policy(
        environment="a-name" if "environment" in unmet else None,
        mounts=(Mount("/usr/share", "/mnt/share"),) if "mounts" in unmet else (),
        egress=("example.org",) if "egress by an allow-list" in unmet else (),
    )
    if not unmet:
        pytest.skip(f"tier {tier_name} promises all of it")
    with pytest.raises(UnsupportedError) as caught:
        Runner(tier=tier_name, policy=policy)
    assert sorted(caught.value.unmet) == sorted(unmet)


def test_commands(runner: Runner, features: Features) -> None:
    if features.commands:
        assert runner.run(Command(("echo", "hi"))).stdout == "hi\n"
    else:
        with pytest.raises(UnsupportedError, match="commands"):
            runner.run(Command(("echo", "hi")))


def test_live_sandboxes(runner: Runner, features: Features) -> None:
    if features.live:
        with runner.open() as sandbox:
            sandbox.exec("x = 1")
            assert sandbox.exec("print(x)").stdout == "1\n"
    else:
        with pytest.raises(UnsupportedError, match="live"), runner.open():
            pass


def test_files(runner: Runner, features: Features, tmp_path: Path) -> None:
    if features.files:
        result = runner.run("open('g', 'w').write(open('f').read())", files={"f": b"x"}, out=tmp_path)
        assert [a.path for a in result.artifacts] == ["g"]
    else:
        with pytest.raises(UnsupportedError, match="files"):
            runner.run("1", files={"f": b"x"})
        with pytest.raises(UnsupportedError, match="files"):
            runner.run("1", out=tmp_path)


def test_mounts_are_read_only_below_mnt(tier_name: str, features: Features) -> None:
    if not features.mounts:
        pytest.skip("refused: see above")
    with Runner(tier=tier_name, policy=Policy(mounts=(Mount("/usr/share/zoneinfo", "/mnt/zones"),))) as runner:
        result = runner.run(
            "print(len(open('/mnt/zones/UTC', 'rb').read()) > 50)\n"
            "try: open('/mnt/zones/new', 'w')\nexcept OSError as e: print(e.strerror)\n"
        )
        assert result.stdout.split("\n")[0] == "True"
        assert result.stdout.split("\n")[1] in ("Read-only file system", "Permission denied")


def test_an_environment_that_nobody_built_is_refused_by_name(tier_name: str, features: Features) -> None:
    if not features.environments:
        pytest.skip("refused: see above")
    policy = Policy(environment="no-such-environment")
    with pytest.raises(PolicyError, match="no-such-environment"), Runner(tier=tier_name, policy=policy) as runner:
        runner.run("print('ran')")


def test_a_policy_below_the_floor_is_refused(tier_name: str, features: Features) -> None:
    for boundary in type(features.boundary):
        if features.boundary.meets(boundary):
            Runner(tier=tier_name, policy=Policy(floor=boundary)).close()
        else:
            with pytest.raises(UnsupportedError, match="floor"):
                Runner(tier=tier_name, policy=Policy(floor=boundary))


def test_unknown_names() -> None:
    with pytest.raises(PolicyError, match="unknown tier 'nonesuch'"):
        Runner(tier="nonesuch")
    with pytest.raises(PolicyError, match="unknown boundary"):
        Runner(floor="nonesuch")


def test_a_floor_that_nothing_meets_lists_every_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    from fumehood import registry

    monkeypatch.setattr(registry, "_TIERS", {k: v for k, v in registry._TIERS.items() if k in ("jail", "subprocess")})
    with pytest.raises(UnavailableError) as caught:
        Runner(floor="hardware")
    assert "jail" in str(caught.value) and "subprocess" in str(caught.value)


def test_probe_never_raises_and_says_what_to_do(tier_name: str, runner: Runner) -> None:
    probe = runner.tier.probe()
    assert probe.available and set(probe.hard) <= {"memory", "pids", "cpu", "disk"}
    assert runner.tier.name == tier_name and runner.tier.features.summary


def test_a_closed_runner_is_closed(tier_name: str, async_runner_factory: Callable[..., AsyncRunner]) -> None:
    import asyncio

    from fumehood.errors import ClosedError

    runner = Runner(tier=tier_name)
    runner.close()
    runner.close()
    with pytest.raises(ClosedError):
        runner.run("print(1)")

    async def main() -> None:
        closed = async_runner_factory()
        await closed.close()
        with pytest.raises(ClosedError):
            await closed.run(Code("print(1)"))

    asyncio.run(main())
