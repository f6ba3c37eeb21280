"""Whether a program failed because Monty lacks what CPython has, and what that is.

Told from the final error alone, by asking this CPython: a name that Monty does not define and CPython does, a module
that cannot be imported, a syntax that Monty's parser names. A program may raise the same words by itself; then it is
told to look for a fuller Python, which harms nobody.
"""

from __future__ import annotations

import builtins
import collections
import datetime
import importlib
import re
import sys

_TYPES = {
    **{name: kind for name, kind in vars(builtins).items() if isinstance(kind, type)},
    "module": type(sys),
    "function": type(lambda: None),
    "_io.TextIOWrapper": type(sys.stdout) if sys.stdout is not None else object,
    "deque": collections.deque,
    "Counter": collections.Counter,
    "defaultdict": collections.defaultdict,
    "OrderedDict": collections.OrderedDict,
    "datetime.datetime": datetime.datetime,
    "datetime.date": datetime.date,
    "datetime.timedelta": datetime.timedelta,
    "re.Match": re.Match,
    "re.Pattern": re.Pattern,
}
#: Modules whose import does something to be seen.
_NOISY = {"antigravity", "this", "__main__"}

_NO_MODULE = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")
_NO_NAME_IN = re.compile(r"ImportError: cannot import name '(\w+)' from '([\w.]+)'")
_NO_NAME = re.compile(r"(?:NameError: name|UnboundLocalError: .*) '(\w+)' is not defined")
_NO_MODULE_ATTRIBUTE = re.compile(r"AttributeError: module '([\w.]+)' has no attribute '(\w+)'")
_NO_ATTRIBUTE = re.compile(r"AttributeError: (?:'([\w.]+)' object|type object '([\w.]+)') has no attribute '(\w+)'")
_NO_SYNTAX = re.compile(r"(?:NotImplementedError|SyntaxError): The monty syntax parser does not yet support (.+)")
_NO_SERVICE = re.compile(r"RuntimeError: '([\w.]+)' is not supported in this environment")
_INTERNAL = re.compile(r"RuntimeError: Internal error in monty: (.+)")
_NOT_YET = re.compile(r"(?:NotImplementedError|TypeError): (.*(?:not (?:yet )?supported|not (?:yet )?implemented).*)")


def unsupported(message: str) -> str | None:
    """What the program lacks, for ``unsupported: …``, or None if it failed by itself.

    ``message`` is the error as ``Type: text``.
    """
    line = message.partition("\n")[0][:500]
    if found := _NO_MODULE.match(line):
        return f"import {found[1]}"
    if found := _NO_NAME_IN.match(line):
        return f"from {found[2]} import {found[1]}" if _in_cpython(found[2], found[1]) else None
    if found := _NO_NAME.match(line):
        return f"{found[1]}()" if hasattr(builtins, found[1]) else None
    if found := _NO_MODULE_ATTRIBUTE.match(line):
        return f"{found[1]}.{found[2]}" if _in_cpython(found[1], found[2]) else None
    if found := _NO_ATTRIBUTE.match(line):
        owner = found[1] or found[2]
        kind = _TYPES.get(owner)
        return f"{owner}.{found[3]}" if kind is not None and hasattr(kind, found[3]) else None
    for pattern in (_NO_SYNTAX, _NO_SERVICE, _INTERNAL, _NOT_YET):
        if found := pattern.match(line):
            return found[1]
    return None


def _in_cpython(module: str, name: str) -> bool:
    """Whether CPython's standard library has ``name`` in ``module``."""
    if module.partition(".")[0] not in sys.stdlib_module_names or module in _NOISY:
        return False
    try:
        return hasattr(importlib.import_module(module), name)
    except ImportError:
        return False
