"""The tools that an agent is given: their schemas, and the handler of a call, which always has something to say.

A :class:`Toolbox` is one agent's conversation: where the tier has live sandboxes, its calls share one, so that
variables and files last; otherwise each call is a sandbox of its own. Whatever a model sends as a call, and whatever
fails, the answer is a :class:`~fumehood.agent.content.Reply`. An internal failure gives the model one sentence, and the
log (``logging.getLogger("fumehood.agent")``) the detail under the same reference.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import secrets
import tempfile
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fumehood.agent.approval import Approval
from fumehood.agent.audit import AuditLog
from fumehood.agent.books import Caller
from fumehood.agent.content import (
    IMAGE_BYTES_MAX,
    STREAM_CHARS_MAX,
    Image,
    Reply,
    Text,
    cut,
    describe,
    display_images,
    image_of,
    quote,
)
from fumehood.agent.gate import AnyRunner, Gate
from fumehood.agent.quotas import Quotas
from fumehood.errors import ClosedError, FileError, OutcomeUnknownError, PolicyError, QuotaError, StartError
from fumehood.model import Artifact, Code, Command, Outcome, Policy, Result
from fumehood.runner import Runner
from fumehood.threads import in_thread
from fumehood.tier import Sandbox, Sink, Tier

log = logging.getLogger("fumehood.agent")

#: Displays, and new image files, of one call that a model is given as images.
IMAGES_MAX = 4

#: Image files that are looked into after one call: a program may leave any number.
IMAGES_LOOKED_INTO_MAX = 16

#: The largest file that a model may read; what it is shown of it is cut further.
READ_BYTES_MAX = 4 << 20

LISTED_MAX = 200
_IMAGE_NAMES = (".png", ".jpg", ".jpeg")

#: Outcomes after which a live sandbox is gone, because Fumehood killed all in it.
_FATAL = frozenset({Outcome.WALL, Outcome.CPU, Outcome.OUTPUT, Outcome.MEMORY})


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool as a model sees it."""

    name: str
    description: str
    schema: dict[str, Any]  # JSON Schema of the arguments

    def anthropic(self) -> dict[str, Any]:
        """For ``tools=`` of Anthropic's Messages API."""
        return {"name": self.name, "description": self.description, "input_schema": self.schema}

    def openai_chat(self) -> dict[str, Any]:
        """For ``tools=`` of OpenAI's Chat Completions API."""
        function = {"name": self.name, "description": self.description, "parameters": self.schema}
        return {"type": "function", "function": function}

    def openai_responses(self) -> dict[str, Any]:
        """For ``tools=`` of OpenAI's Responses API."""
        return {"type": "function", "name": self.name, "description": self.description, "parameters": self.schema}


