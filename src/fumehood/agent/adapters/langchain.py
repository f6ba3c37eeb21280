"""The tools for LangChain and LangGraph (extra ``langchain``).

from fumehood.agent.adapters.langchain import langchain_tools
with Runner() as runner, SyncToolbox(runner) as box:
    agent = create_agent(model, tools=langchain_tools(box))
"""

from __future__ import annotations

from typing import Any

from langchain_core.tools import BaseTool, StructuredTool

from fumehood.agent.content import Reply
from fumehood.agent.tool import SyncToolbox, Toolbox, ToolSpec


def langchain_tools(toolbox: Toolbox | SyncToolbox) -> list[BaseTool]:
    """The tools of ``toolbox``; of an asynchronous one they can be used asynchronously only.

    A tool's content is text, or a list of LangChain's content blocks where there are images; its artifact is the Reply.
    """
    return [_tool(toolbox, spec) for spec in toolbox.specs]


def _tool(toolbox: Toolbox | SyncToolbox, spec: ToolSpec) -> BaseTool:
    shape: dict[str, Any] = {
        "name": spec.name,
        "description": spec.description,
        "args_schema": spec.schema,
        "response_format": "content_and_artifact",
    }
    if isinstance(toolbox, SyncToolbox):

        def call(**arguments: Any) -> tuple[Any, Reply]:
            return _content(toolbox.call(spec.name, arguments))

        return StructuredTool.from_function(func=call, **shape)

    async def call_async(**arguments: Any) -> tuple[Any, Reply]:
        return _content(await toolbox.call(spec.name, arguments))

    return StructuredTool.from_function(coroutine=call_async, **shape)


def _content(reply: Reply) -> tuple[Any, Reply]:
    if not reply.images:
        return reply.text, reply
    images = [{"type": "image", "base64": i.base64, "mime_type": i.media_type} for i in reply.images]
    return [{"type": "text", "text": reply.text}, *images], reply
