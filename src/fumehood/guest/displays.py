"""In the interpreter of a program that may display: its last value, ``display()``, figures, top-level await.

Not a module of the guest's: the host sends this text with the execs that ask for displays, and the interpreter runs it
once in a namespace of its own (:func:`fumehood.guest.agent.load_tools`). It uses the standard library and, once the
program has imported it, matplotlib; everything heavy is imported when it is needed.

A display goes to the agent over a pipe of its own, which is there for one exec, as an item: header length and data
length (4 bytes each, big-endian), header (a JSON object), data. The header holds ``types``, a list of MIME type and
length, in whose order the data follow each other; ``metadata``; and ``dropped``, why a type is not there. The program
can write anything there: the host believes none of it, see :mod:`fumehood.displays`.
"""

from __future__ import annotations

# The C modules behind ``ast`` and ``threading``, which a plain program need not pay for.
import _ast
import _thread
import builtins
import json
import os
import struct
import sys
import traceback

TYPE_CHECKING = False
if TYPE_CHECKING:
    import types
    from typing import Any

ITEM = struct.Struct("!II")
METADATA_MAX = 4 << 10

#: Above this a program is compiled as it is, without its last value: as a tree of objects it takes some hundred times
#: its length of memory.
TREE_SOURCE_MAX = 1 << 20

# <cpython/compile.h>, <cpython/code.h>; the same from Python 3.9 on
PyCF_ONLY_AST = 0x400
PyCF_ALLOW_TOP_LEVEL_AWAIT = 0x2000
CO_COROUTINE = 0x80
CO_FUTURE_ANNOTATIONS = 0x1000000

#: MIME type -> the method by which IPython and those that follow it ask for it
#: (https://ipython.readthedocs.io/en/stable/config/integrating.html).
METHODS = {
    "text/html": "_repr_html_",
    "text/markdown": "_repr_markdown_",
    "text/latex": "_repr_latex_",
    "image/svg+xml": "_repr_svg_",
    "image/png": "_repr_png_",
    "image/jpeg": "_repr_jpeg_",
    "application/pdf": "_repr_pdf_",
    "application/json": "_repr_json_",
}
BINARY = ("image/png", "image/jpeg", "application/pdf")


class _State:
    channel = -1
    budget = 0
    pid = 0
    figures: list[Any] = []  # displayed in this exec as values: not once more at its end  # noqa: RUF012
    loop: Any = None
    names: set[str] = set()  # under which programs were compiled  # noqa: RUF012
    lock = _thread.allocate_lock()


# --- programs --------------------------------------------------------------------------------------------------------


def run(source: bytes, name: str, namespace: dict[str, Any]) -> None:
    """Run a program, display its last value and the figures that it left open. Raises what the program raises."""
    _State.names.add(name)
    body, last = _compile(source, name)
    if (body.co_flags | (last.co_flags if last is not None else 0)) & CO_COROUTINE:
        _make_loop()  # now, so that an interrupt of the program does not find it half made
    try:
        _evaluate(body, namespace)
        if last is not None:
            value = _evaluate(last, namespace)
            if value is not None:
                display(value)
    except KeyboardInterrupt:
        raise
    except BaseException:
        show_figures()
        raise
    show_figures()


def _compile(source: bytes, name: str) -> tuple[types.CodeType, types.CodeType | None]:
    """The program, and its last expression apart if it has one whose value is to be displayed."""
    flags = PyCF_ALLOW_TOP_LEVEL_AWAIT
    if len(source) > TREE_SOURCE_MAX:
        return compile(source, name, "exec", flags, True), None
    tree = compile(source, name, "exec", flags | PyCF_ONLY_AST, True)
    last = None
    if tree.body and isinstance(tree.body[-1], _ast.Expr) and not source.rstrip().endswith(b";"):
        last = _ast.Expression(tree.body.pop().value)
    body = compile(tree, name, "exec", flags, True)
    if last is None:
        return body, None
    future = body.co_flags & CO_FUTURE_ANNOTATIONS
    return body, compile(last, name, "eval", flags | future, True)


