from __future__ import annotations

import enum
import json
import math
import pickle
from dataclasses import FrozenInstanceError, asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood import errors
from fumehood.errors import FumehoodError, PolicyError, UnsupportedError
from fumehood.model import (
    _LIMIT_RANGES,
    CODE_BYTES_MAX,
    HARD_LIMITS,
    Artifact,
    ArtifactLimits,
    Boundary,
    Code,
    Command,
    Control,
    Held,
    Limits,
    Mount,
    Outcome,
    Policy,
    Receipt,
    Result,
    Usage,
    check_path,
)
from fumehood.tier import Features, Probe, require

RECEIPT = Receipt("t", Boundary.KERNEL, (Control("memory", Held.HARD, "cgroup v2", "1"),))


def result(**changes: Any) -> Result:
    return replace(Result(Outcome.EXITED, 0, b"", b"", 0.1, Usage(), RECEIPT), **changes)


# -- boundaries


def test_boundaries_are_ordered_weakest_first() -> None:
    order = ["none", "limits", "interpreter", "kernel", "runtime", "user_kernel", "hardware"]
    ranks = [Boundary(name).rank for name in order]
    assert ranks == sorted(set(ranks))
    assert Boundary.EMULATED.rank == Boundary.KERNEL.rank
    assert not Boundary.EMULATED.meets(Boundary.HARDWARE)
    assert Boundary.KERNEL.meets(Boundary.KERNEL)
    assert {b.value for b in Boundary} == {*order, "emulated"}


@pytest.mark.parametrize("name", ["", "Kernel", 3, None, [], {}, b"kernel"])
def test_an_unknown_boundary_lists_the_known(name: Any) -> None:
    with pytest.raises(PolicyError, match="user_kernel, hardware"):
        Boundary.parse(name)


# -- limits

WHOLE = [name for name, (_, _, whole) in _LIMIT_RANGES.items() if whole]
ARTIFACT_FIELDS = [f.name for f in fields(ArtifactLimits)]
ABSURD = [-1, -(10**30), 10**30, math.nan, math.inf, -math.inf, True, False, "5", None, b"5", [5], 1j]


def limits(name: str, value: Any) -> Limits:
    return Limits(**{name: value})


def test_every_limit_has_a_range() -> None:
    assert [f.name for f in fields(Limits)] == list(_LIMIT_RANGES)


@pytest.mark.parametrize("name", _LIMIT_RANGES)
@pytest.mark.parametrize("value", ABSURD, ids=repr)
def test_an_absurd_limit_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(PolicyError, match=rf"limits\.{name} "):
        limits(name, value)


@pytest.mark.parametrize("name", ARTIFACT_FIELDS)
@pytest.mark.parametrize("value", [*ABSURD, 1.5], ids=repr)
def test_an_absurd_artifact_limit_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(PolicyError, match=rf"artifacts\.{name} "):
        ArtifactLimits(**{name: value})


@pytest.mark.parametrize("name", WHOLE)
def test_a_count_is_whole(name: str) -> None:
    low, _, _ = _LIMIT_RANGES[name]
    with pytest.raises(PolicyError, match=rf"limits\.{name} must be a whole number"):
        limits(name, low + 0.5)


@pytest.mark.parametrize("name", _LIMIT_RANGES)
def test_both_ends_of_a_range_are_in_it_and_what_is_beyond_is_not(name: str) -> None:
    low, high, whole = _LIMIT_RANGES[name]
    number = int if whole else float
    for end in (low, high):
        assert getattr(limits(name, number(end)), name) == end
    step = 1 if whole else 1e-6
    for beyond in (low - step, high + step):
        with pytest.raises(PolicyError, match=name):
            limits(name, number(beyond))


@given(st.sampled_from(list(_LIMIT_RANGES)), st.one_of(st.integers(), st.floats(), st.booleans(), st.text(max_size=3)))
def test_a_limit_is_in_its_range_or_refused(name: str, value: Any) -> None:
    low, high, whole = _LIMIT_RANGES[name]
    good = not isinstance(value, (bool, str)) and low <= value <= high and not (whole and isinstance(value, float))
    try:
        assert getattr(limits(name, value), name) == value
        assert good
    except PolicyError as error:
        assert not good
        assert f"limits.{name}" in str(error)


