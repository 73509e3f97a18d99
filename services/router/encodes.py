"""Have encode workers compute the images of an attempt's prompt.

Each image has a placement of its own. Its encode starts together with the prompt, whose worker pulls the
embeddings (`Start.encoded`). If no encode worker has room, the prompt's worker computes the image. If an
encode fails, the attempt is repeated, and the prompt's worker computes the image itself. If the encode worker
only lacked the image, the next attempt sends it the image instead, once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection

from baton.prefix_keys import image_key
from baton.protos import worker_pb2
from baton.scheduler.client import Placement
from baton.services.router.errors import WorkerUnreachable
from baton.services.router.images import Image
from baton.services.router.prefix import source_of
from baton.services.router.recovery import Failure, Trouble
from baton.services.router.relay_parts import Owner
from baton.services.router.timings import process_of
from baton.services.router.worker_stream import StreamListener, WorkerStream

# Values in `RequestState.encodes_failed`.
_LACKED = 1  # the encode worker did not have the image: send the image
_FAILED = 2  # compute the image with the prompt


class Encodes:
    """The encodes of one attempt. Call `place` before `start`, and `close` at the end."""

    def __init__(self, relay: Owner) -> None:
        self._relay = relay
        self._state = relay.state
        self._placements = relay.parts.placements
        self._prompt_worker = relay.placement.prefill or relay.placement.decode
        self._encodes: list[_Encode] = []
        self._on_failed: Callable[[Failure], None] | None = None  # None if closed or not started

    async def place(self) -> None:
        """Place the images that the prompt's worker would have to compute and that are large enough."""
        state, parts = self._state, self._relay.parts
        cached = state.tokens_to_prefill - self._relay.placement.prompt_tokens
        computed: dict[Image, int] = {}
        for number, (image, tokens) in enumerate(zip(state.images, state.image_places, strict=True)):
            if tokens.stop > cached:
                computed.setdefault(image, number)
        large = [
            image
            for image in computed
            if image.tokens >= parts.encode_min_tokens and state.encodes_failed[image.identifier] < _FAILED
        ]
        for image in large:
            parts.counts.image(image.tokens)
        if self._placements.encoders:
            exclude = frozenset(state.excluded | parts.pool.suspects())
            await asyncio.gather(*(self._place(computed[image], exclude) for image in large))
        parts.metrics.images_computed("prompt", len(computed) - len(self._encodes))

    @property
    def encoded(self) -> list[worker_pb2.Encoded]:
        return [one.message for one in self._encodes]

    @property
    def others(self) -> tuple[Image, ...]:
        """The images that the prompt's worker gets: it may have to compute them."""
        elsewhere = {one.image for one in self._encodes}
        return tuple(image for image in self._state.images if image not in elsewhere)

    def start(self, on_failed: Callable[[Failure], None]) -> None:
        """Start all encodes. `on_failed` is called for the first one that fails before `came` or `close`."""
        self._on_failed = on_failed
        for one in self._encodes:
            one.start()

    def came(self) -> None:
        """End all encodes, even running ones: the prompt has been computed, or its worker had it cached."""
        for one in self._encodes:
            if one.saved:
                self._placements.pairs.passed((one.worker_id, self._prompt_worker.worker_id))
        self.close()

    def did_not_come(self, names: Collection[str]) -> bool:
        """Handle images missing at the prompt's worker. Return whether any were to come from these encodes.

        Other images from the same encode workers are not encoded there again, either. names: the missing
        images, empty if unknown
        """
        lost = {one.worker_id for one in self._encodes if one.image.identifier in names or not names}
        for one in self._encodes:
            if one.worker_id in lost:
                self._state.encodes_failed[one.image.identifier] = _FAILED
        self._state.excluded |= lost
        for worker_id in lost:
            self._placements.pairs.failed((worker_id, self._prompt_worker.worker_id))
        if lost:
            self.close()
        return bool(lost)

    def close(self) -> None:
        """Abort running encodes, release kept embeddings, and end the bookings. Idempotent."""
        self._on_failed = None
        for one in self._encodes:
            one.close()
        self._encodes = []

    async def _place(self, number: int, exclude: frozenset[str]) -> None:
        placed = await self._placements.encode(self._state, number, self._relay.placement, exclude)
        if placed is not None:
            self._encodes.append(_Encode(self._relay, self._state.images[number], placed, self._failed))

    def _failed(self, encode: _Encode, message: str, *, lacked: bool) -> None:
        """End the attempt. lacked: the encode worker has neither the image nor its embeddings."""
        failed, worker_id = self._state.encodes_failed, encode.worker_id
        how = _LACKED if lacked and not failed[encode.image.identifier] else _FAILED
        if how == _FAILED:
            self._state.excluded.add(worker_id)
        for name in [one.image.identifier for one in self._encodes if one.worker_id == worker_id]:
            failed[name] = max(failed[name], how)
        on_failed = self._on_failed
        self.close()
        if on_failed is not None:
            on_failed(Failure(Trouble.ENCODE, worker_id, f"encode worker {worker_id}: {message}"))


