from dataclasses import replace

import pytest

from baton.attempts import Attempt
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.booking import (
    OUTPUT_TOKENS_BOOKED,
    blocks_for,
    could_decode,
    could_prefill,
    max_requests,
    may_decode,
    may_prefill,
    usable_blocks,
)
from baton.scheduler.types import Booking, Reserved, WorkerRecord
from harness.scheduling import LIMITS, Options, capacity, identity, need


def worker(reserved=None, **changes):
    who = identity("w", **changes)
    return WorkerRecord(who, pb.WORKER_STATE_READY, None, reserved or Reserved(), False, 5.0)


@pytest.mark.parametrize(
    ("prompt", "new", "blocks"),
    [
        (1, 0, 1),  # 1 + 4
        (12, 0, 1),  # 12 + 4
        (13, 0, 2),
        (100, 10, 8),  # 114
        (100, 10_000, 23),  # 100 + 4 + 256 of the output
        (1_020, 10_000, 65),  # 1020 + 4 + 4, the rest of max_model_len
    ],
)
def test_prompt_lookahead_and_first_output_tokens_are_booked(prompt, new, blocks):
    assert OUTPUT_TOKENS_BOOKED == 256
    assert blocks_for(need(prompt=prompt, new=new), capacity()) == blocks


def test_at_most_all_blocks_are_booked_and_one_request_is_always_allowed():
    small = capacity(num_blocks=11)
    assert usable_blocks(small) == 10
    assert blocks_for(need(prompt=150, new=200), small) == 10
    assert max_requests(capacity(max_num_seqs=0), Options(max_queue_factor=1.0)) == 1


def test_requests_that_never_fit():
    assert could_prefill(need(prompt=1_023), worker())
    assert not could_prefill(need(prompt=1_024), worker())  # no room for an output token
    assert not could_decode(need(prompt=1_024), worker())
    assert could_prefill(need(prompt=160), worker(num_blocks=11))
    assert not could_decode(need(prompt=160), worker(num_blocks=11))  # needs another block for look-ahead
    assert could_decode(need(prompt=156), worker(num_blocks=11))
    assert not could_prefill(need(prompt=161), worker(num_blocks=11))


def test_room_now():
    assert may_prefill(need(prompt=400), worker(Reserved(prompt_tokens=600)), LIMITS)
    assert not may_prefill(need(prompt=401), worker(Reserved(prompt_tokens=600)), LIMITS)
    assert may_prefill(need(prompt=1_001), worker(Reserved(requests=1)), LIMITS)  # nothing queued
    assert may_decode(need(), worker(Reserved(requests=7)), LIMITS)
    assert not may_decode(need(), worker(Reserved(requests=8)), LIMITS)
    assert may_decode(need(), worker(Reserved(blocks=91)), LIMITS)
    assert not may_decode(need(), worker(Reserved(blocks=92)), LIMITS)


@pytest.mark.parametrize(("prefill", "decode"), [("w", "w"), ("p", "")])
def test_invalid_bookings(prefill, decode):
    with pytest.raises(ValueError, match=r"."):
        Booking(Attempt("r", 1), "", prefill, decode, 1, 1)


def test_a_lower_class_leaves_room():
    half = replace(need(prompt=100), room=0.5)
    assert may_prefill(half, worker(Reserved(prompt_tokens=400)), LIMITS)
    assert not may_prefill(half, worker(Reserved(prompt_tokens=401)), LIMITS)
    assert may_prefill(replace(half, prompt_tokens=900), worker(), LIMITS)  # nothing queued
    slots = capacity().max_num_seqs // 2
    assert may_decode(half, worker(Reserved(requests=slots - 1)), LIMITS)
    assert not may_decode(half, worker(Reserved(requests=slots)), LIMITS)
    assert may_decode(need(prompt=100), worker(Reserved(requests=slots)), LIMITS)
    blocks = usable_blocks(capacity())
    assert not may_decode(half, worker(Reserved(requests=1, blocks=blocks // 2)), LIMITS)
    large = replace(need(prompt=900), room=0.01)
    assert may_decode(large, worker(), LIMITS)  # nothing is booked
    assert not may_decode(large, worker(Reserved(blocks=1)), LIMITS)