# -- mounts and policy


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("a", "/mnt/a"),
        ("", "/mnt/a"),
        (3, "/mnt/a"),
        ("/a\0", "/mnt/a"),
        ("/a", "mnt/a"),
        ("/a", "/mnt"),
        ("/a", "/mnt/"),
        ("/a", "/etc/a"),
        ("/a", "/mnt/../etc"),
        ("/a", "/mnt/a/../../etc"),
        ("/a", "//mnt/a"),
        ("/a", "/mnt/a\0"),
        ("/a", None),
    ],
)
def test_a_mount_lies_below_mnt(source: Any, target: Any) -> None:
    with pytest.raises(PolicyError, match=r"mount\.(source|target) must"):
        Mount(source, target)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("floor", "wood"),
        ("limits", {}),
        ("limits", None),
        ("artifacts", 5),
        ("overflow", "Stop"),
        ("overflow", None),
        ("hard", "memory"),
        ("hard", ("luck",)),
        ("hard", (1,)),
        ("preload", "numpy"),
        ("preload", ("import os",)),
        ("preload", ("",)),
        ("preload", ("a..b",)),
        ("egress", "pypi.org"),
        ("egress", (b"pypi.org",)),
        ("env", [("A", "1")]),
        ("env", {"": "x"}),
        ("env", {"A=B": "x"}),
        ("env", {"1A": "x"}),
        ("env", {"A\n": "x"}),
        ("env", {"A": 1}),
        ("env", {"A": "x\0"}),
        ("env", {1: "x"}),
        ("environment", ""),
        ("environment", 5),
        ("mounts", ("/a",)),
        ("image", ""),
        ("image", "--privileged"),
        ("image", "a b"),
        ("runtime", 5),
        ("runtime", "../runc"),
    ],
)
def test_a_malformed_policy_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(PolicyError, match="boundary|env" if name in ("floor", "env") else name):
        Policy(**{name: value})


def test_a_policy_cannot_be_changed_through_what_it_was_made_of() -> None:
    env = {"A": "1"}
    policy = Policy(env=env, hard=["memory"], mounts=[Mount("/a", "/mnt/a")])  # type: ignore[arg-type]
    env["A"] = "2"
    assert policy.env == {"A": "1"}
    assert policy.hard == ("memory",)
    assert isinstance(policy.mounts, tuple)
    with pytest.raises(TypeError):
        policy.env["A"] = "3"  # type: ignore[index]
    with pytest.raises(FrozenInstanceError):
        policy.limits.pids = 3  # type: ignore[misc]


def test_equal_policies_have_equal_digests_and_any_change_shows() -> None:
    base = Policy(env={"A": "1", "B": "2"})
    assert base.digest() == Policy(env={"B": "2", "A": "1"}).digest()
    assert hash(base) == hash(Policy(env={"B": "2", "A": "1"}))
    changed: dict[str, Any] = {
        "floor": "kernel",
        "limits": Limits(pids=3),
        "artifacts": ArtifactLimits(count=3),
        "overflow": "stop",
        "hard": ("memory",),
        "env": {"A": "1"},
        "environment": "demo",
        "preload": ("numpy",),
        "mounts": (Mount("/a", "/mnt/a"),),
        "egress": ("*",),
        "terminals": True,
        "image": "own",
        "runtime": "crun",
    }
    assert set(changed) == {f.name for f in fields(Policy)}
    digests = {base.digest(), *(replace(base, **{k: v}).digest() for k, v in changed.items())}
    assert len(digests) == 1 + len(changed)


def test_a_policy_as_plain_values_is_json() -> None:
    policy = Policy(floor="hardware", mounts=(Mount("/a", "/mnt/a"),), env={"A": "1"})  # type: ignore[arg-type]
    plain = json.loads(json.dumps(policy.to_dict()))
    assert plain["floor"] == "hardware"
    assert plain["limits"] == asdict(Limits())
    assert plain["mounts"] == [{"source": "/a", "target": "/mnt/a"}]


# -- programs


def test_code_takes_text_and_bytes() -> None:
    assert Code("é").data == b"\xc3\xa9"
    assert Code(b"\xff").data == b"\xff"
    assert Code("\ud800").data == b"\xed\xa0\x80"
    assert Code(b"x" * CODE_BYTES_MAX).data


