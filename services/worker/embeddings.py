"""Bring the embeddings of a request's images from the encode workers that compute them.

All are followed at once, with the Follow call, and pulled in threads. If one fails, the request does without
all: its router sends it again with its images.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from baton.handoff.embeddings import Embeddings
from baton.handoff.errors import HandoffError, MalformedManifest
from baton.handoff.load.embeddings import EmbeddingPuller
from baton.handoff.reports import Problem
from baton.handoff.transports.base import Cancellation
from baton.protos.handoff_pb2 import EmbeddingManifest, Manifest
from baton.protos.worker_pb2 import Complete, Encoded, Failed
from baton.services.engine.errors import RequestRefused
from baton.services.engine.images import MOST_EMBEDDING_BYTES
from baton.services.errors import describe
from baton.services.worker.following import Following
from baton.services.worker.incoming import Event
from baton.services.worker.metrics import WorkerMetrics

logger = logging.getLogger(__name__)

WAIT_S = 30.0  # limit of the wait for all embeddings of a request
_PULLS = 4  # at once


class EmbeddingsComing:
    """The embeddings that this worker's requests wait for."""

    def __init__(self, following: Following, metrics: WorkerMetrics) -> None:
        self._following = following
        self._metrics = metrics
        self._puller: EmbeddingPuller | None = None
        self._threads = ThreadPoolExecutor(_PULLS, "baton-embeddings")

    def fit(self, puller: EmbeddingPuller) -> None:
        self._puller = puller

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._puller is not None:
            self._puller.close()

    async def bring(
        self, encoded: Sequence[Encoded], rows: Mapping[str, int], epoch: int, left_s: float
    ) -> dict[str, Embeddings]:
        """Return the embeddings by image. rows: their numbers; left_s: time until the request's deadline.

        Raises RequestRefused(MEDIA).
        """
        puller = self._puller
        if puller is None:
            raise RequestRefused(Failed.CODE_MEDIA, "this worker pulls no embeddings")
        if (size := sum(puller.bytes_for(rows[one.identifier]) for one in encoded)) > MOST_EMBEDDING_BYTES:
            raise RequestRefused(
                Failed.CODE_MEDIA,
                f"the embeddings of image {encoded[0].identifier} and the others take {size} bytes; a request"
                f" may bring {MOST_EMBEDDING_BYTES}",
            )
        wait_s = min(WAIT_S, left_s or WAIT_S)
        tasks = [
            asyncio.create_task(self._one(puller, one, rows[one.identifier], epoch, wait_s))
            for one in encoded
        ]
        try:
            found = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return dict(zip((one.identifier for one in encoded), found, strict=True))

    async def _one(
        self, puller: EmbeddingPuller, encoded: Encoded, rows: int, epoch: int, wait_s: float
    ) -> Embeddings:
        name, until_s = encoded.identifier, time.monotonic() + wait_s
        told = _Told()
        self._following.follow(told, encoded.source, epoch, wait_s)
        try:
            found, transport = await self._pull(puller, await told.manifest, name, rows, until_s)
        except HandoffError as error:
            self._metrics.on_no_embeddings(type(error).__name__)
            raise RequestRefused(
                Failed.CODE_MEDIA, f"the embeddings of image {name} did not come: {error}"
            ) from None
        except Exception as error:  # a transport of another package may raise anything
            logger.exception("the embeddings of image %s cannot be pulled", name)
            self._metrics.on_no_embeddings(type(error).__name__)
            raise RequestRefused(
                Failed.CODE_MEDIA, f"the embeddings of image {name} did not come: {describe(error)}"
            ) from None
        finally:
            told.cancel()
        self._metrics.on_embeddings(transport, found.data.nbytes)
        return found

    async def _pull(
        self, puller: EmbeddingPuller, manifest: EmbeddingManifest, name: str, rows: int, until_s: float
    ) -> tuple[Embeddings, str]:
        cancellation = Cancellation(until_s)
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, puller.pull, manifest, name, rows, cancellation)
        finally:
            cancellation.set()


class _Told:
    """An encode worker's reply about one image."""

    def __init__(self) -> None:
        self.call: asyncio.Task[None] | None = None
        self.manifest: asyncio.Future[EmbeddingManifest] = asyncio.get_running_loop().create_future()

    def on_begun(self, manifest: Manifest) -> None:
        del manifest
        self._fail(MalformedManifest("the source sent a prompt's KV"))

    def on_complete(self, complete: Complete) -> None:
        if not complete.HasField("embedding"):
            self._fail(MalformedManifest("the source sent no embeddings"))
        elif not self.manifest.done():
            self.manifest.set_result(complete.embedding)

    def on_failed(self, event: Event, problem: Problem) -> None:
        del event
        self._fail(problem.to_error())

    def cancel(self) -> None:
        self.manifest.cancel()
        if self.call is not None:
            self.call.cancel()

    def _fail(self, error: HandoffError) -> None:
        if not self.manifest.done():
            self.manifest.set_exception(error)
