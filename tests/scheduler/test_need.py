"""Needs and their messages."""

from dataclasses import fields, replace

import pytest

from baton.attempts import Attempt
from baton.prefix_keys import PromptKeys
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.need import Adapter, Need, need_from_wire, need_to_wire
from harness.scheduling import need

FULL = Need(
    attempt=Attempt("r", 3),
    router_id="router",
    prompt_tokens=100,
    max_new_tokens=10,
    prefix=PromptKeys((16, 33), 32),
    exclude=frozenset({"a"}),
    vllm_version="0.32.0",
    model_fingerprint="f1",
    waited_s=2.5,
    adapter=Adapter("law", "f00"),
    priority=-1,
    room=0.75,
)


def test_every_field_is_sent():
    bare = need("other", 1, 1, 0, router_id="")
    full = replace(FULL, encode=True)
    same = [one.name for one in fields(Need) if getattr(full, one.name) == getattr(bare, one.name)]
    assert same == ["match"]  # every new field needs a value in `full`
    raw = need_to_wire(full).SerializeToString()
    assert need_from_wire(pb.Need.FromString(raw)) == full
    assert need_from_wire(need_to_wire(bare)) == bare


def test_messages_of_earlier_releases_are_understood():
    """These bytes were made when the messages had other names, and one more field."""
    raw = bytes.fromhex(
        "0a570a01721206726f7574657218032064280a3a01614206302e33322e304a0266315100000000000004405a"
        "10100000000000000021000000000000006020680171000000000000e83f7a0a0a036c61771203663030800101"
    )
    assert [need_from_wire(one) for one in pb.ExchangeRequest.FromString(raw).needs] == [FULL]
    mine = pb.ExchangeRequest(needs=[need_to_wire(FULL)])
    assert mine.SerializeToString(deterministic=True) == b"\x0a\x54" + raw[2:-3]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: need(prompt=0), "no prompt tokens"),
        (lambda: need(new=-1), "max_new_tokens is -1"),
        *((lambda room=room: need(room=room), f"room is {room}") for room in (0.0, -1.0, 1.1)),
    ],
)
def test_invalid_needs(make, why):
    with pytest.raises(ValueError, match=f"request 'r'.*{why}"):
        make()
