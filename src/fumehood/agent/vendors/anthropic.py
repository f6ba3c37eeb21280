"""A conversation over Anthropic's Messages API, by the ``anthropic`` SDK (extra ``anthropic``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import anthropic

from fumehood.agent.content import Image, Reply
from fumehood.agent.loop import Tokens, ToolCall, Turn
from fumehood.agent.tool import ToolSpec
from fumehood.errors import ModelError

#: Room for one turn's text and calls; the API demands a bound.
MAX_TOKENS = 8192


class AnthropicConversation:
    """A :class:`~fumehood.agent.loop.Conversation`. ``client`` defaults to one made from the environment's key."""

    def __init__(
        self, model: str, *, client: anthropic.AsyncAnthropic | None = None, max_tokens: int = MAX_TOKENS
    ) -> None:
        self.model = model
        self._client = client if client is not None else anthropic.AsyncAnthropic()
        self._max_tokens = max_tokens
        self._system = ""
        self._tools: list[Any] = []
        self._messages: list[Any] = []

    def begin(self, system: str, task: str, tools: Sequence[ToolSpec]) -> None:
        """See :class:`~fumehood.agent.loop.Conversation`."""
        self._system = system
        self._tools = [t.anthropic() for t in tools]
        self._messages = [{"role": "user", "content": task}]

    async def turn(self, on_text: Callable[[str], None]) -> Turn:
        """See :class:`~fumehood.agent.loop.Conversation`. A turn that the server paused is gone on with."""
        text, calls, tokens = "", [], Tokens()
        while True:
            message = await self._ask(on_text)
            self._messages.append({"role": "assistant", "content": [b.to_dict() for b in message.content]})
            text += "".join(b.text for b in message.content if b.type == "text")
            calls += [ToolCall(b.id, b.name, _arguments(b.input)) for b in message.content if b.type == "tool_use"]
            tokens += _tokens(message.usage)
            if message.stop_reason != "pause_turn":
                break
        cut = message.stop_reason in ("max_tokens", "model_context_window_exceeded")
        return Turn(text, tuple(calls), tokens, cut=cut, refused=message.stop_reason == "refusal")

    async def _ask(self, on_text: Callable[[str], None]) -> anthropic.types.Message:
        try:
            async with self._client.messages.stream(
                model=self.model,
                max_tokens=self._max_tokens,
                system=self._system,
                tools=self._tools,
                messages=self._messages,
            ) as stream:
                async for event in stream:
                    if event.type == "text":
                        on_text(event.text)
                return await stream.get_final_message()
        except Exception as error:  # the SDK passes on what a broken or malformed stream raises below it
            raise ModelError(f"the model could not be asked: {error}") from error

    def answer(self, replies: Sequence[tuple[ToolCall, Reply]]) -> None:
        """See :class:`~fumehood.agent.loop.Conversation`."""
        self._messages.append({"role": "user", "content": [tool_result(call.ident, reply) for call, reply in replies]})


def tool_result(ident: str, reply: Reply) -> dict[str, Any]:
    """A reply as the ``tool_result`` block for the ``tool_use`` block of that id."""
    content = [
        {"type": "image", "source": {"type": "base64", "media_type": b.media_type, "data": b.base64}}
        if isinstance(b, Image)
        else {"type": "text", "text": b.text}
        for b in reply.blocks
    ]
    return {"type": "tool_result", "tool_use_id": ident, "content": content, "is_error": reply.is_error}


def _arguments(value: object) -> dict[str, Any]:
    return dict(value) if isinstance(value, dict) else {}


def _tokens(usage: anthropic.types.Usage) -> Tokens:
    written = usage.cache_creation_input_tokens or 0
    return Tokens(usage.input_tokens + written, usage.output_tokens, usage.cache_read_input_tokens or 0)
