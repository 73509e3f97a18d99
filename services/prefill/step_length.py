"""Bound the steps that compute prompts of lower classes while the first class has none.

A step cannot be overtaken: a prompt that arrives meanwhile waits for its end, half a step on average. So
while first-class prompts keep arriving, a step of the others takes at most `PART` of the goal for the first
token (`ttft_s`), judged by the last steps. Longer steps compute more tokens a second: without such a goal,
and `LATELY_S` after the last request that had one, steps are as long as the engine allows.
"""

from __future__ import annotations

PART = 0.2  # share of the goal
LATELY_S = 10.0
LEAST_TOKENS = 32  # a KV block on a CPU; a smaller step is mostly fixed cost
SHORTER, LONGER = 0.5, 1.25  # the most that one step changes the next
FULL = 0.9  # share of the allowed tokens; a smaller step says nothing about what fits


class StepLength:
    """The prompt tokens of such a step. For the thread that steps the engine."""

    def __init__(self, most: int) -> None:
        """Begin with `most` tokens, the engine's own limit."""
        self._most = float(most)
        self._least = float(min(LEAST_TOKENS, most))
        self._tokens = self._most

    @property
    def tokens(self) -> int:
        """The number of prompt tokens that fit into the next step."""
        return int(self._tokens)

    def observe(self, prompt_tokens: int, seconds: float, ttft_s: float) -> None:
        """Learn from such a step; prompt_tokens: those computed in it."""
        change = min(LONGER, max(SHORTER, PART * ttft_s / max(1e-6, seconds)))
        if prompt_tokens and (change < 1 or prompt_tokens >= FULL * self.tokens):
            self._tokens = min(self._most, max(self._least, change * self._tokens))
