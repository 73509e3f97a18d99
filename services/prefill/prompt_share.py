"""Choose a prompt's share of a step if a step has a high fixed cost, as on a GPU.

A quarter of a step (fair_share.py) is a good share if a step's time is proportional to its tokens. A GPU's
step with prompts has a fixed launch cost, in which it could compute hundreds or thousands of tokens. With
smaller shares a long prompt takes many steps that are hardly shorter, and everyone waits longer. So a prompt
gets at least as many tokens as take as long as the fixed cost: such a step takes twice the least time.

The cost is a straight line fitted to the measured steps with prompts, weighted by their length: a step of
seconds, which waited for a compiler, does not count.
"""

from __future__ import annotations

STEPS_KEPT = 0.98  # weight kept per step
LEAST_STEPS = 8.0  # weight needed before the share changes
LEAST_SPREAD = 0.2  # standard deviation / mean of the steps' tokens; below it no line is fitted


class PromptShare:
    """The share of a prompt that is not alone. For the thread that steps the engine."""

    def __init__(self, share: int, most: int) -> None:
        """Begin with `share` tokens, the least; at most `most`, which is a whole step."""
        self._least, self._most = share, most
        self.tokens = share
        self._steps = 0.0
        self._sums = [0.0] * 5  # sums of weights, tokens, seconds, tokens squared, tokens times seconds

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn from a step with prompts; tokens: its total."""
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
