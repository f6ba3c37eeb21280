"""Quotas hold exactly, whoever calls and however they die. Every test runs on SQLite and on Postgres."""

from __future__ import annotations

import multiprocessing
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from fumehood.agent import quotas as quotas_module
from fumehood.agent.quotas import LEASE_S, Amounts, Owner, Quota, Quotas
from fumehood.errors import PolicyError, QuotaError, UnavailableError

ME = {"session": "s1"}
RUN = Amounts(runs=1, cpu_s=10, wall_s=10, output_bytes=1000, sandboxes=1)


def _postgres_bin() -> Path | None:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return found[-1].parent if found else None


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The URL of a server started for this test process, on a socket in a folder of its own."""
    pytest.importorskip("psycopg", reason="quotas in Postgres are not tested: install the extra postgres")
    programs = _postgres_bin()
    if programs is None:
        pytest.skip("quotas in Postgres are not tested: there is no server (Debian: apt-get install postgresql)")
    folder = Path(tempfile.mkdtemp(prefix="fumehood-pg-"))
    user = pwd.getpwuid(os.getuid()).pw_name if os.getuid() else "nobody"
    as_user: list[str] = []
    if os.getuid() == 0:  # the server refuses to run as root
        nobody = pwd.getpwnam("nobody")
        os.chown(folder, nobody.pw_uid, nobody.pw_gid)
        as_user = ["setpriv", f"--reuid={nobody.pw_uid}", f"--regid={nobody.pw_gid}", "--clear-groups"]
    data = folder / "data"
    server = None
    try:
        init = [*as_user, str(programs / "initdb"), "-D", str(data), "-A", "trust", "-N", "-U", user]
        subprocess.run(init, check=True, capture_output=True, cwd=folder)
        options = ["-c", "listen_addresses=", "-c", "fsync=off", "-k", str(folder)]
        command = [*as_user, str(programs / "postgres"), "-D", str(data), *options]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder)
        url = f"postgresql:///postgres?host={folder}&user={user}"
        for _ in range(1200):
            try:
                Quotas([], url).close()
                break
            except UnavailableError:
                assert server.poll() is None
                time.sleep(0.05)
        yield url
    finally:
        if server is not None:
            server.send_signal(signal.SIGINT)
            server.wait()
        shutil.rmtree(folder)


@pytest.fixture(params=["sqlite", "postgres"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty place for quotas."""
    if request.param == "sqlite":
        yield str(tmp_path / "quotas.db")
        return
    url = request.getfixturevalue("postgres")
    import psycopg

    name = "t" + uuid.uuid4().hex
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {name}".encode())
    yield f"{url}&options=-csearch_path%3D{name}"


@pytest.fixture
def make(where: str) -> Iterator[Callable[..., Quotas]]:
    """Makes quotas over the place under test."""
    made: list[Quotas] = []

    def make(*quotas: Quota) -> Quotas:
        made.append(Quotas(quotas, where))
        return made[-1]

    yield make
    for quotas in made:
        quotas.close()


def test_runs_are_counted_within_the_window(make: Callable[..., Quotas]) -> None:
    quotas = make(Quota("session", "runs", 2, 3600))
    for _ in range(2):
        quotas.settle(quotas.reserve(ME, RUN), Amounts(runs=1))
    with pytest.raises(QuotaError, match="the quota of 2 runs in 3600 s for each session is used up") as caught:
        quotas.reserve(ME, RUN)
    assert caught.value.retry_after_s is not None and 3000 < caught.value.retry_after_s <= 3600
    quotas.reserve({"session": "another"}, RUN)


def test_what_left_the_window_does_not_count(make: Callable[..., Quotas], monkeypatch: pytest.MonkeyPatch) -> None:
    quotas = make(Quota("session", "runs", 1, 60))
    quotas.settle(quotas.reserve(ME, RUN), Amounts(runs=1))
    _shift_clock(monkeypatch, 59)
    with pytest.raises(QuotaError):
        quotas.reserve(ME, RUN)
    _shift_clock(monkeypatch, 61)
    quotas.reserve(ME, RUN)


