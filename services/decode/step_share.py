"""Share an engine's step between the first class and requests that give way to it.

While first-class requests decode, as many others decode beside them as keep the step within the goal of the
first class (`itl_s`): one more after each step with time to spare, a quarter fewer after one that took too
long. Time is shared while first-class prompts are computed, and for the prompts of the others at any time:
the others owe the time they had, and get nothing more until the first class has had its time, by `share`.
They also owe for the time they had while no first-class request was there, up to `MOST_ALONE_S`: having just
had the engine, they need no part of the first class's next step.
"""

from __future__ import annotations

import math
from typing import NamedTuple

SPARE = 0.9  # share of the goal: a shorter step has time to spare
GROWTH, CUT = 0.25, 0.75  # requests added after a step; the part kept after a cut
MOST_OWED_S = 10.0  # s; a bound on the debt, in case the clock jumps or a step never seems to end
MOST_ALONE_S = 0.1  # s; a share of a tenth has paid for it after one second


class Standing(NamedTuple):
    """The rank of a request among those at its engine."""

    priority: int = 0  # lower goes first
    share: float = 0.25
    itl_s: float = 0.0  # 0: no goal
    preemptible: bool = False
    ttft_s: float = 0.0  # 0: no goal


STANDARD = Standing()


class Contest(NamedTuple):
    """A step that several classes want."""

    first_rows: int  # decoding requests of the first class
    prompts: bool  # prompts of the first class are computed, or wait
    goal_s: float  # the decoding first class's; 0: none
    share: float  # the share of requests that give way


class StepShare:
    """The shares in an engine's steps. For the thread that steps it."""

    def __init__(self) -> None:
        self._rows = 1.0  # rows for those that give way, beside the decoding first class
        self._owed_s = 0.0

    def rows(self, contest: Contest) -> float:
        """Return how many requests that give way may decode in the next step."""
        if contest.prompts:
            return math.inf if self.may_prefill else 0
        return max(self._rows, self._least(contest)) if contest.goal_s else math.inf

    @property
    def may_prefill(self) -> bool:
        """Return whether a prompt that gives way may be computed in the next step."""
        return self._owed_s <= 0

    def observe_alone(self, seconds: float, prompts: float) -> None:
        """Learn from a step shortly after the first class left. prompts: their part of its tokens."""
        self._owed_s = max(self._owed_s, min(MOST_ALONE_S, self._owed_s + seconds * prompts))

    def observe(self, contest: Contest, seconds: float, others: float, rows: int, *, held: bool) -> None:
        """Learn from a step.

        others: the share of its tokens that went to requests which give way and owe for it; rows: how many of
        them decoded; held: whether more of them would have decoded
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
        """Return the guaranteed number: a share of the rows, but at least one."""
        return max(1, math.ceil(contest.first_rows * contest.share / (1 - contest.share)))
