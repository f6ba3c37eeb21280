"""The MCP server, driven by the official client: over stdio and HTTP, with and without the old versions' handshake."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fumehood import cli, registry
from fumehood.agent.audit import read, verify
from fumehood.linux import process

mcp = pytest.importorskip("mcp", reason="the extra mcp is not installed")

import httpx2  # noqa: E402 - the HTTP client that the SDK brings
from mcp.client.streamable_http import streamable_http_client  # noqa: E402

PATIENCE_S = 60.0


class Sleeper:
    """A program that sleeps, and can be found from outside by the argument of its ``sleep``."""

    def __init__(self) -> None:
        self._seconds = f"600.{secrets.randbits(60)}"
        command = ["sleep", self._seconds]
        self.code = f"import subprocess\nprint('started', flush=True)\nsubprocess.run({command})"

    def is_there(self) -> bool:
        wanted = f"sleep\0{self._seconds}\0".encode()
        return any(_cmdline(int(p.name)) == wanted for p in Path("/proc").iterdir() if p.name.isdigit())

    async def wait(self, *, there: bool) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while self.is_there() is not there:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)


PNG = """
import struct, zlib
def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
rows = zlib.compress(b"".join(b"\\0" + b"\\x55" * 8 for _ in range(8)))
head = chunk(b"IHDR", struct.pack(">IIBBBBB", 8, 8, 8, 0, 0, 0, 0))
open("plot.png", "wb").write(b"\\x89PNG\\r\\n\\x1a\\n" + head + chunk(b"IDAT", rows) + chunk(b"IEND", b""))
"""

Connect = Callable[[], contextlib.AbstractAsyncContextManager[Any]]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    probe = registry.make("jail").probe()
    if not probe.available:
        pytest.skip(f"tier jail is not on this host: {probe.reason}")
    path = tmp_path_factory.mktemp("policy") / "policy.toml"
    path.write_text('floor = "kernel"\n[limits]\nwall_s = "600s"\ncpu_s = "20s"\n')
    return path


@dataclass
class Http:
    url: str
    token: str
    pid: int
    audit: Path

    @contextlib.asynccontextmanager
    async def client(self, mode: str) -> AsyncIterator[Any]:
        headers = {"authorization": f"Bearer {self.token}"}
        timeout = httpx2.Timeout(PATIENCE_S)
        async with httpx2.AsyncClient(headers=headers, timeout=timeout) as http_client:
            transport = streamable_http_client(self.url, http_client=http_client)
            async with mcp.Client(transport, mode=mode) as client:
                yield client


@pytest.fixture(scope="module")
def http(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Http]:
    folder = tmp_path_factory.mktemp("http")
    log = folder / "audit.jsonl"
    options = ["--policy", str(policy), "--audit", str(log), "--audit-keep", "code"]
    server = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "fumehood",
            "mcp",
            "--http",
            "127.0.0.1:0",
            "--token-file",
            str(folder / "token"),
            *options,
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stderr is not None
        line = server.stderr.readline()
        assert "listening on" in line, line
        token = (folder / "token").read_text().strip()
        yield Http(line.rpartition(" ")[2].strip(), token, server.pid, log)
    finally:
        server.terminate()
        server.wait()
    assert verify(log).ok


@pytest.fixture(params=["stdio-legacy", "stdio-auto", "http-legacy", "http-auto"])
def connect(request: pytest.FixtureRequest, policy: Path) -> Connect:
    transport, mode = request.param.split("-")
    if transport == "http":
        http: Http = request.getfixturevalue("http")
        return lambda: http.client(mode)

    def stdio() -> contextlib.AbstractAsyncContextManager[Any]:
        from mcp import StdioServerParameters

        parameters = StdioServerParameters(
            command=sys.executable, args=["-m", "fumehood", "mcp", "--policy", str(policy)], env={**os.environ}
        )
        client: contextlib.AbstractAsyncContextManager[Any] = mcp.Client(parameters, mode=mode)
        return client

    return stdio


def with_client(connect: Connect, work: Callable[[Any], Awaitable[None]]) -> None:
    async def run() -> None:
        async with connect() as client:
            await asyncio.wait_for(work(client), PATIENCE_S)

    asyncio.run(run())


def text(result: Any) -> str:
    return "\n".join(c.text for c in result.content if c.type == "text")


async def call(client: Any, name: str, **arguments: Any) -> Any:
    return await client.call_tool(name, arguments)


def test_tools_sessions_files_images_and_artifacts(connect: Connect) -> None:
    async def work(client: Any) -> None:
        tools = {t.name: t for t in (await client.list_tools()).tools}
        assert {"run_python", "open_session", "run_in_session", "read_file", "write_file", "list_files"} <= set(tools)
        assert tools["run_python"].input_schema["required"] == ["code"]

        assert "45" in text(await call(client, "run_python", code="x = 1; print(sum(range(10)))"))
        afresh = await call(client, "run_python", code="print(x)")
        assert "NameError" in text(afresh) and not afresh.is_error

        plotted = await call(client, "run_python", code=PNG)
        [image] = [c for c in plotted.content if c.type == "image"]
        [link] = [c for c in plotted.content if c.type == "resource_link"]
        assert image.mime_type == "image/png" and link.name == "plot.png"
        [content] = (await client.read_resource(str(link.uri))).contents
        assert base64.b64decode(content.blob) == base64.b64decode(image.data)

        session = text(await call(client, "open_session"))
        await call(client, "write_file", session=session, path="in.csv", content="a,b\n1,2\n")
        await call(client, "run_in_session", session=session, code="rows = open('in.csv').read().split()")
        assert "1,2" in text(await call(client, "run_in_session", session=session, code="print(rows[1])"))
        assert "in.csv" in text(await call(client, "list_files", session=session))
        assert "a,b" in text(await call(client, "read_file", session=session, path="in.csv"))
        another = text(await call(client, "open_session"))
        assert "NameError" in text(await call(client, "run_in_session", session=another, code="rows"))
        for name in (session, another):
            await call(client, "close_session", session=name)
        assert (await call(client, "run_in_session", session=session, code="1")).is_error

    with_client(connect, work)


@pytest.mark.parametrize("connect", ["stdio-legacy", "http-auto"], indirect=True)
def test_nothing_that_a_client_sends_loosens_anything(connect: Connect) -> None:
    async def work(client: Any) -> None:
        for arguments in ({"tier": "subprocess"}, {"policy": {}}, {"wall_s": 9999}, {"out": "/tmp"}):
            refused = await client.call_tool("run_python", {"code": "print(1)", **arguments})
            assert refused.is_error and "exactly: code" in text(refused)
        for name, arguments in (("nope", {}), ("run_python", {"code": 7}), ("read_file", {"session": 3, "path": "x"})):
            assert (await client.call_tool(name, arguments)).is_error
        guess = await client.call_tool("run_in_session", {"session": "a" * 22, "code": "1"})
        assert guess.is_error and "no such session" in text(guess)
        with pytest.raises(Exception, match="no such resource"):
            await client.read_resource("fumehood://artifact/../../etc/passwd")

    with_client(connect, work)


@pytest.mark.parametrize("connect", ["stdio-auto", "http-legacy"], indirect=True)
def test_calls_run_at_once_and_report_progress(connect: Connect) -> None:
    reports: list[tuple[float, float | None, str | None]] = []

    async def progress(done: float, total: float | None, message: str | None) -> None:
        reports.append((done, total, message))

    async def work(client: Any) -> None:
        code = "import time as t; a = t.time(); print('x' * 100, flush=True); t.sleep(1.5); print('done', a, t.time())"
        results = await asyncio.gather(
            client.call_tool("run_python", {"code": code}, progress_callback=progress),
            *(client.call_tool("run_python", {"code": code}) for _ in range(3)),
        )
        found = [re.search(r"done (\S+) (\S+)", text(r)) for r in results]
        spans = [(float(one[1]), float(one[2])) for one in found if one is not None]
        assert len(spans) == 4
        # By the programs' own clocks: one after the other, all of it would take as long as each of them together.
        assert max(end for _, end in spans) - min(t for t, _ in spans) < sum(end - t for t, end in spans)

    with_client(connect, work)
    assert reports and reports[0][1] == 600
    assert any("101 bytes printed" in (message or "") for _, _, message in reports)


def test_a_cancelled_call_is_ended_and_the_server_goes_on(connect: Connect) -> None:
    async def work(client: Any) -> None:
        await call(client, "run_python", code="1")  # the template is there from now on
        session = text(await call(client, "open_session"))
        await call(client, "run_in_session", session=session, code="x = 1")
        started = asyncio.Event()

        async def progress(_: float, __: float | None, message: str | None) -> None:
            if "8 bytes printed" in (message or ""):
                started.set()

        for name, more in (("run_python", {}), ("run_in_session", {"session": session})):
            started.clear()
            sleeper = Sleeper()
            arguments = {"code": sleeper.code, **more}
            task = asyncio.ensure_future(client.call_tool(name, arguments, progress_callback=progress))
            await started.wait()
            await sleeper.wait(there=True)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await sleeper.wait(there=False)
            assert "2" in text(await call(client, "run_python", code="print(1 + 1)"))
        after = text(await call(client, "run_in_session", session=session, code="print(x)"))
        assert "new sandbox" in after and "NameError" in after
        await call(client, "close_session", session=session)

    with_client(connect, work)


def _cmdline(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


CLIENT = """
import asyncio, json, sys
import httpx2
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client

