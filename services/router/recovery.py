"""What to do when a part of a request fails: one table and one rule."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

# Up to here reading the text again on the decode worker is cheaper than another placement, prefill and
# handoff: it is about one step of an engine's usual token budget, so its running requests wait for one step.
SHORT_PROMPT_TOKENS = 512


class Trouble(Enum):
    """What went wrong with an attempt."""

    UNREACHABLE = "unreachable"  # no connection, or the worker refuses to talk to us
    REFUSED = "refused"  # it drains, or its queue is full
    LOST = "lost"  # its stream ended
    ENGINE = "engine"  # its engine failed, or ended the request by itself
    STALE = "stale"  # it has seen a later epoch
    NOT_KEPT = "not kept"  # the prompt was read, but its KV cache could not be saved
    HANDOFF = "handoff"  # the KV cache could not be loaded
    INVALID = "invalid"  # it cannot read the request; no other will


class Step(Enum):
    """What comes next."""

    PLACE_AGAIN = "place again"
    COMPUTE_HERE = "compute here"  # the decode worker of this placement reads the prompt itself
    GIVE_UP = "give up"


@dataclass(frozen=True, slots=True)
class Failure:
    """An attempt's end without an answer. `worker_id` is who the next attempt should do without."""

    trouble: Trouble
    worker_id: str
    message: str

    @property
    def decode_side_is_fine(self) -> bool:
        """The placement's decode worker is there, and holds nothing of this request."""
        return self.trouble in (Trouble.NOT_KEPT, Trouble.HANDOFF)


def next_step(failure: Failure, *, attempts_left: int, tokens_to_read: int) -> Step:
    """Decide. No worker is asked for the same thing twice: every step but COMPUTE_HERE uses up an attempt,
    and COMPUTE_HERE cannot itself fail by the handoff that it does without.
    """
    if failure.trouble is Trouble.INVALID:
        return Step.GIVE_UP
    if failure.decode_side_is_fine and (attempts_left == 0 or tokens_to_read <= SHORT_PROMPT_TOKENS):
        return Step.COMPUTE_HERE
    return Step.PLACE_AGAIN if attempts_left > 0 else Step.GIVE_UP
