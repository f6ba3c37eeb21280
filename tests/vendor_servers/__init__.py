"""A local server that speaks the vendors' APIs, with streaming and without, and plays a script in the model's place.

On loopback only. It holds a request to what the vendors refuse too (a call without its answer, an answer without its
call, unknown roles), so that a conversation which passes here is one that they would take.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Says:
    """One turn of the model."""

    text: str = ""
    calls: Sequence[tuple[str, Any]] = ()  # (tool, arguments): a mapping, or raw text that is sent as it is
    cut: bool = False  # by the limit on tokens
    refused: bool = False


#: A turn, or a function from what the model last saw (all text of the last message) to one.
Script = Sequence[Says | Callable[[str], Says]]


@dataclass
class Seen:
    """What the server was sent."""

    bodies: list[dict[str, Any]] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)

    @property
    def last_results(self) -> list[dict[str, Any]]:
        """The answers to the last turn's calls, as sent."""
        body = self.bodies[-1]
        if "input" in body:
            return [i for i in body["input"] if i.get("type") == "function_call_output"]
        last = body["messages"][-1]
        if isinstance(last["content"], list) and last["content"] and last["content"][0].get("type") == "tool_result":
            return list(last["content"])
        return [m for m in body["messages"] if m["role"] == "tool"]


class VendorServer:
    """Plays ``script``, one turn a request. A context manager; ``url`` is its address without a path."""

    def __init__(self, script: Script) -> None:
        self.seen = Seen()
        self._script = list(script)
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers["content-length"]))
                outer._serve(self, raw)

            def log_message(self, *_: object) -> None:
                return None

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    def __enter__(self) -> VendorServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def turns_left(self) -> int:
        return len(self._script)

    def _serve(self, handler: BaseHTTPRequestHandler, raw: bytes) -> None:
        api = _APIS[handler.path.partition("?")[0]]
        body = json.loads(raw)
        with self._lock:
            self.seen.raw.append(raw)
            self.seen.bodies.append(body)
            wrong = api.check(body)
            if wrong is None and not self._script:
                wrong = "the script is over"
            if wrong is not None:
                self.seen.refusals.append(wrong)
                _send(handler, 400, "application/json", [json.dumps({"error": {"type": "bad", "message": wrong}})])
                return
            turn = self._script.pop(0)
        says = turn if isinstance(turn, Says) else turn(api.last(body))
        pieces = api.play(says, body, len(self.seen.bodies))
        if body.get("stream"):
            _send(handler, 200, "text/event-stream", pieces)
        else:
            events = [json.loads(piece.partition("data: ")[2]) for piece in pieces if "data: {" in piece]
            _send(handler, 200, "application/json", [json.dumps(api.fold(events))])


def _send(handler: BaseHTTPRequestHandler, status: int, kind: str, pieces: Iterator[str] | list[str]) -> None:
    handler.send_response(status)
    handler.send_header("content-type", kind)
    handler.send_header("transfer-encoding", "chunked")
    handler.end_headers()
    for piece in pieces:
        data = piece.encode()
        handler.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
    handler.wfile.write(b"0\r\n\r\n")


def _pieces(text: str, size: int) -> Iterator[str]:
    for start in range(0, len(text), size):
        yield text[start : start + size]


