from __future__ import annotations

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from baton.handoff import wire
from baton.protos.handoff_pb2 import Chunk


@given(st.integers(0, 2**32 - 1), st.binary(max_size=400))
def test_the_bytes_are_those_of_the_protobuf_message(first_block: int, payload: bytes) -> None:
    encoded = wire.encode(wire.RawChunk(first_block, np.frombuffer(payload, np.uint8)))
    assert Chunk.FromString(encoded) == Chunk(first_block=first_block, records=payload)
    decoded = wire.decode(Chunk(first_block=first_block, records=payload).SerializeToString())
    assert (decoded.first_block, decoded.records.tobytes()) == (first_block, payload)


@given(st.integers(0, 50))
def test_a_message_cut_short_is_an_error(kept: int) -> None:
    whole = wire.encode(wire.RawChunk(300, np.arange(50, dtype=np.uint8)))
    cut = whole[: min(kept, len(whole) - 1)]
    if cut and len(cut) != 3:  # three bytes are a whole message: a first block and no records
        with pytest.raises(DecodeError):
            wire.decode(cut)


def test_an_unknown_field_is_an_error() -> None:
    with pytest.raises(DecodeError, match="tag 26"):
        wire.decode(b"\x1a\x01x")
