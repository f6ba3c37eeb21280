"""Tar streams by strangers: what is refused, what is bounded, and that tarfile reads what is written here."""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import AsyncIterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fumehood import tar
from fumehood.tar import Member, Reader


async def pieces(data: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


def read(data: bytes, *, size: int = 1000, members: int = 100, total_bytes: int = 1 << 20) -> dict[Member, bytes]:
    async def main() -> dict[Member, bytes]:
        reader = Reader(pieces(data, size), members=members, total_bytes=total_bytes)
        found = {}
        while (member := await reader.next()) is not None:
            found[member] = b"".join([piece async for piece in reader.data()])
        return found

    return asyncio.run(main())


def packed(*infos: tuple[tarfile.TarInfo, bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=form) as archive:
        for info, data in infos:
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def named(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("size", [1, 511, 512, 100_000])
def test_every_format_in_pieces_of_any_length(form: int, size: int) -> None:
    long = "d/" * 30 + "n" * 90 if form == tarfile.USTAR_FORMAT else "d/" * 60 + "n" * 200
    data = packed((named("a"), b"1"), (named("b/", tarfile.DIRTYPE), b""), (named(long), b"x" * 1025), form=form)
    assert read(data, size=size) == {
        Member("a", False, 1): b"1",
        Member("b", True, 0): b"",
        Member(long, False, 1025): b"x" * 1025,
    }


def test_unread_data_is_passed_over() -> None:
    async def main() -> list[str]:
        data = packed((named("a"), b"1" * 3000), (named("b"), b"2"))
        reader = Reader(pieces(data, 700), members=10, total_bytes=10_000)
        names = []
        while (member := await reader.next()) is not None:
            names.append(member.path)
        return names

    assert asyncio.run(main()) == ["a", "b"]


@pytest.mark.parametrize(
    ("info", "message"),
    [
        (named("/etc/passwd"), "relative"),
        (named("a/../../b"), "relative"),
        (named(".."), "relative"),
        (named("l", tarfile.SYMTYPE, "/etc"), "neither"),
        (named("l", tarfile.LNKTYPE, "a"), "neither"),
        (named("p", tarfile.FIFOTYPE), "neither"),
        (named("c", tarfile.CHRTYPE), "neither"),
        (named("b", tarfile.BLKTYPE), "neither"),
        (named("s", tarfile.GNUTYPE_SPARSE), "neither"),
        (named("x" * 300), "longer than a path can be"),
    ],
)
def test_refused_members(info: tarfile.TarInfo, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(packed((info, b"")))


def pax(records: dict[str, str], kind: bytes = tarfile.XHDTYPE) -> bytes:
    lines = b""
    for key, value in records.items():
        text = f" {key}={value}\n".encode()
        length = len(text) + len(str(len(text) + 2))
        lines += str(length).encode() + text
    info = named("pax", kind)
    info.size = len(lines)
    return info.tobuf(tarfile.USTAR_FORMAT) + lines + tar.padding(len(lines))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"not a tar" * 100, "not a tar header"),
        (packed((named("a"), b"1"))[:700], "ends within"),
        (packed((named("a"), b"1"))[:300], "ends within"),
        (pax({"path": "../out"}) + tar.file("in", 0), "relative"),
        (pax({"linkpath": "/etc"}) + tar.file("in", 0), "linkpath"),
        (pax({"GNU.sparse.major": "1"}) + tar.file("in", 0), "sparse"),
        (pax({"size": "99999999999"}) + tar.file("in", 0), "more bytes"),
        (pax({"size": "-5"}) + tar.file("in", 0), "not a length"),
        (pax({"path": "same"}, tarfile.XGLTYPE) + tar.file("in", 0), "global"),
        (tar.file("pax", 5).replace(b"0" + b"\0" * 100, b"x" + b"\0" * 100), "tar header"),
    ],
)
def test_malformed_streams(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(data)


def test_a_record_is_bounded_before_it_is_read() -> None:
    info = named("pax", tarfile.XHDTYPE)
    info.size = 1 << 30

    async def endless() -> AsyncIterator[bytes]:
        yield info.tobuf(tarfile.GNU_FORMAT)
        raise AssertionError("it reads the record")

    with pytest.raises(ValueError, match="a record of"):
        asyncio.run(Reader(endless(), members=1, total_bytes=1).next())


@pytest.mark.parametrize(("bound", "message"), [({"members": 2}, "more members"), ({"total_bytes": 2}, "more bytes")])
def test_bounds(bound: dict[str, int], message: str) -> None:
    data = packed(*((named(f"f{i}"), b"1") for i in range(3)))
    assert len(read(data)) == 3
    with pytest.raises(ValueError, match=message):
        read(data, **bound)


def test_what_is_written_is_read_by_tarfile() -> None:
    names: dict[str, bytes] = {"a": b"", "d/ü" + "x" * 200: b"1" * 513}
    stream = (
        tar.folder("d") + b"".join(tar.file(n, len(d)) + d + tar.padding(len(d)) for n, d in names.items()) + tar.END
    )
    with tarfile.open(fileobj=io.BytesIO(stream)) as archive:
        seen = {m.name: archive.extractfile(m).read() for m in archive if m.isreg()}  # type: ignore[union-attr]
        assert archive.getnames()[0] == "d"
    assert seen == names


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4095), st.integers(0, 255)), max_size=8))
def test_any_damage_is_a_value_error_or_a_checked_member(damage: list[tuple[int, int]]) -> None:
    data = bytearray(packed((named("a" * 150), b"1" * 600), (named("b"), b"2")))
    for place, value in damage:
        data[place % len(data)] = value
    try:
        found = read(bytes(data))
    except ValueError:
        return
    for member in found:
        assert ".." not in member.path.split("/") and not member.path.startswith("/")
