"""Choose a prompt's share of a step where steps have a high fixed cost, as on a GPU.

A quarter of a step (fair_share.py) is right if a step's time is proportional to its tokens. With a fixed
cost, small shares make many steps that are hardly shorter. So a share has at least the number of tokens whose
time equals that cost, according to a line fitted to measured steps. Long steps, which may have waited for a
compiler, have little weight.
"""

from __future__ import annotations

STEPS_KEPT = 0.98  # weight kept per step
LEAST_STEPS = 8.0  # steps before the share changes
LEAST_SPREAD = 0.2  # minimum of standard deviation / mean of the steps' tokens for a fit


class PromptShare:
    """The share of a prompt if there are other prompts. Call it on the engine's thread."""

    def __init__(self, share: int, most: int) -> None:
        """Begin with `share` tokens, the minimum; `most` is the maximum, a whole step."""
        self._least, self._most = share, most
        self.tokens = share
        self._steps = 0.0
        self._sums = [0.0] * 5  # sums of weights, tokens, seconds, tokens squared, tokens times seconds

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn from a step with prompts, of `tokens` tokens in all."""
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
