"""Add and subtract routers' reports (`pb.RouterLoad`), whose counts only grow."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest

from baton.protos import scheduler_pb2 as pb

HISTOGRAMS = ("prompts", "first_token", "gap", "images")
COUNTS = ("prompt_tokens", "over", "output_tokens", "image_tokens")


def summed(loads: Iterable[pb.RouterLoad]) -> pb.RouterLoad:
    """Return the sum of several reports, with the requests that wait."""
    loads = list(loads)
    whole = pb.RouterLoad(waiting=sum(one.waiting for one in loads))
    for name in HISTOGRAMS:
        columns = zip_longest(*(getattr(one, name) for one in loads), fillvalue=0)
        getattr(whole, name).extend(map(sum, columns))
    for name in COUNTS:
        setattr(whole, name, sum(getattr(one, name) for one in loads))
    return whole


def increase(now: pb.RouterLoad, then: pb.RouterLoad) -> pb.RouterLoad:
    """Return what was counted since an earlier report; a count that was not sent is 0."""
    new = pb.RouterLoad()
    for name in HISTOGRAMS:
        columns = zip_longest(getattr(now, name), getattr(then, name), fillvalue=0)
        getattr(new, name).extend(max(0, one - other) for one, other in columns)
    for name in COUNTS:
        setattr(new, name, max(0, getattr(now, name) - getattr(then, name)))
    return new
