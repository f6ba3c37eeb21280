"""Fixtures for every tier: the suite below ``conformance/`` takes each tier of the registry as a parameter.

A tier that this host lacks is skipped by name, with its own reason and remedy. The environment variable
``FUMEHOOD_REQUIRE_TIERS`` (names with commas, or ``all``) makes a failure of that: continuous integration sets it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import e2b_endpoint
from support.needs import RunnerFactory, need_tier
from support.not_applicable import reason_for
from support.residue import own_folder
from support.timed import PAUSE_S, TRIES, promise_of

from fumehood import registry
from fumehood.model import Policy
from fumehood.runner import AsyncRunner, Runner
from fumehood.tier import Features

#: Tests that take up to a minute in some tier. They come early, so that no worker waits for another's at the end.
LONG = (
    "test_a_run_that_is_cancelled_at_any_point_leaves_nothing",
    "test_many_runs_leave_nothing",
    "test_all_of_this_as_an_ordinary_user",
    "test_all_164_pass",
    "test_every_tier_shows_the_same",
    "test_thousand_runs.py",
    "test_many_runs_at_once",
)

#: Folders with tests of milliseconds: a worker takes a file of them at once, since asking for each costs more than it.
QUICK = ("agent/", "attacks/", "cli/", "unit/", "test_docs.py", "test_layers.py", "containers/test_units.py")

# A shell has what it starts in the background ignore it, and so would all that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _nothing_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The suite's own temporary files lie elsewhere, and are kept."""
    tmp_path_factory.getbasetemp()
    with own_folder():
        yield
        e2b_endpoint.stop()


@pytest.fixture(params=registry.names())
def tier_name(request: pytest.FixtureRequest) -> str:
    """Every tier of the registry in turn."""
    name: str = request.param
    need_tier(name)
    return name


@pytest.fixture
def features(tier_name: str) -> Features:
    """What the tier under test promises."""
    return registry.make(tier_name).features


@pytest.fixture
def full_python(tier_name: str, features: Features) -> None:
    """For tests whose programs need more than a subset of Python."""
    if not features.full_python:
        pytest.skip(f"tier {tier_name} runs a subset of Python and says so in its features")


class _Shared:
    """Runners with the default policy, by tier."""

    def __init__(self) -> None:
        self._made: dict[str, Runner] = {}

    def get(self, name: str) -> Runner:
        """The tier's one, made when it is first asked for."""
        if name not in self._made:
            self._made[name] = Runner(tier=name)
        return self._made[name]

    def close(self) -> None:
        """End them all; the next test that asks gets another."""
        while self._made:
            self._made.popitem()[1].close()


@pytest.fixture(scope="session")
def _shared_runners() -> Iterator[_Shared]:
    shared = _Shared()
    try:
        yield shared
    finally:
        shared.close()


@pytest.fixture
def runner(tier_name: str, _shared_runners: _Shared) -> Runner:
    """A runner with the default policy, shared by the tests of this process."""
    return _shared_runners.get(tier_name)


@pytest.fixture
def runner_factory(tier_name: str) -> Iterator[RunnerFactory]:
    """Makes runners of the tier under test by policy; closed at the test's end."""
    with contextlib.ExitStack() as stack:

        def make(policy: Policy | None = None) -> Runner:
            return stack.enter_context(Runner(tier=tier_name, policy=policy))

        yield make


@pytest.fixture
def async_runner_factory(tier_name: str) -> Callable[..., AsyncRunner]:
    """Makes asynchronous runners of the tier under test; the test closes them."""

    def make(policy: Policy | None = None) -> AsyncRunner:
        return AsyncRunner(tier=tier_name, policy=policy)

    return make


@pytest.fixture
def private_tmp(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory, _shared_runners: _Shared
) -> Iterator[Path]:
    """A folder of its own for everything that the supervisor keeps in temporary files, so that it can be counted.

    It must be passable by all, since sandboxes started by root run as other users. Shared runners are ended first: a
    tier that makes the next sandbox after a run would have it here, and lose it with this folder.
    """
    _shared_runners.close()
    tmp_path_factory.getbasetemp()  # before this folder is the one for temporary files
    folder = tempfile.mkdtemp(prefix="fumehood-test-")
    os.chmod(folder, 0o755)
    monkeypatch.setattr(tempfile, "tempdir", folder)
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Deal the tests to workers, and mark what :mod:`support.not_applicable` and :mod:`support.timed` name.

    xdist deals groups in the order of their first tests (``--no-loadscope-reorder``): what one worker must do alone
    comes first, single tests, which even out how long the workers take, last.
    """
    for item in items:
        tier = _tier_of(item)
        reason = reason_for(tier, item.nodeid) if tier is not None else None
        if reason is not None:
            item.add_marker(pytest.mark.xfail(reason=f"not applicable to {tier}: {reason}", strict=True))
        if promise_of(item.nodeid) is not None:
            item.add_marker(pytest.mark.flaky(reruns=TRIES, reruns_delay=PAUSE_S))
        if (group := _group_of(item, tier)) is not None:
            item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=_turn)


def _tier_of(item: pytest.Item) -> str | None:
    """The tier that the test is a test of, if it names one."""
    if "microvm/" in item.nodeid:
        return "microvm"
    callspec = getattr(item, "callspec", None)
    if callspec is None:
        return None
    first = item.name.partition("[")[2].partition("-")[0].rstrip("]")  # a test may name its tiers itself
    return str(callspec.params.get("tier_name", first))


def _group_of(item: pytest.Item, tier: str | None) -> str | None:
    """Tests with one group go to one worker, in turn."""
    if tier in ("docker", "podman"):
        return tier  # they count what an engine holds
    path = item.nodeid.partition("::")[0].removeprefix("tests/")
    if tier not in registry.names() and path.startswith(QUICK):
        return path
    return None


def _turn(item: pytest.Item) -> tuple[bool, ...]:
    """Lowest first: the engines' groups, other tests that take long, what is dealt by file or group, the others."""
    mark = item.get_closest_marker("xdist_group")
    group = str(mark.args[0]) if mark is not None else ""
    long = any(name in item.nodeid for name in LONG)
    return group not in ("docker", "podman"), not long, not group
