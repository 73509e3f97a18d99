"""Prepare the grammars of requests: test each in a helper process, then compile it."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Callable
from typing import Any

from baton.protos.worker_pb2 import Failed
from baton.services.engine.errors import RequestRefused
from baton.services.engine.grammars.house import GrammarHouse
from baton.services.engine.grammars.trial import Context
from baton.services.engine.host import EngineHost
from baton.services.errors import describe
from baton.services.worker.attempts import RunningAttempt
from baton.services.worker.replies import names_of

logger = logging.getLogger(__name__)


class Grammars:
    """Test each grammar in a helper process, then compile it in this one."""

    def __init__(self, host: EngineHost, house: GrammarHouse) -> None:
        self._host = host
        self._house = house

    async def open(self) -> None:
        """Get ready for the model of the engine, which is loaded."""
        await self._house.open(Context.of(self._host.grammars.config))

    def close(self) -> None:
        self._house.close()

    async def prepare(self, request: Any, party: int) -> None:
        """Compile the grammar of vLLM's Request, so that no engine step waits for it.

        party: the client, among which compilation takes turns. Raises RequestRefused, and whatever the
        compiler raises. Cancelling this call leaves at most one compilation running.
        """
        verdict = await self._house.check(request.sampling_params, party)
        asked = copy.copy(verdict.structured_outputs)
        request.sampling_params.structured_outputs = asked
        request.structured_output_request.params = asked
        request.structured_output_request.__dict__.pop("structured_output_key", None)
        await asyncio.wrap_future(self._host.grammars.compile(request, verdict.seconds))


class Compilations:
    """The attempts that wait for their grammars."""

    def __init__(
        self,
        grammars: Grammars,
        let_in: Callable[[RunningAttempt], None],
        refuse: Callable[[str, Exception], None],
    ) -> None:
        """Use `let_in` to submit an attempt, and `refuse` to end one by its internal id."""
        self._grammars = grammars
        self._let_in = let_in
        self._refuse = refuse
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, attempt: RunningAttempt, party: int) -> None:
        """Prepare an attempt's grammar, then let it in. Cancelled when the attempt ends."""
        task = attempt.grammar = asyncio.create_task(self._prepare(attempt, party))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._grammars.close()

    async def _prepare(self, attempt: RunningAttempt, party: int) -> None:
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
                    extra=names_of(attempt),
                )
            problem = RequestRefused(Failed.CODE_INVALID, describe(error))
        attempt.grammar = None
        if problem is not None:
            self._refuse(attempt.internal_id, problem)
        else:
            self._let_in(attempt)
