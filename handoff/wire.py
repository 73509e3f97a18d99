"""The Handoff service's wire form: its names, and Chunk messages without needless copies of their records.

The protobuf runtime copies a bytes field into the message, out of it and into the wire form; for 11 MB of
KV each of these is a millisecond. The bytes on the wire are those of `handoff.Chunk` (a test compares
them).

Python's gRPC copies each message under the GIL, where it is sent and more than once where it is received:
small ones keep the engine's thread waiting for less long.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from google.protobuf.message import DecodeError

from baton.handoff.records import Bytes, Digests, Records

SERVICE = "baton.handoff.v1.Handoff"
PULL = "Pull"
RELEASE = "Release"
RENEW = "Renew"
TAKEN = "Taken"
STAGED = "Staged"
SAMPLE = "Sample"
TRIAL = "Trial"
ERROR_KEY = "baton-error"  # trailing metadata: the name of the HandoffError

# Of records that a puller wants in one message; most have more than half of it. At 4 MiB the pages of each
# are brought in anew, for a third more CPU time; at 0.5 MiB TLS takes twice the source's (decision 0037).
MESSAGE_BYTES = 5 << 18

_FIRST_BLOCK = 1 << 3 | 0  # field 1, varint
_RECORDS = 2 << 3 | 2  # field 2, length-delimited
_DIGESTS = 3 << 3 | 2  # field 3, packed
_NONE = np.empty(0, np.uint8)
_NO_DIGESTS = np.empty(0, np.uint64)


@dataclass(frozen=True)
class RawChunk:
    """Whole records, from block `first_block` on, or a part of one.

    records: [n * record_bytes] uint8; digests: [n] uint64, none with a part that others of its record follow.
    """

    first_block: int
    records: Bytes
    digests: Digests


def split(records: Records, most: int) -> Iterator[RawChunk]:
    """Yield records as one chunk; a single one that is larger than `most` bytes in parts of one size."""
    data = records.data.reshape(-1)
    parts = -(-data.size // most) if len(records.data) == 1 else 1
    size = -(-data.size // parts)
    for at in range(0, data.size, size):
        last = at + size >= data.size
        yield RawChunk(records.first_block, data[at : at + size], records.digests if last else _NO_DIGESTS)


def encode(chunk: RawChunk) -> bytes:
    """Return the message's bytes, the records copied once."""
    digests = chunk.digests.tobytes()
    head = (
        bytes([_FIRST_BLOCK]) + _varint(chunk.first_block) + bytes([_RECORDS]) + _varint(chunk.records.size)
    )
    between = bytes([_DIGESTS]) + _varint(len(digests)) if digests else b""
    return b"".join((head, chunk.records.data, between, digests))


def decode(message: bytes) -> RawChunk:
    """Return the chunk, whose records stay where they are in `message`. Raises DecodeError."""
    first_block, at = 0, 0
    found = {_RECORDS: _NONE, _DIGESTS: _NONE}
    while at < len(message):
        tag, at = _read_varint(message, at)
        value, at = _read_varint(message, at)
        if tag == _FIRST_BLOCK:
            first_block = value
        elif tag in found and at + value <= len(message):
            found[tag] = np.frombuffer(message, np.uint8, count=value, offset=at)
            at += value
        else:
            raise DecodeError(f"a chunk with tag {tag} and value {value} at byte {at} of {len(message)}")
    if found[_DIGESTS].size % 8:
        raise DecodeError(f"a chunk with {found[_DIGESTS].size} bytes of digests; each has 8")
    return RawChunk(first_block, found[_RECORDS], found[_DIGESTS].view("<u8"))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(message) or shift > 63:
            raise DecodeError(f"a chunk of {len(message)} bytes that ends within a number")
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
