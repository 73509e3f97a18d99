"""Compute a request's position in the engine's queue, and one prompt's part of a step with several.

The simulator uses this module, too; bench/fair_share.py measures each rule. decode/step_share.py has the
shares of classes.

- On a CPU a step is short (`CPU_STEP_TOKENS`), because an arriving request waits for its end.
- Several prompts get at least 1 / `SHARE` of a step each; a single prompt gets the whole step.
- Waiting prompts are ordered by the time at which their prefill would have finished, had it begun on arrival
  and taken `MS_PER_TOKEN` (fair queueing; Demers, Keshav and Shenker, 1989). Short prompts overtake a long
  one only if they arrive within `MOST_MS`, so none starves. A class's `patience_s` counts as a later arrival.
"""

from __future__ import annotations

CPU_STEP_TOKENS = 256  # 90 ms on one core with 80 M parameters; half as many would cost 12 % of the tokens/s
SHARE = 4  # a prompt's part of a step is 1 / SHARE
MS_PER_TOKEN = 1.0
MOST_MS = 2_000.0
# Handed-over requests go before prompts that arrived up to this much earlier, because their clients already
# have the first token. It exceeds the time that an idle decode worker spends on prompts, and is limited so
# that no prompt starves.
HANDED_OVER_MS = 5_000.0


def step_tokens(max_num_seqs: int, drafted: int) -> int:
    """Return the maximum tokens of a step on a CPU: enough for the tokens and drafts of a full batch."""
    return max(CPU_STEP_TOKENS, max_num_seqs * (1 + drafted))


def share_of(step: int) -> int:
    """Return the tokens that a prompt gets of a step of `step` tokens if there are other prompts."""
    return max(1, step // SHARE)


def priority(arrived_s: float, prompt_tokens: int, *, handed_over: bool = False, patience_ms: int = 0) -> int:
    """Return the position in the engine's queue (vLLM's `priority`), in milliseconds; the lowest goes first.

    arrived_s: on this worker's clock; prompt_tokens: 0 keeps the order of arrival; patience_ms: of the
    request's class, if it gives way
    """
    lead_ms = HANDED_OVER_MS if handed_over else 0.0
    return round(arrived_s * 1e3 + min(prompt_tokens * MS_PER_TOKEN, MOST_MS) - lead_ms) + patience_ms
