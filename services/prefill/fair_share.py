"""Fair share between short and long prompts at one worker: the length of a step, and its tokens.

Three measures, in vLLM's own terms; bench/fair_share.py measures the benefit of each.

- A step cannot be overtaken, so on a CPU a step is short (`CPU_STEP_TOKENS`).
- Beside others a prompt gets one `SHARE`th of the step, or its equal share where that is more: the rest is
  for those that came behind it. Alone it gets the whole step.
- A class that gives way stands its `patience_s` further back, and no longer than that: a prompt that waits is
  never overtaken by one that comes later than it.
- Waiting prompts are ordered by the time at which they would be prefilled, had prefill begun on arrival and
  taken `MS_PER_TOKEN`. Short prompts run before a long one that came a little earlier; `MOST_MS` later ones
  stand behind it, so none starves. After fair queueing by finish times (Demers, Keshav and Shenker, 1989),
  with a request for a flow.
"""

from __future__ import annotations

CPU_STEP_TOKENS = 256  # 90 ms of one core for a model of 80 M parameters; with half, 12 % fewer tokens/s
SHARE = 4  # a part of the step is 1 / SHARE
MS_PER_TOKEN = 1.0
MOST_MS = 2_000.0
# Handed-over requests stand so far before those that arrive with them: their clients wait behind the first
# token. Longer than an idle decode worker's own prompts take; bounded, so that no prompt starves behind them.
HANDED_OVER_MS = 5_000.0


def step_tokens(max_num_seqs: int, drafted: int) -> int:
    """Return the tokens of a step on a CPU: every request that decodes has room for its token and drafts."""
    return max(CPU_STEP_TOKENS, max_num_seqs * (1 + drafted))


def share_of(step: int) -> int:
    """Return the tokens of one prompt in a step of so many, beside others."""
    return max(1, step // SHARE)


def priority(arrived_s: float, prompt_tokens: int, *, handed_over: bool = False, patience_ms: int = 0) -> int:
    """Return the place in the engine's queue, in milliseconds: the lowest goes first.

    arrived_s: of this worker's own clock, seconds; prompt_tokens: 0 to keep the order of arrival;
    patience_ms: of the request's class.
    """
    lead_ms = HANDED_OVER_MS if handed_over else 0.0
    return round(arrived_s * 1e3 + min(prompt_tokens * MS_PER_TOKEN, MOST_MS) - lead_ms) + patience_ms