class Toolbox:
    """The tools over a runner (or a gate), for asyncio. Use as an asynchronous context manager.

    ``live`` shares one sandbox among the calls (default: if the tier can). ``files`` are put into each new sandbox's
    work folder. What programs leave there is saved below ``out``, if given, when a sandbox ends.
    ``tools`` narrows what is offered to these names. ``on_artifacts`` is called, in a thread, with what a sandbox of a
    single call left, while the files are there. Calls are taken one after the other.
    """

    def __init__(
        self,
        runner: AnyRunner,
        *,
        live: bool | None = None,
        files: Mapping[str, bytes] | None = None,
        out: Path | None = None,
        tools: Collection[str] | None = None,
        stream_chars_max: int = STREAM_CHARS_MAX,
        on_artifacts: Callable[[Sequence[Artifact]], None] | None = None,
    ) -> None:
        features = runner.tier.features
        self._runner = runner
        self._live = features.live if live is None else live
        self._files = dict(files or {})
        self._out = out
        self._chars_max = stream_chars_max
        self._on_artifacts = on_artifacts
        self._lock = asyncio.Lock()
        self._stack: contextlib.AsyncExitStack | None = None
        self._sandbox: Sandbox | None = None
        self._seen: set[str] = set()  # digests of images that the model has
        self._closed = False
        self._lost = False  # a run's failure or cancellation cost the sandbox, and the model was not told yet
        self.artifacts: list[Artifact] = []  # saved or skipped so far
        handlers: dict[str, Callable[..., Awaitable[Reply]]] = {"run_python": self._run_python}
        if features.commands:
            handlers["run_command"] = self._run_command
        if self._live and features.files:
            handlers |= {
                "read_file": self._read_file,
                "write_file": self._write_file,
                "list_files": self._list_files,
            }
        self._handlers = {n: h for n, h in handlers.items() if tools is None or n in tools}
        if tools is not None and (missing := set(tools) - set(handlers)):
            raise PolicyError(f"no such tool with this tier: {', '.join(sorted(missing))}", tier=runner.tier.name)
        self.specs = tuple(_spec(name, runner.tier, runner.policy, live=self._live) for name in self._handlers)

    # --- the handler

    async def call(self, name: str, arguments: str | Mapping[str, Any], *, sink: Sink | None = None) -> Reply:
        """Do what a model asked for; ``arguments`` is the JSON it sent, as text or parsed. Raises only CancelledError.

        ``sink`` is given the output of a program as it comes. A cancellation ends the run and, with it, a live
        sandbox; :meth:`close` waits until that is done.
        """
        # In a task of its own: a framework with level-triggered cancellation (anyio) would cancel the clean-up too.
        task = asyncio.ensure_future(self._call(name, arguments, sink))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.cancel()
            raise

    async def _call(self, name: str, arguments: str | Mapping[str, Any], sink: Sink | None) -> Reply:
        try:
            spec = next((s for s in self.specs if s.name == name), None)
            if spec is None:
                known = ", ".join(self._handlers)
                return _refusal(f"There is no tool of that name; the tools are {known}. Nothing was started.")
            values = _arguments(spec, arguments)
            async with self._lock:
                if self._closed:
                    raise ClosedError("the toolbox is closed")
                return await self._handlers[name](sink=sink, **values)
        except _BadArguments as error:
            return _refusal(f"{error} Nothing was started.")
        except Exception as error:
            return _failure(error)

    async def run_python(self, code: str) -> str:
        """Run a Python program in the sandbox; what happened and what it printed, as text."""
        return (await self.call("run_python", {"code": code})).text

    async def _run_python(self, *, code: str, sink: Sink | None = None) -> Reply:
        return await self._run(Code(code, displays=True if self._runner.tier.features.displays else None), sink)

    async def _run_command(self, *, argv: list[str], sink: Sink | None = None) -> Reply:
        return await self._run(Command(tuple(argv)), sink)

    async def _run(self, program: Code | Command, sink: Sink | None) -> Reply:
        if self._live:
            result, images, notes = await self._run_live(program, sink)
        else:
            result, images, notes = await self._run_once(program, sink)
        displayed = display_images(result.displays, IMAGES_MAX)
        if displayed:
            notes.append(f"Of the images below, it displayed the first {len(displayed)}.")
        text = describe(result, self._runner.policy.limits, notes=notes, chars_max=self._chars_max)
        return Reply((Text(text), *displayed, *images), result=result)

    # --- a sandbox for each call

    async def _run_once(self, program: Code | Command, sink: Sink | None) -> tuple[Result, list[Image], list[str]]:
        if not self._runner.tier.features.files:
            return await self._runner.run(program, files=self._files or None, sink=sink), [], []
        with contextlib.ExitStack() as stack:
            out = self._out
            if out is None:
                out = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fumehood-")))
            result = await self._runner.run(program, files=self._files, out=out, sink=sink)
            self.artifacts += result.artifacts if self._out is not None else ()
            images, notes = await in_thread(_saved_images, result.artifacts)
            if self._on_artifacts is not None:
                await in_thread(self._on_artifacts, result.artifacts)
        names = [a.path for a in result.artifacts if a.saved is not None]
        if names:
            notes.insert(0, quote([("files", "\n".join(names[:LISTED_MAX]))], what="the names of files it left"))
        return result, images, notes

    # --- one sandbox for all calls

    async def _run_live(self, program: Code | Command, sink: Sink | None) -> tuple[Result, list[Image], list[str]]:
        sandbox = await self._open()
        try:
            result = await sandbox.exec(program, sink=sink)
        except QuotaError:
            raise  # nothing started, so nothing is lost
        except BaseException:
            self._lost = True
            await self._end()
            raise
        if result.outcome is Outcome.DENIED:
            return result, [], []
        notes = []
        if self._lost:
            self._lost = False
            notes.append("This is a new sandbox: variables and files of calls before the one that failed are gone.")
        if result.outcome in _FATAL and not await _answers(sandbox):
            await self._end()
            notes.append("The sandbox ended with it: variables and files of earlier calls are gone.")
            return result, [], notes
        if result.interpreter_lost:
            notes.append("The interpreter ended with it: variables of earlier calls are gone, files are there.")
        images, more = await self._new_images(sandbox)
        return result, images, notes + more

    async def _open(self) -> Sandbox:
        if self._sandbox is None:
            stack = contextlib.AsyncExitStack()
            try:
                sandbox = await stack.enter_async_context(self._runner.open())
                for path, data in self._files.items():
                    await sandbox.write_file(path, data)
            except BaseException:
                await stack.aclose()
                raise
            self._stack, self._sandbox = stack, sandbox
        return self._sandbox

    async def _end(self) -> None:
        """End the live sandbox, if there is one, and save what it left."""
        stack, sandbox = self._stack, self._sandbox
        self._stack = self._sandbox = None
        if stack is None or sandbox is None:
            return
        try:
            self.artifacts += await sandbox.close(out=self._out)
        finally:
            await stack.aclose()

    async def _new_images(self, sandbox: Sandbox) -> tuple[list[Image], list[str]]:
        """Images in the work folder that the model does not have yet, and notes on those it is not given."""
        if not self._runner.tier.features.files:
            return [], []
        try:
            found = [f for f in await sandbox.list_files() if f.kind == "file" and _is_image_name(f.path)]
            candidates = [(f.path, f.size_bytes) for f in found[:IMAGES_LOOKED_INTO_MAX]]
            images: list[Image] = []
            notes: list[str] = []
            for path, size_bytes in candidates:
                if size_bytes > IMAGE_BYTES_MAX:
                    continue
                data = await sandbox.read_file(path, max_bytes=IMAGE_BYTES_MAX)
                digest = hashlib.sha256(data).hexdigest()
                if digest in self._seen:
                    continue
                image = image_of(path, data)
                if isinstance(image, str):
                    continue  # a plot that is being written, or no image: the model sees the file in list_files
                if len(images) == IMAGES_MAX:
                    notes.append(f"There are more new images than the {IMAGES_MAX} shown.")
                    break
                self._seen.add(digest)
                images.append(image)
        except (FileError, ClosedError, PolicyError):
            return [], ["Images could not be read from the work folder."]
        return images, notes + _image_notes(images)

    # --- files

    async def _read_file(self, *, path: str, sink: Sink | None = None) -> Reply:
        data = await (await self._open()).read_file(path, max_bytes=READ_BYTES_MAX)
        if _is_image_name(path) and isinstance(image := image_of(path, data), Image):
            return Reply((Text(f"The image has {len(data):,} bytes."), image))
        try:
            text = data.decode()
        except UnicodeDecodeError:
            return Reply((Text(f"The file has {len(data):,} bytes, which are not UTF-8 text."),))
        if not text:
            return Reply((Text("The file is empty."),))
        return Reply((Text(quote([("content", cut(text, 2 * self._chars_max))], what="the file's content")),))

    async def _write_file(self, *, path: str, content: str, sink: Sink | None = None) -> Reply:
        data = content.encode("utf-8", "replace")
        await (await self._open()).write_file(path, data)
        return Reply((Text(f"Written: {len(data):,} bytes."),))

    async def _list_files(self, *, sink: Sink | None = None) -> Reply:
        entries = await (await self._open()).list_files()
        if not entries:
            return Reply((Text("The work folder is empty."),))
        lines = [f"{e.size_bytes:>12,}  {e.path}" + ("/" if e.kind == "folder" else "") for e in entries[:LISTED_MAX]]
        if len(entries) > LISTED_MAX:
            lines.append(f"… and {len(entries) - LISTED_MAX} more")
        listed = cut("\n".join(lines), 2 * self._chars_max)
        return Reply((Text(quote([("size in bytes, name", listed)], what="the list of files")),))

    # --- the end

    async def close(self) -> tuple[Artifact, ...]:
        """End the live sandbox and return all artifacts, those of ended sandboxes included. Idempotent.

        A call that is under way is waited for. Raises FumehoodError if files could not be saved.
        """
        async with self._lock:
            self._closed = True
            await self._end()
        return tuple(self.artifacts)

    async def __aenter__(self) -> Toolbox:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class SyncToolbox:
    """The tools over a :class:`~fumehood.runner.Runner`, as plain functions. Use as a context manager.

    Takes what :class:`Toolbox` and :class:`~fumehood.agent.gate.Gate` take. Threads may share it.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        caller: Caller | None = None,
        approval: Approval | None = None,
        quotas: Quotas | None = None,
        audit: AuditLog | None = None,
        **options: Any,
    ) -> None:
        self._portal = runner._portal
        gate = Gate(runner._core, caller=caller, approval=approval, quotas=quotas, audit=audit)
        self._toolbox = Toolbox(gate, **options)
        self.specs = self._toolbox.specs

    def call(self, name: str, arguments: str | Mapping[str, Any], *, sink: Sink | None = None) -> Reply:
        """See :meth:`Toolbox.call`."""
        return self._portal.call(self._toolbox.call(name, arguments, sink=sink))

    def run_python(self, code: str) -> str:
        """Run a Python program in the sandbox; what happened and what it printed, as text."""
        return self.call("run_python", {"code": code}).text

    def close(self) -> tuple[Artifact, ...]:
        """See :meth:`Toolbox.close`."""
        return self._portal.call(self._toolbox.close())

    def __enter__(self) -> SyncToolbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# --- what a model is told of the tools


def _spec(name: str, tier: Tier, policy: Policy, *, live: bool) -> ToolSpec:
    text, properties = _TOOLS[name]
    if name in ("run_python", "run_command"):
        text += " " + _terms(tier, policy, live=live)
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return ToolSpec(name, text, schema)


_TOOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "run_python": (
        "Run a Python program in an isolated sandbox and get its exit code, stdout and stderr. "
        "Use print() for what you want to see.",
        {"code": {"type": "string", "description": "The whole program."}},
    ),
    "run_command": (
        "Run a command in the sandbox, by its argument vector and without a shell, and get its exit code and output.",
        {"argv": {"type": "array", "items": {"type": "string"}, "description": "The program and its arguments."}},
    ),
    "read_file": (
        "Read a text file or a PNG or JPEG image from the sandbox's work folder.",
        {"path": {"type": "string", "description": "Relative to the work folder."}},
    ),
    "write_file": (
        "Create or replace a text file in the sandbox's work folder.",
        {
            "path": {"type": "string", "description": "Relative to the work folder."},
            "content": {"type": "string", "description": "The whole text."},
        },
    ),
    "list_files": ("List the files in the sandbox's work folder.", {}),
}


def _terms(tier: Tier, policy: Policy, *, live: bool) -> str:
    limits = policy.limits
    state = (
        "Variables and files last between calls."
        if live
        else "Each call starts afresh: no variable or file of an earlier one is there."
    )
    files = " PNG and JPEG files that it saves in the current folder are shown to you." if tier.features.files else ""
    language = "" if tier.features.full_python else " The sandbox runs a subset of Python."
    if policy.egress == ("*",):
        network = "The network can be reached."
    elif policy.egress:
        network = f"Of the network, only these hosts can be reached: {', '.join(policy.egress)}."
    else:
        network = "There is no network."
    return (
        f"{state}{files}{language} {network} A run may take {limits.wall_s:g} s and use "
        f"{limits.memory_bytes >> 20} MiB of memory."
    )


# --- arguments


class _BadArguments(Exception):
    """A model's arguments do not fit the schema; the message is for the model."""