def _shift_clock(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    from fumehood.agent import quotas_postgres

    for kind in (quotas_module._SqliteTransaction, quotas_postgres._PostgresTransaction):
        now = getattr(kind, "honest_now", kind.now)
        monkeypatch.setattr(kind, "honest_now", now, raising=False)
        monkeypatch.setattr(kind, "now", lambda self, now=now: now(self) + seconds)


def test_the_most_is_reserved_and_what_was_used_is_booked(make: Callable[..., Quotas]) -> None:
    quota = Quota("session", "cpu_s", 25, 3600)
    quotas = make(quota)
    first, _second = quotas.reserve(ME, RUN), quotas.reserve(ME, RUN)
    with pytest.raises(QuotaError, match="5 left, and this run may use 10"):
        quotas.reserve(ME, RUN)
    quotas.settle(first, Amounts(runs=1, cpu_s=0.5))
    assert quotas.used(quota, "s1") == pytest.approx(10.5)
    quotas.reserve(ME, RUN)


def test_what_never_fits_is_told_so(make: Callable[..., Quotas]) -> None:
    with pytest.raises(QuotaError, match="it never fits") as caught:
        make(Quota("session", "output_bytes", 999, 60)).reserve(ME, RUN)
    assert caught.value.retry_after_s is None


def test_what_never_ran_costs_nothing(make: Callable[..., Quotas]) -> None:
    quota = Quota("session", "runs", 1, 3600)
    quotas = make(quota)
    for _ in range(3):
        quotas.settle(quotas.reserve(ME, RUN), Amounts())
    assert quotas.used(quota, "s1") == 0


def test_settling_twice_counts_once(make: Callable[..., Quotas]) -> None:
    quota = Quota("session", "wall_s", 100, 3600)
    quotas = make(quota)
    ident = quotas.reserve(ME, RUN)
    quotas.settle(ident, Amounts(runs=1, wall_s=2))
    quotas.settle(ident, Amounts(runs=1, wall_s=50))
    quotas.settle(ident, Amounts())
    assert quotas.used(quota, "s1") == 2


def test_session_and_key_are_both_held(make: Callable[..., Quotas]) -> None:
    quotas = make(Quota("session", "runs", 5, 60), Quota("key", "runs", 2, 60))
    quotas.reserve({"session": "a", "key": "k"}, RUN)
    quotas.reserve({"session": "b", "key": "k"}, RUN)
    with pytest.raises(QuotaError, match="for each key"):
        quotas.reserve({"session": "c", "key": "k"}, RUN)
    assert quotas.used(quotas.quotas[0], "c") == 0


def test_the_same_name_as_session_and_key_is_two_subjects(make: Callable[..., Quotas]) -> None:
    quotas = make(Quota("session", "runs", 1, 60), Quota("key", "runs", 9, 60))
    quotas.settle(quotas.reserve({"session": "x", "key": "x"}, RUN), Amounts(runs=1))
    quotas.reserve({"session": "y", "key": "x"}, RUN)


def _call_many(where: str, threads: int, tries: int, counts: multiprocessing.queues.Queue[tuple[int, int]]) -> None:
    quotas = Quotas([Quota("key", "runs", 70, 3600), Quota("key", "sandboxes", 7)], where)
    live, most, admitted = 0, 0, 0
    lock = threading.Lock()

    def call(_: int) -> None:
        nonlocal live, most, admitted
        for _ in range(tries):
            try:
                ident = quotas.reserve({"session": "s", "key": "k"}, RUN)
            except QuotaError:
                continue
            with lock:
                admitted, live = admitted + 1, live + 1
                most = max(most, live)
            time.sleep(0.002)
            with lock:
                live -= 1
            quotas.settle(ident, Amounts(runs=1, cpu_s=0.1))

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(call, range(threads)))
    counts.put((admitted, most))


def test_fifty_callers_in_five_processes_get_exactly_the_quota(where: str) -> None:
    context = multiprocessing.get_context("spawn")
    counts = context.Queue()
    callers = [context.Process(target=_call_many, args=(where, 10, 8, counts)) for _ in range(5)]
    for caller in callers:
        caller.start()
    found = [counts.get(timeout=120) for _ in callers]
    for caller in callers:
        caller.join()
        assert caller.exitcode == 0
    quotas = Quotas([], where)
    admitted = sum(a for a, _ in found)
    # The sandboxes quota turns callers away too, so fewer than 70 may be let in while they try; never more.
    assert 7 <= admitted <= 70
    assert max(most for _, most in found) <= 7
    assert quotas.used(Quota("key", "runs", 70, 3600), "k") == admitted
    rest = 0
    fresh = Quotas([Quota("key", "runs", 70, 3600)], where)
    while True:
        try:
            fresh.settle(fresh.reserve({"session": "s", "key": "k"}, RUN), Amounts(runs=1))
            rest += 1
        except QuotaError:
            break
    assert admitted + rest == 70
    fresh.close()
    quotas.close()


