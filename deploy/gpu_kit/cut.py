"""Strip a CUDA extension of all device code except Hopper's.

The section .nv_fatbin of a CUDA extension has a container for each compiled file, and a container has
entries: machine code for one architecture, or PTX. Only machine code for sm_90 and sm_90a is kept. Everything
else and the debug symbol tables are overwritten with zeros, which compress well and leave addresses
unchanged. A container without Hopper code gets the file's smallest entry, preferably for another
architecture: it can be loaded, but its kernels fail.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

_MAGIC = 0xBA55ED50  # the first bytes of a container
_CODE = 2  # kind of an entry with machine code
_SYMBOLS, _NO_BITS = 2, 8  # kinds of sections
_HOPPER = 90
_FATBIN = (".nv_fatbin", "__nv_relfatbin")


@dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    start: int
    size: int
    link: int  # number of its string section


@dataclass(frozen=True)
class _Entry:
    start: int
    size: int  # includes the header
    kind: int
    architecture: int


@dataclass(frozen=True)
class _Container:
    start: int
    head: int  # bytes before the first entry
    end: int
    entries: list[_Entry]


def cut(extension: bytes, only: re.Pattern[bytes] | None = None) -> bytes:
    """Return the extension with only Hopper's code, and only kernels whose names match `only`."""
    data = bytearray(extension)
    sections = _sections(extension)
    for section in sections:
        if section.kind == _SYMBOLS:
            for table in (section, sections[section.link]):
                data[table.start : table.start + table.size] = bytes(table.size)
        elif section.kind != _NO_BITS and section.name.startswith(_FATBIN):
            _cut_section(data, list(_containers(extension, section)), only)
    return bytes(data)


def _cut_section(data: bytearray, containers: list[_Container], only: re.Pattern[bytes] | None) -> None:
    code = [entry for one in containers for entry in one.entries if entry.kind == _CODE]
    others = [entry for entry in code if entry.architecture != _HOPPER]
    least = min(others or code, key=lambda entry: entry.size, default=None)
    spare = _bytes_of(data, least) if least else b""
    for one in containers:
        kept = [_bytes_of(data, entry) for entry in one.entries if _runs(entry)]
        body = b"".join(part for part in kept if only is None or only.search(part)) or spare
        room = one.end - one.start - one.head
        if not body or len(body) > room:
            body = _bytes_of(data, min(one.entries, key=lambda entry: entry.size))
        struct.pack_into("<Q", data, one.start + 8, len(body))
        data[one.start + one.head : one.end] = body + bytes(room - len(body))


def _runs(entry: _Entry) -> bool:
    return entry.kind == _CODE and entry.architecture == _HOPPER


def _bytes_of(data: bytearray, entry: _Entry) -> bytes:
    return bytes(data[entry.start : entry.start + entry.size])


def _sections(data: bytes) -> list[_Section]:
    """Return the sections of a 64-bit ELF file."""
    at = struct.unpack_from("<Q", data, 0x28)[0]
    width, count, names = struct.unpack_from("<HHH", data, 0x3A)
    raw = [struct.unpack_from("<IIQQQQI", data, at + number * width) for number in range(count)]
    strings = raw[names][4]

    def text(start: int) -> str:
        return data[strings + start : data.index(b"\0", strings + start)].decode()

    return [_Section(text(one[0]), one[1], one[4], one[5], one[6]) for one in raw]


def _containers(data: bytes, section: _Section) -> Iterator[_Container]:
    at, end = section.start, section.start + section.size
    while at + 16 <= end:
        if struct.unpack_from("<I", data, at)[0] != _MAGIC:
            at += 8
            continue
        head, body = struct.unpack_from("<HQ", data, at + 6)
        entry, last, entries = at + head, at + head + body, list[_Entry]()
        while entry < last:
            kind, _, own, payload = struct.unpack_from("<HHIQ", data, entry)
            architecture = struct.unpack_from("<I", data, entry + 28)[0]
            entries.append(_Entry(entry, own + payload, kind, architecture))
            entry += own + payload
        yield _Container(at, head, last, entries)
        at = last
