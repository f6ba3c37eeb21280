"""``fumehood agent``: a task, a model, and a sandbox for the code that it writes."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Callable, Mapping
from typing import Any

from fumehood.agent.content import Reply
from fumehood.agent.loop import (
    TURNS_MAX,
    AgentResult,
    Conversation,
    Prices,
    ToolCall,
    Watcher,
    run_agent_async,
)
from fumehood.cli import guards
from fumehood.cli.exits import ExitCode
from fumehood.cli.output import LiveOutput, print_json, say
from fumehood.cli.run import _artifact_in_words, _files, _out_folder
from fumehood.cli.terminal import TerminalFilter, escape
from fumehood.errors import PolicyError, UnavailableError
from fumehood.runner import AsyncRunner
from fumehood.tier import Stream

#: The exit code when the model stopped before it was done: by the limit on turns or tokens, or by refusing.
UNFINISHED = 1

_EPILOG = f"""\
The model's code runs in a sandbox, never in this process; the sandbox sees no key and no variable of
yours. Keys are read by the vendor's SDK from ANTHROPIC_API_KEY or OPENAI_API_KEY.

exit codes: 0 the model says it is done; {UNFINISHED} it stopped before (turns, tokens, a refusal); the others as
for `fumehood run`."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``fumehood agent``."""
    parser.epilog = _EPILOG
    parser.add_argument("task", metavar="TASK", help="what is to be done, in words")
    model = parser.add_argument_group("model")
    model.add_argument("--model", required=True, help="the model's name")
    model.add_argument(
        "--api",
        choices=("anthropic", "openai", "openai-responses"),
        help="default: anthropic for a model called claude..., else openai (Chat Completions)",
    )
    model.add_argument("--base-url", metavar="URL", help="the API's address, for a local server or a gateway")
    model.add_argument("--turns", type=int, default=TURNS_MAX, metavar="N", help="at most (default: %(default)s)")
    model.add_argument(
        "--prices", metavar="IN:OUT", help="dollars for a million tokens of input and output, to report the cost"
    )
    model.add_argument("--no-images", action="store_true", help="the model takes no images (OpenAI's APIs)")
    data = parser.add_argument_group("files")
    data.add_argument(
        "--file",
        action="append",
        default=[],
        metavar="SRC[:DEST]",
        help="a copy of a file, in the work folder under DEST (default: its own name)",
    )
    data.add_argument("--out", metavar="DIR", help="save what is left in the work folder")
    data.add_argument("--transcript", metavar="FILE", help="write the conversation to this new file, as JSON lines")
    data.add_argument("--json", action="store_true", help="one JSON object on stdout instead of the conversation")
    guards.configure(parser, terminal=True)


def main(args: argparse.Namespace) -> int:
    """Run the task and return the exit code. Raises FumehoodError, and KeyboardInterrupt after cleaning up."""
    if args.turns < 1:
        raise PolicyError("--turns must be 1 or more")
    prices = _prices(args.prices)
    runner = guards.make_runner(args)
    conversation = _conversation(args)
    options: dict[str, Any] = {
        "files": _files(args.file, runner.policy.limits.disk_bytes),
        "out": None if args.out is None else _out_folder(args.out),
        "turns_max": args.turns,
        "prices": prices,
        "transcript": args.transcript,
    }
    with guards.guarded(args, runner) as gate:
        screen = None if args.json else Screen()
        watcher = screen.watcher if screen is not None else None
        work = run_agent_async(args.task, gate, conversation, watcher=watcher, **options)
        result = asyncio.run(_execute(runner, work, screen))
    if isinstance(result, int):
        return result
    if args.json:
        print_json(result.to_dict())
    else:
        _explain(result)
    return 0 if result.stop == "finished" else UNFINISHED


async def _execute(runner: AsyncRunner, work: Any, screen: Screen | None) -> AgentResult | int:
    """The result, or an exit code if SIGTERM or a broken pipe ended it. Ctrl-C is asyncio.run's own business."""
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work)
    ended_by: list[int] = []

    def stop(code: int) -> None:
        ended_by.append(code)
        task.cancel()

    if screen is not None:
        screen.on_failure = lambda: loop.call_soon_threadsafe(stop, ExitCode.BROKEN_PIPE.value)
    for number in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop, 128 + number)
    try:
        async with runner:
            result: AgentResult = await task
    except asyncio.CancelledError:
        if ended_by:
            return ended_by[0]
        raise
    finally:
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
    if screen is not None:
        screen.finish()
    return result


