"""Decide what happens when a part of a request fails: one table, one rule, one back-off.

A request runs on one placement at a time: nothing is hedged, as a second copy of a request would take room
from another client's first one. Three things end the retries: the request's deadline, its budget of failures,
and an error that no other worker could mend.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from random import uniform

# Up to this length, recomputing the prompt on the decode worker is cheaper than another placement, prefill
# and handoff: it is about one step of an engine's usual token budget, so its running requests wait for one
# step.
SHORT_PROMPT_TOKENS = 512
MAX_ATTEMPTS = 4  # give up after this many workers in a row fail a request without progress
# An attempt that generated so many tokens made progress, and the failures before it are forgotten: one token
# may be the prefill's, two are of a worker that decoded. A request that kills its workers does so at the same
# token again, and one that waits for others may well outlive more workers than the budget has.
PROGRESS_TOKENS = 2
# Seconds between two placements of one request; the first retry does not wait, as another worker may be free.
BACKOFF_S = 0.05
MOST_BACKOFF_S = 1.0


class Trouble(Enum):
    """The kind of an attempt's failure."""

    UNREACHABLE = "unreachable"  # no connection, or the worker refuses this router
    REFUSED = "refused"  # the worker drains, or its staging stays full
    FULL = "full"  # the worker has no room now, despite the booking
    LOST = "lost"  # the worker's stream ended, or fell silent
    ENGINE = "engine"  # the engine failed, or ended the request by itself
    STALE = "stale"  # the worker has seen a later epoch
    NOT_KEPT = "not kept"  # the prompt was prefilled, but its KV cache could not be saved
    HANDOFF = "handoff"  # the KV cache could not be loaded
    SOURCE = "source"  # as HANDOFF, because the decode worker does not reach the prefill worker
    PREFIX = "prefix"  # the beginning of the prompt could not be loaded from the worker that holds it
    INVALID = "invalid"  # the worker cannot decode the request's message; no other can


class RecoveryStep(Enum):
    """The next step after a failure."""

    PLACE_AGAIN = "place again"
    WITHOUT_PREFIX = "without prefix"  # the prefill worker of this placement computes the whole prompt
    COMPUTE_HERE = "compute here"  # the decode worker of this placement prefills the prompt itself
    GIVE_UP = "give up"


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed attempt. The next attempt should avoid the worker `worker_id`."""

    trouble: Trouble
    worker_id: str
    message: str
    engine_goes_on: bool = False  # with ENGINE: it goes on without the failed step's requests

    @property
    def decode_side_is_fine(self) -> bool:
        """Whether the placement's decode worker is well and holds nothing of this request."""
        return self.trouble in (Trouble.NOT_KEPT, Trouble.HANDOFF, Trouble.SOURCE)

    @property
    def counts(self) -> bool:
        """Whether the failure counts against the budget: the worker had begun.

        A request that kills its workers must not meet all of them. One that was only turned away does no
        harm, and is retried until its deadline; the same goes for a prefix that did not come. An engine that
        reports a failure makes the request a suspect, which has its own limits.
        """
        free = (Trouble.UNREACHABLE, Trouble.REFUSED, Trouble.FULL, Trouble.PREFIX, Trouble.ENGINE)
        return self.trouble not in free


@dataclass(slots=True)
class Toll:
    """The workers that failed a request in a row; its length is their number.

    It counts workers, not attempts: one that hangs, comes back and then ends is one lost worker. But from the
    third failure of the same worker on, each counts. A request may break a worker's stream whenever it gets
    there, and this must end too: it takes at most twice as many attempts as workers.
    """

    _failures: Counter[str] = field(default_factory=Counter)  # keyed by worker id

    def __len__(self) -> int:
        return sum(max(1, times - 1) for times in self._failures.values())

    def add(self, worker_id: str) -> None:
        self._failures[worker_id] += 1

    def clear(self) -> None:
        """Forget all failures: the request made progress."""
        self._failures.clear()


# Workers that a request may lose in a row, without progress, before it is tried alone.
LOSSES_BESIDE = 2
# Tokens that a suspect generates alone, beyond the point where the engine failed, before it goes on beside
# others: a step that computes the prompt, and one or more that decode, with drafts. Each further failure
# beside others multiplies the next trial's length by LONGER.
TRIAL_TOKENS, LONGER = 4, 4
# Tokens to generate beside other requests until a failure that the engine survived is forgotten.
FORGET_TOKENS = 32