def _evaluate(code: types.CodeType, namespace: dict[str, Any]) -> Any:
    value = eval(code, namespace)
    return _await(value) if code.co_flags & CO_COROUTINE else value


def _await(coroutine: Any) -> Any:
    """Run a program that awaits, in the one event loop of this interpreter; what it left running goes on with it."""
    import asyncio

    _make_loop()
    task = _State.loop.create_task(coroutine)
    try:
        return _State.loop.run_until_complete(task)
    except KeyboardInterrupt:
        if not task.done():  # it was the loop that was interrupted
            task.cancel()
            for _ in range(2):
                _State.loop.run_until_complete(asyncio.sleep(0))
            # What waits for nothing and was not run by now will never be: the interrupt came when the loop had taken
            # its next step off the queue and not begun it.
            if not task.done() and getattr(task, "_fut_waiter", None) is None:
                task._log_destroy_pending = False
                try:
                    coroutine.close()
                except Exception:  # of the program's own, while it ended
                    pass
            else:
                try:
                    _State.loop.run_until_complete(task)
                except asyncio.CancelledError:
                    pass
        raise


def _make_loop() -> None:
    import asyncio

    if _State.loop is None or _State.loop.is_closed():
        _State.loop = asyncio.new_event_loop()


def keep_user_frames(error: BaseException) -> None:
    """Leave in the tracebacks of ``error`` and those before it what is the program's, from its first line on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename not in _State.names:
        trace = trace.tb_next
    error.__traceback__ = trace
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        link.__traceback__ = _without_ours(link.__traceback__)
        link = link.__cause__ or link.__context__


def _without_ours(trace: types.TracebackType | None) -> types.TracebackType | None:
    ours = run.__code__.co_filename
    while trace is not None and trace.tb_frame.f_code.co_filename == ours:
        trace = trace.tb_next
    node = trace
    while node is not None:
        while node.tb_next is not None and node.tb_next.tb_frame.f_code.co_filename == ours:
            node.tb_next = node.tb_next.tb_next
        node = node.tb_next
    return trace


# --- displays --------------------------------------------------------------------------------------------------------


def display(*objects: Any, raw: bool = False, metadata: Any = None, **_: Any) -> None:
    """Show each object in the richest forms it has; with ``raw``, each is a dict of MIME types and data already."""
    for value in objects:
        data, more = (dict(value), {}) if raw else _forms_of(value)
        _send(data, {**more, **(metadata or {})})


def _forms_of(value: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """An object's MIME bundle and metadata. Raises what ``repr`` raises."""
    data: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    kind = type(value)  # methods are looked up on it, as Python does for its own; a mock has every attribute
    figure = _figure_class()
    if figure is not None and isinstance(value, figure):
        _State.figures.append(value)
        data["image/png"] = _draw(value)
    bundle = _ask(kind, "_repr_mimebundle_", value)
    if isinstance(bundle, tuple) and len(bundle) == 2:
        bundle, more = bundle
        metadata.update(more or {})
    if isinstance(bundle, dict):
        data.update(bundle)
    for mime, name in METHODS.items():
        if mime in data or (mime == "image/jpeg" and "image/png" in data):
            continue  # an image that gives both is one image
        form = _ask(kind, name, value)
        if isinstance(form, tuple) and len(form) == 2 and mime != "application/json":
            form, metadata[mime] = form
        if form is not None:
            data[mime] = form
    if "text/plain" not in data:
        data["text/plain"] = repr(value)
    return data, metadata


def _ask(kind: type, name: str, value: Any) -> Any:
    """What the method gives, or None. Its failure is shown and costs this one form."""
    method = getattr(kind, name, None)
    if method is None or isinstance(value, type):
        return None
    try:
        return method(value)
    except NotImplementedError:
        return None
    except Exception as error:
        keep_user_frames(error)
        traceback.print_exception(error)
        return None


