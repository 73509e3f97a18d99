from __future__ import annotations

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from baton.handoff import wire
from baton.handoff.records import Records
from baton.protos.handoff_pb2 import Chunk

NO_DIGESTS = np.empty(0, np.uint64)


@given(st.integers(0, 2**32 - 1), st.binary(max_size=400), st.lists(st.integers(0, 2**64 - 1), max_size=40))
def test_the_bytes_are_those_of_the_protobuf_message(
    first_block: int, payload: bytes, digests: list[int]
) -> None:
    backwards = np.array(digests[::-1], np.uint64)[::-1]  # as they lie in shared memory
    encoded = wire.encode(wire.RawChunk(first_block, np.frombuffer(payload, np.uint8), backwards))
    message = Chunk(first_block=first_block, records=payload, digests=digests)
    assert Chunk.FromString(encoded) == message
    decoded = wire.decode(message.SerializeToString())
    assert (decoded.first_block, decoded.records.tobytes()) == (first_block, payload)
    assert decoded.digests.tolist() == digests


@given(st.integers(0, 50))
def test_a_message_cut_short_is_an_error(kept: int) -> None:
    whole = wire.encode(wire.RawChunk(300, np.arange(50, dtype=np.uint8), NO_DIGESTS))
    cut = whole[: min(kept, len(whole) - 1)]
    if cut and len(cut) != 3:  # three bytes are a whole message: a first block and no records
        with pytest.raises(DecodeError):
            wire.decode(cut)


def test_an_unknown_field_is_an_error() -> None:
    with pytest.raises(DecodeError, match="tag 34"):
        wire.decode(b"\x22\x01x")


def test_half_a_digest_is_an_error() -> None:
    with pytest.raises(DecodeError, match="3 bytes of digests"):
        wire.decode(b"\x1a\x03xyz")


@given(st.integers(1, 300), st.integers(1, 3), st.integers(1, 400))
def test_a_record_that_is_too_large_goes_in_parts_of_one_size_its_digest_with_the_last(
    record_bytes: int, count: int, most: int
) -> None:
    records = Records(
        7,
        np.arange(count * record_bytes, dtype=np.uint8).reshape(count, -1),
        np.arange(count, dtype=np.uint64),
    )
    chunks = list(wire.split(records, most))
    assert {chunk.first_block for chunk in chunks} == {7}
    assert np.array_equal(np.concatenate([chunk.records for chunk in chunks]), records.data.reshape(-1))
    assert [len(chunk.digests) for chunk in chunks] == [0] * (len(chunks) - 1) + [count]
    if count > 1:
        assert len(chunks) == 1
    elif record_bytes > most:
        assert max(chunk.records.size for chunk in chunks) <= most
        assert len(chunks) == -(-record_bytes // most)
