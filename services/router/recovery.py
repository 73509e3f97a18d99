"""What to do when a part of a request fails: one table, one rule, one back-off.

A request is tried on one placement at a time: nothing is hedged, as a second copy of an answer would take
room from somebody else's first one. Three things end the trying: the request's deadline, its budget of
failures, and an error that no other worker could mend.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from random import uniform

# Up to here reading the text again on the decode worker is cheaper than another placement, prefill and
# handoff: it is about one step of an engine's usual token budget, so its running requests wait for one step.
SHORT_PROMPT_TOKENS = 512
# An attempt that wrote so much was no failure of the request's: one that kills its workers does so at the
# same token again, and a long answer may well outlive more workers than the budget has.
PROGRESS_TOKENS = 16
# Seconds between two placements of one request; the first retry does not wait, as somebody else may be free.
BACKOFF_S = 0.05
MOST_BACKOFF_S = 1.0


class Trouble(Enum):
    """What went wrong with an attempt."""

    UNREACHABLE = "unreachable"  # no connection, or the worker refuses to talk to us
    REFUSED = "refused"  # it drains, or its queue is full
    LOST = "lost"  # its stream ended, or it was not heard of
    ENGINE = "engine"  # its engine failed, or ended the request by itself
    STALE = "stale"  # it has seen a later epoch
    NOT_KEPT = "not kept"  # the prompt was read, but its KV cache could not be saved
    HANDOFF = "handoff"  # the KV cache could not be loaded
    INVALID = "invalid"  # it cannot read the request; no other will


class RecoveryStep(Enum):
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

    @property
    def counts(self) -> bool:
        """The worker had begun. A request that kills its workers must not meet all of them; one that only
        knocks at closed doors does no harm, and goes on until its deadline.
        """
        return self.trouble not in (Trouble.UNREACHABLE, Trouble.REFUSED)


def next_step(failure: Failure, *, failures_left: int, tokens_to_prefill: int) -> RecoveryStep:
    """Decide; `failures_left` is what the budget still allows, this failure counted. COMPUTE_HERE cannot
    itself fail by the handoff that it does without.
    """
    if failure.trouble is Trouble.INVALID:
        return RecoveryStep.GIVE_UP
    if failure.decode_side_is_fine and (failures_left <= 0 or tokens_to_prefill <= SHORT_PROMPT_TOKENS):
        return RecoveryStep.COMPUTE_HERE
    return RecoveryStep.PLACE_AGAIN if failures_left > 0 or not failure.counts else RecoveryStep.GIVE_UP


def backoff_s(retries: int) -> float:
    """How long to wait before the next placement, after so many that came to nothing.

    It doubles, with a jitter of a quarter, so that what one worker dropped does not come back in step.
    """
    if retries <= 1:
        return 0.0
    return uniform(0.75, 1.25) * min(BACKOFF_S * 2.0 ** (retries - 2), MOST_BACKOFF_S)  # noqa: S311 (no secret)
