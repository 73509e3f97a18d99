"""Fair share between short and long prompts at one worker: how long a step may be, whose tokens are in it.

Three measures, in vLLM's own terms; bench/fair_share.py tells what each of them brings.

- What is in a step cannot be overtaken, so on a CPU a step is short (`CPU_STEP_TOKENS`).
- Beside others a prompt gets one `SHARE`th of the step, or its equal share where that is more: the rest is
  for those that came behind it. Alone it gets the whole step.
- Who waits, waits by the time at which they would be read if reading began on arrival and took
  `MS_PER_TOKEN`. Short prompts are read before a long one that came a little earlier; `MOST_MS` later ones
  stand behind it, so nobody starves. After fair queueing by finish times (Demers, Keshav and Shenker, 1989),
  with a request for a flow.
"""

from __future__ import annotations

CPU_STEP_TOKENS = 256  # 90 ms of one core for a model of 80 M parameters; with half, 12 % fewer tokens/s
SHARE = 4  # a part of the step is 1 / SHARE
MS_PER_TOKEN = 1.0
MOST_MS = 2_000.0
# What was handed over stands so far before what came with it: its client waits behind the first token. Longer
# than an idle decode worker's own prompts take it; bounded, so that nobody starves behind such ones either.
HANDED_OVER_MS = 5_000.0


def step_tokens(max_num_seqs: int, drafted: int) -> int:
    """Tokens in one step on a CPU: every request that writes has room for its token and its drafts."""
    return max(CPU_STEP_TOKENS, max_num_seqs * (1 + drafted))


def share_of(step: int) -> int:
    """Tokens of one prompt in a step of so many, beside others."""
    return max(1, step // SHARE)


def priority(arrived_s: float, tokens_to_read: int, *, handed_over: bool = False) -> int:
    """A place in the engine's queue: the lowest goes first. Milliseconds.

    arrived_s: of this worker's own clock, seconds; tokens_to_read: 0 for who keeps the order of arrival.
    """
    lead_ms = HANDED_OVER_MS if handed_over else 0.0
    return round(arrived_s * 1e3 + min(tokens_to_read * MS_PER_TOKEN, MOST_MS) - lead_ms)
