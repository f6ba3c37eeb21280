"""1,000 hostile runs leave no process, mount, control group, descriptor, temporary file or file behind."""

# ruff: noqa: E501 - a program of one line stays on one line

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from support.residue import Look

from fumehood.errors import FumehoodError, StartError
from fumehood.model import Code, Limits, MiB, Outcome, Policy, Result
from fumehood.runner import AsyncRunner

pytestmark = pytest.mark.usefixtures("full_python")

CONCURRENCY = 4
TRIES = 8

#: Runs by tier; others than these are slower to start, and take fewer.
RUNS = {"jail": 1000, "subprocess": 300}
RUNS_ELSEWHERE = 40

PROGRAMS = {
    "loop": "while True: pass",
    "sleep": "import time\ntime.sleep(600)",
    "daemons": "import os, time\nfor i in range(5):\n if os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0: time.sleep(600)\n  os._exit(0)",
    "fork bomb": "import os\nwhile True:\n try: os.fork()\n except OSError: pass",
    "output": "import os\nwhile True: os.write(1, b'x' * 65536)",
    "both outputs": "import os\nwhile True: os.write(1, b'x' * 9999); os.write(2, b'y' * 9999)",
    "files": "i = 0\nwhile True:\n open(f'f{i}', 'w').write('x' * 999); i += 1",
    "deep folders": "import os\nwhile True: os.mkdir('d'); os.chdir('d')",
    "disk": "f = open('big', 'wb')\nwhile True: f.write(b'x' * (1 << 20)); f.flush()",
    "shared memory": "from multiprocessing.shared_memory import SharedMemory as S\nk = [S(create=True, size=65536) for _ in range(40)]\nimport os\nos.kill(os.getpid(), 9)",
    "stop": "import os, signal\nif os.fork(): os.kill(0, signal.SIGSTOP)\nos.kill(os.getpid(), signal.SIGSTOP)",
    "close": "import os\nos.closerange(0, 256)\nwhile True: pass",
    "close and exit": "import os\nos.closerange(0, 256)",
    "memory": "b = []\nwhile True: b.append(bytearray(1 << 20))",
    "segfault": "import ctypes; ctypes.string_at(0)",
    "threads": "import threading\nwhile True:\n try: threading.Thread(target=threading.Event().wait).start()\n except RuntimeError: pass",
    "modes": "import os\nos.mkdir('d')\nopen('d/f', 'w').close()\nos.chmod('d', 0)\nos.chmod('.', 0)",
    "links": "import os\nfor i in range(50): os.symlink('/etc/passwd', f'l{i}'); os.mkfifo(f'p{i}')",
    "sockets": "import socket\nk = [socket.socketpair() for _ in range(50)]\nfor a, b in k: a.setblocking(False)\n"
    "for a, b in k:\n socket.send_fds(a, [b'x'], [b.fileno()])\nwhile True: pass",
    "signals": "import os, signal\nfor n in range(1, 65):\n try: signal.signal(n, signal.SIG_IGN)\n except (OSError, ValueError): pass\nos.fork()\nwhile True: pass",
    "fine": "print('fine')",
}


def test_nothing_is_left(
    tier_name: str, async_runner_factory: Callable[..., AsyncRunner], private_tmp: Path, tmp_path: Path
) -> None:
    dice = random.Random(1000)
    runs = RUNS.get(tier_name, RUNS_ELSEWHERE)
    outcomes: Counter[str] = Counter()
    wrong: list[str] = []

    async def started(runner: AsyncRunner, program: str, out: Path | None) -> Result:
        """Nothing ran where StartError is raised: on a busy machine 50 ms pass before a program starts."""
        for _ in range(TRIES):
            try:
                return await runner.run(Code(program), out=out)
            except StartError:
                outcomes["not started"] += 1
        return await runner.run(Code(program), out=out)

    async def main() -> None:
        outer = Look.take(private_tmp)
        runners = []
        for wall_s in (0.05, 0.1, 0.2):
            limits = Limits(wall_s=wall_s, cpu_s=5, pids=24, memory_bytes=128 * MiB, disk_bytes=2 * MiB, files=200)
            for overflow in ("truncate", "stop"):
                runners.append(async_runner_factory(Policy(limits=limits, overflow=overflow)))
        try:
            for runner in runners:
                await started(runner, "pass", None)
            before = Look.take(private_tmp)
            slots = asyncio.Semaphore(CONCURRENCY)

            async def one(number: int) -> None:
                async with slots:
                    name = dice.choice(list(PROGRAMS))
                    out = tmp_path / str(number) if runners[0].tier.features.files and number % 10 == 0 else None
                    try:
                        result = await started(dice.choice(runners), PROGRAMS[name], out)
                    except FumehoodError as error:
                        wrong.append(f"{name}: {error!r}")
                        return
                    outcomes[result.outcome.value] += 1
                    if result.outcome not in (Outcome.WALL, Outcome.CPU) and name in ("loop", "sleep", "signals"):
                        wrong.append(f"{name}: {result.outcome.value}")

            await asyncio.gather(*(one(number) for number in range(runs)))
            assert await asyncio.to_thread(before.left, private_tmp, kept=len(runners)) == []
        finally:
            for runner in runners:
                await runner.close()
        assert outer.left(private_tmp) == []

    asyncio.run(main())
    print(f"{tier_name}: {dict(outcomes)}")
    assert not wrong, f"{len(wrong)} of {runs}: {Counter(wrong).most_common(8)}"
    assert outcomes["wall"] > runs / 4 and sum(outcomes.values()) - outcomes["not started"] == runs
