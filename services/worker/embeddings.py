"""Fetch the embeddings of a request's images from the encode workers that compute them.

All images are followed concurrently, with the Follow call, and their embeddings are pulled in threads. If one
fails, the attempt fails, and its router tries again and sends that image whole. A request waits while others
take up too much memory with their embeddings.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from baton.handoff.embeddings import Embeddings
from baton.handoff.errors import HandoffError, MalformedManifest, StagingFull
from baton.handoff.load.embeddings import EmbeddingPuller
from baton.handoff.reports import Problem
from baton.handoff.transports.base import Cancellation
from baton.protos.handoff_pb2 import EmbeddingManifest, Manifest
from baton.protos.worker_pb2 import Complete, Encoded, Failed
from baton.services.engine.errors import RequestRefused
from baton.services.engine.images import MOST_EMBEDDING_BYTES
from baton.services.errors import describe
from baton.services.worker.attempts import RunningAttempt
from baton.services.worker.following import Following
from baton.services.worker.incoming import Event
from baton.services.worker.metrics import WorkerMetrics

logger = logging.getLogger(__name__)

WAIT_S = 30.0  # limit of the wait for all embeddings of a request
ROOM_S = 5.0  # limit of the wait for room
_PULLS = 4  # concurrent pulls


class EmbeddingRoom:
    """Limit the memory that all attempts' embeddings take. An attempt keeps its embeddings until it ends."""

    def __init__(self) -> None:
        self._free = 0
        self._waiting: deque[tuple[RunningAttempt, int, asyncio.Future[None]]] = deque()

    def fit(self, size: int) -> None:
        self._free = size

    async def take(self, attempt: RunningAttempt, size: int, wait_s: float) -> None:
        """Take `size` bytes, in the order of the calls. Raises StagingFull."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((attempt, size, turn))
        self._serve()
        try:
            async with asyncio.timeout(wait_s):
                await turn
        except TimeoutError:
            raise StagingFull(
                f"no room for {size} bytes of embeddings, because other requests keep theirs: add workers"
            ) from None
        finally:
            self._serve()  # requests behind it may fit now

    def give_back(self, attempt: RunningAttempt) -> None:
        """Free what an attempt took. Idempotent."""
        self._free += attempt.embedding_bytes
        attempt.embedding_bytes = 0
        self._serve()

    def _serve(self) -> None:
        while self._waiting:
            attempt, size, turn = self._waiting[0]
            if not turn.done():
                if size > self._free:
                    return
                self._free -= size
                attempt.embedding_bytes = size
                turn.set_result(None)
            self._waiting.popleft()


class EmbeddingsComing:
    """The embeddings that this worker's requests are waiting for."""

    def __init__(self, following: Following, metrics: WorkerMetrics) -> None:
        self.room = EmbeddingRoom()
        self._following = following
        self._metrics = metrics
        self._puller: EmbeddingPuller | None = None
        self._threads = ThreadPoolExecutor(_PULLS, "baton-embeddings")

    def fit(self, puller: EmbeddingPuller) -> None:
        self._puller = puller
        self.room.fit(puller.most_bytes)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._puller is not None:
            self._puller.close()

    async def bring(
        self, attempt: RunningAttempt, encoded: Sequence[Encoded], rows: Mapping[str, int], left_s: float
    ) -> dict[str, Embeddings]:
        """Return the embeddings by image. rows: how many each image has. Raises RequestRefused."""
        puller, names = self._puller, [one.identifier for one in encoded]
        if puller is None:
            raise RequestRefused(Failed.CODE_MEDIA, "this worker pulls no embeddings", names)
        size = sum(puller.bytes_for(rows[name]) for name in names)
        if size > (most := min(MOST_EMBEDDING_BYTES, puller.most_bytes)):
            raise RequestRefused(
                Failed.CODE_MEDIA,
                f"the embeddings of image {names[0]} and the others take {size} bytes; a request may bring"
                f" {most}",
                names,
            )
        until = time.monotonic() + min(WAIT_S, left_s or WAIT_S)
        try:
            await self.room.take(attempt, size, min(ROOM_S, until - time.monotonic()))
        except StagingFull as error:
            self._metrics.on_no_embeddings(type(error).__name__)
            raise RequestRefused(Failed.CODE_MEDIA, str(error), names) from None
        wait_s = max(0.001, until - time.monotonic())
        tasks = [
            asyncio.create_task(self._one(puller, one, rows[one.identifier], attempt.epoch, wait_s))
            for one in encoded
        ]
        try:
            found = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return dict(zip(names, found, strict=True))

    async def _one(
        self, puller: EmbeddingPuller, encoded: Encoded, rows: int, epoch: int, wait_s: float
    ) -> Embeddings:
        name, until_s = encoded.identifier, time.monotonic() + wait_s
        told, cancellation = _Told(), Cancellation(until_s)
        self._following.follow(told, encoded.source, epoch, wait_s)
        try:
            manifest = await told.manifest
            found, transport = await asyncio.get_running_loop().run_in_executor(
                self._threads, puller.pull, manifest, name, rows, cancellation
            )
        except Exception as error:
            if not isinstance(error, HandoffError):  # a transport of another package may raise anything
                logger.exception("the embeddings of image %s cannot be pulled", name)
            self._metrics.on_no_embeddings(type(error).__name__)
            raise RequestRefused(
                Failed.CODE_MEDIA, f"the embeddings of image {name} did not come: {describe(error)}", [name]
            ) from None
        finally:
            cancellation.set()
            told.cancel()
        self._metrics.on_embeddings(transport, found.data.nbytes)
        return found


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
