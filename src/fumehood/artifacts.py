"""Collecting the files that a program left behind, once its last process is dead.

Both sides are walked by descriptor. On the guest's side nothing but regular files on the work folder's own file
system is opened, and no link is followed. On the host's side every folder below ``out`` is opened without following
links and every file is made under a fresh name and then renamed, so that a link planted in ``out`` (by an earlier
run, say) leads nowhere.

Decided here, because a reader of ``out`` may be a tool and not a person:

- A name that is not UTF-8, or holds control, line-separating or text-direction characters, is skipped: such names
  deceive terminals and logs (see https://trojansource.codes for direction marks).
- Entries that a tool on the host would act on merely because they are there (:data:`ACTED_UPON`: version control
  folders with their hooks, direnv and editor settings) are skipped at every level, whatever their case. Other names
  with a leading dot are saved.
- A file with several links is skipped: where the host does not protect hard links
  (/proc/sys/fs/protected_hardlinks), it may be a file of somebody else's.
- Modes become 0644, or 0755 if the owner could execute it: no setuid, no group write.
"""

from __future__ import annotations

import errno
import itertools
import os
import secrets
import stat
import unicodedata
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from fumehood.model import Artifact, ArtifactLimits

#: Names that git, mercurial, subversion, bazaar, jujutsu, direnv and editors act upon when they find them.
ACTED_UPON = frozenset({".git", ".hg", ".svn", ".bzr", ".jj", ".envrc", ".vscode", ".idea"})

COPY_BYTES = 1 << 20

_DIRECTION = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

_KINDS = (
    (stat.S_ISLNK, "a link"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISCHR, "a device"),
)


