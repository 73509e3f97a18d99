"""Share an engine's steps between the first class and classes that give way to it.

While first-class requests decode, the number of other requests in the batch is adjusted to keep a step within
the goal of the first class (`itl_s`): one more after every four short steps, a quarter fewer after a long
one. Prompts share time: the other classes run up a debt, and compute no more prompts until the first class
has had its part of the time, as set by `share`. Time that the other classes used while alone counts too, up
to `MOST_ALONE_S`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

SPARE = 0.9  # a step shorter than this part of the goal has time to spare
GROWTH, CUT = 0.25, 0.75  # requests added after a short step; factor after a long one
MOST_OWED_S = 10.0  # limits the debt if the clock jumps or a step hangs
MOST_ALONE_S = 0.1  # a debt that is paid off within a second if the share is a tenth


class Standing(NamedTuple):
    """The service class of a request, as its engine needs it."""

    priority: int = 0  # lower goes first
    share: float = 0.25
    itl_s: float = 0.0  # 0: no goal
    preemptible: bool = False
    ttft_s: float = 0.0  # 0: no goal


STANDARD = Standing()


class Contest(NamedTuple):
    """A step with requests of several classes."""

    first_rows: int  # decoding requests of the first class
    prompts: bool  # whether the first class has prompts, running or waiting
    goal_s: float  # itl_s of the decoding first class; 0: none
    share: float  # part of a step guaranteed to requests that give way


class StepShare:
    """The controller of the shares. Call it on the engine's thread."""

    def __init__(self) -> None:
        self._rows = 1.0  # how many requests that give way may decode while the first class decodes
        self._owed_s = 0.0

    def rows(self, contest: Contest) -> float:
        """Return how many requests that give way may decode in the next step."""
        if contest.prompts:
            return math.inf if self.may_prefill else 0
        return max(self._rows, self._least(contest)) if contest.goal_s else math.inf

    @property
    def may_prefill(self) -> bool:
        """Whether the next step may compute a prompt that gives way."""
        return self._owed_s <= 0

    def observe_alone(self, seconds: float, prompts: float) -> None:
        """Learn from a step without the first class. prompts: the share of prompt tokens in it."""
        self._owed_s = max(self._owed_s, min(MOST_ALONE_S, self._owed_s + seconds * prompts))

    def observe(self, contest: Contest, seconds: float, others: float, rows: int, *, held: bool) -> None:
        """Learn from a step.

        others: the part of the step's tokens that counts towards the debt of requests that give way; rows:
        how many of those requests decoded; held: whether any requests that give way were left out
        """
        kept = contest.share / (1 - contest.share)
        self._owed_s += seconds * (others - kept * (1 - others))
        self._owed_s = min(MOST_OWED_S, max(0.0, self._owed_s))
        if contest.prompts or others or not contest.goal_s:
            return
        if seconds > contest.goal_s:
            self._rows = max(1.0, CUT * min(self._rows, max(1, rows)))
        elif held and seconds < SPARE * contest.goal_s:
            self._rows += GROWTH

    @staticmethod
    def _least(contest: Contest) -> int:
        return max(1, math.ceil(contest.first_rows * contest.share / (1 - contest.share)))
