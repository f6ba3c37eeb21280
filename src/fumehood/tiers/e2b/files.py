"""The work folder of a microVM at the service: every file operation by the vendor's SDK."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterable, AsyncIterator, Coroutine, Iterable
from hashlib import sha256
from typing import Any, Literal

from e2b_code_interpreter import AsyncSandbox

from fumehood.errors import FileError, FumehoodError
from fumehood.guest_files import GuestFiles, pieces_of
from fumehood.model import check_path
from fumehood.tier import FileInfo
from fumehood.tiers.e2b.errors import translate
from fumehood.wire import BODY_MAX

HOME = "/home/user"  # the user's folder in the service's templates
WORK = f"{HOME}/work"

_SPOOL_BYTES = 1 << 20  # what a file to be written may take of this process's memory
_Kind = Literal["file", "folder", "other"]
_KINDS: dict[str, _Kind] = {"dir": "folder", "file": "file"}


class E2BFiles(GuestFiles):
    """The file operations of a sandbox; tar streams are made and read here, as for every other tier."""

    _remote: AsyncSandbox
    _secret: str

    async def _file(self, call: Coroutine[Any, Any, Any]) -> Any:
        """What the SDK answers. Raises FileError, ClosedError."""
        raise NotImplementedError

    async def write_file(self, path: str, data: bytes) -> None:
        """See :class:`fumehood.tier.Sandbox`."""
        path = check_path(path)
        self._written.pop(path, None)
        await self._file(self._remote.files.write(f"{WORK}/{path}", data))
        self._written[path] = len(data), sha256(data).hexdigest()

    async def write_stream(self, path: str, source: AsyncIterable[bytes] | Iterable[bytes]) -> None:
        """See :class:`fumehood.tier.FullSandbox`. Begins to send when ``source`` has ended."""
        path = check_path(path)
        digest, size = sha256(), 0
        with tempfile.SpooledTemporaryFile(_SPOOL_BYTES) as spool:
            async for piece in pieces_of(source):
                spool.write(piece)
                digest.update(piece)
                size += len(piece)
            spool.seek(0)
            self._written.pop(path, None)
            await self._file(self._remote.files.write(f"{WORK}/{path}", spool))
        self._written[path] = size, digest.hexdigest()

    async def _read(self, path: str, max_bytes: int) -> AsyncIterator[bytes]:
        path = check_path(path)
        stream = await self._file(self._remote.files.read(f"{WORK}/{path}", format="stream"))
        got = 0
        try:
            async with contextlib.aclosing(stream) as pieces:
                async for piece in pieces:
                    got += len(piece)
                    if got > max_bytes:
                        raise FileError(f"{path!r} is larger than {max_bytes} bytes", tier="e2b")
                    for start in range(0, len(piece), BODY_MAX):
                        yield piece[start : start + BODY_MAX]
        except (FumehoodError, GeneratorExit, asyncio.CancelledError):
            raise
        except Exception as error:
            raise translate(error, "file", secret=self._secret) from None

    async def _list(self, path: str) -> list[tuple[bytes, _Kind, int]]:
        depth = self._policy.artifacts.depth + 2  # one more than is fetched, so that what is too deep is seen
        where = f"{WORK}/{check_path(path)}" if path else WORK
        found: list[tuple[bytes, _Kind, int]] = []
        for entry in (await self._file(self._remote.files.list(where, depth=depth)))[: self._policy.limits.files]:
            name = str(entry.path).removeprefix(f"{WORK}/")
            # The service tells names as text: U+FFFD stands for bytes that are not UTF-8, and no such name can be read.
            raw = name.encode("utf-8", "replace").replace("\ufffd".encode(), b"\xff")
            found.append((raw, _kind(entry), int(entry.size)))
        return found

    async def stat(self, path: str) -> FileInfo:
        """See :class:`fumehood.tier.FullSandbox`."""
        path = check_path(path)
        entry = await self._file(self._remote.files.get_info(f"{WORK}/{path}"))
        return FileInfo(path, _kind(entry), int(entry.size), int(entry.modified_time.timestamp()), entry.mode & 0o7777)

    async def rename(self, path: str, new_path: str) -> None:
        """See :class:`fumehood.tier.FullSandbox`."""
        path, new_path = check_path(path), check_path(new_path)
        await self._file(self._remote.files.rename(f"{WORK}/{path}", f"{WORK}/{new_path}"))
        self._written.pop(path, None)
        self._written.pop(new_path, None)

    async def make_folder(self, path: str) -> None:
        """See :class:`fumehood.tier.FullSandbox`."""
        path = check_path(path)
        made = await self._file(self._remote.files.make_dir(f"{WORK}/{path}"))
        if not made and (await self.stat(path)).kind != "folder":
            raise FileError(f"{path!r:.200} is there and is not a folder", tier="e2b")

    async def remove(self, path: str) -> None:
        """See :class:`fumehood.tier.Sandbox`."""
        path = check_path(path)
        await self._file(self._remote.files.remove(f"{WORK}/{path}"))
        self._written.pop(path, None)


def _kind(entry: Any) -> _Kind:
    if entry.symlink_target is not None or entry.type is None:
        return "other"
    return _KINDS.get(entry.type.value, "other")
