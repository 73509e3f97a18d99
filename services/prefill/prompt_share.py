"""A prompt's share of a step where a step has a high fixed cost, as on a GPU.

A quarter of a step (fair_share.py) is a good share where a step's time is that of its tokens. A GPU's step
with prompts has a fixed cost, of launches, in which it could compute hundreds or thousands of tokens. With
smaller shares a long prompt takes many steps that are hardly shorter, and all wait longer. So a prompt gets
at least the tokens that take as long as a step without any would: such a step takes twice the least time.

The cost is a straight line through the measured steps with prompts, weighed by their length: a step of
seconds, which waited for a compiler, counts for nothing.
"""

from __future__ import annotations

STEPS_KEPT = 0.98  # of the weight, a step
LEAST_STEPS = 8.0  # before the share changes; weight
LEAST_SPREAD = 0.2  # standard deviation of the steps' tokens, as a part of their mean: else no line is known


class PromptShare:
    """The share that a prompt gets beside others. For the thread that steps the engine."""

    def __init__(self, share: int, most: int) -> None:
        """Begin with `share` tokens, the least; at most `most`, which is a whole step."""
        self._least, self._most = share, most
        self.tokens = share
        self._steps = 0.0
        self._sums = [0.0] * 5  # of weights, tokens, seconds, tokens squared, tokens times seconds

    def observe(self, tokens: int, seconds: float) -> None:
        """Take note of a step with prompts, of so many tokens in all."""
        if seconds <= 0:
            return
        weight = 1.0 / (seconds * seconds)
        terms = 1.0, tokens, seconds, tokens * tokens, tokens * seconds
        self._sums = [STEPS_KEPT * one + weight * term for one, term in zip(self._sums, terms, strict=True)]
        self._steps = STEPS_KEPT * self._steps + 1.0
        if self._steps >= LEAST_STEPS:
            self.tokens = self._choose()

    def _choose(self) -> int:
        weights, tokens, seconds, squares, products = self._sums
        mean, mean_s = tokens / weights, seconds / weights
        spread = squares / weights - mean * mean
        if spread < (LEAST_SPREAD * mean) ** 2:
            return self.tokens
        each_s = (products / weights - mean * mean_s) / spread
        fixed_s = mean_s - each_s * mean
        if fixed_s <= 0:
            return self._least
        if each_s * self._most <= fixed_s:
            return self._most
        return max(self._least, int(fixed_s / each_s))
