from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood import policy_file
from fumehood.errors import PolicyError
from fumehood.model import ArtifactLimits, Boundary, GiB, KiB, Limits, MiB, Mount, Policy
from fumehood.policy_file import load, parse, parse_bytes_size, parse_duration

WHOLE = """
floor = "user_kernel"
overflow = "stop"
hard = ["memory", "pids"]
environment = "demo"
preload = ["numpy", "matplotlib.pyplot"]
egress = ["pypi.org"]
terminals = true
image = "registry.example:5000/own/python@sha256:0a"
runtime = "crun"

[limits]
wall_s = "500ms"
cpu_s = 2
cpus = 0.5
memory_bytes = "512MiB"
pids = 8
disk_bytes = "64k"
files = 100
open_files = 32
output_bytes = 1000
display_bytes = 2000

[artifacts]
count = 3
total_bytes = "1MB"
depth = 2

[env]
LANG = "C.UTF-8"

[[mounts]]
source = "/srv/a"
target = "/mnt/a"

[[mounts]]
source = "/srv/b"
target = "/mnt/b/c"
"""


def problem(text: str) -> str:
    with pytest.raises(PolicyError) as caught:
        parse(text, source="p.toml")
    assert "p.toml" in caught.value.message
    return caught.value.message


def test_every_key_is_loaded() -> None:
    policy = parse(WHOLE)
    assert policy == Policy(
        floor=Boundary.USER_KERNEL,
        limits=Limits(0.5, 2, 0.5, 512 * MiB, 8, 64 * KiB, 100, 32, 1000, 2000),
        artifacts=ArtifactLimits(3, 1_000_000, 2),
        overflow="stop",
        hard=("memory", "pids"),
        env={"LANG": "C.UTF-8"},
        environment="demo",
        preload=("numpy", "matplotlib.pyplot"),
        mounts=(Mount("/srv/a", "/mnt/a"), Mount("/srv/b", "/mnt/b/c")),
        egress=("pypi.org",),
        terminals=True,
        image="registry.example:5000/own/python@sha256:0a",
        runtime="crun",
    )
    default = Policy()
    unset = [f.name for f in fields(Policy) if getattr(policy, f.name) == getattr(default, f.name)]
    unset += [f.name for f in fields(Limits) if getattr(policy.limits, f.name) == getattr(default.limits, f.name)]
    assert unset == [], "this test no longer sets every field"


def test_an_empty_file_is_the_default_policy() -> None:
    assert parse("") == Policy()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[limits]\nwal_s = 1", ["'limits.wal_s'", "limits.wall_s?"]),
        ("[limits]\nmemory = 1", ["'limits.memory'", "limits.memory_bytes?"]),
        ("[limits]\nwall = 1", ["'limits.wall'", "limits.wall_s?"]),
        ("flor = 'kernel'", ["'flor'", "floor?"]),
        ("[artifacts]\ncuont = 1", ["'artifacts.cuont'", "artifacts.count?"]),
        ("[[mounts]]\nsource='/a'\ntarget='/mnt/a'\nmode='rw'", ["'mounts[1].mode'", "known keys", "mounts[1].source"]),
        ("zzzzzz = 1", ["'zzzzzz'", "known keys are floor, limits"]),
    ],
)
def test_unknown_keys_are_named_with_the_nearest(text: str, expected: list[str]) -> None:
    message = problem(text)
    for part in ["unknown key", *expected]:
        assert part in message


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("limits = 3", "limits: must be a table"),
        ("artifacts = []", "artifacts: must be a table"),
        ("env = 'A=1'", "env"),
        ("[env]\nA = 1", "env.A"),
        ("[env]\n'A B' = 'x'", "A B"),
        ("floor = 3", "floor"),
        ("floor = 'wood'", "floor"),
        ("floor = {a=1}", "floor"),
        ("hard = 'memory'", "hard"),
        ("hard = ['luck']", "hard"),
        ("preload = ['a b']", "preload"),
        ("egress = [1]", "egress"),
        ("overflow = 'spill'", "overflow"),
        ("environment = 5", "environment"),
        ("mounts = {source='/a', target='/mnt/a'}", "mounts: must be an array of tables"),
        ("[[mounts]]\nsource = '/a'", "mounts[1].target is missing"),
        ("[[mounts]]\nsource = 'a'\ntarget = '/mnt/a'", "mounts[1]: mount.source"),
        ("[[mounts]]\nsource = '/a'\ntarget = '/etc'", "mounts[1]: mount.target"),
        ("[limits]\npids = '64'", "limits.pids"),
        ("[limits]\npids = 1.5", "limits.pids"),
        ("[limits]\npids = true", "limits.pids"),
        ("[limits]\nwall_s = nan", "limits.wall_s"),
        ("[limits]\nwall_s = -inf", "limits.wall_s"),
        ("[limits]\nwall_s = -1", "limits.wall_s"),
        ("[limits]\nwall_s = '5 parsecs'", "limits.wall_s"),
        ("[limits]\nwall_s = 2026-11-30", "limits.wall_s"),
        ("[limits]\nmemory_bytes = '1.0001k'", "limits.memory_bytes"),
        ("[limits]\nmemory_bytes = '9999999TiB'", "limits.memory_bytes"),
        ("[limits]\nmemory_bytes = 'lots'", "limits.memory_bytes"),
    ],
)
def test_wrong_values_are_named(text: str, named: str) -> None:
    assert named in problem(text)