def _conversation(args: argparse.Namespace) -> Conversation:
    api = args.api or ("anthropic" if args.model.startswith("claude") else "openai")
    base_url = args.base_url
    extra = "anthropic" if api == "anthropic" else "openai"
    key = f"{extra.upper()}_API_KEY"
    # A local server wants no key, and the SDK will not do without.
    key_option: dict[str, str] = {"api_key": "none"} if base_url is not None and not os.environ.get(key) else {}
    if not key_option and not os.environ.get(key):
        raise PolicyError(f"there is no key for the model's API: {key} is not set")
    try:
        if api == "anthropic":
            import anthropic

            from fumehood.agent.vendors.anthropic import AnthropicConversation

            client = anthropic.AsyncAnthropic(base_url=base_url, **key_option)  # type: ignore[arg-type]
            return AnthropicConversation(args.model, client=client)
        import openai

        from fumehood.agent.vendors.openai import ChatConversation, ResponsesConversation

        kind = ChatConversation if api == "openai" else ResponsesConversation
        openai_client = openai.AsyncOpenAI(base_url=base_url, **key_option)  # type: ignore[arg-type]
        return kind(args.model, client=openai_client, images=not args.no_images)
    except ImportError as error:
        raise UnavailableError(
            f"the {extra} SDK is not installed", remedy=f"pip install 'fumehood[{extra}]'"
        ) from error


def _prices(text: str | None) -> Prices | None:
    if text is None:
        return None
    try:
        input_usd, output_usd = map(float, text.split(":"))
    except ValueError:
        raise PolicyError(f"--prices {text!r} is not IN:OUT, such as 3:15") from None
    return Prices(input_usd, output_usd)


def _explain(result: AgentResult) -> None:
    tokens = result.tokens
    cost = "" if result.cost_usd is None else f", ${result.cost_usd:.4f}"
    cached = f" + {tokens.cached_input:,} cached" if tokens.cached_input else ""
    endings = {
        "finished": "done",
        "turns": "stopped: the limit on turns was reached",
        "tokens": "stopped: the model's answer was cut off by its limit on tokens",
        "refused": "stopped: the model refused",
    }
    say(
        f"{endings[result.stop]}; {result.turns} turns, tokens: {tokens.input:,}{cached} in, "
        f"{tokens.output:,} out{cost}"
    )
    for artifact in result.artifacts:
        say(_artifact_in_words(artifact))


class Screen:
    """The conversation on stdout: the model's text as it is, and behind a mark at each line the code (``>``), what it
    prints (``|``, stderr ``!``) and how it ended (``=``). Everything is made harmless for a terminal; the marks keep a
    program's output from passing for the model's words or ours."""

    def __init__(self) -> None:
        self.on_failure: Callable[[], object] = lambda: None  # called in another thread
        self._output = LiveOutput(self._failed)
        self._filters: dict[Stream, TerminalFilter] = {}
        self._at_line_start = True
        self._mark = ""

    @property
    def watcher(self) -> Watcher:
        """The callbacks."""
        return Watcher(self._text, self._call, self._reply, self._sink)

    def finish(self) -> None:
        """Wait until all is written."""
        self._fresh_line()
        self._output.finish()

    def _failed(self) -> None:
        self.on_failure()

    def _text(self, text: str) -> None:
        self._marked("", escape(text))

    def _call(self, call: ToolCall) -> None:
        self._marked("> ", f"{escape(call.name)}\n{escape(_program(call.arguments))}\n")
        self._filters = {}

    def _sink(self, stream: Stream, data: bytes) -> None:
        text = self._filters.setdefault(stream, TerminalFilter()).feed(data).decode()
        self._marked("| " if stream == "stdout" else "! ", text)

    def _reply(self, call: ToolCall, reply: Reply) -> None:
        self._marked("= ", escape(reply.text.partition("\n")[0]) + "\n")

    def _marked(self, mark: str, text: str) -> None:
        if not text:
            return
        if mark != self._mark:
            self._fresh_line()
            self._mark = mark
        ends = text.endswith("\n")
        lines = text.removesuffix("\n").split("\n")
        head = mark if self._at_line_start else ""
        self._write(head + ("\n" + mark).join(lines) + ("\n" if ends else ""))
        self._at_line_start = ends

    def _fresh_line(self) -> None:
        if not self._at_line_start:
            self._write("\n")
            self._at_line_start = True

    def _write(self, text: str) -> None:
        self._output.sink("stdout", text.encode())


def _program(arguments: str | Mapping[str, Any]) -> str:
    """What a call runs, as a person reads it: the code itself where that is all there is."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return str(arguments)
    if isinstance(arguments, Mapping) and isinstance(arguments.get("code"), str) and len(arguments) == 1:
        return str(arguments["code"])
    return json.dumps(arguments, indent=1)
