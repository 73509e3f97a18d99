"""Decide what follows when an attempt fails: `next_step` and its back-off.

Requests are not hedged: a second copy would take another client's slot. Retries end at the request's
deadline, when its budget of failures is spent, or at an error that every worker would return.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from random import uniform

from baton.protos import worker_pb2

# Up to this length, recomputing the prompt on the decode worker is cheaper than another placement, prefill
# and handoff: it takes about one step of the usual token budget, which delays the worker's other requests.
SHORT_PROMPT_TOKENS = 512
MAX_ATTEMPTS = 4  # give up after this many workers in a row fail a request without progress
# An attempt that generated this many tokens made progress, and earlier failures are forgotten. One token may
# come from the prefill, two only from a worker that decodes. A request that kills its workers does so at the
# same token each time, so it makes no progress.
PROGRESS_TOKENS = 2
# Seconds between two placements of one request; the first retry does not wait.
BACKOFF_S = 0.05
MOST_BACKOFF_S = 1.0


class Trouble(Enum):
    UNREACHABLE = "unreachable"  # no connection, or the worker refuses this router
    REFUSED = "refused"  # the worker is draining, takes no images, or its staging stays full
    FULL = "full"  # the worker has no room, despite the booking
    LOST = "lost"  # the worker's stream ended or fell silent
    ENGINE = "engine"  # the engine failed, or ended the request by itself
    STALE = "stale"  # the worker has seen a later epoch
    NOT_KEPT = "not kept"  # the prompt was prefilled, but its KV could not be saved
    HANDOFF = "handoff"  # the KV could not be loaded
    SOURCE = "source"  # like HANDOFF, but because the decode worker cannot reach the prefill worker
    PREFIX = "prefix"  # the prompt's first blocks could not be pulled from the worker that has them
    MEDIA = "media"  # the worker lacks an image, which must be sent again
    ENCODE = "encode"  # an image's embeddings did not arrive from an encode worker
    INVALID = "invalid"  # the worker cannot parse the Start; no other could


TROUBLES = {  # keyed by the code of a worker's message
    worker_pb2.Failed.CODE_HANDOFF: Trouble.HANDOFF,
    worker_pb2.Failed.CODE_SOURCE: Trouble.SOURCE,
    worker_pb2.Failed.CODE_DRAINING: Trouble.REFUSED,
    worker_pb2.Failed.CODE_FULL: Trouble.FULL,
    worker_pb2.Failed.CODE_STAGING: Trouble.REFUSED,
    worker_pb2.Failed.CODE_MEDIA: Trouble.MEDIA,
    worker_pb2.Failed.CODE_INVALID: Trouble.INVALID,
    worker_pb2.Failed.CODE_STALE: Trouble.STALE,
    worker_pb2.Failed.CODE_ENGINE: Trouble.ENGINE,
}


_HELP_FAILED = (Trouble.PREFIX, Trouble.ENCODE)  # the placement's own workers are healthy


class RecoveryStep(Enum):
    PLACE_AGAIN = "place again"
    SAME_WORKERS = "same workers"  # this placement's workers compute what did not arrive from other workers
    COMPUTE_HERE = "compute here"  # the decode worker of this placement prefills the prompt itself
    GIVE_UP = "give up"


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed attempt. The next attempt should avoid the worker `worker_id`."""

    trouble: Trouble
    worker_id: str
    message: str
    engine_goes_on: bool = False  # with ENGINE: the engine is running, only the failed step's requests ended

    @property
    def decode_side_is_fine(self) -> bool:
        """Whether the decode worker is healthy and has no KV of this request."""
        return self.trouble in (Trouble.NOT_KEPT, Trouble.HANDOFF, Trouble.SOURCE)

    @property
    def counts(self) -> bool:
        """Whether the failure counts against the budget: the request may have caused it.

        A request that was turned away, or whose prefix or image did not come, does no harm and is retried
        for a tenth of `router.request_timeout_s`. If an engine reports a failure, the request becomes a
        suspect, with limits of its own.
        """
        free = (
            *(Trouble.UNREACHABLE, Trouble.REFUSED, Trouble.FULL),
            *(Trouble.PREFIX, Trouble.MEDIA, Trouble.ENCODE, Trouble.ENGINE),
        )
        return self.trouble not in free


@dataclass(slots=True)
class Toll:
    """The workers that failed a request in a row; `len()` counts them.

    It counts workers, not attempts: a worker that hangs, comes back and then dies is one lost worker. From
    a worker's third failure on, each failure counts: the request may be breaking its stream each time.
    """

    _failures: Counter[str] = field(default_factory=Counter)  # keyed by worker id

    def __len__(self) -> int:
        return sum(max(1, times - 1) for times in self._failures.values())

    def add(self, worker_id: str) -> None:
        self._failures[worker_id] += 1

    def clear(self) -> None:
        self._failures.clear()


# When a decode worker cannot get the KV, the prefill worker may have died. Its stream then ends within this
# many seconds, and its failure counts as the cause.
SOURCE_ENDS_S = 0.25


def may_be_the_source(decode: Failure | None) -> bool:
    """Return whether the prefill worker may have caused a decode leg's failure."""
    return decode is not None and decode.trouble in (Trouble.HANDOFF, Trouble.SOURCE)


def failure_of_pair(prefill: Failure | None, decode: Failure | None, *, begun: bool) -> Failure | None:
    """Return an attempt's failure, given the failures of its two legs so far.

    begun: the prompt is prefilled, so the decode worker could decode
    """
    # A failed prefill explains any failure of the decode leg. A missing prefix or image does not: the same
    # two workers continue without it, if both are healthy.
    mends = prefill is not None and prefill.trouble in _HELP_FAILED
    if decode is None or (prefill is not None and (not mends or may_be_the_source(decode))):
        return prefill
    if begun or decode.trouble not in (Trouble.LOST, Trouble.ENGINE):
        return decode
    # The worker died while the request was only waiting there: the request did not cause it.
    return replace(decode, trouble=Trouble.UNREACHABLE)


def next_step(failure: Failure, *, failures_left: int, tokens_to_prefill: int) -> RecoveryStep:
    """Decide on the next step.

    failures_left: how many further failures the budget allows
    tokens_to_prefill: the request's length for a worker without its KV
    """
    if failure.trouble is Trouble.INVALID:
        return RecoveryStep.GIVE_UP
    if failure.trouble in _HELP_FAILED:
        return RecoveryStep.SAME_WORKERS
    if failure.decode_side_is_fine and (failures_left <= 0 or tokens_to_prefill <= SHORT_PROMPT_TOKENS):
        return RecoveryStep.COMPUTE_HERE
    return RecoveryStep.PLACE_AGAIN if failures_left > 0 or not failure.counts else RecoveryStep.GIVE_UP


def backoff_s(retries: int, draw: Callable[[float, float], float] = uniform) -> float:
    """Return the seconds to wait before the next placement, after `retries` without progress.

    The wait doubles, with 25 % jitter to spread the requests of a lost worker. `draw` is random.uniform.
    """
    if retries <= 1:
        return 0.0
    return draw(0.75, 1.25) * min(BACKOFF_S * 2.0 ** (retries - 2), MOST_BACKOFF_S)
