from __future__ import annotations

import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.cli.terminal import TerminalFilter, escape, escape_line

BIDI = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("plain äöü 漢字 👩\u200d🔬\tand\ntabs", "plain äöü 漢字 👩\u200d🔬\tand\ntabs"),
        ("\x1b[31mred\x1b[0m", "␛[31mred␛[0m"),
        ("\x1b]52;c;aGk=\x07", "␛]52;c;aGk=␇"),
        ("safe\rfake", "safe␍fake"),
        ("a\x08\x00\x7f", "a␈␀␡"),
        ("\x9b31m", "\\x9b31m"),
        ("\u202etxt.exe", "<U+202E>txt.exe"),
        ("\u200b\ufeff\U000e0041", "<U+200B><U+FEFF><U+E0041>"),
        ("\udc80", "<U+DC80>"),
    ],
)
def test_what_a_terminal_would_obey_is_shown(raw: str, shown: str) -> None:
    assert escape(raw) == shown


def test_no_character_that_controls_or_changes_direction_gets_through() -> None:
    kept = {chr(c) for c in range(sys.maxunicode + 1) if escape(chr(c)) == chr(c)}
    through = {c for c in kept if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")}
    assert through == {"\n", "\t"}
    assert not {c for c in kept if unicodedata.bidirectional(c) in BIDI}
    assert {"\u200c", "\u200d"} <= kept


def test_a_name_stays_on_its_line() -> None:
    assert escape_line("a\nb\tc\x1b") == "a␊b␉c␛"


@given(st.binary(max_size=60), st.integers(1, 7))
def test_where_the_pieces_are_cut_does_not_matter(data: bytes, size: int) -> None:
    whole = TerminalFilter()
    expected = whole.feed(data) + whole.finish()
    pieces = TerminalFilter()
    got = b"".join(pieces.feed(data[i : i + size]) for i in range(0, len(data), size)) + pieces.finish()
    assert got == expected == escape(data.decode("utf-8", "replace")).encode()


@given(st.binary(max_size=60))
def test_what_comes_out_can_be_put_in_again_unchanged(data: bytes) -> None:
    once = TerminalFilter().feed(data)
    assert TerminalFilter().feed(once) == once


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_no_byte_is_a_control_character_in_the_encoding_of_the_terminal(encoding: str) -> None:
    everything = "".join(chr(c) for c in range(0x3000) if not 0xD800 <= c < 0xE000).encode()
    out = TerminalFilter(encoding).feed(everything).decode(encoding)
    assert escape(out) == out
