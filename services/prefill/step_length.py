"""Limit the steps that compute prompts of lower classes while the first class has none.

A first-class prompt that arrives waits for the end of the step. So while such prompts keep arriving, steps of
other classes take at most `PART` of the first class's goal (`ttft_s`), judging by the times of the last
steps. Longer steps compute more tokens per second, so the limit is lifted `LATELY_S` after the last request
with such a goal.
"""

from __future__ import annotations

PART = 0.2  # share of the goal
LATELY_S = 10.0
LEAST_TOKENS = 32  # a KV block on a CPU; smaller steps are mostly fixed cost
SHORTER, LONGER = 0.5, 1.25  # limits on the change after one step
FULL = 0.9  # share of the allowed tokens; steps with fewer tokens do not raise the limit


class StepLength:
    """The limit on prompt tokens of a step without first-class prompts. Call it on the engine's thread."""

    def __init__(self, most: int) -> None:
        """Begin with `most` tokens, the engine's limit."""
        self._most = float(most)
        self._least = float(min(LEAST_TOKENS, most))
        self._tokens = self._most

    @property
    def tokens(self) -> int:
        return int(self._tokens)

    def observe(self, prompt_tokens: int, seconds: float, ttft_s: float) -> None:
        """Learn from a step with `prompt_tokens` tokens of prompts."""
        change = min(LONGER, max(SHORTER, PART * ttft_s / max(1e-6, seconds)))
        if prompt_tokens and (change < 1 or prompt_tokens >= FULL * self.tokens):
            self._tokens = min(self._most, max(self._least, change * self._tokens))
