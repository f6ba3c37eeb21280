"""The interpreter: code in a state that lasts, answered as JSON lines while it runs.

An uncaught exception is told as an ``error`` line with its name, value and traceback, as E2B's interpreter does, and
not as text on stderr; so what looks like the beginning of a traceback is held back until the code has ended.
"""

from __future__ import annotations

import ast
import asyncio
import base64
import json
import time
from typing import Any

from fumehood.e2b_server.http import Scope, Send, answer_json
from fumehood.e2b_server.sandboxes import Box, inside
from fumehood.errors import FumehoodError, PolicyError
from fumehood.model import BINARY_MIME_TYPES, Code, Display, Outcome, Result

_MARK = "Traceback (most recent call last):"
_CONTEXT = "default"
#: What the protocol calls the forms of a result.
_FORMS = {
    "text/plain": "text",
    "text/html": "html",
    "text/markdown": "markdown",
    "text/latex": "latex",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpeg",
    "application/pdf": "pdf",
}
_CHDIR = "import os as _os\n_os.makedirs({0!r}, exist_ok=True)\n_os.chdir({0!r})\ndel _os\n"
_ENV = "import os as _os\n_os.environ.update({0!r})\ndel _os\n"


async def serve(box: Box, scope: Scope, body: bytes, send: Send) -> None:
    """One request."""
    path, method = scope["path"], scope["method"]
    try:
        values = json.loads(body) if body else {}
        if path == "/execute" and method == "POST":
            await _execute(box, values, send)
        elif path == "/contexts" and method == "POST":
            await _context(box, values, send)
        elif path == "/health":
            await answer_json(send, 200, {"status": "ok"})
        else:
            await answer_json(send, 404, {"message": f"{path} is not served here"})
    except (ValueError, TypeError, KeyError, PolicyError) as error:
        await answer_json(send, 400, {"message": str(error)[:500]})


async def _context(box: Box, values: dict[str, Any], send: Send) -> None:
    """The one context, in the folder that is asked for."""
    _python(values)
    cwd = str(values.get("cwd") or "")
    if cwd:
        box.folder = "/".join(("/work", inside(cwd))).rstrip("/")
        async with box.turn:
            await box.sandbox.exec(_quiet(_CHDIR.format(box.folder)))
    await answer_json(send, 200, {"id": _CONTEXT, "language": "python", "cwd": cwd})


async def _execute(box: Box, values: dict[str, Any], send: Send) -> None:
    _python(values)
    code = Code(str(values["code"]), name="<cell>")
    env = {**box.envs, **(values.get("env_vars") or {})}
    lines: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/x-ndjson")]})
    async with box.turn:
        task = asyncio.create_task(_run(box, code, env, lines))
        try:
            while (line := await lines.get()) is not None:
                await send({"type": "http.response.body", "body": json.dumps(line).encode() + b"\n", "more_body": True})
            await task
        finally:
            if not task.done():
                await box.sandbox.interrupt()
                await asyncio.wait((task,), timeout=1.0)
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    await send({"type": "http.response.body", "body": b""})


async def _run(box: Box, code: Code, env: dict[str, str], lines: asyncio.Queue[dict[str, Any] | None]) -> None:
    talk = _Talk(lines)
    try:
        if env:
            await box.sandbox.exec(_quiet(_ENV.format(env)))
        box.executions += 1
        lines.put_nowait({"type": "number_of_executions", "execution_count": box.executions})
        result = await box.sandbox.exec(code, sink=talk)
        talk.end(result, ends_in_expression(code.source))
        if result.interpreter_lost and box.folder:
            await box.sandbox.exec(_quiet(_CHDIR.format(box.folder)))
    except FumehoodError as error:
        lines.put_nowait({"type": "error", "name": type(error).__name__, "value": error.message, "traceback": ""})
        box.dead.set()
    finally:
        lines.put_nowait(None)


class _Talk:
    """Output as lines of the protocol."""

    def __init__(self, lines: asyncio.Queue[dict[str, Any] | None]) -> None:
        self._lines = lines
        self._held = ""
        self._shown: Display | None = None

    def __call__(self, stream: str, data: bytes) -> None:
        """A piece of output."""
        text = data.decode("utf-8", "replace")
        if stream == "stderr":
            self._held += text
            start = self._held.find(_MARK)
            text, self._held = (self._held, "") if start < 0 else (self._held[:start], self._held[start:])
        self._say(stream, text)

    def _say(self, stream: str, text: str) -> None:
        if text:
            self._lines.put_nowait({"type": stream, "text": text, "timestamp": time.time_ns()})

    def display(self, display: Display) -> None:
        """Something shown. The last one waits, since it may turn out to be the value of the code."""
        self._show(main=False)
        self._shown = display

    def _show(self, main: bool) -> None:
        shown, self._shown = self._shown, None
        if shown is None:
            return
        line: dict[str, Any] = {"type": "result", "is_main_result": main}
        for mime, form in shown.data.items():
            name = _FORMS.get(mime)
            if name is not None:
                binary = mime in BINARY_MIME_TYPES
                line[name] = base64.b64encode(form).decode() if binary else form.decode("utf-8", "replace")
        self._lines.put_nowait(line)

    def end(self, result: Result, expression: bool) -> None:
        """The last lines: the value if ``expression``, an error if there was one."""
        self._show(main=expression and result.ok)
        if result.outcome is Outcome.EXITED and result.exit_code == 0:
            self._say("stderr", self._held)
            return
        if result.outcome is not Outcome.EXITED:
            self._say("stderr", self._held)
            name, value, trace = "SandboxError", f"ended by {result.outcome.value}", ""
        elif result.exit_code == 1 and (self._held or result.stderr.strip()):
            text = (self._held or result.stderr).strip()
            name, _, value = text.rpartition("\n")[2].partition(":")
            trace = self._held
        else:
            self._say("stderr", self._held)
            name, value, trace = "SystemExit", str(result.exit_code), ""
        self._lines.put_nowait({"type": "error", "name": name, "value": value.strip(), "traceback": trace})


def ends_in_expression(source: str | bytes) -> bool:
    """Whether the code has a value: that of its last statement."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return bool(body) and isinstance(body[-1], ast.Expr)


def _quiet(source: str) -> Code:
    return Code(source, name="<endpoint>", displays=False)


def _python(values: dict[str, Any]) -> None:
    language = values.get("language")
    if language not in (None, "python", "python3"):
        raise ValueError(f"this interpreter speaks Python, not {language!r:.50}")
    if values.get("context_id") not in (None, _CONTEXT):
        raise ValueError("there is one context")