@pytest.mark.parametrize("source", [None, 3, ["x"], bytearray(b"x"), b"x" * (CODE_BYTES_MAX + 1), "é" * CODE_BYTES_MAX])
def test_what_is_no_code(source: Any) -> None:
    with pytest.raises(PolicyError, match=r"^code "):
        Code(source)


@pytest.mark.parametrize("argv", [(), "ls", ("ls", 1), ("ls\0",), None])
def test_what_is_no_command(argv: Any) -> None:
    with pytest.raises(PolicyError, match="argv"):
        Command(argv)


# -- paths


@pytest.mark.parametrize(
    ("path", "clean"),
    [
        ("a", "a"),
        ("a/b.csv", "a/b.csv"),
        ("./a//b/", "a/b"),
        ("..a/b..", "..a/b.."),
        ("é/ü", "é/ü"),
        ("x" * 255, "x" * 255),
        (" ", " "),
    ],
)
def test_paths_inside_the_work_folder(path: str, clean: str) -> None:
    assert check_path(path) == clean


@pytest.mark.parametrize(
    "path",
    [
        *("", ".", "./", "/", "/a", "..", "../a", "a/..", "a/../b", "a\0b", "x" * 256, "é" * 128, "a/" * 2048 + "a"),
        *("\ud800", 3, None, b"a"),
    ],
)
def test_paths_outside_of_it(path: Any) -> None:
    with pytest.raises(PolicyError):
        check_path(path)


@given(st.text(alphabet="ab./\0\\ é", max_size=12))
def test_a_clean_path_stays_inside_and_is_a_fixed_point(path: str) -> None:
    try:
        clean = check_path(path)
    except PolicyError:
        return
    assert check_path(clean) == clean
    assert not Path(clean).is_absolute()
    assert not {"..", ".", ""} & set(clean.split("/"))


# -- results


def test_a_result_says_how_it_ended() -> None:
    assert result().ok
    assert not result(exit_code=1).ok
    assert not result(outcome=Outcome.WALL, exit_code=None).ok
    assert {o for o in Outcome if result(outcome=o).timed_out} == {Outcome.WALL, Outcome.CPU}
    assert not result(stdout_data=b"abc", usage=Usage(stdout_bytes=3)).truncated
    assert result(stdout_data=b"abc", usage=Usage(stdout_bytes=4)).truncated
    assert result(usage=Usage(stderr_bytes=1)).truncated
    assert result(stdout_data=b"\xffa").stdout == "\ufffda"


def test_a_result_as_plain_values_is_json() -> None:
    full = result(
        stdout_data=b"\xff",
        artifacts=(Artifact("a", 1, saved=Path("/o/a")), Artifact("b", 2, skipped="too big")),
        exit_code=-9,
        outcome=Outcome.SIGNALED,
    )
    plain = json.loads(json.dumps(full.to_dict()))
    assert plain["outcome"] == "signaled"
    assert plain["exit_code"] == -9
    assert plain["artifacts"][0] == {"path": "a", "size_bytes": 1, "saved": "/o/a", "skipped": None}
    assert plain["receipt"]["controls"] == [{"name": "memory", "held": "hard", "mechanism": "cgroup v2", "value": "1"}]
    assert RECEIPT.control("memory") is RECEIPT.controls[0]
    assert RECEIPT.control("pids") is None


# -- errors


def every_error() -> list[type[FumehoodError]]:
    found = [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, FumehoodError)]
    assert len(found) > 8
    return found


@pytest.mark.parametrize("kind", every_error())
def test_an_error_says_where_and_what_to_do(kind: type[FumehoodError]) -> None:
    error = kind("it failed", tier="jail", remedy="mend it")
    assert (str(error), error.tier, error.remedy) == ("jail: it failed (mend it)", "jail", "mend it")
    assert str(kind("it failed")) == "it failed"
    assert kind.__name__ in (errors.__doc__ or "")