def _encode(mime: str, form: Any) -> bytes:
    if isinstance(form, (bytes, bytearray, memoryview)):
        return bytes(form)
    if mime in BINARY and isinstance(form, str):
        import base64

        return base64.b64decode(form)
    if mime == "application/json" and not isinstance(form, str):
        return json.dumps(form).encode()
    return str(form).encode("utf-8", "replace")


def _send(data: dict[str, Any], metadata: dict[str, Any]) -> None:
    """One item, without the types for which there is no room."""
    if os.getpid() != _State.pid or _State.channel < 0:
        print(data.get("text/plain", ""))  # a child of the program's, or a thread after the exec's end
        return
    encoded: dict[str, bytes] = {}
    dropped = []
    room = _State.budget
    for mime, form in sorted(((str(m), _encode(m, f)) for m, f in data.items()), key=lambda item: len(item[1])):
        if len(form) + METADATA_MAX > room:
            dropped.append(f"{mime}: {len(form)} bytes are more than may be displayed")
        else:
            room -= len(form)
            encoded[mime] = form
    if len(json.dumps(metadata, default=str)) > METADATA_MAX:
        metadata = {}
    types = [(mime, len(form)) for mime, form in encoded.items()]
    head = json.dumps({"types": types, "metadata": metadata, "dropped": dropped}, default=str).encode()
    body = b"".join(encoded.values())
    item = memoryview(ITEM.pack(len(head), len(body)) + head + body)
    for stream in (sys.stdout, sys.stderr):  # what was printed before stands before it
        try:
            stream.flush()
        except Exception:
            pass
    with _State.lock:
        _State.budget -= len(item)
        try:
            while item:
                item = item[os.write(_State.channel, item) :]
        except OSError:  # the agent takes no more
            close_channel()
        except BaseException:  # half an item: what would follow could not be told from it
            close_channel()
            raise


def open_channel(fd: int, budget: int) -> None:
    """Displays of the exec that begins go to ``fd``, ``budget`` bytes at most."""
    _State.channel, _State.budget, _State.pid = fd, budget, os.getpid()
    _State.figures = []


def close_channel() -> None:
    """No more displays in this exec."""
    fd, _State.channel = _State.channel, -1
    if fd >= 0:
        os.close(fd)


# --- matplotlib, once the program has imported it --------------------------------------------------------------------


def show_figures(*_: Any, **__: Any) -> None:
    """``plt.show()``, also at the end of an exec: display the open figures in the order of their numbers, close them.

    As with the figures of a notebook, the next plot begins a new one.
    """
    helpers = sys.modules.get("matplotlib._pylab_helpers")
    if helpers is None:
        return
    managers = sorted(helpers.Gcf.get_all_fig_managers(), key=lambda m: m.num)
    try:
        for manager in managers:
            figure = manager.canvas.figure
            if not any(figure is shown for shown in _State.figures) and (figure.axes or figure.lines):
                _send({"image/png": _draw(figure), "text/plain": repr(figure)}, {})
    finally:
        helpers.Gcf.destroy_all()


def _figure_class() -> Any:
    module = sys.modules.get("matplotlib.figure")
    return getattr(module, "Figure", None)


def _draw(figure: Any) -> bytes:
    import io

    target = io.BytesIO()
    figure.savefig(target, format="png", bbox_inches="tight")
    return target.getvalue()


class _Hook:
    """An entry of ``sys.meta_path``: matplotlib draws into memory, and ``pyplot.show`` displays."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
        if name == "matplotlib":
            os.environ.setdefault("MPLBACKEND", "agg")
        if name != "matplotlib.pyplot":
            return None
        sys.meta_path.remove(cls)
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_patch(module: types.ModuleType) -> None:
                load(module)
                module.__dict__["show"] = show_figures

            spec.loader.exec_module = load_and_patch  # type: ignore[method-assign]
        return spec


builtins.display = display  # type: ignore[attr-defined]
if "matplotlib.pyplot" in sys.modules:
    sys.modules["matplotlib.pyplot"].__dict__["show"] = show_figures
else:
    sys.meta_path.insert(0, _Hook)