@dataclass(slots=True)
class Suspicion:
    """The case against a request: engines failed under it, or workers were lost.

    A suspect is tried alone. If an engine reports a failure then, the request is convicted. Two requests that
    are poison only together both pass, so each further failure beside others makes the next trial longer, and
    a request under which two engines ended runs alone to its end. A failure that the engine survived is
    forgotten with progress: it cost little, and a client with many different requests that break steps must
    not make all others run alone.

    A worker that is lost silently says little about a request. Two in a row make it a suspect, so that, if it
    does kill workers, it stops costing its neighbours theirs. No number of them convicts it.
    """

    suspect: bool = False
    ends: int = 0  # engines that ended under it, or pairs of workers that were lost, beside others
    failures: int = 0  # engines that failed and went on, beside others, since the last progress
    losses: Toll = field(default_factory=Toll)  # workers lost in a row, without progress
    convicted: bool = False

    @property
    def to_its_end(self) -> bool:
        """Return whether it must now run alone."""
        return self.ends > 1

    def trial_tokens(self, left: int) -> int:
        """Return how many of the `left` tokens it has to generate alone."""
        failures = self.ends + self.failures
        return left if self.to_its_end else min(left, TRIAL_TOKENS * LONGER ** max(0, failures - 1))

    def note(self, failure: Failure, *, alone: bool, generated: int) -> None:
        """Record a failed attempt after `generated` tokens. alone: no other request was in the engine."""
        if generated >= PROGRESS_TOKENS:
            self.losses.clear()
        if generated >= FORGET_TOKENS and not alone:
            self.failures = 0
        if failure.trouble is Trouble.ENGINE:
            self.convicted = alone
            self.suspect = True
            self.failures += not alone and failure.engine_goes_on
            self.ends += not alone and not failure.engine_goes_on
        elif failure.trouble is Trouble.LOST and not alone:
            self.losses.add(failure.worker_id)
            if len(self.losses) >= LOSSES_BESIDE:
                self.suspect = True
                self.ends += 1

    def passed(self) -> None:
        self.suspect = self.to_its_end
        self.losses.clear()


# Seconds after a decode worker reports that the prefill worker's KV does not come before that counts as the
# cause: the prefill worker may have died, and its own stream says so a moment later.
SOURCE_ENDS_S = 0.25


def may_be_the_source(decode: Failure | None) -> bool:
    """Return whether a decode leg's failure may come from the end of the prefill leg."""
    return decode is not None and decode.trouble in (Trouble.HANDOFF, Trouble.SOURCE)


def failure_of_pair(prefill: Failure | None, decode: Failure | None, *, begun: bool) -> Failure | None:
    """Return the one failure of two legs that run at the same time. Each worker's end counts once.

    prefill, decode: the legs' failures so far
    begun: the decode worker has decoded, or could: the prompt is prefilled
    """
    # Without its prefill a decode worker can only wait, or fail for lack of a source. A missing prefix is
    # different: the same two workers would go on without it, if both are well.
    mends = prefill is not None and prefill.trouble is Trouble.PREFIX
    if decode is None or (prefill is not None and (not mends or may_be_the_source(decode))):
        return prefill
    if begun or decode.trouble not in (Trouble.LOST, Trouble.ENGINE):
        return decode
    # Its worker ended while the request waited there for its prompt, so the request did not cause it.
    return replace(decode, trouble=Trouble.UNREACHABLE)


def next_step(failure: Failure, *, failures_left: int, tokens_to_prefill: int) -> RecoveryStep:
    """Decide on the next step. COMPUTE_HERE cannot fail for a handoff, as it needs none.

    failures_left: of the budget, this failure included
    tokens_to_prefill: for a worker that has none of the request's KV
    """
    if failure.trouble is Trouble.INVALID:
        return RecoveryStep.GIVE_UP
    if failure.trouble is Trouble.PREFIX:
        return RecoveryStep.WITHOUT_PREFIX
    if failure.decode_side_is_fine and (failures_left <= 0 or tokens_to_prefill <= SHORT_PROMPT_TOKENS):
        return RecoveryStep.COMPUTE_HERE
    return RecoveryStep.PLACE_AGAIN if failures_left > 0 or not failure.counts else RecoveryStep.GIVE_UP


def backoff_s(retries: int, draw: Callable[[float, float], float] = uniform) -> float:
    """Return how many seconds to wait before the next placement, after `retries` without progress.

    The wait doubles, with a jitter of a quarter, so that the requests of a lost worker do not return in step.
    `draw` returns a random number between two.
    """
    if retries <= 1:
        return 0.0
    return draw(0.75, 1.25) * min(BACKOFF_S * 2.0 ** (retries - 2), MOST_BACKOFF_S)