def test_the_error_tree_is_as_drawn() -> None:
    for kind, bases in {
        errors.PolicyError: (FumehoodError, ValueError),
        errors.UnsupportedError: (PolicyError,),
        errors.PoolTimeoutError: (errors.StartError, TimeoutError),
        errors.FileError: (FumehoodError, OSError),
        errors.ClosedError: (FumehoodError, RuntimeError),
    }.items():
        assert all(issubclass(kind, base) for base in bases)


@pytest.mark.parametrize("kind", every_error())
def test_an_error_survives_its_journey_to_another_process(kind: type[FumehoodError]) -> None:
    error = pickle.loads(pickle.dumps(kind("it failed", tier="jail")))  # noqa: S301 - our own bytes
    assert (type(error), error.message, error.tier) == (kind, "it failed", "jail")


# -- require


class Stub:
    name = "stub"

    def __init__(self, features: Features, hard: tuple[str, ...] = ()) -> None:
        self.features = features
        self._hard = hard

    def probe(self) -> Probe:
        return Probe(True, hard=self._hard)

    async def create(self, policy: Policy) -> Any:
        raise NotImplementedError

    async def close(self) -> None:
        return None


BARE = Features(Boundary.KERNEL, "")
FULL = Features(
    Boundary.KERNEL,
    "",
    commands=True,
    environments=True,
    mounts=True,
    images=True,
    runtimes=True,
    egress_open=True,
    egress_list=True,
)


@pytest.mark.parametrize(
    ("policy", "unmet"),
    [
        (Policy(environment="demo"), "environment"),
        (Policy(preload=("numpy",)), "preload"),
        (Policy(mounts=(Mount("/a", "/mnt/a"),)), "mounts"),
        (Policy(image="own"), "image"),
        (Policy(runtime="crun"), "runtime"),
        (Policy(egress=("*",)), "egress to everywhere"),
        (Policy(egress=("pypi.org",)), "egress by an allow-list"),
        (Policy(egress=("*", "pypi.org")), "egress by an allow-list"),
    ],
)
def test_a_tier_that_lacks_a_feature_refuses_by_name(policy: Policy, unmet: str) -> None:
    require(Stub(FULL), policy)
    with pytest.raises(UnsupportedError) as caught:
        require(Stub(BARE), policy)
    assert caught.value.unmet == (unmet,)
    assert caught.value.tier == "stub"
    assert caught.value.remedy


def test_commands_are_refused_by_a_tier_without_them() -> None:
    require(Stub(BARE), Policy(), program=Code("1"))
    require(Stub(FULL), Policy(), program=Command(("ls",)))
    with pytest.raises(UnsupportedError, match="commands"):
        require(Stub(BARE), Policy(), program=Command(("ls",)))


@pytest.mark.parametrize("limit", HARD_LIMITS)
def test_a_hard_limit_that_the_host_lacks_is_refused(limit: str) -> None:
    require(Stub(BARE, hard=HARD_LIMITS), Policy(hard=(limit,)))
    others = tuple(name for name in HARD_LIMITS if name != limit)
    with pytest.raises(UnsupportedError, match=f"a hard limit on {limit}"):
        require(Stub(BARE, hard=others), Policy(hard=(limit,)))


@pytest.mark.parametrize("floor", list(Boundary))
@pytest.mark.parametrize("has", list(Boundary))
def test_neither_floor_is_ever_undercut(floor: Boundary, has: Boundary) -> None:
    tier = Stub(Features(has, ""))
    refused = [_refused(tier, Policy(floor=floor)), _refused(tier, Policy(), floor=floor)]
    assert refused == [has.rank < floor.rank] * 2


def _refused(tier: Stub, policy: Policy, floor: Boundary | None = None) -> bool:
    try:
        require(tier, policy, floor=floor)
    except UnsupportedError as error:
        assert "floor" in error.message
        return True
    return False


def test_all_that_is_unmet_is_named_at_once() -> None:
    policy = Policy(floor=Boundary.HARDWARE, environment="e", egress=("*",), hard=("memory",))
    with pytest.raises(UnsupportedError) as caught:
        require(Stub(BARE), policy, floor=Boundary.RUNTIME, program=Command(("ls",)))
    assert len(caught.value.unmet) == 6


def test_values_in_json_are_words() -> None:
    for kind in (Boundary, Outcome, Held):
        assert issubclass(kind, enum.Enum)
        assert all(isinstance(member.value, str) for member in kind)
