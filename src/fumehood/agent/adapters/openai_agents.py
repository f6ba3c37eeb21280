"""The tools for the OpenAI Agents SDK (extra ``openai-agents``).

from fumehood.agent.adapters.openai_agents import function_tools
async with AsyncRunner() as runner, Toolbox(runner) as box:
    agent = Agent(name="analyst", tools=function_tools(box))
"""

from __future__ import annotations

from typing import Any

from agents import FunctionTool, Tool, ToolOutputImage, ToolOutputText

from fumehood.agent.content import Image
from fumehood.agent.tool import Toolbox, ToolSpec


def function_tools(toolbox: Toolbox) -> list[Tool]:
    """The tools of ``toolbox``."""
    return [_tool(toolbox, spec) for spec in toolbox.specs]


def _tool(toolbox: Toolbox, spec: ToolSpec) -> FunctionTool:
    async def call(_: object, arguments: str) -> Any:
        reply = await toolbox.call(spec.name, arguments)
        if not reply.images:
            return reply.text
        return [
            ToolOutputImage(image_url=b.url) if isinstance(b, Image) else ToolOutputText(text=b.text)
            for b in reply.blocks
        ]

    return FunctionTool(
        name=spec.name, description=spec.description, params_json_schema=spec.schema, on_invoke_tool=call
    )
