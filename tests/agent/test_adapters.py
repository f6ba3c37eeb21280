"""Each framework's own package drives its adapter."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_toolbox import PNG
from vendor_servers import Says, VendorServer

from fumehood.agent.approval import Approval, CallbackApprover
from fumehood.agent.audit import AuditLog, verify
from fumehood.agent.content import Reply
from fumehood.agent.gate import Gate
from fumehood.agent.tool import SyncToolbox, Toolbox
from fumehood.errors import PolicyError
from fumehood.runner import AsyncRunner, Runner

DRAW = PNG + "plot('a.png', 10); print('drawn')"


@pytest.fixture
def box(jail: Runner) -> Iterator[SyncToolbox]:
    with SyncToolbox(jail) as box:
        yield box


# --- LangChain


def test_langchain_tools(box: SyncToolbox) -> None:
    pytest.importorskip("langchain_core", reason="the extra langchain is not installed")
    from langchain_core.messages import ToolMessage

    from fumehood.agent.adapters.langchain import langchain_tools

    tools = {t.name: t for t in langchain_tools(box)}
    assert tools["run_python"].args == {"code": {"type": "string", "description": "The whole program."}}
    call = {"name": "run_python", "args": {"code": "x = 6 * 7; print(x)"}, "id": "c1", "type": "tool_call"}
    message = tools["run_python"].invoke(call)
    assert isinstance(message, ToolMessage) and "42" in message.content and isinstance(message.artifact, Reply)
    drawn = tools["run_python"].invoke({**call, "args": {"code": DRAW}})
    assert [block["type"] for block in drawn.content_blocks] == ["text", "image"]
    assert "42" in tools["run_python"].invoke({"code": "print(x)"})
    assert "a.png" in tools["list_files"].invoke({})


def test_langchain_tools_of_an_asynchronous_toolbox() -> None:
    pytest.importorskip("langchain_core", reason="the extra langchain is not installed")
    from fumehood.agent.adapters.langchain import langchain_tools

    async def work() -> str:
        async with AsyncRunner(tier="jail") as runner, Toolbox(runner, tools=["run_python"]) as box:
            [tool] = langchain_tools(box)
            return str(await tool.ainvoke({"code": "print(6 * 7)"}))

    assert "42" in asyncio.run(work())


# --- Pydantic AI


def test_pydantic_ai_toolset() -> None:
    pytest.importorskip("pydantic_ai", reason="the extra pydantic-ai is not installed")
    from pydantic_ai import Agent, BinaryContent
    from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart
    from pydantic_ai.models.function import AgentInfo, FunctionModel

    from fumehood.agent.adapters.pydantic_ai import FumehoodToolset

    programs = iter(["x = 42; y = oops", DRAW + "; print(x)", None])

    def model(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        assert "run_python" in [t.name for t in info.function_tools]
        program = next(programs)
        if program is None:
            return ModelResponse(parts=[TextPart("done")])
        return ModelResponse(parts=[ToolCallPart("run_python", {"code": program})])

    async def work() -> Any:
        async with AsyncRunner(tier="jail") as runner:
            agent = Agent(FunctionModel(model), toolsets=[FumehoodToolset(runner)])
            first = await agent.run("go")
            nonlocal programs
            programs = iter(["print(x)", None])
            return first, await agent.run("again")

    first, second = asyncio.run(work())
    assert first.output == "done"
    returns = [p for m in first.all_messages() for p in m.parts if p.part_kind == "tool-return"]
    assert "NameError" in returns[0].content
    text, image = returns[1].content
    assert "42" in text and "drawn" in text and isinstance(image, BinaryContent) and image.media_type == "image/png"
    [afresh] = [p for m in second.all_messages() for p in m.parts if p.part_kind == "tool-return"]
    assert "NameError" in afresh.content  # another run has another sandbox


# --- OpenAI Agents SDK


def test_openai_agents_tools() -> None:
    agents = pytest.importorskip("agents", reason="the extra openai-agents is not installed")
    import openai

    from fumehood.agent.adapters.openai_agents import function_tools

    seen: list[str] = []

    def ends(text: str) -> Says:
        seen.append(text)
        return Says("done")

    async def work(url: str) -> Any:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0)
        model = agents.OpenAIResponsesModel("m", openai_client=client)
        async with AsyncRunner(tier="jail") as runner, Toolbox(runner, tools=["run_python"]) as box:
            agent = agents.Agent(name="a", tools=function_tools(box), model=model)
            running = agents.Runner.run_streamed(agent, "go", run_config=agents.RunConfig(tracing_disabled=True))
            async for _ in running.stream_events():
                pass
            return running.final_output

    with VendorServer([Says(calls=[("run_python", {"code": DRAW})]), ends]) as server:
        assert asyncio.run(work(server.url)) == "done"
    assert server.seen.refusals == [] and "drawn" in seen[0]
    [answer] = server.seen.last_results
    assert [part["type"] for part in answer["output"]] == ["input_text", "input_image"]


# --- smolagents


def test_smolagents_executor(jail: Runner, tmp_path: Path) -> None:
    smolagents = pytest.importorskip("smolagents", reason="the extra smolagents is not installed")
    from fumehood.agent.adapters.smolagents import FumehoodExecutor

    tool = smolagents.tool  # its source is sent to the sandbox, without a line that is just @tool
    said: list[str] = []
    steps = iter(
        [
            "<code>\nrows = [3, 4, 5]\nprint(rows, oops)\n</code>",
            "<code>\nprint('sum', sum(rows), greet('you'))\n</code>",
            "<code>\nfinal_answer({'sum': sum(rows), 'parts': (1, 2)})\n</code>",
        ]
    )

    class Scripted(smolagents.Model):  # type: ignore[misc,name-defined]
        def generate(self, messages: list[Any], **_: Any) -> Any:
            said.append(str(messages[-1].content))
            return smolagents.ChatMessage(role="assistant", content=next(steps))

    @tool
    def greet(name: str) -> str:
        """Greet somebody.

        Args:
            name: Who.
        """
        return "hello " + name

    log = AuditLog(tmp_path / "a.jsonl")
    with FumehoodExecutor(jail, audit=log) as executor:
        agent = smolagents.CodeAgent(tools=[greet], model=Scripted(), executor=executor, verbosity_level=0)
        assert agent.run("add") == {"sum": 12, "parts": (1, 2)}
    assert "NameError" in said[1] and "not instructions" in said[1]
    assert "sum 12 hello you" in said[2]
    assert verify(log.path).ok


def test_smolagents_executor_takes_no_pickle_and_no_lesser_tier(jail: Runner) -> None:
    pytest.importorskip("smolagents", reason="the extra smolagents is not installed")
    from smolagents.utils import AgentExecutionError
    from stand_in import StandInTier

    from fumehood.agent.adapters.smolagents import FumehoodExecutor

    with FumehoodExecutor(jail) as executor:
        for answer in ("pickle:gASVAAAA", "safe:{not json"):
            with pytest.raises(AgentExecutionError):
                executor(f"class FinalAnswerException(BaseException): pass\nraise FinalAnswerException({answer!r})")
        with pytest.raises(AgentExecutionError, match="exit code 3"):
            executor("import os; os._exit(3)")
    with Runner(tier=StandInTier(live=False)) as runner, pytest.raises(PolicyError):
        FumehoodExecutor(runner)


def test_a_refusal_reaches_smolagents_as_an_error(jail: Runner) -> None:
    pytest.importorskip("smolagents", reason="the extra smolagents is not installed")
    from smolagents.utils import AgentExecutionError

    from fumehood.agent.adapters.smolagents import FumehoodExecutor

    no = Approval(CallbackApprover(lambda _: False, name="eve"))
    with FumehoodExecutor(jail, approval=no) as executor, pytest.raises(AgentExecutionError, match="refused by eve"):
        executor("print(1)")


# --- one gate for all


def test_adapters_go_through_the_gate(tmp_path: Path) -> None:
    pytest.importorskip("langchain_core", reason="the extra langchain is not installed")
    from fumehood.agent.adapters.langchain import langchain_tools

    log = AuditLog(tmp_path / "a.jsonl")

    async def work() -> None:
        async with AsyncRunner(tier="jail") as runner, Toolbox(Gate(runner, audit=log)) as box:
            await langchain_tools(box)[0].ainvoke({"code": "1"})

    asyncio.run(work())
    assert verify(log.path).records == 2
