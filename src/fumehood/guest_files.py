"""Files of a sandbox with a guest agent: the host's side of every operation.

Each is a question and an answer in frames. Files are read and written in pieces, of which one is held at a time. No
archive by the guest is parsed: a folder that leaves as a tar stream is listed and read file by file, and the stream is
made here.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from fumehood import tar
from fumehood.artifacts import _bad_name, collect
from fumehood.errors import FileError, FumehoodError
from fumehood.model import Artifact, Policy, Receipt, check_path
from fumehood.tier import FileInfo
from fumehood.wire import BODY_MAX, Header

READ_FILE_MAX = 64 << 20
LISTING_MAX = 64 << 20
_COUNT_MAX = 1 << 62

_Kind = Literal["file", "folder", "other"]
_KINDS: Mapping[bytes, _Kind] = {b"f": "file", b"d": "folder"}


class GuestFiles:
    """The file operations of :class:`fumehood.session.GuestSandbox`, over its :meth:`_ask`."""

    _policy: Policy
    _receipt: Receipt
    _killed: str | None
    _written: dict[str, tuple[int, str]]  # path -> size and SHA-256 of what the host wrote

    async def _ask(self, operation: str, *, body: bytes = b"", limit: int = 0, **fields: int) -> tuple[Header, bytes]:
        raise NotImplementedError

    async def write_file(self, path: str, data: bytes) -> None:
        """See :class:`fumehood.tier.Sandbox`."""
        await self.write_stream(path, (data,))

    async def write_stream(self, path: str, source: AsyncIterable[bytes] | Iterable[bytes]) -> None:
        """See :class:`fumehood.tier.FullSandbox`."""
        path = check_path(path)
        raw = path.encode()
        room = BODY_MAX - len(raw)
        self._written.pop(path, None)
        digest = sha256()
        offset = 0
        try:
            async for data in pieces_of(source):
                for start in range(0, len(data), room):
                    piece = data[start : start + room]
                    await self._ask("write", body=raw + piece, path_bytes=len(raw), offset=offset)
                    digest.update(piece)
                    offset += len(piece)
            if offset == 0:
                await self._ask("write", body=raw, path_bytes=len(raw), offset=0)
        except FileError:
            raise  # the guest has removed what there was of it
        except Exception:
            if offset and self._killed is None:
                await self._ask("remove", body=raw, path_bytes=len(raw))
            raise
        self._written[path] = offset, digest.hexdigest()

    async def read_file(self, path: str, *, max_bytes: int = READ_FILE_MAX) -> bytes:
        """See :class:`fumehood.tier.Sandbox`."""
        return b"".join([piece async for piece in self._read(path, max_bytes)])

    async def read_stream(self, path: str) -> AsyncIterator[bytes]:
        """See :class:`fumehood.tier.FullSandbox`."""
        async for piece in self._read(path, self._policy.limits.disk_bytes):
            yield piece

    async def _read(self, path: str, max_bytes: int) -> AsyncIterator[bytes]:
        """A regular file's content in pieces of at most 1 MiB, refused above ``max_bytes``."""
        raw = check_path(path).encode()
        got = 0
        while True:
            header, data = await self._ask(
                "read", body=raw, limit=BODY_MAX, path_bytes=len(raw), offset=got, length=min(BODY_MAX, max_bytes + 1)
            )
            size = header.get("size")
            if not is_count(size):
                raise FileError("the guest sent a malformed reply", tier=self._receipt.tier)
            got += len(data)
            if got > max_bytes or header["size"] > max_bytes:
                raise FileError(f"{path!r} is larger than {max_bytes} bytes", tier=self._receipt.tier)
            if data:
                yield data
            if not data or got >= header["size"]:
                return

    async def list_files(self) -> tuple[FileInfo, ...]:
        """See :class:`fumehood.tier.Sandbox`. Names that are not UTF-8 show U+FFFD."""
        found = [FileInfo(n.decode("utf-8", "replace"), kind, size) for n, kind, size in await self._list("")]
        return tuple(sorted(found, key=lambda f: f.path))

    async def _list(self, path: str) -> list[tuple[bytes, _Kind, int]]:
        """Name, kind and size of what is below ``path``, at most Limits.files entries."""
        count = self._policy.limits.files
        raw = check_path(path).encode() if path else b""
        where = {"path_bytes": len(raw)} if raw else {}
        _, data = await self._ask("list", body=raw, limit=LISTING_MAX, count=count, **where)
        found: list[tuple[bytes, _Kind, int]] = []
        for line in data.split(b"\0", count)[:count]:
            size, _, name = line[1:].partition(b" ")
            if size.isdigit() and len(size) < 20 and name:
                found.append((name, _KINDS.get(line[:1], "other"), int(size)))
        return found

    async def stat(self, path: str) -> FileInfo:
        """See :class:`fumehood.tier.FullSandbox`."""
        path = check_path(path)
        header, _ = await self._ask("stat", body=path.encode(), path_bytes=len(path.encode()))
        size, modified, mode = (header.get(name) for name in ("size", "mtime", "mode"))
        if not (is_count(size) and is_count(modified) and is_count(mode)):
            raise FileError("the guest sent a malformed reply", tier=self._receipt.tier)
        kinds: dict[Any, _Kind] = {"file": "file", "folder": "folder"}
        kind = kinds.get(str(header.get("kind")), "other")
        return FileInfo(path, kind, header["size"], header["mtime"], header["mode"] & 0o7777)

    async def rename(self, path: str, new_path: str) -> None:
        """See :class:`fumehood.tier.FullSandbox`."""
        path, new_path = check_path(path), check_path(new_path)
        raw, to = path.encode(), new_path.encode()
        await self._ask("rename", body=raw + to, path_bytes=len(raw), to_bytes=len(to))
        self._written.pop(path, None)
        self._written.pop(new_path, None)

    async def make_folder(self, path: str) -> None:
        """See :class:`fumehood.tier.FullSandbox`."""
        raw = check_path(path).encode()
        await self._ask("mkdir", body=raw, path_bytes=len(raw))

    async def export_tar(
        self, path: str = "", *, skipped: Callable[[str, str], None] | None = None
    ) -> AsyncIterator[bytes]:
        """See :class:`fumehood.tier.FullSandbox`."""
        top = check_path(path).encode() + b"/" if path else b""
        left = self._policy.limits.disk_bytes
        for name, kind, size in sorted(await self._list(path)):
            reason = next((r for r in map(_bad_name, name.split(b"/")) if r), None)
            if reason is None and (kind == "other" or not name.startswith(top)):
                reason = "not a file or folder"
            if reason is None and size > left and kind == "file":
                reason = f"more than {self._policy.limits.disk_bytes} bytes together"
            if reason is not None:
                if skipped is not None:
                    skipped(name.decode("utf-8", "replace"), reason)
                continue
            inner = name.removeprefix(top).decode()
            if kind == "folder":
                yield tar.folder(inner)
                continue
            left -= size
            yield tar.file(inner, size)
            got = 0
            async for piece in self._read(name.decode(), self._policy.limits.disk_bytes):
                yield piece[: size - got]
                got += min(len(piece), size - got)
            if got < size:
                raise FileError(f"{inner!r:.200} became shorter while it was read", tier=self._receipt.tier)
            yield tar.padding(size)
        yield tar.END

    async def import_tar(self, source: AsyncIterable[bytes] | Iterable[bytes], path: str = "") -> None:
        """See :class:`fumehood.tier.FullSandbox`."""
        top = check_path(path) + "/" if path else ""
        limits = self._policy.limits
        reader = tar.Reader(pieces_of(source), members=limits.files, total_bytes=limits.disk_bytes)
        try:
            while (member := await reader.next()) is not None:
                if member.is_folder:
                    await self.make_folder(top + member.path)
                else:
                    await self.write_stream(top + member.path, reader.data())
        except FileError:
            raise
        except ValueError as error:
            raise FileError(f"the tar stream was not taken: {error}", tier=self._receipt.tier) from None

    async def remove(self, path: str) -> None:
        """See :class:`fumehood.tier.Sandbox`."""
        raw = check_path(path).encode()
        await self._ask("remove", body=raw, path_bytes=len(raw))


async def pieces_of(source: AsyncIterable[bytes] | Iterable[bytes]) -> AsyncIterator[bytes]:
    """The pieces of an iterator of either kind."""
    if isinstance(source, AsyncIterable):
        async for piece in source:
            yield piece
    else:
        for piece in source:
            yield piece


def is_count(value: object) -> bool:
    """Whether the guest has named a number of bytes, or the like."""
    return type(value) is int and 0 <= value < _COUNT_MAX


def save_left(
    workdir: int, out: Path, policy: Policy, unchanged: Mapping[str, tuple[int, str]]
) -> tuple[Artifact, ...]:
    """What a dead sandbox left in its folder, saved below ``out``; closes ``workdir``. Raises FumehoodError."""
    try:
        return collect(workdir, out, policy.artifacts, unchanged)
    except OSError as error:
        raise FumehoodError(f"artifacts could not be saved: {error}", remedy="choose another output folder") from error
    finally:
        os.close(workdir)
