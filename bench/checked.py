"""A checked load (harness/chaos/load.py) on a deployment with one router, and what became of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

from harness.chaos.load import Load, judge
from harness.chaos.site import Part


class Served:
    """The deployment as the load sees it: one router."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.routers: Sequence[Part] = [Part("router-0", "router", {}, cast(Any, self))]

    def url(self, router: Part) -> str:
        del router
        return self._url


def outcome(load: Load) -> dict[str, Any]:
    """Count the requests of a load that is over, and print why any is not right."""
    verdicts = [judge(answer, load.expected(answer)) for answer in load.over]
    fates = Counter(fate.value for fate, _ in verdicts)
    for _, why in verdicts:
        if why:
            print(why, flush=True)
    pauses = [end - start for answer in load.over for start, end in answer.pauses()]
    return {
        "requests": len(load.over),
        "tokens": load.tokens,
        "failed": len(load.over) - fates["right"] - fates["wrong"],
        "wrong": fates["wrong"],
        "refused": sum(len(answer.refused) for answer in load.over),
        "longest_pause_s": round(max(pauses), 2),
    }