def test_all_problems_are_reported_together() -> None:
    message = problem("flor='kernel'\noverflow='x'\n[limits]\nwal_s=1\npids=-1\n[[mounts]]\nsource=1\n[env]\nA=1")
    assert "6 problems" in message
    for part in ("flor", "overflow", "limits.wal_s", "limits.pids", "mounts[1].target", "env.A"):
        assert part in message


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("floor = 'kernel'\nfloor = 'kernel'", ["line 2", "'floor'"]),
        ("[limits]\npids = 1\npids = 2", ["line 3", "'pids'"]),
        ("[limits]\npids = 1\n[limits]\ncpus = 1", ["line 3", "[limits]"]),
        ("floor = ", ["line 1", "'floor'"]),
        ("a = " + "[" * 20_000, ["nested too deeply"]),
        ("[limits]\npids = " + "9" * 5000, ["not TOML"]),
    ],
)
def test_what_is_not_toml_is_located(text: str, parts: list[str]) -> None:
    message = problem(text)
    for part in parts:
        assert part in message


@given(st.text(max_size=200))
def test_any_text_gives_a_policy_or_a_policy_error(text: str) -> None:
    try:
        assert isinstance(parse(text), Policy)
    except PolicyError:
        pass


_VALUES = st.recursive(
    st.one_of(st.booleans(), st.integers(), st.floats(), st.text(max_size=8)), lambda v: st.lists(v, max_size=3)
)


@given(st.sampled_from([f.name for f in fields(Policy)] + ["limits.pids", "limits.wall_s", "artifacts.count"]), _VALUES)
def test_any_value_of_a_known_key_gives_a_policy_or_names_the_key(key: str, value: object) -> None:
    text = f"{key} = {_toml(value)}"
    try:
        parse(text)
    except PolicyError as error:
        assert key.rpartition(".")[2] in error.message or "not TOML" in error.message, error.message


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, str):
        return '"' + "".join(f"\\U{ord(c):08X}" for c in value) + '"'
    return repr(value)


def test_load_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text("floor = 'kernel'\n")
    assert load(path) == Policy(floor=Boundary.KERNEL)
    path.write_bytes(b"floor = 'kernel'\n# \xff\n")
    with pytest.raises(PolicyError, match=r"p\.toml' is not UTF-8 \(line 2\)"):
        load(path)
    path.write_bytes(b"#" * (policy_file.FILE_BYTES_MAX + 1))
    with pytest.raises(PolicyError, match=r"p\.toml' is larger"):
        load(str(path))
    with pytest.raises(PolicyError, match=r"none\.toml': No such file"):
        load(tmp_path / "none.toml")
    with pytest.raises(PolicyError, match="Is a directory"):
        load(tmp_path)
    with pytest.raises(PolicyError, match="cannot read"):
        load("nul\0.toml")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("17b", 17),
        ("64k", 64 * KiB),
        ("64K", 64 * KiB),
        ("64KiB", 64 * KiB),
        ("64kB", 64_000),
        ("256MiB", 256 * MiB),
        ("256 MiB", 256 * MiB),
        ("10MB", 10_000_000),
        ("1.5GiB", 3 * GiB // 2),
        ("2g", 2 * GiB),
        ("1T", 1024 * GiB),
        ("0.1TB", 100_000_000_000),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "k", "-1", "+1", "1e3", "nan", "0x10", "1_000", "1 k b", "1kk", "0.3", "1.0001k", "١", "9" * 19, "1\n"]
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(PolicyError, match="is not a"):
        parse_bytes_size(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("5", 5), ("1.5", 1.5), ("5s", 5), ("500ms", 0.5), ("2m", 120), ("1h", 3600), ("0.1s", 0.1)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "-5s", "nan", "inf", "1e3", "5S", "5M", "5 min", "1d", "٣s", "9" * 19])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(PolicyError, match="is not a time"):
        parse_duration(text)


@given(st.integers(0, 1 << 40))
def test_a_whole_number_means_itself(size: int) -> None:
    assert parse_bytes_size(str(size)) == size
