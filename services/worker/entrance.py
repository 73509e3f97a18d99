"""Prepare an attempt for the engine and submit it: build its request, compile its grammar, fetch its KV."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from baton.attempts import PREFIX_WAIT_S
from baton.handoff.reports import Problem
from baton.protos.handoff_pb2 import EmbeddingManifest, Manifest
from baton.protos.worker_pb2 import PHASE_ENCODE, PHASE_PREFILL, PHASE_SAVE, Complete, Failed, Start
from baton.services.engine import requests
from baton.services.engine.errors import RequestRefused
from baton.services.engine.host import EngineHost
from baton.services.engine.images import FindImage
from baton.services.engine.requests import EngineLimits, Prepared
from baton.services.errors import describe
from baton.services.worker.attempts import RunningAttempt
from baton.services.worker.embeddings import EmbeddingsComing
from baton.services.worker.engine_gate import EngineGate
from baton.services.worker.following import Following
from baton.services.worker.grammars import Grammars
from baton.services.worker.incoming import Incoming
from baton.services.worker.metrics import WorkerMetrics

logger = logging.getLogger(__name__)

Fail = Callable[[RunningAttempt, Failed.Code, str], None]


class Entrance:
    def __init__(
        self,
        host: EngineHost,
        gate: EngineGate,
        grammars: Grammars,
        metrics: WorkerMetrics,
        *,
        fail: Fail,
        refuse: Callable[[str, Exception], None],
        encoded: Callable[[RunningAttempt, EmbeddingManifest], None],
    ) -> None:
        """`fail`, `refuse` and `encoded` (for embeddings that are kept here) end an attempt and report it."""
        self._host = host
        self._gate = gate
        self._grammars = grammars
        self._metrics = metrics
        self._fail = fail
        self._refuse = refuse
        self._encoded = encoded
        self._preparing: set[asyncio.Task[None]] = set()
        self._following = Following()
        self._embeddings = EmbeddingsComing(self._following, metrics)
        self._limits = EngineLimits(0, 0, None)

    def fit(self, limits: EngineLimits) -> None:
        self._limits = limits
        if limits.find_image is not None and self._host.shelf is None:
            self._embeddings.fit(self._host.embedding_puller())

    async def close(self) -> None:
        for task in self._preparing:
            task.cancel()
        self._grammars.close()
        self._gate.close()
        self._embeddings.close()
        await self._following.close()

    def ended(self, attempt: RunningAttempt) -> None:
        self._gate.ended(attempt)
        self._embeddings.room.give_back(attempt)

    def begin(self, attempt: RunningAttempt, start: Start) -> None:
        """Begin an attempt, and get what other workers compute for it. Raises RequestRefused."""
        if start.phase == PHASE_ENCODE:
            self._encode(attempt, start)
        elif start.encoded:
            self._wait_for_embeddings(attempt, start)
        else:
            self._begin(attempt, start)

    def _begin(self, attempt: RunningAttempt, start: Start) -> None:
        if not start.HasField("source"):
            self.enter(attempt, start, None)
            return
        if start.phase == PHASE_SAVE or not (start.source.address and start.source.key):
            raise RequestRefused(
                Failed.CODE_INVALID, "a source needs an address and a key, and is for a PREFILL or a DECODE"
            )
        held = start.phase == PHASE_PREFILL
        within_s: float | None = PREFIX_WAIT_S
        if not held:
            attempt.prepared = self._prepare(attempt, start, None)
            held, within_s = attempt.prepared.late, start.left_s or None
        attempt.incoming = Incoming(attempt, start, self, held=held)
        if not held:
            self._submit(attempt)
        self._following.follow(attempt.incoming, start.source, start.epoch, within_s)

    # Called by Incoming.

    def enter(self, attempt: RunningAttempt, start: Start, complete: Complete | None) -> None:
        """Build the request, with or without loaded KV, and submit it. Raises RequestRefused."""
        attempt.prepared = self._prepare(attempt, start, complete)
        if attempt.prepared.request.use_structured_output:
            # Before the gate: an engine emptied for a request must not wait for its grammar.
            self._later(attempt, partial(self._compile, attempt, start.party))
        else:
            self._submit(attempt)

    def begin_load(self, attempt: RunningAttempt, manifest: Manifest) -> None:
        self._gate.then(attempt, partial(self._host.begin_load, attempt.internal_id, attempt.epoch, manifest))

    def resume(self, attempt: RunningAttempt, complete: Complete) -> None:
        """Give the submitted request its first token and all KV. Raises RequestRefused."""
        give_tokens = requests.resume(attempt.prepared, complete)
        self._gate.go_on(
            attempt,
            partial(self._host.resume, attempt.internal_id, attempt.epoch, complete.manifest, give_tokens),
        )

    def fail(self, attempt: RunningAttempt, code: Failed.Code, problem: Problem) -> None:
        self._metrics.on_not_loaded(problem)
        self._fail(attempt, code, str(problem))

    def do_without(self, attempt: RunningAttempt, problem: Problem) -> None:
        self._metrics.on_not_loaded(problem)
        logger.info("a prompt is computed without a pulled prefix: %s", problem, extra=attempt.log_fields)

    def _encode(self, attempt: RunningAttempt, start: Start) -> None:
        attempt.prepared = self._prepare(attempt, start, None)
        name, rows = requests.image_of(attempt.prepared)
        shelf = self._host.shelf
        if shelf is None:
            raise RequestRefused(Failed.CODE_INVALID, "this worker keeps no embeddings")
        if (manifest := shelf.manifest(name, rows)) is not None:
            self._encoded(attempt, manifest)
            return
        requests.add_image(attempt.prepared, self._finder(attempt))
        if attempt.received is not None:
            attempt.received.prepared()
        if not shelf.has_room(rows):
            raise RequestRefused(
                Failed.CODE_FULL,
                f"no room for the embeddings of image {name}: add encode workers",
            )
        self._submit(attempt)

    def _wait_for_embeddings(self, attempt: RunningAttempt, start: Start) -> None:
        with _building(attempt):
            rows = requests.images_of(start)
        names = [one.identifier for one in start.encoded]
        whole_prompt = start.phase == PHASE_PREFILL or not start.HasField("source")
        if start.phase == PHASE_SAVE or not whole_prompt or len({*names} & {*rows}) != len(names):
            raise RequestRefused(
                Failed.CODE_INVALID, "`encoded` is for different images of a prompt that is computed here"
            )
        find = self._finder(attempt) or (lambda _: None)
        attempt.images = {name: find(name) for name in rows if name not in names}
        if attempt.received is not None:
            attempt.received.prepared()
        if missing := [name for name, item in attempt.images.items() if item is None]:
            raise RequestRefused(Failed.CODE_MEDIA, f"the image {missing[0]} is not here", missing)
        self._later(attempt, partial(self._bring, attempt, start, rows))

    async def _bring(self, attempt: RunningAttempt, start: Start, rows: Mapping[str, int]) -> None:
        found = await self._embeddings.bring(attempt, start.encoded, rows, start.left_s)
        attempt.images, attempt.preparing = {**(attempt.images or {}), **found}, None
        self._begin(attempt, start)

    def _later(self, attempt: RunningAttempt, work: Callable[[], Awaitable[None]]) -> None:
        task = attempt.preparing = asyncio.create_task(self._guard(attempt, work))
        self._preparing.add(task)
        task.add_done_callback(self._preparing.discard)

    async def _guard(self, attempt: RunningAttempt, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception as error:  # otherwise the request would wait forever
            if not isinstance(error, RequestRefused):
                logger.exception("request %s cannot begin", attempt.request_id, extra=attempt.log_fields)
                error = RequestRefused(Failed.CODE_INVALID, describe(error))
            attempt.preparing = None
            self._refuse(attempt.internal_id, error)

    def _finder(self, attempt: RunningAttempt) -> FindImage | None:
        kept, received = self._limits.find_image, attempt.received
        if kept is None or received is None:
            return kept
        return lambda name: received.find(name) or kept(name)

    def _submit(self, attempt: RunningAttempt) -> None:
        self._gate.enter(attempt, lambda: self._host.submit(attempt.prepared.request))

    async def _compile(self, attempt: RunningAttempt, party: int) -> None:
        try:
            await self._grammars.prepare(attempt.prepared.request, party or -attempt.session)
        except ValueError as error:  # what the compiler says of a wrong grammar
            raise RequestRefused(Failed.CODE_INVALID, describe(error)) from None
        attempt.preparing = None
        self._submit(attempt)

    def _prepare(self, attempt: RunningAttempt, start: Start, complete: Complete | None) -> Prepared:
        limits, received = self._limits, attempt.received
        if attempt.images is not None:
            limits, received = replace(limits, find_image=attempt.images.get), None
        elif start.phase != PHASE_SAVE:
            limits = replace(limits, find_image=self._finder(attempt))
        try:
            with _building(attempt):
                if start.phase == PHASE_ENCODE:
                    return requests.prepare_encode(start, attempt.internal_id, attempt.session, limits)
                return requests.prepare(start, attempt.internal_id, attempt.session, limits, complete)
        finally:
            if received is not None:
                received.prepared()


@contextmanager
def _building(attempt: RunningAttempt) -> Iterator[None]:
    """Refuse a request that cannot be built: the error would end its router's stream with all requests."""
    try:
        yield
    except RequestRefused:
        raise
    except Exception as error:
        logger.exception("request %s cannot be built", attempt.request_id, extra=attempt.log_fields)
        raise RequestRefused(Failed.CODE_INVALID, f"vLLM refuses it: {describe(error)}") from None
