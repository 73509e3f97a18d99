"""The part of an engine's step for requests that give way to others in it.

While those that go first decode, as many others decode beside them as keep the step within the first ones'
goal (`itl_s`): one more after each step with time to spare, a quarter fewer after one that took too long.
While prompts of the first are computed, and for the prompts of the others at any time, it is time that is
shared: what the others had of it they owe, and have nothing more until the first have had theirs, by `share`.
So they also owe for what they had while none of the first was there, up to `MOST_ALONE_S`: who had the engine
a moment ago needs no part of the first's next step.
"""

from __future__ import annotations

import math
from typing import NamedTuple

SPARE = 0.9  # of the goal: a step that takes less has time to spare
GROWTH, CUT = 0.25, 0.75  # requests more after a step; the part that stays
MOST_OWED_S = 10.0  # s; a clock that jumps, or one endless step, is not paid for with more than it
MOST_ALONE_S = 0.1  # s; a share of a tenth has paid for it after one second


class Standing(NamedTuple):
    """The rank of a request among those at its engine."""

    priority: int = 0  # a lower one goes first
    share: float = 0.25
    itl_s: float = 0.0  # 0: no goal
    preemptible: bool = False
    ttft_s: float = 0.0  # 0: no goal


STANDARD = Standing()


class Contest(NamedTuple):
    """A step that several classes want."""

    first_rows: int  # requests that go first and decode
    prompts: bool  # prompts of the first are computed, or wait for it
    goal_s: float  # of the first that decode; 0: none
    share: float  # of those that give way


class StepShare:
    """The shares in an engine's steps. For the thread that steps it."""

    def __init__(self) -> None:
        self._rows = 1.0  # of those that give way, beside those that decode
        self._owed_s = 0.0

    def rows(self, contest: Contest) -> float:
        """Return how many requests that give way may decode in the next step."""
        if contest.prompts:
            return math.inf if self.may_prefill else 0
        return max(self._rows, self._least(contest)) if contest.goal_s else math.inf

    @property
    def may_prefill(self) -> bool:
        """Whether a prompt of those that give way may be computed in the next step."""
        return self._owed_s <= 0

    def observe_alone(self, seconds: float, prompts: float) -> None:
        """Take note of a step without the first, who were there lately. prompts: of its tokens, the part."""
        self._owed_s = max(self._owed_s, min(MOST_ALONE_S, self._owed_s + seconds * prompts))

    def observe(self, contest: Contest, seconds: float, others: float, rows: int, *, held: bool) -> None:
        """Take note of a step.

        others: the part of its tokens that those had which give way and owe for it; rows: how many of them
        decoded; held: whether others of them would have, too.
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
        """Return the guaranteed number: a share of the rows, but one at least."""
        return max(1, math.ceil(contest.first_rows * contest.share / (1 - contest.share)))
