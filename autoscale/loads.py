"""Add and subtract routers' reports (`pb.RouterLoad`), whose counts only grow."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest

from baton.autoscale.histogram import SECONDS, TOKENS
from baton.protos import scheduler_pb2 as pb

_MOST, _MOST_WAITING = 2**64 - 1, 2**32 - 1  # a router may report anything
BUCKETS = {"prompts": TOKENS, "first_token": SECONDS, "gap": SECONDS, "images": TOKENS}
COUNTS = ("prompt_tokens", "over", "output_tokens", "image_tokens")


def summed(loads: Iterable[pb.RouterLoad]) -> pb.RouterLoad:
    """Return the sum of several reports, with the requests that wait."""
    loads = list(loads)
    whole = pb.RouterLoad(waiting=min(_MOST_WAITING, sum(one.waiting for one in loads)))
    for name in BUCKETS:
        columns = zip_longest(*(getattr(one, name) for one in loads), fillvalue=0)
        getattr(whole, name).extend(min(_MOST, sum(column)) for column in columns)
    for name in COUNTS:
        setattr(whole, name, min(_MOST, sum(getattr(one, name) for one in loads)))
    return whole


def increase(now: pb.RouterLoad, then: pb.RouterLoad) -> pb.RouterLoad:
    """Return what was counted since an earlier report; a count that was not sent is 0."""
    new = pb.RouterLoad()
    for name, bounds in BUCKETS.items():
        size = len(bounds) + 1  # a router of another version may have other buckets
        columns = zip_longest(getattr(now, name)[:size], getattr(then, name)[:size], range(size), fillvalue=0)
        getattr(new, name).extend(max(0, one - other) for one, other, _ in columns)
    for name in COUNTS:
        setattr(new, name, max(0, getattr(now, name) - getattr(then, name)))
    return new
