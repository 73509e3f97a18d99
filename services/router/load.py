"""Count a router's load for the autoscaler, reported with each request for a snapshot, once a second."""

from __future__ import annotations

import time
from collections.abc import Sized

from baton.autoscale.histogram import SECONDS, TOKENS, Histogram
from baton.protos import scheduler_pb2 as pb
from baton.services.router.state import RequestState


class RouterCounts:
    def __init__(self) -> None:
        self._prompts = Histogram(TOKENS)
        self._first_token = Histogram(SECONDS)
        self._gap = Histogram(SECONDS)
        self._images = Histogram(TOKENS)
        self._sums = pb.RouterLoad()

    def arrived(self, state: RequestState) -> None:
        """Count a request on its arrival, before it is placed."""
        self._prompts.add(state.prompt_tokens)
        self._sums.prompt_tokens += state.prompt_tokens

    def image(self, tokens: int) -> None:
        """Count an image that is large enough for an encode worker."""
        self._images.add(tokens)
        self._sums.image_tokens += tokens

    def first_token(self, state: RequestState) -> None:
        state.first_token = time.monotonic()
        self._first_token.add(state.first_token - state.arrived)

    def over(self, state: RequestState) -> None:
        self._sums.over += 1
        self._sums.output_tokens += len(state.tokens)
        if state.mean_gap_s is not None:
            self._gap.add(state.mean_gap_s)

    def message(self, waiting: Sized) -> pb.RouterLoad:
        """Return the message for a scheduler; `waiting` holds the queued requests."""
        load = pb.RouterLoad(
            prompts=self._prompts.counts,
            first_token=self._first_token.counts,
            gap=self._gap.counts,
            images=self._images.counts,
            waiting=len(waiting),
        )
        load.MergeFrom(self._sums)
        return load
