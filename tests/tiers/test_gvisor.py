"""What is gVisor's own: where it departs from the contract of the suite, what is left of it then."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.needs import need_tier

from fumehood import Command, Limits, MiB, Policy, Runner


@pytest.fixture(scope="module")
def gvisor() -> Iterator[Runner]:
    """A runner of the tier, shared by the tests here."""
    need_tier("gvisor")
    with Runner(tier="gvisor") as runner:
        yield runner


def test_calls_that_gvisor_names_otherwise_are_allowed(gvisor: Runner) -> None:
    """runsc passes over the names in a profile that it does not know: pselect6 is what select(2) becomes."""
    program = "import os, select\nr, w = os.pipe()\nos.write(w, b'x')\nprint(select.select([r], [], [], 1)[0] == [r])"
    assert gvisor.run(program).stdout == "True\n"


def test_all_processes_that_the_limit_allows_are_busy_at_once() -> None:
    """The Sentry needs tasks of the host for each, and ends if it is refused one."""
    need_tier("gvisor")
    program = (
        "import os, time\n"
        "children = []\n"
        "for _ in range(28):\n"
        "    if (child := os.fork()) == 0:\n"
        "        until = time.monotonic() + 3\n"
        "        while time.monotonic() < until: os.stat('/'); time.sleep(0.001)\n"
        "        os._exit(0)\n"
        "    children.append(child)\n"
        "print(sum(os.waitpid(child, 0)[1] == 0 for child in children))\n"
    )
    limits = Limits(pids=32, memory_bytes=512 * MiB, wall_s=120, cpu_s=120, cpus=2)
    with Runner(tier="gvisor", policy=Policy(limits=limits)) as runner:
        assert runner.run(program).stdout == "28\n"


def test_a_fifo_stays_in_the_sentry_and_a_link_is_skipped(gvisor: Runner, tmp_path: Path) -> None:
    result = gvisor.run(
        "import os\nopen('plain', 'w').write('p')\nos.symlink('/etc/passwd', 'absolute')\nos.symlink('.', 'loop')\n"
        "os.mkfifo('fifo')\nprint(sorted(os.listdir()))",
        out=tmp_path,
    )
    assert result.stdout == "['absolute', 'fifo', 'loop', 'plain']\n"
    assert {a.path: a.skipped for a in result.artifacts} == {"absolute": "a link", "loop": "a link", "plain": None}
    assert (tmp_path / "plain").read_text() == "p"


def test_a_terminal_has_lines_echo_and_a_size() -> None:
    need_tier("gvisor")
    command = Command(("sh", "-c", 'test -t 0 && stty size; read x; echo "<$x>"'), pty=(30, 90))
    with Runner(tier="gvisor", policy=Policy(terminals=True)) as runner, runner.open() as sandbox:
        running = sandbox.start(command, stdin=True)
        running.write(b"typed\n")
        # The terminal's echo of what was typed may come at any place.
        assert sorted(running.wait().stdout.split("\r\n")) == sorted(["30 90", "typed", "<typed>", ""])