def _arguments(spec: ToolSpec, arguments: str | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise _BadArguments("The arguments are not valid JSON.") from None
    if not isinstance(arguments, Mapping):
        raise _BadArguments("The arguments must be a JSON object.")
    properties = spec.schema["properties"]
    if set(arguments) != set(properties):
        raise _BadArguments(f"The arguments must be exactly: {', '.join(properties) or 'none'}.")
    for name, wanted in properties.items():
        value = arguments[name]
        if wanted["type"] == "string" and not isinstance(value, str):
            raise _BadArguments(f"The argument {name} must be a string.")
        if wanted["type"] == "array" and not (isinstance(value, list) and all(isinstance(v, str) for v in value)):
            raise _BadArguments(f"The argument {name} must be a list of strings.")
    return dict(arguments)


# --- failures


def _refusal(text: str) -> Reply:
    return Reply((Text(text),), is_error=True)


def _failure(error: Exception) -> Reply:
    """What a model is told of an error: its own mistakes in full, ours in a sentence."""
    if isinstance(error, QuotaError):
        return _refusal(f"Not run: {error}. Nothing was started.")
    if isinstance(error, FileError):
        return _refusal(quote([("error", cut(error.message, 500))], what="why the file operation failed"))
    if isinstance(error, PolicyError):
        return _refusal(quote([("error", cut(error.message, 500))], what="why the request was refused"))
    reference = secrets.token_hex(4)
    log.error("tool call failed (reference %s)", reference, exc_info=error)
    if isinstance(error, StartError):
        text = "The sandbox could not be started; nothing was run, and you may try again."
    elif isinstance(error, OutcomeUnknownError):
        text = "The sandbox was lost during the run; it is not known how far it got. Files and variables are gone."
    else:
        text = "The tool failed on its own side; this is not a fault of your program."
    return _refusal(f"{text} (reference {reference})")


async def _answers(sandbox: Sandbox) -> bool:
    """Whether a sandbox lives on after a limit was reached in it (a killed child need not take it along)."""
    try:
        await sandbox.list_files()
    except (ClosedError, FileError, OutcomeUnknownError):
        return False
    return True


# --- images


def _is_image_name(path: str) -> bool:
    return path.lower().endswith(_IMAGE_NAMES)


def _saved_images(artifacts: Sequence[Artifact]) -> tuple[list[Image], list[str]]:
    images: list[Image] = []
    found = [a for a in artifacts if a.saved is not None and _is_image_name(a.path)]
    for artifact in found[:IMAGES_LOOKED_INTO_MAX]:
        if artifact.saved is None or artifact.size_bytes > IMAGE_BYTES_MAX:
            continue
        image = image_of(artifact.path, artifact.saved.read_bytes())
        if isinstance(image, Image) and len(images) < IMAGES_MAX:
            images.append(image)
    return images, _image_notes(images)


def _image_notes(images: Sequence[Image]) -> list[str]:
    if not images:
        return []
    return [quote([("images", "\n".join(i.name for i in images))], what="the names of the images shown below")]
