"""Run a request's decode, and also its prefill if there is no prefill worker."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from baton.protos import worker_pb2
from baton.scheduler.client import Placement
from baton.services.router.leg import Leg, LegHost
from baton.services.router.recovery import Trouble
from baton.services.router.sink import OutputSink
from baton.services.router.stream import WorkerStream


class DecodeLeg(Leg):
    """A leg that succeeds when the request is complete. With a source it waits for the prefill (`go_on`)."""

    _PHASE = worker_pb2.PHASE_DECODE
    _SOURCE_LOST = Trouble.HANDOFF

    def __init__(
        self,
        host: LegHost,
        sink: OutputSink,
        placement: Placement,
        source: worker_pb2.Source | None = None,
        *,
        alone_tokens: int = 0,
        more_alone: bool = False,
    ) -> None:
        """source: the worker that prefills the prompt; alone_tokens, more_alone: as in Start."""
        self._alone = alone_tokens > 0
        self._computes = 0 if placement.prefill or self._alone else placement.prompt_tokens
        super().__init__(
            host,
            sink,
            placement.decode,
            source,
            alone_tokens=alone_tokens,
            more_alone=more_alone,
            prompt_tokens=self._computes,
            blocks=0 if self._alone else placement.blocks,
        )
        self._prefills = source is None
        if source is not None:
            self._behind = []

    @property
    def begun(self) -> bool:
        """Whether its worker has received the prompt's KV: its messages wait here."""
        return bool(self._behind)

    def go_on(self) -> None:
        """Pass on the waiting messages, now that the prompt is prefilled, and later ones directly."""
        waited, self._behind = self._behind or [], None
        if self._stream is not None:
            self._take_part(self._stream)
        for take in waited:
            take()

    def on_saved(self, saved: worker_pb2.Saved) -> None:
        """Do nothing: only prefill workers send it."""

    def on_admitted(self, admitted: worker_pb2.Admitted) -> None:
        self._pulls = False
        self._later_or_now(partial(self._admitted, admitted, time.monotonic()))

    def on_shared(self, shared: worker_pb2.Shared) -> None:
        self._later_or_now(partial(self._host.shared, shared.blocks))

    def _later_or_now(self, take: Callable[[], None]) -> None:
        if self._behind is None:
            take()
        elif not self.over.done():
            self._behind.append(take)

    def _admitted(self, admitted: worker_pb2.Admitted, now: float) -> None:
        timings = self._state.timings
        timings.admitted = now
        timings.handoff = admitted
        self._host.loaded(admitted)

    def _take_part(self, stream: WorkerStream) -> None:
        self._state.taken_by(self._worker.worker_id, prefills=self._prefills, decodes=True)
        self._state.method = stream.speculative_method

    def _first_output(self, output: Any, clock_offset_s: float) -> None:
        super()._first_output(output, clock_offset_s)
        if self._computes:
            self._host.prefilled()

    def _cut(self) -> bool:
        if self._alone:
            self._end(None)
        return self._alone
