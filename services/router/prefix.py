"""Have the prefill worker pull the KV of a prompt's first blocks from the placement's source.

The source gets a SAVE when the prefill worker gets its Start, and the prefill worker waits for up to a
second. On any failure, the prefill worker computes the whole prompt.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence

from baton.attempts import PREFIX_WAIT_S, prefix_id
from baton.protos import scheduler_pb2, worker_pb2
from baton.scheduler.client import Placement
from baton.services.router.errors import WorkerUnreachable
from baton.services.router.recovery import Failure, Trouble
from baton.services.router.relay_parts import RelayParts
from baton.services.router.state import RequestState
from baton.services.router.worker_stream import StreamListener, WorkerStream

KEY_BYTES = 16
BLOCK = 64  # tokens: a multiple of the usual block sizes
LEAST_TOKENS = 2 * BLOCK  # a prefix that ends before an image is pulled only if it has this many


def prefix_of(state: RequestState, placement: Placement, parts: RelayParts) -> Prefix | None:
    """Return the prefix to pull from the placement's source, or None."""
    source, prefill = placement.source, placement.prefill
    # Ask for one token more than is cached, because an engine computes at least one per request.
    tokens = min(placement.source_tokens + 1, state.prompt_tokens - 1)
    whole = between_images(tokens, placement.source_tokens, state.image_places)
    tokens, least = whole, 1 if whole == tokens else LEAST_TOKENS
    if source is None or prefill is None or tokens < least or state.prompt_logprobs:
        return None  # prompt log-probabilities need the whole prompt computed
    if parts.placements.pairs.avoid((source.worker_id, prefill.worker_id)):
        parts.metrics.prefix_pull("avoided")
        return None
    return Prefix(state, source, prefill.worker_id, tokens, parts)


def between_images(tokens: int, cached: int, places: Sequence[range]) -> int:
    """Return the largest number of tokens, up to `tokens`, whose last block has no part of an image.

    The source computes that block again, and may not have the image. cached: tokens of whole blocks
    """
    computed = cached if tokens > cached else _block_start(tokens)
    for place in reversed(places):
        if place.start < tokens and place.stop > computed:
            tokens = place.start
            computed = _block_start(tokens)
    return tokens


def _block_start(tokens: int) -> int:
    return (tokens - 1) // BLOCK * BLOCK


def source_of(worker: scheduler_pb2.Worker, request_id: str, tokens: int = 0) -> worker_pb2.Source:
    """Return where other workers get what a request saves on a worker, and a new key for it."""
    return worker_pb2.Source(
        worker_id=worker.worker_id,
        address=worker.address,
        request_id=request_id,
        key=secrets.token_bytes(KEY_BYTES),
        tokens=tokens,
    )


class Prefix(StreamListener):
    """The request that saves the first blocks of one attempt's prompt at their source.

    Its only output is dropped: the token is not part of the answer.
    """

    def __init__(
        self,
        state: RequestState,
        source: scheduler_pb2.Worker,
        prefill_id: str,
        tokens: int,
        parts: RelayParts,
    ) -> None:
        self.request_id = prefix_id(state.request_id)
        self.epoch = state.epoch
        self._state = state
        self._worker = source
        self._pair = source.worker_id, prefill_id
        self.source = source_of(source, self.request_id, tokens)
        self._pool = parts.pool
        self._pairs = parts.placements.pairs
        self._metrics = parts.metrics
        self._stream: WorkerStream | None = None
        self._on_lost: Callable[[str], None] | None = None  # set while the prefill worker may wait or pull
        self._saved = False
        self._outcome = ""  # the outcome that was counted

    def start(self, on_lost: Callable[[str], None]) -> None:
        """Ask the source to save the prefix. `on_lost` is called if the source is lost during the pull."""
        self._on_lost = on_lost
        self._state.timings.prefix_asked = time.monotonic()
        self._pool.reach(self._worker, self._reached)

    def loaded(self, admitted: worker_pb2.Admitted) -> None:
        """Record that the prefill worker has loaded the prefix, which also released it at the source."""
        self._state.timings.prefix_loaded = time.monotonic()
        self._state.timings.prefix = admitted
        self._count("loaded", admitted.tokens)
        self._pairs.passed(self._pair)

    def over(self, failure: Failure | None) -> None:
        """Record the end of the prefill. If the pull failed, avoid this pair of workers for a while."""
        if failure is None:
            self._count("late")
        elif failure.trouble is Trouble.PREFIX and self._count("failed"):
            self._pairs.failed(self._pair)

    def drop(self) -> None:
        """Release the saved prefix at the source unless it was loaded."""
        self._on_lost = None
        if self._stream is None:
            return
        self._stream.forget(self)
        if self._outcome in ("", "late", "failed"):  # otherwise the source holds no KV
            self._stream.abort(self.request_id)

    def _reached(self, stream: WorkerStream | WorkerUnreachable) -> None:
        if self._on_lost is None:
            return  # the prefill ended before the source was connected
        if isinstance(stream, WorkerUnreachable):
            self.on_lost(str(stream))
            return
        start = self._state.start(
            worker_pb2.PHASE_SAVE,
            request_id=self.request_id,
            epoch=self.epoch,
            engine_request=self._state.engine_request,
            prefix_tokens=self.source.tokens,
            key=self.source.key,
        )
        if stream.begin(self, start):
            self._stream = stream
        else:
            self._answered("refused")

    def _answered(self, outcome: str = "") -> None:
        self._state.timings.prefix_saved = time.monotonic()
        if outcome:
            self._count(outcome)

    def _count(self, outcome: str, tokens: int = 0) -> bool:
        if self._outcome:
            return False
        self._outcome = outcome
        self._metrics.prefix_pull(outcome, tokens)
        return True

    # -- StreamListener

    def on_saved(self, saved: worker_pb2.Saved) -> None:
        self._saved = not saved.problem
        if time.monotonic() > self._state.timings.prefix_asked + PREFIX_WAIT_S:
            self._on_lost = None  # the prefill worker has stopped waiting for the prefix
        self._answered("not_kept" if saved.problem else "")

    def on_failed(self, failed: worker_pb2.Failed) -> None:
        """Handle a refusal: the source has fewer blocks than the scheduler assumed, or no room."""
        self._answered("not_cached" if failed.code == worker_pb2.Failed.CODE_HANDOFF else "refused")

    def on_lost(self, message: str) -> None:
        """Handle the loss of the source. Before the save, the prefill worker notices the loss by itself."""
        if self._saved and self._on_lost is not None:
            self._on_lost(message)
        elif not self._saved:
            self._answered("lost")