def collect(
    workdir_fd: int, out: Path, limits: ArtifactLimits, unchanged: Mapping[str, tuple[int, str]]
) -> tuple[Artifact, ...]:
    """Save what is new or changed in the work folder below ``out``, which is made if it is missing.

    ``unchanged`` maps a path to the size and SHA-256 (hex) of a file that the host wrote: if it is still that, it is
    neither saved nor listed. What is not saved is listed with the reason, ``2 * limits.count`` of them at most, and
    then one entry (path ``""``) for all the rest. Empty folders are neither. Blocking: call it in a thread, when no
    process of the sandbox is left. Raises OSError if ``out`` cannot be used or the host's disk is full.
    """
    out.mkdir(parents=True, exist_ok=True)
    out_fd = os.open(out, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return _Collector(workdir_fd, out_fd, out, limits, unchanged).run()
    finally:
        os.close(out_fd)


class _Full(Exception):
    """The listing of skipped entries is full: the walk ends."""


class _Collector:
    def __init__(
        self,
        workdir_fd: int,
        out_fd: int,
        out: Path,
        limits: ArtifactLimits,
        unchanged: Mapping[str, tuple[int, str]],
    ) -> None:
        self.workdir_fd = workdir_fd
        self.out_fd = out_fd
        self.out = out
        self.limits = limits
        self.unchanged = unchanged
        self.device = os.fstat(workdir_fd).st_dev
        self.saved: list[Artifact] = []
        self.skipped: list[Artifact] = []
        self.bytes_left = limits.total_bytes
        # Every entry looked at costs one of these, so that a million empty folders end the walk too.
        self.looks_left = 16 * limits.count + len(unchanged) + 4096

    def run(self) -> tuple[Artifact, ...]:
        folders: list[tuple[str, ...]] = [()]
        try:
            while folders:
                folders.extend(reversed(self.folder(folders.pop())))
        except _Full:
            self.skipped.append(Artifact("", 0, skipped="more was left behind than is listed"))
        return (*self.saved, *self.skipped)

    def folder(self, parts: tuple[str, ...]) -> list[tuple[str, ...]]:
        """Collect one folder's files; the folders in it."""
        try:
            fd = _descend(self.workdir_fd, parts)
        except OSError as error:
            self.skip(_shown(parts), 0, f"cannot be opened: {error.strerror}")
            return []
        below = []
        try:
            with os.scandir(fd) as entries:
                names = sorted(os.fsencode(e.name) for e in itertools.islice(entries, self.looks_left + 1))
            for raw in names:
                self.looks_left -= 1
                if self.looks_left < 0:
                    raise _Full
                reason = _bad_name(raw)
                if reason is not None:
                    self.skip(_shown((*parts, os.fsdecode(raw))), 0, reason)
                    continue
                inner = (*parts, raw.decode())
                info = os.stat(raw, dir_fd=fd, follow_symlinks=False)
                if stat.S_ISDIR(info.st_mode):
                    if len(inner) > self.limits.depth:
                        self.skip("/".join(inner), 0, f"more than {self.limits.depth} folders deep")
                    elif info.st_dev != self.device:
                        self.skip("/".join(inner), 0, "on another file system")
                    else:
                        below.append(inner)
                else:
                    self.file(fd, raw, inner, info)
        finally:
            os.close(fd)
        return below

    def file(self, folder: int, raw: bytes, parts: tuple[str, ...], info: os.stat_result) -> None:
        """Save or skip one entry that is not a folder."""
        path = "/".join(parts)
        if not stat.S_ISREG(info.st_mode):
            kind = next((text for test, text in _KINDS if test(info.st_mode)), "not a regular file")
            self.skip(path, 0, kind)
            return
        try:
            fd = os.open(raw, _FILE, dir_fd=folder)
        except OSError as error:
            self.skip(path, info.st_size, f"cannot be opened: {error.strerror}")
            return
        try:
            info = os.fstat(fd)
            size = info.st_size
            if not stat.S_ISREG(info.st_mode) or info.st_dev != self.device:
                self.skip(path, 0, "changed while it was collected")
            elif info.st_nlink > 1:
                self.skip(path, size, "has several links")
            elif self.is_unchanged(fd, path, size):
                pass
            elif len(self.saved) >= self.limits.count:
                self.skip(path, size, f"more than {self.limits.count} files")
            elif size > self.bytes_left:
                self.skip(path, size, f"more than {self.limits.total_bytes} bytes together")
            else:
                self.save(fd, path, parts, info)
        finally:
            os.close(fd)

    def is_unchanged(self, fd: int, path: str, size: int) -> bool:
        """Whether the file is what the host wrote; leaves the descriptor at the start."""
        known = self.unchanged.get(path)
        if known is None or known[0] != size:
            return False
        digest = sha256()
        while piece := os.read(fd, COPY_BYTES):
            digest.update(piece)
        os.lseek(fd, 0, os.SEEK_SET)
        return digest.hexdigest() == known[1]

    def save(self, fd: int, path: str, parts: tuple[str, ...], info: os.stat_result) -> None:
        try:
            folder = _descend(self.out_fd, parts[:-1], create=True)
        except OSError as error:
            if error.errno not in _NOT_A_FOLDER:
                raise
            self.skip(path, info.st_size, "a link or file on the host is in the way of its folder")
            return
        try:
            name = parts[-1]
            if not _replaceable(folder, name):
                self.skip(path, info.st_size, "a link or folder on the host is in its place")
                return
            fresh = f".fumehood-{secrets.token_hex(8)}"
            target = os.open(fresh, _NEW, 0o600, dir_fd=folder)
            try:
                copied = _copy(fd, target, self.bytes_left)
                os.fchmod(target, 0o755 if info.st_mode & stat.S_IXUSR else 0o644)
                if copied is not None:
                    os.rename(fresh, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                os.unlink(fresh, dir_fd=folder)
                raise
            finally:
                os.close(target)
            if copied is None:
                os.unlink(fresh, dir_fd=folder)
                self.skip(path, info.st_size, f"more than {self.limits.total_bytes} bytes together")
                return
        finally:
            os.close(folder)
        self.bytes_left -= copied
        self.saved.append(Artifact(path, copied, saved=self.out.joinpath(*parts)))

    def skip(self, path: str, size: int, reason: str) -> None:
        if len(self.skipped) >= 2 * self.limits.count:
            raise _Full
        self.skipped.append(Artifact(path, size, skipped=reason))


#: What opening or making a folder fails with when something else has its name.
_NOT_A_FOLDER = frozenset({errno.ENOTDIR, errno.ELOOP})


def _descend(top: int, parts: tuple[str, ...], create: bool = False) -> int:
    """A descriptor of the folder ``parts`` below ``top``, following no link. Raises OSError."""
    fd = os.dup(top)
    for part in parts:
        try:
            if create:
                try:
                    os.mkdir(part, 0o755, dir_fd=fd)
                except FileExistsError:
                    pass
            below = os.open(part, _FOLDER, dir_fd=fd)
        finally:
            os.close(fd)
        fd = below
    return fd


def _replaceable(folder: int, name: str) -> bool:
    """Whether ``name`` is free or a regular file."""
    try:
        return stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return True


def _copy(source: int, target: int, most: int) -> int | None:
    """Copy to the end of file; the bytes copied, or None if there are more than ``most``. Raises OSError."""
    copied = 0
    while piece := os.read(source, COPY_BYTES):
        copied += len(piece)
        if copied > most:
            return None
        view = memoryview(piece)
        while view:
            view = view[os.write(target, view) :]
    return copied


def _bad_name(raw: bytes) -> str | None:
    """Why an entry of this name is not collected, or None."""
    try:
        name = raw.decode()
    except UnicodeDecodeError:
        return "its name is not UTF-8"
    if any(c in _DIRECTION or unicodedata.category(c) in ("Cc", "Zl", "Zp") for c in name):
        return "its name holds control characters"
    if name.casefold() in ACTED_UPON:
        return "a tool on the host would act upon it"
    return None


def _shown(parts: tuple[str, ...]) -> str:
    """A path that is safe to print: what is not plain is escaped."""
    text = "/".join(parts)
    plain = (c if c.isprintable() else c.encode("utf-8", "surrogateescape") for c in text)
    return "".join(c if isinstance(c, str) else "".join(f"\\x{b:02x}" for b in c) for c in plain)
