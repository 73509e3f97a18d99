"""Prepare the grammars of requests: test each in a helper process, then compile it."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

from baton.services.engine.grammars.house import GrammarHouse
from baton.services.engine.grammars.trial import Context
from baton.services.engine.host import EngineHost


class Grammars:
    """Test each grammar in a helper process, then compile it in this one."""

    def __init__(self, host: EngineHost, house: GrammarHouse) -> None:
        self._host = host
        self._house = house

    async def open(self) -> None:
        await self._house.open(Context.of(self._host.grammars.config))

    def close(self) -> None:
        self._house.close()

    async def prepare(self, request: Any, party: int) -> None:
        """Compile the grammar of vLLM's Request, so that no engine step waits for it.

        party: the client; clients take turns in compilation. Raises RequestRefused, and whatever the
        compiler raises. Cancelling this call leaves at most one compilation running.
        """
        verdict = await self._house.check(request.sampling_params, party)
        asked = copy.copy(verdict.structured_outputs)
        request.sampling_params.structured_outputs = asked
        request.structured_output_request.params = asked
        request.structured_output_request.__dict__.pop("structured_output_key", None)
        await asyncio.wrap_future(self._host.grammars.compile(request, verdict.seconds))
