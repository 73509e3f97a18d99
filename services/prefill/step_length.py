"""The length of a step that computes prompts of those that give way, while none of the first has one.

A step cannot be overtaken: a prompt that comes meanwhile waits for its end, on the average for half of it. So
while prompts come that go first, a step of the others takes at most `PART` of the goal for the first token
(`ttft_s`), by the time that the last ones took. Longer steps compute more tokens a second: without such a
goal, and a while after the last request that had one (`LATELY_S`), they are as long as the engine allows.
"""

from __future__ import annotations

PART = 0.2  # of the goal
LATELY_S = 10.0
LEAST_TOKENS = 32  # a KV block on a CPU; with fewer a step is mostly its fixed cost
SHORTER, LONGER = 0.5, 1.25  # at most, from one step to the next
FULL = 0.9  # of the tokens allowed: a step with fewer says nothing of what fits


class StepLength:
    """The prompt tokens of such a step. For the thread that steps the engine."""

    def __init__(self, most: int) -> None:
        """Begin with `most` tokens, the engine's own limit."""
        self._most = float(most)
        self._least = float(min(LEAST_TOKENS, most))
        self._tokens = self._most

    @property
    def tokens(self) -> int:
        """The number of tokens of prompts that fit into the next step."""
        return int(self._tokens)

    def observe(self, prompt_tokens: int, seconds: float, ttft_s: float) -> None:
        """Take note of such a step, in which so many tokens of prompts were computed."""
        change = min(LONGER, max(SHORTER, PART * ttft_s / max(1e-6, seconds)))
        if prompt_tokens and (change < 1 or prompt_tokens >= FULL * self.tokens):
            self._tokens = min(self._most, max(self._least, change * self._tokens))
