"""The tools for Pydantic AI (extra ``pydantic-ai``).

from fumehood.agent.adapters.pydantic_ai import FumehoodToolset
async with AsyncRunner() as runner:
    agent = Agent(model, toolsets=[FumehoodToolset(runner)])
    await agent.run("...")
"""

from __future__ import annotations

from typing import Any

from pydantic_ai import AbstractToolset, BinaryContent, RunContext, ToolDefinition
from pydantic_ai.toolsets import ToolsetTool
from pydantic_core import SchemaValidator, core_schema

from fumehood.agent.gate import AnyRunner
from fumehood.agent.tool import Toolbox

#: The toolbox checks the arguments itself, and answers a wrong call in words.
_ANY = SchemaValidator(core_schema.dict_schema(core_schema.str_schema(), core_schema.any_schema()))


class FumehoodToolset(AbstractToolset[Any]):
    """A toolset with a live sandbox of its own for each run of the agent. ``options`` are those of Toolbox."""

    def __init__(self, runner: AnyRunner, *, id: str | None = None, **options: Any) -> None:
        self._runner = runner
        self._id = id
        self._options = options
        self._toolbox = Toolbox(runner, **options)

    @property
    def id(self) -> str | None:
        """See Pydantic AI."""
        return self._id

    async def for_run(self, ctx: RunContext[Any]) -> FumehoodToolset:
        """A fresh one, so that no run sees another's files and variables."""
        return FumehoodToolset(self._runner, id=self._id, **self._options)

    async def __aexit__(self, *_: object) -> None:
        """End the sandbox."""
        await self._toolbox.close()

    async def get_tools(self, ctx: RunContext[Any]) -> dict[str, ToolsetTool[Any]]:
        """See Pydantic AI."""
        return {
            spec.name: ToolsetTool(
                toolset=self,
                tool_def=ToolDefinition(
                    name=spec.name, description=spec.description, parameters_json_schema=spec.schema
                ),
                max_retries=1,
                args_validator=_ANY,
            )
            for spec in self._toolbox.specs
        }

    async def call_tool(
        self, name: str, tool_args: dict[str, Any], ctx: RunContext[Any], tool: ToolsetTool[Any]
    ) -> Any:
        """The reply's text, with its images where there are any."""
        reply = await self._toolbox.call(name, tool_args)
        if not reply.images:
            return reply.text
        return [reply.text, *(BinaryContent(data=i.data, media_type=i.media_type) for i in reply.images)]
