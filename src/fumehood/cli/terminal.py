"""Output made harmless for a terminal.

A terminal obeys what it is sent: escape sequences move the cursor over what was printed before, set the title, fill
the clipboard or answer on the keyboard, and a bidirectional override makes text read as what it is not (Trojan Source,
https://trojansource.codes). So each control character is shown instead of sent: ``ESC [ 3 1 m`` appears as ``␛[31m``.
Newline and tab are kept. A carriage return is shown too, for it overwrites the line.
"""

from __future__ import annotations

import codecs
import re

# C0 but \t and \n, DEL, C1; soft hyphen and the invisible or direction-changing format characters; line and paragraph
# separators; tags; lone surrogates. The joiners U+200C and U+200D stay: Persian and emoji need them.
_HARMFUL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
_C0_PICTURES = 0x2400
_DEL_PICTURE = "\u2421"


def _visible(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(_C0_PICTURES + code)
    if code == 0x7F:
        return _DEL_PICTURE
    return f"\\x{code:02x}" if code < 0x100 else f"<U+{code:04X}>"


def escape(text: str) -> str:
    """``text`` with every character that a terminal would obey in a visible form; newlines and tabs kept."""
    return _HARMFUL.sub(_visible, text)


def escape_line(text: str) -> str:
    """The same for text that must stay on its line, such as a file's name."""
    return escape(text).replace("\n", "␊").replace("\t", "␉")


class TerminalFilter:
    """Makes a stream of bytes harmless piece by piece; a character cut in two by a piece's end is put together.

    ``encoding`` is the terminal's: bytes that are harmless as UTF-8 may be control characters in another one. What it
    lacks is written as ``\\uXXXX``. Bytes that are not UTF-8 become U+FFFD.
    """

    def __init__(self, encoding: str = "utf-8") -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._encoding = encoding

    def feed(self, data: bytes) -> bytes:
        """The next piece, ready to be written."""
        return self._encoded(self._decoder.decode(data))

    def finish(self) -> bytes:
        """What is left of a character that never ended."""
        return self._encoded(self._decoder.decode(b"", final=True))

    def _encoded(self, text: str) -> bytes:
        return escape(text).encode(self._encoding, "backslashreplace")
