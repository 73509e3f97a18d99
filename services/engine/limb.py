"""Run an engine's ranks on a further machine, and the thread that starts them.

The ranks load like the engine's other ranks, and get each step from the machine of the first rank. They would
wait forever for a dead engine, so this process ends when the gang's link reports the engine's end.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import Any

from baton.services.engine.build import EnginePlan, build_limb
from baton.services.engine.errors import EngineFailed, RankLost


class LimbHost:
    """The ranks of one machine, one per process. `failed` resolves with the error once a rank has died."""

    def __init__(self, plan: EnginePlan) -> None:
        self._plan = plan
        # The ranks end with the thread that forks them, so this thread runs until the process ends.
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)
        self._started: Future[None] = Future()
        self._loop = asyncio.get_running_loop()
        self._executor: Any = None
        self.failed: asyncio.Future[EngineFailed] = self._loop.create_future()

    async def start(self) -> None:
        """Start and load this machine's ranks. Raises StartError or ConfigError."""
        self._thread.start()
        await asyncio.wrap_future(self._started)

    def _run(self) -> None:
        try:
            self._executor = build_limb(self._plan, self._lost)
        except BaseException as error:  # noqa: BLE001 (raised where `start` is awaited)
            self._started.set_exception(error)
            return
        self._started.set_result(None)
        threading.Event().wait()

    def _lost(self) -> None:
        def tell() -> None:
            if not self.failed.done():
                self.failed.set_result(RankLost("the process of a rank died"))

        self._loop.call_soon_threadsafe(tell)
