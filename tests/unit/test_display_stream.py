"""The host's side of displays: a hostile stream in pieces, and what is taken of it."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.displays import COUNT_MAX, TYPES_MAX, Displays, check, decode
from fumehood.model import MIME_TYPES, Display

PNG = b"\x89PNG\r\n\x1a\n..."


def item(types: Any, body: bytes = b"", **more: Any) -> bytes:
    head = json.dumps({"types": types, **more}).encode()
    return struct.pack("!II", len(head), len(body)) + head + body


def text(words: bytes) -> bytes:
    return item([["text/plain", len(words)]], words)


@given(st.integers(1, 200))
def test_pieces_of_any_length(size: int) -> None:
    seen: list[Display] = []
    displays = Displays(10_000, seen.append)
    both = item([["text/plain", 1], ["image/png", len(PNG)]], b"a" + PNG, metadata={"w": 1.5})
    stream = text(b"one") + both + item([])
    for start in range(0, len(stream), size):
        displays.feed(stream[start : start + size])
    expected = (
        Display({"text/plain": b"one"}),
        Display({"text/plain": b"a", "image/png": PNG}, {"w": 1.5}),
        Display({}),
    )
    assert displays.finish() == expected == tuple(seen) and not displays.truncated


def test_bounds() -> None:
    displays = Displays(len(text(b"12345")) + 10)
    displays.feed(text(b"12345") + text(b"6"))
    assert [d.data for d in displays.finish()] == [{"text/plain": b"12345"}] and displays.truncated
    displays = Displays(1 << 20)
    displays.feed(text(b"x") * (COUNT_MAX + 5))
    assert len(displays.finish()) == COUNT_MAX and displays.truncated
    displays = Displays(1 << 20)
    displays.feed(text(b"whole") + text(b"cut")[:-1])
    assert len(displays.finish()) == 1 and displays.truncated
    displays = Displays(0)
    displays.feed(b"x")
    assert displays.finish() == () and displays.truncated


@pytest.mark.parametrize(
    "stream",
    [
        struct.pack("!II", 1 << 31, 0),
        struct.pack("!II", 4, 1 << 31) + b"{}",
        item({"text/plain": 1}, b"x"),
        item([["text/plain", 2]], b"x"),
        item([["text/plain", 0]], b"x"),
        item([["text/plain", -1], ["text/html", 2]], b"x"),
        item([["text/plain", True]], b"x"),
        item([["text/plain"]], b""),
        item([[["text/plain"], 0]], b""),
        item([["text/plain", 0]] * (TYPES_MAX + 1)),
        item([], metadata=[1]),
        item([], dropped=[1]),
        item([], dropped="text"),
        struct.pack("!II", 16, 0) + b'{"types": [NaN]}',
        struct.pack("!II", 9000, 0) + b"[" * 9000,
        struct.pack("!II", 6000, 0) + b"1" * 6000,
        struct.pack("!II", 2, 0) + b"\xff\xff",
    ],
)
def test_what_is_no_display_ends_the_stream(stream: bytes) -> None:
    displays = Displays(1 << 20)
    displays.feed(text(b"before") + stream + text(b"after"))
    assert [d.data for d in displays.finish()] == [{"text/plain": b"before"}] and displays.truncated


@given(st.binary(max_size=300))
def test_any_bytes(noise: bytes) -> None:
    displays = Displays(200)
    displays.feed(noise)
    for display in displays.finish():
        assert set(display.data) <= set(MIME_TYPES)


@pytest.mark.parametrize(
    ("mime", "form", "taken"),
    [
        ("text/plain", b"\xff", False),
        ("text/plain", b"", True),
        ("text/html", "é".encode(), True),
        ("image/png", PNG, True),
        ("image/png", b"<svg>", False),
        ("image/png", b"", False),
        ("image/jpeg", b"\xff\xd8\xff\xe0", True),
        ("image/jpeg", PNG, False),
        ("application/pdf", b"%PDF-1.4", True),
        ("application/pdf", b"\n%PDF-1.4", False),
        ("image/svg+xml", b"  <?xml version='1.0'?><svg/>", True),
        ("image/svg+xml", b"javascript:", False),
        ("application/json", b"[1]", True),
        ("application/json", b"<script>", False),
        ("application/javascript", b"alert(1)", False),
        ("TEXT/PLAIN", b"", False),
        ("image/gif", b"GIF89a", False),
    ],
)
def test_types_and_how_their_data_begin(mime: str, form: bytes, taken: bool) -> None:
    assert (check(mime, form) == "") is taken


def test_what_is_dropped_is_named_in_text_that_is_safe_to_print() -> None:
    head = json.dumps({"types": [["image/\x1b[2J", 1], ["image/png", 1]], "dropped": ["a\x07" + "b" * 500]}).encode()
    display = decode(head, b"xy")
    assert display.data == {}
    assert display.dropped == (
        "a?" + "b" * 198,
        "image/?[2J: not a type that is passed on",
        "image/png: does not begin as its type does",
    )


def test_to_dict() -> None:
    display = Display({"text/html": "é".encode(), "image/png": b"\x89"}, {"w": 1}, ("x: y",))
    assert display.to_dict() == {
        "data": {"text/html": "é", "image/png": "iQ=="},
        "metadata": {"w": 1},
        "dropped": ["x: y"],
    }
