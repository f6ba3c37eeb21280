"""The examples in the documentation are Python, what they import of us is there, and those of the README run."""

from __future__ import annotations

import ast
import asyncio
import importlib
import inspect
import json
import re
import sys
import tomllib
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vendor_servers import Says, VendorServer

from fumehood.model import Outcome
from fumehood.runner import Runner

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/agent.md", "docs/live.md", "docs/mcp.md")
BLOCKS = {page: re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S) for page in PAGES}
ALL = [pytest.param(block, id=f"{page}-{n}") for page, blocks in BLOCKS.items() for n, block in enumerate(blocks)]
RUN = ("run_python", {"code": "print(6 * 7)"})


@pytest.mark.parametrize("block", ALL)
def test_examples_are_python_and_import_what_there_is(block: str) -> None:
    for node in ast.walk(ast.parse(compiled(block))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fumehood"):
            try:
                module = importlib.import_module(str(node.module))
            except ImportError as error:
                assert not (error.name or "").startswith("fumehood")
                pytest.skip(f"the extra that brings {error.name} is not installed")
            assert [a.name for a in node.names if not hasattr(module, a.name)] == []


def compiled(block: str) -> ast.Module:
    return compile(block, "README.md", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def run(starts_with: str, **given: Any) -> dict[str, Any]:
    """Run the README's example that starts so; the names it leaves."""
    [block] = [block for block in BLOCKS["README.md"] if block.startswith(starts_with)]
    code = compile(compiled(block), "README.md", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    names: dict[str, Any] = dict(given)
    if code.co_flags & inspect.CO_COROUTINE:
        asyncio.run(eval(code, names))
    else:
        exec(code, names)
    return names


def test_every_adapter_has_an_example_that_is_run() -> None:
    adapters = {p.stem for p in (ROOT / "src/fumehood/agent/adapters").glob("[a-z]*.py")}
    named = {name for name in adapters if f"adapters.{name} " in "\n".join(BLOCKS["README.md"])}
    assert adapters - named == {"inspect_ai"}  # which is found by its entry point
    run_here = Path(__file__).read_text()
    assert [b for b in BLOCKS["README.md"] if f'run("{b[:9]}' not in run_here] == []


# --- the first two


def test_the_first_example(jail: Runner) -> None:
    names = run("import fumehood")
    assert names["result"].stdout == "45\n" and names["result"].outcome is Outcome.EXITED


def test_the_example_of_a_runner(
    jail: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run("from pathlib", code="open('out.txt', 'w').write('1')", data=b"a\nb\n", programs=["print(1)", "print(2)"])
    assert (tmp_path / "results" / "out.txt").read_text() == "1"
    assert capsys.readouterr().out.splitlines()[0] == "2"


# --- the vendors' SDKs


def test_the_example_of_anthropics_sdk(jail: Runner) -> None:
    anthropic = pytest.importorskip("anthropic", reason="the extra anthropic is not installed")
    messages: list[Any] = [{"role": "user", "content": "go"}]
    with VendorServer([Says("I run it.", calls=[RUN]), Says("done")]) as server:
        client = anthropic.Anthropic(base_url=server.url, api_key="k", max_retries=0)
        names = run("# Anthropic's SDK", client=client, model="m", messages=messages)
        messages += [
            {"role": "assistant", "content": names["message"].content},
            {"role": "user", "content": names["answers"]},
        ]
        client.messages.create(model="m", max_tokens=10, messages=messages)
    assert "42" in json.dumps(server.seen.last_results) and server.seen.refusals == []


def test_the_example_of_openais_sdk(jail: Runner) -> None:
    openai = pytest.importorskip("openai", reason="the extra openai is not installed")
    messages: list[Any] = [{"role": "user", "content": "go"}]
    with VendorServer([Says("I run it.", calls=[RUN]), Says("done")]) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0)
        names = run("# OpenAI's SDK", client=client, model="m", messages=messages)
        messages += [names["message"], *names["answers"]]
        client.chat.completions.create(model="m", messages=messages)
    assert "42" in json.dumps(server.seen.last_results) and server.seen.refusals == []


# --- the frameworks


def test_the_example_of_langchain(
    jail: Runner, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its tools are of langchain-core, the extra; the agent in the example is of the package above it."""
    pytest.importorskip("langchain_core", reason="the extra langchain is not installed")

    class Agent:
        def __init__(self, model: object, tools: list[Any]) -> None:
            self.tools = {tool.name: tool for tool in tools}

        def invoke(self, state: dict[str, Any]) -> Any:
            assert state["messages"] == [("user", "go")]
            return self.tools[RUN[0]].invoke({"name": RUN[0], "args": RUN[1], "id": "1", "type": "tool_call"})

    above = types.ModuleType("langchain.agents")
    above.create_agent = Agent  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "langchain", types.ModuleType("langchain"))
    monkeypatch.setitem(sys.modules, "langchain.agents", above)
    run("# LangChain", model=None, task="go")
    assert "42" in capsys.readouterr().out


def test_the_example_of_pydantic_ai(jail: Runner, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pydantic_ai", reason="the extra pydantic-ai is not installed")
    from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart
    from pydantic_ai.models.function import AgentInfo, FunctionModel

    def model(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        [part] = messages[-1].parts
        if part.part_kind == "tool-return":
            return ModelResponse(parts=[TextPart(str(part.content))])
        return ModelResponse(parts=[ToolCallPart(*RUN)])

    run("# Pydantic AI", model=FunctionModel(model), task="go")
    assert "42" in capsys.readouterr().out


def test_the_example_of_smolagents(jail: Runner, capsys: pytest.CaptureFixture[str]) -> None:
    smolagents = pytest.importorskip("smolagents", reason="the extra smolagents is not installed")

    class Scripted(smolagents.Model):  # type: ignore[misc,name-defined]
        def generate(self, messages: list[Any], **_: Any) -> Any:
            return smolagents.ChatMessage(role="assistant", content="<code>\nfinal_answer(6 * 7)\n</code>")

    run("# smolagents", model=Scripted(), task="go")
    assert capsys.readouterr().out.splitlines()[-1] == "42"


def test_the_example_of_the_openai_agents_sdk(jail: Runner, capsys: pytest.CaptureFixture[str]) -> None:
    agents = pytest.importorskip("agents", reason="the extra openai-agents is not installed")
    import openai

    agents.set_tracing_disabled(True)
    says: list[Says | Callable[[str], Says]] = [Says(calls=[RUN]), Says]
    with VendorServer(says) as server:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0)
        run("# OpenAI Agents SDK", model=agents.OpenAIResponsesModel("m", openai_client=client), task="go")
    assert "42" in capsys.readouterr().out and server.seen.refusals == []


def test_the_example_of_inspect(jail: Runner, tmp_path: Path) -> None:
    pytest.importorskip("inspect_ai", reason="the extra inspect is not installed")
    import inspect_ai

    # What Inspect does where Fumehood is installed; a development install may be older than the entry point.
    entry_points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    importlib.import_module(entry_points["inspect_ai"]["fumehood"])
    from inspect_ai.dataset import Sample
    from inspect_ai.solver import Generate, TaskState, solver
    from inspect_ai.tool import python

    said: list[Any] = []

    @solver
    def call() -> Any:
        """In the place of a model, whose tokens Inspect would count by a table that it downloads."""

        async def solve(state: TaskState, generate: Generate) -> TaskState:
            said.append(await python()("print(6 * 7)"))
            return state

        return solve

    task = run("# Inspect", dataset=[Sample("go")])["task"]
    told = {"model": "mockllm/model", "log_dir": str(tmp_path), "display": "none"}
    [log] = inspect_ai.eval(inspect_ai.task_with(task, solver=call()), **told)
    assert log.status == "success", log.error
    assert [text.strip() for text in said] == ["42"]


# --- MCP


def test_the_configuration_of_an_mcp_client_starts_the_server(tmp_path: Path) -> None:
    """In the README and on the page of its own: the command's options are there."""
    from fumehood import cli

    for page in ("README.md", "docs/mcp.md"):
        [block] = re.findall(r"^```json\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)
        server = json.loads(block)["mcpServers"]["fumehood"]
        assert server["command"] == "fumehood"
        arguments = cli.parser("mcp").parse_args(server["args"])
        assert arguments.command == "mcp" and arguments.policy == "/etc/fumehood/agent.toml"
