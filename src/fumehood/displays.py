"""Displays as they come from a guest: a hostile stream of items, cut into checked :class:`~fumehood.model.Display`.

The form of an item is :mod:`fumehood.guest.displays`'s, but whoever writes the stream is the program, which may write
anything. So lengths are checked before anything is kept, types are of a list, every type's data begin as the type
demands, text is UTF-8; what fails that is dropped and named. Nothing is parsed beyond its first bytes: whoever shows an
SVG, a PDF or HTML must treat it as what it is, a document by somebody hostile.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from typing import Any, NoReturn

from fumehood.model import BINARY_MIME_TYPES, MIME_TYPES, Display

ITEM = struct.Struct("!II")
HEADER_MAX = 16 << 10
TYPES_MAX = 16  # of one display
COUNT_MAX = 256  # of one exec
METADATA_MAX = 8 << 10
_DROPPED_MAX = 200

#: How the data of a type begin: https://www.w3.org/TR/png-3/#5PNG-file-signature; ITU-T T.81 B.1.1.3, SOI and another
#: marker; ISO 32000-1 7.5.2; XML 1.0 production 1, a document is markup from its first character that is no space;
#: RFC 8259 section 3, a value.
_BEGINNINGS = {
    "image/png": re.compile(rb"\x89PNG\r\n\x1a\n"),
    "image/jpeg": re.compile(rb"\xff\xd8\xff"),
    "application/pdf": re.compile(rb"%PDF-[0-9]"),
    "image/svg+xml": re.compile(rb"(?:\xef\xbb\xbf)?\s*<[?!a-zA-Z]"),
    "application/json": re.compile(rb"\s*[\[{\"0-9tfn-]"),
}


class Displays:
    """The displays of one exec: fed with pieces of the stream, as they come.

    At most ``budget`` bytes of the stream are looked at, framing included, and :data:`COUNT_MAX` displays are kept.
    ``show`` is called with each display once it is complete; what it raises is passed on.
    """

    def __init__(self, budget: int, show: Callable[[Display], None] | None = None) -> None:
        self.kept: list[Display] = []
        self.truncated = False  # there was more, or what came was no item
        self._budget = budget
        self._show = show
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Take the next piece."""
        if self.truncated:
            return
        self._buffer += data[: self._budget]
        full = len(data) > self._budget
        self._budget -= min(len(data), self._budget)
        try:
            while len(self._buffer) >= ITEM.size:
                head_bytes, body_bytes = ITEM.unpack_from(self._buffer)
                if head_bytes > HEADER_MAX or head_bytes + body_bytes > self._budget + len(self._buffer):
                    raise ValueError("longer than what may come")
                end = ITEM.size + head_bytes + body_bytes
                if len(self._buffer) < end:
                    break
                if len(self.kept) >= COUNT_MAX:
                    raise ValueError("too many")
                head = bytes(self._buffer[ITEM.size : ITEM.size + head_bytes])
                body = bytes(self._buffer[ITEM.size + head_bytes : end])
                del self._buffer[:end]
                display = decode(head, body)
                self.kept.append(display)
                if self._show is not None:
                    self._show(display)
        except ValueError:
            self._end()
        if full:
            self._end()

    def finish(self) -> tuple[Display, ...]:
        """All displays; the stream is over."""
        if self._buffer:
            self._end()
        return tuple(self.kept)

    def _end(self) -> None:
        self.truncated = True
        self._buffer.clear()


def decode(head: bytes, body: bytes) -> Display:
    """One item as a display. Raises ValueError if it is not in the form of one."""
    try:
        header = _decoder.decode(head.decode())
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(header, dict):
        raise ValueError("not an object")
    types, metadata, dropped = header.get("types"), header.get("metadata", {}), header.get("dropped", [])
    if not isinstance(types, list) or len(types) > TYPES_MAX or not isinstance(metadata, dict):
        raise ValueError("not a bundle")
    if not isinstance(dropped, list) or len(dropped) > TYPES_MAX or not all(isinstance(d, str) for d in dropped):
        raise ValueError("not a list of reasons")
    reasons = [_plain(reason) for reason in dropped]
    data: dict[str, bytes] = {}
    start = 0
    for entry in types:
        mime, length = entry if isinstance(entry, list) and len(entry) == 2 else (None, None)
        if not isinstance(mime, str) or type(length) is not int or not 0 <= length <= len(body) - start:
            raise ValueError("not a type and its length")
        form = body[start : start + length]
        start += length
        problem = check(mime, form)
        if problem:
            reasons.append(f"{_plain(mime)}: {problem}")
        else:
            data[mime] = form
    if start != len(body):
        raise ValueError("more data than the types have")
    if len(head) > METADATA_MAX:
        metadata = {}
    return Display(data, metadata, tuple(reasons))


def check(mime: str, form: bytes) -> str:
    """Why ``form`` is not taken for data of type ``mime``; "" if it is."""
    if mime not in MIME_TYPES:
        return "not a type that is passed on"
    if mime not in BINARY_MIME_TYPES:
        try:
            form.decode()
        except UnicodeDecodeError:
            return "not UTF-8"
    beginning = _BEGINNINGS.get(mime)
    if beginning is not None and not beginning.match(form):
        return "does not begin as its type does"
    return ""


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


_decoder = json.JSONDecoder(parse_constant=_refuse)


def _plain(text: Any) -> str:
    """A short text by the program that is safe to print."""
    return "".join(c if c.isprintable() else "?" for c in str(text)[:_DROPPED_MAX])