async def main(kind, mode, target, code):
    async with httpx2.AsyncClient(headers={"authorization": "Bearer " + target.get("token", "")}, timeout=600) as http:
        if kind == "stdio":
            server = StdioServerParameters(command=sys.executable, args=["-m", "fumehood", "mcp", *target["args"]])
        else:
            server = streamable_http_client(target["url"], http_client=http)
        async with Client(server, mode=mode) as client:
            await client.call_tool("run_python", {"code": "1"})
            print("warm", flush=True)
            sys.stdin.readline()
            async def progress(done, total, message):
                if "8 bytes" in message:
                    print("running", flush=True)
            await client.call_tool("run_python", {"code": code}, progress_callback=progress)

asyncio.run(main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), sys.argv[4]))
"""


@contextlib.contextmanager
def client_process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-c", CLIENT, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def killed_while_running(*arguments: str) -> tuple[Sleeper, dict[int, int]]:
    """The program of a client that was killed during its call, and the processes that were below the client."""
    sleeper = Sleeper()
    with client_process(*arguments, sleeper.code) as child:
        assert child.stdin is not None and child.stdout is not None
        assert child.stdout.readline() == "warm\n"
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "running\n"
        asyncio.run(sleeper.wait(there=True))
        below = {pid: process.start_time(pid) for pid in process.descendants(child.pid)}
        child.send_signal(signal.SIGKILL)
        child.wait()
    return sleeper, below


@pytest.mark.parametrize("mode", ["legacy", "auto"])
def test_an_http_client_that_is_killed_leaves_nothing_running(http: Http, mode: str) -> None:
    target = json.dumps({"url": http.url, "token": http.token})
    sleeper, _ = killed_while_running("http", mode, target)
    asyncio.run(sleeper.wait(there=False))
    deadline = time.monotonic() + PATIENCE_S
    while [r["event"] for r in read(http.audit)][-1] != "failed":
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_stdio_client_that_is_killed_leaves_nothing_running(policy: Path) -> None:
    sleeper, below = killed_while_running("stdio", "auto", json.dumps({"args": ["--policy", str(policy)]}))
    asyncio.run(sleeper.wait(there=False))
    assert len(below) >= 3  # the server, and what it had started
    deadline = time.monotonic() + PATIENCE_S
    while left := [pid for pid, start in below.items() if process.alive(pid, start)]:
        assert time.monotonic() < deadline, [_cmdline(p) for p in left]
        time.sleep(0.05)


def test_http_without_the_token_is_shut(http: Http) -> None:
    for authorization in (None, "Bearer wrong", f"Basic {http.token}", f"Bearer {http.token}x"):
        request = urllib.request.Request(http.url, data=b"{}", method="POST")
        if authorization is not None:
            request.add_header("authorization", authorization)
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=PATIENCE_S)
        assert caught.value.code == 401
        caught.value.close()


def test_http_clients_cannot_list_each_others_artifacts(http: Http) -> None:
    async def work(client: Any) -> None:
        await call(client, "run_python", code="open('mine.txt', 'w').write('x')")
        assert (await client.list_resources()).resources == []

    with_client(lambda: http.client("auto"), work)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--http", "127.0.0.1:0"],
        ["--http", "nowhere", "--no-token"],
        ["--http", "0.0.0.0:0", "--no-token"],
        ["--no-token"],
        ["--sessions", "0"],
        ["--approve", "always"],
        ["--tier", "nope"],
    ],
)
def test_malformed_commands_serve_nothing(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["mcp", *arguments]) >= 240
    assert "fumehood: " in capsys.readouterr().err


def test_a_weak_token_file_is_refused_and_a_new_one_is_private(tmp_path: Path) -> None:
    from fumehood.cli.mcp import _token
    from fumehood.errors import PolicyError

    arguments = cli.parser("mcp").parse_args(["mcp", "--http", ":0", "--token-file", str(tmp_path / "t")])
    token = _token(arguments)
    assert token is not None and len(token) > 40 and (tmp_path / "t").stat().st_mode & 0o777 == 0o600
    assert _token(arguments) == token
    (tmp_path / "t").write_text("short")
    with pytest.raises(PolicyError):
        _token(arguments)
