"""Prepare an attempt for the engine and submit it: build its request, compile its grammar, fetch its KV."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from baton.attempts import BEGINNING_S
from baton.handoff.reports import Problem
from baton.protos.handoff_pb2 import Manifest
from baton.protos.worker_pb2 import PHASE_PREFILL, PHASE_SAVE, Complete, Failed, Start
from baton.services.engine import requests
from baton.services.engine.errors import RequestRefused
from baton.services.engine.host import EngineHost
from baton.services.engine.requests import EngineLimits, Prepared
from baton.services.errors import describe
from baton.services.worker.attempts import RunningAttempt
from baton.services.worker.following import Following
from baton.services.worker.grammars import Compilations
from baton.services.worker.incoming import Incoming
from baton.services.worker.isolation import Isolation
from baton.services.worker.metrics import WorkerMetrics
from baton.services.worker.replies import names_of

logger = logging.getLogger(__name__)

Fail = Callable[[RunningAttempt, Failed.Code, str], None]


class Entrance:
    """The way into one engine. It implements `Seams` for incoming KV."""

    def __init__(
        self,
        host: EngineHost,
        isolation: Isolation,
        compilations: Compilations,
        metrics: WorkerMetrics,
        *,
        request_s: float,
        fail: Fail,
    ) -> None:
        """Wait at most `request_s` for KV; `fail` ends an attempt and tells its router."""
        self._host = host
        self._isolation = isolation
        self._compilations = compilations
        self._metrics = metrics
        self._request_s = request_s
        self._fail = fail
        self._following = Following()
        self._limits = EngineLimits(0, 0, None)

    def fit(self, limits: EngineLimits) -> None:
        """Set the limits of the engine, which is loaded."""
        self._limits = limits

    async def close(self) -> None:
        """Cancel everything that waits and close connections."""
        self._compilations.close()
        self._isolation.close()
        await self._following.close()

    def begin(self, attempt: RunningAttempt, start: Start) -> None:
        """Begin an attempt, with KV from its source if it has one. Raises RequestRefused."""
        if not start.HasField("source"):
            self.enter(attempt, start, None)
            return
        if start.phase == PHASE_SAVE or not (start.source.address and start.source.key):
            raise RequestRefused(
                Failed.CODE_INVALID,
                "a source needs an address and a key, and is for a PREFILL or a DECODE",
            )
        held, within_s = start.phase == PHASE_PREFILL, BEGINNING_S
        if not held:
            attempt.prepared = self._prepare(attempt, start, None)
            held, within_s = attempt.prepared.late, self._request_s
        attempt.incoming = Incoming(attempt, start, self, held=held)
        if not held:
            self.let_in(attempt)
        self._following.follow(attempt.incoming, start.source, start.epoch, within_s)

    def let_in(self, attempt: RunningAttempt) -> None:
        """Submit an attempt's request to the engine, once isolation allows it."""
        self._isolation.enter(attempt, lambda: self._host.submit(attempt.prepared.request))

    # Called by Incoming.

    def enter(self, attempt: RunningAttempt, start: Start, complete: Complete | None) -> None:
        attempt.prepared = self._prepare(attempt, start, complete)
        if attempt.prepared.request.use_structured_output:
            # Before isolation: an engine emptied for a request must not wait for its grammar.
            self._compilations.begin(attempt, start.party)
        else:
            self.let_in(attempt)

    def begin_load(self, attempt: RunningAttempt, manifest: Manifest) -> None:
        self._isolation.then(
            attempt, partial(self._host.begin_load, attempt.internal_id, attempt.epoch, manifest)
        )

    def resume(self, attempt: RunningAttempt, complete: Complete) -> None:
        give_tokens = requests.resume(attempt.prepared, complete)
        self._isolation.go_on(
            attempt,
            partial(self._host.resume, attempt.internal_id, attempt.epoch, complete.manifest, give_tokens),
        )

    def fail(self, attempt: RunningAttempt, code: Failed.Code, problem: Problem) -> None:
        """End an attempt whose KV cannot be had."""
        self._metrics.on_not_loaded(problem)
        self._fail(attempt, code, str(problem))

    def do_without(self, attempt: RunningAttempt, problem: Problem) -> None:
        self._metrics.on_not_loaded(problem)
        logger.info("a prompt is computed from its beginning: %s", problem, extra=names_of(attempt))

    def _prepare(self, attempt: RunningAttempt, start: Start, complete: Complete | None) -> Prepared:
        try:
            return requests.prepare(start, attempt.internal_id, attempt.session, self._limits, complete)
        except RequestRefused:
            raise
        except Exception as error:
            # Otherwise one bad request would end the router's stream and all requests on it.
            logger.exception("request %s cannot be built", start.request_id, extra=names_of(attempt))
            raise RequestRefused(Failed.CODE_INVALID, f"vLLM refuses it: {describe(error)}") from None
