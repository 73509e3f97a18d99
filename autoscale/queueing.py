"""The share of requests within a goal, for a given number of workers.

First tokens: prefill workers are a queue with several servers (M/G/c). The probability of a wait is
Sakasegawa's approximation (Ann. Inst. Statist. Math. 29, 1977); its length falls off exponentially, as in
heavy traffic (Kingman, 1962), with a mean that follows from the spread of prompt lengths.

Gaps: a decode worker runs all its requests at once, so their number is that of a queue without waiting
(M/G/inf): Poisson-distributed, here in its normal approximation. The gap grows with that number, and
the time for which a request stays grows with the gap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from baton.autoscale.capacity import Gap


def first_tokens_within(
    goal_s: float, prompts: Sequence[tuple[float, float]], load: float, servers: int
) -> float:
    """Return the share of first tokens within the goal.

    `prompts`: (seconds that one worker takes, share of the requests); `load`: seconds of work that arrive per
    second; `servers`: workers.
    """
    usage = load / servers
    if usage >= 1.0:
        return 0.0
    mean = sum(seconds * share for seconds, share in prompts)
    if mean <= 0.0:
        return 1.0
    square = sum(seconds * seconds * share for seconds, share in prompts)
    waits: float = usage ** (math.sqrt(2 * (servers + 1)) - 1)
    # The mean wait follows from a running prompt's mean residual: mean * (1 + cv^2) / 2 = square / mean / 2.
    length_s = square / mean / (2 * servers * (1 - usage))
    return sum(
        share * (1 - waits * math.exp((seconds - goal_s) / length_s))
        for seconds, share in prompts
        if seconds < goal_s
    )


def requests_each(gap: Gap, tokens_per_s: float, servers: int) -> float:
    """Return the mean number of requests in a decode worker's batch; infinite if it cannot keep up.

    By Little's law n is the rate of tokens times their gap, and the gap is `base + slope * n`.
    """
    rate = tokens_per_s / servers
    room = 1 - rate * gap.slope
    return rate * gap.base / room if room > 0 else math.inf


def gaps_within(most: float, requests: float) -> float:
    """Return the probability that a batch has at most `most` requests, given a mean of `requests`."""
    if math.isinf(requests):
        return 0.0
    if requests <= 0:
        return 1.0
    return 0.5 * math.erfc((requests - most - 0.5) / math.sqrt(2 * requests))