class _Encode(StreamListener):
    def __init__(self, relay: Owner, image: Image, placement: Placement, failed: Callable[..., None]) -> None:
        self.image = image
        self.saved = False
        self.request_id, self.epoch = placement.attempt.request_id, placement.attempt.epoch
        self.worker_id = placement.decode.worker_id
        self._relay = relay
        self._placement = placement
        self._failed = failed
        self._source = source_of(placement.decode, self.request_id)
        self._began = time.monotonic()
        self._stream: WorkerStream | None = None
        self._over = False

    @property
    def message(self) -> worker_pb2.Encoded:
        return worker_pb2.Encoded(identifier=self.image.identifier, source=self._source)

    def start(self) -> None:
        if not self._over:  # another encode may have failed at once, which ends this one
            self._relay.parts.pool.reach(self._placement.decode, self._reached)

    def close(self) -> None:
        """Abort a running encode; release its embeddings, which the worker keeps while it has room."""
        if not self._over:
            self._end("abort")
        if self._stream is not None:
            self._stream.abort(self.request_id)

    @property
    def _held(self) -> bool:
        return self._placement.prompt_tokens < self.image.tokens

    def _reached(self, stream: WorkerStream | WorkerUnreachable) -> None:
        if self._over:
            return
        if isinstance(stream, WorkerUnreachable):
            self._fail(str(stream))
            return
        state = self._relay.state
        start = state.start(
            worker_pb2.PHASE_ENCODE,
            request_id=self.request_id,
            epoch=self.epoch,
            engine_request=self.image.request,
            service=state.service_message,
            party=state.party.number,
            prompt_tokens=self._placement.prompt_tokens,
            key=self._source.key,
        )
        lacked = state.encodes_failed[self.image.identifier] == _LACKED
        if lacked:
            stream.sent.forget(self.image.identifier)
        self._stream = stream
        if not stream.begin(self, start, (self.image,) if lacked or not self._held else ()):
            self._fail("its queue is full")

    def _end(self, outcome: str, kept: int = 0) -> None:
        self._over = True
        self._relay.parts.placements.reports.finished(self._placement.attempt, outcome, kept=kept)
        if self._stream is not None:
            self._stream.forget(self)

    def _fail(self, message: str, *, lacked: bool = False) -> None:
        self._end("error")
        self._failed(self, message, lacked=lacked)

    # -- StreamListener

    def on_saved(self, saved: worker_pb2.Saved) -> None:
        """Stop listening: if the encode worker is lost from now on, the prompt's worker notices."""
        if self._over:
            return
        if saved.problem:
            self._fail(f"it could not keep an image's embeddings: {saved.problem}")
            return
        self.saved = True
        self._end("stop", image_key(self.image.identifier))
        timings = self._relay.state.timings
        timings.encoded = time.monotonic()
        timings.encoder = process_of(self._placement.decode)
        timings.images += 1
        self._relay.parts.metrics.images_computed("held" if self._held else "encode")
        self._relay.parts.metrics.encode_seconds.observe(timings.encoded - self._began)

    def on_failed(self, failed: worker_pb2.Failed) -> None:
        if self._over:
            return
        self._fail(failed.message, lacked=failed.code == worker_pb2.Failed.CODE_MEDIA)

    def on_lost(self, message: str) -> None:
        if not self._over:
            self._fail(f"its stream ended: {message}")