def _text_of(content: Any) -> str:
    """All text in a message's content, however it is nested."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(map(_text_of, content))
    if isinstance(content, dict):
        return _text_of(content.get("text") or content.get("content") or content.get("output") or "")
    return ""


def _raw_arguments(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


# --- Anthropic's Messages API: https://docs.anthropic.com/en/api/messages-streaming


def _check_messages(body: dict[str, Any]) -> str | None:
    waiting: list[str] = []
    wanted = "user"
    for message in body["messages"]:
        if message["role"] != wanted:
            return f"role {message['role']} where {wanted} was expected"
        wanted = "assistant" if wanted == "user" else "user"
        blocks = message["content"] if isinstance(message["content"], list) else []
        answers = [b["tool_use_id"] for b in blocks if b["type"] == "tool_result"]
        if message["role"] == "user" and answers != waiting:
            return f"tool_use {waiting} was answered by tool_result {answers}"
        waiting = [b["id"] for b in blocks if b["type"] == "tool_use"]
        for block in blocks:
            if block["type"] == "text" and not block["text"]:
                return "text content blocks must be non-empty"
    for tool in body.get("tools", ()):
        if set(tool) != {"name", "description", "input_schema"}:
            return f"tool {tool} is malformed"
    return None if body["max_tokens"] > 0 else "max_tokens is wanted"


def _play_messages(says: Says, body: dict[str, Any], number: int) -> Iterator[str]:
    def event(kind: str, **fields: Any) -> str:
        return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"

    usage = {"input_tokens": 100, "output_tokens": 1, "cache_read_input_tokens": 10}
    message = {
        "id": f"msg_{number}",
        "type": "message",
        "role": "assistant",
        "content": [],
        "model": body["model"],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }
    yield event("message_start", message=message)
    yield event("ping")
    index = 0
    if says.text:
        yield event("content_block_start", index=index, content_block={"type": "text", "text": ""})
        for piece in _pieces(says.text, 7):
            yield event("content_block_delta", index=index, delta={"type": "text_delta", "text": piece})
        yield event("content_block_stop", index=index)
        index += 1
    for at, (name, arguments) in enumerate(says.calls):
        block = {"type": "tool_use", "id": f"toolu_{number}_{at}", "name": name, "input": {}}
        yield event("content_block_start", index=index, content_block=block)
        for piece in _pieces(_raw_arguments(arguments), 23):
            yield event("content_block_delta", index=index, delta={"type": "input_json_delta", "partial_json": piece})
        yield event("content_block_stop", index=index)
        index += 1
    reason = "refusal" if says.refused else "max_tokens" if says.cut else "tool_use" if says.calls else "end_turn"
    yield event("message_delta", delta={"stop_reason": reason, "stop_sequence": None}, usage={"output_tokens": 20})
    yield event("message_stop")


def _fold_messages(events: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = events[0]["message"]
    for event in events:
        if event["type"] == "content_block_start":
            message["content"].append({**event["content_block"], "raw": ""})
        elif event["type"] == "content_block_delta":
            message["content"][-1]["raw"] += event["delta"].get("text") or event["delta"].get("partial_json")
        elif event["type"] == "content_block_stop":
            block = message["content"][-1]
            raw = block.pop("raw")
            block |= {"text": raw} if block["type"] == "text" else {"input": json.loads(raw)}
        elif event["type"] == "message_delta":
            message |= event["delta"]
    return message


# --- OpenAI's Chat Completions API: https://platform.openai.com/docs/api-reference/chat-streaming


def _check_chat(body: dict[str, Any]) -> str | None:
    waiting: list[str] = []
    for message in body["messages"]:
        if message["role"] == "tool":
            if message["tool_call_id"] not in waiting:
                return "a tool message without its call"
            if not isinstance(message["content"], str):
                return "a tool message may hold text only"
            waiting.remove(message["tool_call_id"])
        elif waiting:
            return f"tool calls {waiting} were not answered"
        elif message["role"] == "assistant":
            waiting = [c["id"] for c in message.get("tool_calls", ())]
        elif message["role"] not in ("system", "user"):
            return f"role {message['role']}"
    return f"tool calls {waiting} were not answered" if waiting else None


def _play_chat(says: Says, body: dict[str, Any], number: int) -> Iterator[str]:
    def chunk(delta: dict[str, Any], finish: str | None = None) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
        return _data({**head, "choices": [choice], "usage": None})

    head = {"id": f"chatcmpl-{number}", "object": "chat.completion.chunk", "created": 1, "model": body["model"]}
    yield chunk({"role": "assistant", "content": ""})
    for piece in _pieces(says.text, 7):
        yield chunk({"content": piece})
    for index, (name, arguments) in enumerate(says.calls):
        function = {"name": name, "arguments": ""}
        call = {"index": index, "id": f"call_{number}_{index}", "type": "function", "function": function}
        yield chunk({"tool_calls": [call]})
        for piece in _pieces(_raw_arguments(arguments), 23):
            yield chunk({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
    finish = "content_filter" if says.refused else "length" if says.cut else "tool_calls" if says.calls else "stop"
    yield chunk({}, finish)
    if body.get("stream_options", {}).get("include_usage"):
        details = {"cached_tokens": 10}
        usage = {
            "prompt_tokens": 110,
            "completion_tokens": 20,
            "total_tokens": 130,
            "prompt_tokens_details": details,
        }
        yield _data({**head, "choices": [], "usage": usage})
    yield "data: [DONE]\n\n"


def _fold_chat(events: list[dict[str, Any]]) -> dict[str, Any]:
    text, finish, calls = "", None, dict[int, dict[str, Any]]()
    for choice in [choice for event in events for choice in event["choices"]]:
        text += choice["delta"].get("content") or ""
        for piece in choice["delta"].get("tool_calls", ()):
            if "id" in piece:
                calls[piece["index"]] = {k: v for k, v in piece.items() if k != "index"}
            else:
                calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
        finish = choice["finish_reason"] or finish
    message = {"role": "assistant", "content": text or None, **({"tool_calls": list(calls.values())} if calls else {})}
    choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
    return {**events[0], "object": "chat.completion", "choices": [choice], "usage": None}


def _data(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


# --- OpenAI's Responses API: https://platform.openai.com/docs/api-reference/responses-streaming


def _check_responses(body: dict[str, Any]) -> str | None:
    calls = [i["call_id"] for i in body["input"] if i.get("type") == "function_call"]
    answers = [i["call_id"] for i in body["input"] if i.get("type") == "function_call_output"]
    return None if calls == answers else f"function_call {calls} was answered by {answers}"


def _play_responses(says: Says, body: dict[str, Any], number: int) -> Iterator[str]:
    sequence = iter(range(10**6))

    def event(kind: str, **fields: Any) -> str:
        return f"event: {kind}\ndata: {json.dumps({'type': kind, 'sequence_number': next(sequence), **fields})}\n\n"

    output: list[dict[str, Any]] = []
    response = {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": 1,
        "model": body["model"],
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "status": "in_progress",
    }
    yield event("response.created", response=response)
    if says.text:
        ident = f"msg_{number}"
        content = {"type": "output_text", "text": says.text, "annotations": []}
        item = {"id": ident, "type": "message", "role": "assistant", "status": "completed", "content": [content]}
        yield event("response.output_item.added", output_index=0, item={**item, "content": []})
        for piece in _pieces(says.text, 7):
            place = {"item_id": ident, "output_index": 0, "content_index": 0, "logprobs": []}
            yield event("response.output_text.delta", delta=piece, **place)
        output.append(item)
        yield event("response.output_item.done", output_index=0, item=item)
    for index, (name, arguments) in enumerate(says.calls):
        call_id = f"call_{number}_{index}"
        item = {
            "id": f"fc_{number}_{index}",
            "type": "function_call",
            "call_id": call_id,
            "name": name,
            "arguments": _raw_arguments(arguments),
            "status": "completed",
        }
        yield event("response.output_item.added", output_index=len(output), item={**item, "arguments": ""})
        output.append(item)
        yield event("response.output_item.done", output_index=len(output) - 1, item=item)
    usage = {
        "input_tokens": 110,
        "input_tokens_details": {"cached_tokens": 10},
        "output_tokens": 20,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 130,
    }
    reason = "content_filter" if says.refused else "max_output_tokens" if says.cut else None
    ending = {"incomplete_details": {"reason": reason}, "status": "incomplete"} if reason else {"status": "completed"}
    yield event(f"response.{ending['status']}", response={**response, **ending, "output": output, "usage": usage})


def _fold_responses(events: list[dict[str, Any]]) -> dict[str, Any]:
    whole: dict[str, Any] = events[-1]["response"]
    return whole


@dataclass(frozen=True)
class _Api:
    check: Callable[[Any], str | None]  # what is wrong with a request
    play: Callable[[Says, dict[str, Any], int], Iterator[str]]
    fold: Callable[[list[dict[str, Any]]], dict[str, Any]]  # the streamed events as one answer
    last: Callable[[Any], str]  # the text that the model saw last


_APIS = {
    "/v1/messages": _Api(_check_messages, _play_messages, _fold_messages, lambda b: _text_of(b["messages"][-1])),
    "/v1/chat/completions": _Api(
        _check_chat, _play_chat, _fold_chat, lambda b: _text_of([m["content"] for m in b["messages"][-2:]])
    ),
    "/v1/responses": _Api(_check_responses, _play_responses, _fold_responses, lambda b: _text_of(b["input"][-1])),
}
