"""An executor for smolagents' CodeAgent (extra ``smolagents``).

    from fumehood.agent.adapters.smolagents import FumehoodExecutor
    with Runner() as runner, FumehoodExecutor(runner) as executor:
        CodeAgent(tools=[], model=model, executor=executor).run("...")

The agent's code, and the code of its tools, run in one live sandbox. smolagents itself need not be there. A final
answer comes back as smolagents' remote executors bring it: as JSON in the message of an exception, never pickled.
"""

from __future__ import annotations

import re
from typing import Any

from smolagents.local_python_executor import CodeOutput
from smolagents.monitoring import AgentLogger, LogLevel
from smolagents.remote_executors import RemotePythonExecutor
from smolagents.tools import get_tools_definition_code
from smolagents.utils import AgentExecutionError

from fumehood.agent.content import STREAM_CHARS_MAX, cut, describe, neutralise
from fumehood.agent.tool import SyncToolbox
from fumehood.errors import PolicyError
from fumehood.model import Outcome
from fumehood.runner import Runner

_TOP_IMPORT = re.compile(r"^import ([\w.]+)$", re.MULTILINE)
_FINAL_ANSWER = re.compile(r"FinalAnswerException: (safe:.*)\s*\Z")


class FumehoodExecutor(RemotePythonExecutor):
    """A PythonExecutor over a runner whose tier has live sandboxes. Use as a context manager, or call cleanup().

    ``options`` are those of :class:`~fumehood.agent.tool.SyncToolbox`: approval, quotas, audit, files, out and so on.
    Packages are the policy's environment: none is installed. Raises PolicyError for a tier without live sandboxes.
    """

    def __init__(self, runner: Runner, *, logger: AgentLogger | None = None, **options: Any) -> None:
        if not runner.tier.features.live:
            raise PolicyError("an executor keeps variables, and this tier has no live sandboxes", tier=runner.tier.name)
        self._toolbox = SyncToolbox(runner, live=True, **options)
        self._limits = runner.policy.limits
        super().__init__([], logger if logger is not None else AgentLogger(level=LogLevel.ERROR), allow_pickle=False)

    def run_code_raise_errors(self, code: str) -> CodeOutput:
        """Run code in the sandbox. Raises AgentExecutionError, which the agent's model reads, if it failed."""
        reply = self._toolbox.call("run_python", {"code": code})
        result = reply.result
        if result is None:
            raise AgentExecutionError(reply.text, self.logger)
        answer = _FINAL_ANSWER.search(result.stderr) if result.exit_code else None
        if answer is not None:
            try:
                value = self._deserialize_final_answer(answer[1], allow_pickle=False)
            except Exception as error:
                raise AgentExecutionError("the final answer could not be read", self.logger) from error
            return CodeOutput(output=value, logs=self._logs(result.stdout), is_final_answer=True)
        if result.outcome is not Outcome.EXITED or result.exit_code != 0:
            raise AgentExecutionError(describe(result, self._limits), self.logger)
        return CodeOutput(output=None, logs=self._logs(result.stdout), is_final_answer=False)

    def _logs(self, text: str) -> str:
        return neutralise(cut(text, STREAM_CHARS_MAX))

    def send_tools(self, tools: dict[str, Any]) -> None:
        """Define the tools in the sandbox. What a tool's source imports is needed only when the tool is called."""
        if "final_answer" in tools:
            self._patch_final_answer_with_exception(tools["final_answer"])
        # smolagents lifts each import of a tool to the top, those that the tool itself would do without included.
        code = _TOP_IMPORT.sub(r"try:\n    import \1\nexcept ImportError:\n    pass", get_tools_definition_code(tools))
        self.run_code_raise_errors(code)

    def install_packages(self, additional_imports: list[str]) -> list[str]:
        """Nothing is installed at run time: the policy's environment has what there is."""
        return []

    def cleanup(self) -> None:
        """End the sandbox. Idempotent."""
        self._toolbox.close()

    def __enter__(self) -> FumehoodExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        self.cleanup()
