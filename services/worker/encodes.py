"""End ENCODEs: tell their followers, and make the messages for their routers."""

from __future__ import annotations

import time

from baton.handoff.errors import StagingFull
from baton.handoff.reports import Problem
from baton.protos.handoff_pb2 import EmbeddingManifest
from baton.protos.scheduler_pb2 import Embeddings
from baton.protos.worker_pb2 import Complete, Saved
from baton.services.engine.host import EngineHost
from baton.services.engine.requests import image_of
from baton.services.worker.attempts import RunningAttempt
from baton.services.worker.metrics import WorkerMetrics
from baton.services.worker.outgoing import Outgoing


class Encodes:
    def __init__(self, host: EngineHost, outgoing: Outgoing, metrics: WorkerMetrics) -> None:
        self._host = host
        self._outgoing = outgoing
        self._metrics = metrics
        self._computed = self._found = 0  # images

    def kept(self) -> Embeddings | None:
        """Return figures on the embeddings kept here; None if this is not an encode worker."""
        if self._host.shelf is None:
            return None
        images, size, capacity = self._host.shelf.size()
        return Embeddings(
            images=images, bytes=size, capacity=capacity, computed=self._computed, found=self._found
        )

    def finished(self, attempt: RunningAttempt) -> Saved:
        shelf = self._host.shelf
        manifest = shelf.manifest(*image_of(attempt.prepared)) if shelf is not None else None
        return self.told(attempt, manifest, kept=False)

    def told(self, attempt: RunningAttempt, manifest: EmbeddingManifest | None, *, kept: bool) -> Saved:
        """Tell the follower, and return the message for the router. kept: nothing had to be computed."""
        told = Saved(request_id=attempt.request_id, epoch=attempt.epoch)
        if manifest is None:
            problem = Problem.of(StagingFull("there was no room for the image's embeddings"))
            self._outgoing.over(attempt.request_id, attempt.epoch, problem)
            self._metrics.on_no_embeddings(problem.name)
            told.problem = str(problem)
        else:
            self._outgoing.complete(attempt.request_id, attempt.epoch, Complete(embedding=manifest))
            self._found += kept
            self._computed += not kept
            told.saved_at_s = time.monotonic()
        return told
