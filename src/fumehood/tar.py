"""Tar streams, member by member: what goes out is written here, and what comes in is read as a stranger's.

Read are the formats ustar, pax and GNU of tar(5), uncompressed, and of their members regular files and folders; a link,
a device, a FIFO or a sparse file ends the reading, as do a name that is absolute or leads out, and a stream with more
members or bytes than allowed. Records about the next member (long names) are bounded before they are read. Modes,
owners and times are not taken over.
"""

from __future__ import annotations

import tarfile
from collections.abc import AsyncIterator
from dataclasses import dataclass

from fumehood.model import check_path

BLOCK = 512
END = bytes(2 * BLOCK)

#: A path is at most 4095 bytes; the rest is room for times and attributes, which are not looked at.
RECORD_MAX = 64 << 10
PIECE = 256 << 10

_UNDERSTOOD = frozenset({"path", "size"})
#: Attributes of a pax record that change what the member is.
_REFUSED = ("GNU.sparse", "linkpath")


def folder(path: str) -> bytes:
    """The header of a folder."""
    return _header(path + "/", tarfile.DIRTYPE, 0o755, 0)


def file(path: str, size: int) -> bytes:
    """The header of a file, after which ``size`` bytes and :func:`padding` must follow."""
    return _header(path, tarfile.REGTYPE, 0o644, size)


def padding(size: int) -> bytes:
    """What fills the last block of a file."""
    return bytes(-size % BLOCK)


def _header(path: str, kind: bytes, mode: int, size: int) -> bytes:
    info = tarfile.TarInfo(path)
    info.type, info.mode, info.size = kind, mode, size
    return info.tobuf(tarfile.PAX_FORMAT)


@dataclass(frozen=True, slots=True)
class Member:
    """A file or a folder of the stream."""

    path: str
    is_folder: bool
    size: int


class Reader:
    """The members of a stream, in order. Every method raises ValueError for a stream that is not taken."""

    def __init__(self, source: AsyncIterator[bytes], *, members: int, total_bytes: int) -> None:
        self._source = source
        self._buffer = bytearray()
        self._members_left = members
        self._bytes_left = total_bytes
        self._data_left = 0  # of the member under way
        self._padding = 0

    async def next(self) -> Member | None:
        """The next member, past what was not read of the last one; None at the end of the stream."""
        async for _ in self.data():
            pass
        records: dict[str, str] = {}
        while True:
            block = await self._take(BLOCK)
            if block.count(0) == BLOCK:
                return None
            try:
                info = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
            except (tarfile.HeaderError, UnicodeError) as error:
                raise ValueError(f"not a tar header: {error}") from None
            self._members_left -= 1
            if self._members_left < 0:
                raise ValueError("more members than the sandbox may have files")
            if info.type in (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE):
                records.update(_pax(await self._record(info)))
            elif info.type == tarfile.XGLTYPE:
                if _UNDERSTOOD & _pax(await self._record(info)).keys():
                    raise ValueError("a global record that names every member alike")
            elif info.type == tarfile.GNUTYPE_LONGNAME:
                records["path"] = (await self._record(info)).rstrip(b"\0").decode()
            else:
                member = self._member(info, records)
                if member is not None:
                    return member
                records = {}

    def _member(self, info: tarfile.TarInfo, records: dict[str, str]) -> Member | None:
        """The member, or None for the top folder itself, which is there already."""
        name = records.get("path", info.name)
        if info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE):
            raise ValueError(f"{name!r:.200} is neither a file nor a folder")
        is_folder = info.type == tarfile.DIRTYPE
        size = 0 if is_folder else _number(records["size"]) if "size" in records else info.size
        if not 0 <= size <= self._bytes_left:
            raise ValueError("more bytes than the sandbox may hold")
        if is_folder and not name.replace("/", "").replace(".", "") and ".." not in name and name[:1] == ".":
            return None
        path = check_path(name)
        self._bytes_left -= size
        self._data_left, self._padding = size, -size % BLOCK
        return Member(path, is_folder, size)

    async def data(self) -> AsyncIterator[bytes]:
        """The data of the member under way, in pieces."""
        while self._data_left:
            if not self._buffer:
                await self._fill()
            piece = bytes(self._buffer[: min(self._data_left, PIECE)])
            del self._buffer[: len(piece)]
            self._data_left -= len(piece)
            yield piece
        if self._padding:
            padding, self._padding = self._padding, 0
            await self._take(padding)

    async def _record(self, info: tarfile.TarInfo) -> bytes:
        if not 0 <= info.size <= RECORD_MAX:
            raise ValueError(f"a record of {info.size} bytes about a member")
        data = await self._take(info.size)
        await self._take(-info.size % BLOCK)
        return data

    async def _take(self, size: int) -> bytes:
        while len(self._buffer) < size:
            await self._fill()
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data

    async def _fill(self) -> None:
        async for piece in self._source:
            if piece:
                self._buffer += piece
                return
        raise ValueError("the stream ends within a member")


def _pax(record: bytes) -> dict[str, str]:
    """The attributes that are looked at of a pax record: lines of ``length SPACE keyword = value NEWLINE``."""
    found: dict[str, str] = {}
    while record:
        digits, space, _ = record.partition(b" ")
        length = _number(digits.decode()) if len(digits) < 8 else 0
        line = record[len(digits) + 1 : length]
        keyword, equals, value = line.partition(b"=")
        if not space or not equals or not line.endswith(b"\n") or length > len(record):
            raise ValueError("a malformed pax record")
        name = keyword.decode("utf-8", "replace")
        if name.startswith(_REFUSED):
            raise ValueError(f"a pax record of {name[:40]!r}")
        if name in _UNDERSTOOD:
            found[name] = value[:-1].decode()
        record = record[length:]
    return found


def _number(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 20:
        raise ValueError(f"{text!r:.40} is not a length")
    return int(text)
