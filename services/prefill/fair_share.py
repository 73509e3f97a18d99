"""Share an engine fairly between short and long prompts: the length of a step, and who gets its tokens.

Three measures, in vLLM's own terms; bench/fair_share.py measures the benefit of each.

- A step cannot be overtaken, so on a CPU a step is short (`CPU_STEP_TOKENS`).
- A prompt that is not alone gets one `SHARE`th of the step, or its equal share if that is more; the rest is
  for prompts that arrived later. Alone it gets the whole step.
- A class that gives way stands its `patience_s` further back, but no more: a waiting prompt is never
  overtaken by one that arrives later than that.
- Waiting prompts are ordered by when their prefill would have finished, had it begun on arrival and taken
  `MS_PER_TOKEN`. Short prompts run before a long one that came a little earlier; prompts that arrive
  `MOST_MS` later stand behind it, so none starves. After fair queueing by finish times (Demers, Keshav and
  Shenker, 1989), with one flow per request.
"""

from __future__ import annotations

CPU_STEP_TOKENS = 256  # 90 ms of one core for a model of 80 M parameters; with half, 12 % fewer tokens/s
SHARE = 4  # a part of the step is 1 / SHARE
MS_PER_TOKEN = 1.0
MOST_MS = 2_000.0
# Handed-over requests get this head start over those that arrive with them: their clients already wait past
# the first token. It is longer than an idle decode worker's own prompts take, and bounded so that no prompt
# starves.
HANDED_OVER_MS = 5_000.0


def step_tokens(max_num_seqs: int, drafted: int) -> int:
    """Return the tokens of a step on a CPU: enough for every decoding request's token and drafts."""
    return max(CPU_STEP_TOKENS, max_num_seqs * (1 + drafted))


def share_of(step: int) -> int:
    """Return the tokens that one prompt gets in a step of `step` tokens when it is not alone."""
    return max(1, step // SHARE)


def priority(arrived_s: float, prompt_tokens: int, *, handed_over: bool = False, patience_ms: int = 0) -> int:
    """Return the place in the engine's queue, in milliseconds: the lowest goes first.

    arrived_s: seconds on this worker's own clock; prompt_tokens: 0 to keep the order of arrival; patience_ms:
    the patience of the request's class.
    """
    lead_ms = HANDED_OVER_MS if handed_over else 0.0
    return round(arrived_s * 1e3 + min(prompt_tokens * MS_PER_TOKEN, MOST_MS) - lead_ms) + patience_ms
