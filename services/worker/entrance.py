"""Prepare an attempt for the engine and submit it: build its request, compile its grammar, fetch its KV."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
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
from baton.services.worker.engine_gate import EngineGate
from baton.services.worker.following import Following
from baton.services.worker.grammars import Grammars
from baton.services.worker.incoming import Incoming
from baton.services.worker.metrics import WorkerMetrics

logger = logging.getLogger(__name__)

Fail = Callable[[RunningAttempt, Failed.Code, str], None]


class Entrance:
    """The way into one engine."""

    def __init__(
        self,
        host: EngineHost,
        gate: EngineGate,
        grammars: Grammars,
        metrics: WorkerMetrics,
        *,
        fail: Fail,
        refuse: Callable[[str, Exception], None],
    ) -> None:
        """Set up; `fail` and `refuse` end an attempt and tell its router."""
        self._host = host
        self._gate = gate
        self._grammars = grammars
        self._metrics = metrics
        self._fail = fail
        self._refuse = refuse
        self._compiling: set[asyncio.Task[None]] = set()
        self._following = Following()
        self._limits = EngineLimits(0, 0, None)

    def fit(self, limits: EngineLimits) -> None:
        self._limits = limits

    async def close(self) -> None:
        """Cancel everything that waits and close connections."""
        for task in self._compiling:
            task.cancel()
        self._grammars.close()
        self._gate.close()
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
        held = start.phase == PHASE_PREFILL
        within_s: float | None = BEGINNING_S
        if not held:
            attempt.prepared = self._prepare(attempt, start, None)
            held, within_s = attempt.prepared.late, start.left_s or None
        attempt.incoming = Incoming(attempt, start, self, held=held)
        if not held:
            self._let_in(attempt)
        self._following.follow(attempt.incoming, start.source, start.epoch, within_s)

    # Called by Incoming.

    def enter(self, attempt: RunningAttempt, start: Start, complete: Complete | None) -> None:
        """Build the request, with or without loaded KV, and submit it. Raises RequestRefused."""
        attempt.prepared = self._prepare(attempt, start, complete)
        if attempt.prepared.request.use_structured_output:
            # Before the gate: an engine emptied for a request must not wait for its grammar.
            task = attempt.grammar = asyncio.create_task(self._compile(attempt, start.party))
            self._compiling.add(task)
            task.add_done_callback(self._compiling.discard)
        else:
            self._let_in(attempt)

    def begin_load(self, attempt: RunningAttempt, manifest: Manifest) -> None:
        """Let the submitted request pull the available KV."""
        self._gate.then(attempt, partial(self._host.begin_load, attempt.internal_id, attempt.epoch, manifest))

    def resume(self, attempt: RunningAttempt, complete: Complete) -> None:
        """Give the submitted request its token and all KV. Raises RequestRefused."""
        give_tokens = requests.resume(attempt.prepared, complete)
        self._gate.go_on(
            attempt,
            partial(self._host.resume, attempt.internal_id, attempt.epoch, complete.manifest, give_tokens),
        )

    def fail(self, attempt: RunningAttempt, code: Failed.Code, problem: Problem) -> None:
        self._metrics.on_not_loaded(problem)
        self._fail(attempt, code, str(problem))

    def do_without(self, attempt: RunningAttempt, problem: Problem) -> None:
        """Record why the whole prompt is computed here."""
        self._metrics.on_not_loaded(problem)
        logger.info("a prompt is computed from its beginning: %s", problem, extra=attempt.log_fields)

    def _let_in(self, attempt: RunningAttempt) -> None:
        self._gate.enter(attempt, lambda: self._host.submit(attempt.prepared.request))

    async def _compile(self, attempt: RunningAttempt, party: int) -> None:
        """Compile an attempt's grammar, then let it in. Cancelled when the attempt ends."""
        problem: RequestRefused | None = None
        try:
            await self._grammars.prepare(attempt.prepared.request, party or -attempt.session)
        except RequestRefused as refused:
            problem = refused
        except Exception as error:  # otherwise the request would wait forever
            if not isinstance(error, ValueError):
                logger.exception(
                    "the grammar of request %s cannot be compiled",
                    attempt.request_id,
                    extra=attempt.log_fields,
                )
            problem = RequestRefused(Failed.CODE_INVALID, describe(error))
        attempt.grammar = None
        if problem is not None:
            self._refuse(attempt.internal_id, problem)
        else:
            self._let_in(attempt)

    def _prepare(self, attempt: RunningAttempt, start: Start, complete: Complete | None) -> Prepared:
        limits, received = self._limits, attempt.received
        if received and start.phase != PHASE_SAVE and (kept := limits.find_image) is not None:
            limits = replace(limits, find_image=lambda name: received.find(name) or kept(name))
        try:
            return requests.prepare(start, attempt.internal_id, attempt.session, limits, complete)
        except RequestRefused:
            raise
        except Exception as error:
            # Otherwise one bad request would end the router's stream and all requests on it.
            logger.exception("request %s cannot be built", start.request_id, extra=attempt.log_fields)
            raise RequestRefused(Failed.CODE_INVALID, f"vLLM refuses it: {describe(error)}") from None
        finally:
            if received:
                received.prepared()