def test_fifty_callers_at_once_get_exactly_the_number_of_sandboxes(make: Callable[..., Quotas]) -> None:
    quotas = make(Quota("key", "sandboxes", 7))
    start = threading.Barrier(50)

    def call(_: int) -> bool:
        start.wait()
        try:
            quotas.reserve({"session": "s", "key": "k"}, RUN)
        except QuotaError:
            return False
        return True

    with ThreadPoolExecutor(50) as pool:
        assert sum(pool.map(call, range(50))) == 7


def _reserve_and_wait(where: str, ready: multiprocessing.synchronize.Event) -> None:
    quotas = Quotas([], where)
    for _ in range(3):
        quotas.reserve(ME, RUN)
    ready.set()
    time.sleep(600)


def test_a_killed_owner_gives_its_sandboxes_back_and_is_charged_in_full(where: str) -> None:
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    owner = context.Process(target=_reserve_and_wait, args=(where, ready))
    owner.start()
    assert ready.wait(60)
    quotas = Quotas([Quota("session", "sandboxes", 3), Quota("session", "cpu_s", 45, 3600)], where)
    with pytest.raises(QuotaError, match="sandboxes at once"):
        quotas.reserve(ME, RUN)
    assert owner.pid is not None
    os.kill(owner.pid, signal.SIGKILL)
    owner.join()
    assert quotas.used(quotas.quotas[0], "s1") == 0
    assert quotas.used(quotas.quotas[1], "s1") == 30
    quotas.reserve(ME, RUN)
    with pytest.raises(QuotaError, match="CPU seconds"):
        quotas.reserve(ME, RUN)
    quotas.close()


def test_an_owner_on_another_host_is_judged_by_its_lease(
    make: Callable[..., Quotas], monkeypatch: pytest.MonkeyPatch
) -> None:
    quota = Quota("session", "sandboxes", 1)
    remote = make(quota)
    remote._owner = replace(remote._owner, boot="another-boot")
    ident = remote.reserve(ME, RUN, lease_s=10)
    here = make(quota)
    _shift_clock(monkeypatch, LEASE_S)
    with pytest.raises(QuotaError):
        here.reserve(ME, RUN)
    remote.renew(ident, lease_s=10)
    _shift_clock(monkeypatch, 2 * LEASE_S)
    with pytest.raises(QuotaError):
        here.reserve(ME, RUN)
    _shift_clock(monkeypatch, 2 * LEASE_S + 11)
    here.reserve(ME, RUN)


def test_a_process_is_not_taken_for_a_later_one_with_its_number() -> None:
    me = Owner.of_this_process()
    assert not me.is_gone(me, lease_over=True)
    assert replace(me, started="1").is_gone(me, lease_over=False)
    assert Owner.parse(str(me)) == me


@pytest.mark.parametrize("text", ["session:runs=5/60", "key:sandboxes=4", "session:cpu_s=1.5/3600"])
def test_quotas_are_read_from_text(text: str) -> None:
    quota = Quota.parse(text)
    assert text == f"{quota.per}:{quota.resource}={quota.limit:g}" + (f"/{quota.window_s:g}" if quota.window_s else "")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "runs=5/60",
        "user:runs=5/60",
        "key:runs=5",
        "key:sandboxes=5/60",
        "key:runs=-1/60",
        "key:runs=nan/60",
        "key:x=1/2",
        "key:runs=1/0",
        "key:runs=1/1e12",
        "key:runs=x/60",
    ],
)
def test_malformed_quotas_are_refused(text: str) -> None:
    with pytest.raises(PolicyError):
        Quota.parse(text)


def test_a_place_that_cannot_be_used_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError):
        Quotas([], tmp_path / "no" / "folder" / "q.db")
    with pytest.raises(UnavailableError) as caught:
        Quotas([], f"postgresql:///x?host={tmp_path}&password=hunter2")
    assert "hunter2" not in str(caught.value)
