"""Policies from TOML files, and sizes and durations from text.

A file mirrors :class:`~fumehood.model.Policy`: its plain fields are top-level keys, ``limits`` and ``artifacts`` are
tables, ``env`` is a table of strings and ``mounts`` an array of tables::

    floor = "kernel"
    environment = "demo"

    [limits]
    wall_s = "30s"
    memory_bytes = "512MiB"

    [[mounts]]
    source = "/srv/tables"
    target = "/mnt/tables"

The known keys are the fields of the dataclasses, so a new limit is loadable the moment it exists. A key that ends in
``_bytes`` may be text that :func:`parse_bytes_size` takes, one that ends in ``_s`` text for :func:`parse_duration`.
All problems of a file are reported together.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import fields
from fractions import Fraction
from pathlib import Path
from typing import Any

from fumehood.errors import PolicyError
from fumehood.model import ArtifactLimits, KiB, Limits, MiB, Mount, Policy

#: A policy file is a page of text; more is some other file given by mistake.
FILE_BYTES_MAX = 1 * MiB

_SIZE_UNITS = {"b": 1} | {
    letter + suffix: base**power
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in (("", KiB), ("ib", KiB), ("b", 1000))
}
_DURATION_UNITS = {"ms": Fraction(1, 1000), "s": Fraction(1), "m": Fraction(60), "h": Fraction(3600)}
_QUANTITY = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?([A-Za-z]*)\Z")
_TOML_LINE = re.compile(r"at line (\d+)")


def parse_bytes_size(text: str) -> int:
    """A size in bytes from text: ``4096``, ``64k``, ``256MiB``, ``1.5GiB``, ``10MB``.

    ``k M G T`` and ``KiB MiB GiB TiB`` count in 1024s, as ulimit and container engines do; ``kB MB GB TB`` count in
    1000s, as SI says. Case does not matter. Raises PolicyError for anything else, and for a part of a byte.
    """
    match = _QUANTITY.match(text)
    factor = _SIZE_UNITS.get(match[2].lower() or "b") if match else None
    if match is None or factor is None:
        raise PolicyError(f"{_shown(text)} is not a size; write bytes, or a number with k, M, G, T, KiB, MiB, GiB, TiB")
    size = Fraction(match[1]) * factor
    if size.denominator != 1:
        raise PolicyError(f"{_shown(text)} is not a whole number of bytes")
    return int(size)


def parse_duration(text: str) -> float:
    """A time in seconds from text: ``5``, ``1.5``, ``5s``, ``500ms``, ``2m``, ``1h``.

    Raises PolicyError for anything else (a sign, ``nan`` and ``inf`` included).
    """
    match = _QUANTITY.match(text)
    factor = _DURATION_UNITS.get(match[2] or "s") if match else None
    if match is None or factor is None:
        raise PolicyError(f"{_shown(text)} is not a time; write seconds, or a number with ms, s, m or h")
    return float(Fraction(match[1]) * factor)


def load(path: str | os.PathLike[str]) -> Policy:
    """The policy in the TOML file ``path``.

    Raises PolicyError, with the file's name, if it cannot be read, is over FILE_BYTES_MAX, or as :func:`parse` does.
    """
    source = os.fspath(path)
    try:
        with Path(path).open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise PolicyError(f"cannot read the policy file {_shown(source)}: {reason}") from None
    if len(data) > FILE_BYTES_MAX:
        raise PolicyError(f"{_shown(source)} is larger than the {FILE_BYTES_MAX} bytes a policy file may have")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise PolicyError(f"{_shown(source)} is not UTF-8 (line {line})") from None
    return parse(text, source=source)


def parse(text: str, *, source: str = "policy") -> Policy:
    """The policy in TOML ``text``; ``source`` is what errors call it.

    Raises PolicyError that names every unknown key (with the nearest known one), every value of a wrong type or out
    of range, or, where the text is not TOML, the line.
    """
    try:
        table = tomllib.loads(text + "\n")  # a fault in a last line without an end has no line number otherwise
    except (ValueError, RecursionError) as error:
        raise PolicyError(f"{_shown(source)} is not TOML: {_toml_fault(error, text)}") from None
    problems: list[str] = []
    values = _read(table, Policy, "", problems, _READERS)
    if not problems:
        return Policy(**values)
    if len(problems) == 1:
        raise PolicyError(f"{_shown(source)}: {problems[0]}")
    raise PolicyError(f"{_shown(source)} has {len(problems)} problems:\n" + "\n".join(f"  {p}" for p in problems))


_Reader = Callable[[Any, list[str]], Any]


def _read(
    table: Mapping[str, Any], kind: Callable[..., Any], prefix: str, problems: list[str], readers: Mapping[str, _Reader]
) -> dict[str, Any]:
    """Arguments for the dataclass ``kind`` from ``table``. Each is tried alone, so that all faults are found."""
    known = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for key, raw in table.items():
        if key not in known:
            problems.append(_unknown(prefix, key, known))
            continue
        before = len(problems)
        try:
            value = readers[key](raw, problems) if key in readers else _quantity(key, raw)
        except PolicyError as error:
            problems.append(f"{prefix}{key}: {error.message}")
            continue
        if len(problems) == before and _fits(kind, key, value, problems):
            values[key] = value
    return values


def _fits(kind: Callable[..., Any], key: str, value: Any, problems: list[str]) -> bool:
    if kind is Mount:  # its fields have no defaults, so it cannot be tried one by one
        return True
    try:
        kind(**{key: value})
    except PolicyError as error:
        problems.append(error.message if error.message.startswith(key) else _named(key, error.message))
        return False
    return True


def _named(key: str, message: str) -> str:
    return message if key in message else f"{key}: {message}"


def _quantity(key: str, raw: Any) -> Any:
    if isinstance(raw, str) and key.endswith("_bytes"):
        return parse_bytes_size(raw)
    if isinstance(raw, str) and key.endswith("_s"):
        return parse_duration(raw)
    return raw


def _subtable(kind: type, name: str) -> _Reader:
    def read(raw: Any, problems: list[str]) -> Any:
        if not isinstance(raw, dict):
            raise PolicyError(f"must be a table, not {_shown(raw)}")
        before = len(problems)
        values = _read(raw, kind, f"{name}.", problems, {})
        return kind(**values) if len(problems) == before else None

    return read


def _mounts(raw: Any, problems: list[str]) -> tuple[Mount, ...]:
    if not isinstance(raw, list) or not all(isinstance(item, dict) for item in raw):
        raise PolicyError(f"must be an array of tables ([[mounts]]), not {_shown(raw)}")
    mounts = []
    for number, item in enumerate(raw, start=1):
        name = f"mounts[{number}]"
        before = len(problems)
        values = _read(item, Mount, f"{name}.", problems, {})
        missing = [f.name for f in fields(Mount) if f.name not in item]
        problems.extend(f"{name}.{key} is missing" for key in missing)
        if len(problems) == before:
            try:
                mounts.append(Mount(**values))
            except PolicyError as error:
                problems.append(f"{name}: {error.message}")
    return tuple(mounts)


_READERS: dict[str, _Reader] = {
    "limits": _subtable(Limits, "limits"),
    "artifacts": _subtable(ArtifactLimits, "artifacts"),
    "mounts": _mounts,
}


def _unknown(prefix: str, key: str, known: list[str]) -> str:
    # A unit left out ("wall", "memory") is the likeliest slip, and too far away for a measure of edits.
    unit_left_out = [name for name in known if name.rpartition("_")[0] == key]
    near = unit_left_out or difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"did you mean {prefix}{near[0]}?" if near else f"known keys are {', '.join(prefix + k for k in known)}"
    return f"unknown key {_shown(prefix + key)}; {hint}"


def _toml_fault(error: Exception, text: str) -> str:
    """The parser's words, with the key of the line they point at: its messages name a position only."""
    if isinstance(error, RecursionError):
        return "arrays or tables are nested too deeply"
    message = str(error)
    at = _TOML_LINE.search(message)
    lines = text.splitlines()
    if at is None or not 0 < int(at[1]) <= len(lines):
        return message
    key = lines[int(at[1]) - 1].partition("=")[0].strip()
    return f"{message}: {_shown(key)}" if key else message


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
