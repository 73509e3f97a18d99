"""Run a trace against a simulated deployment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from baton.services.simulate.deployment import Setup, SimulatedDeployment
from baton.services.simulate.figures import Outcome, Run
from baton.services.simulate.loop import VirtualLoop, run
from baton.services.simulate.router import SimulatedRouter
from baton.services.simulate.traces import Ask, Trace

PROGRESS_S = 1.0  # real time between progress reports

# Called with the share of the time that has passed (0 to 1) and the number of finished requests.
Progress = Callable[[float, int], None]


def simulate(setup: Setup, trace: Trace, progress: Progress | None = None) -> Run:
    """Run all requests of `trace`, which is consumed; deterministic. Raises BadPolicy."""
    loop = VirtualLoop()
    return run(_Simulation(loop, setup, trace, progress).run(), loop)


class _Simulation:
    def __init__(self, loop: VirtualLoop, setup: Setup, trace: Trace, progress: Progress | None) -> None:
        self._loop = loop
        self._setup = setup
        self._trace = trace
        self._progress = progress
        self._deployment = SimulatedDeployment(loop, setup, trace.block_tokens)
        self._routers = [
            SimulatedRouter(loop, f"router-{number}", self._deployment, setup, trace.block_tokens)
            for number in range(setup.routers)
        ]
        self._outcomes: list[Outcome] = []
        self._over = 0
        self._told = time.perf_counter()

    async def run(self) -> Run:
        began, setup, seconds = time.perf_counter(), self._setup, self._trace.seconds
        warm_s = setup.warm_share * seconds
        self._deployment.begin()
        self._loop.call_at(warm_s, self._deployment.gaps.clear)
        async with asyncio.TaskGroup() as running:
            watching = running.create_task(self._deployment.watch())
            async with asyncio.TaskGroup() as conversations:
                for ask in self._trace.begin():
                    await asyncio.sleep(ask.at - self._loop.time())
                    conversations.create_task(self._converse(ask))
            watching.cancel()
        until = self._loop.time()
        return Run(
            [one for one in self._outcomes if one.arrived >= warm_s],
            seconds - warm_s,
            self._deployment.gaps,
            setup.goals,
            {name: busy_s / until for name, busy_s in self._deployment.busy_s().items()},
            len(self._outcomes),
            time.perf_counter() - began,
        )

    async def _converse(self, first: Ask) -> None:
        ask: Ask | None = first
        while ask is not None:
            await asyncio.sleep(ask.at - self._loop.time())
            number = len(self._outcomes)
            outcome = Outcome(self._loop.time(), ask.prompt, ask.output, service=ask.service.name)
            self._outcomes.append(outcome)
            await self._routers[number % len(self._routers)].serve(f"r{number}", ask, outcome)
            self._over += 1
            self._tell()
            ask = None if outcome.problem else self._trace.after(ask, self._loop.time())

    def _tell(self) -> None:
        now = time.perf_counter()
        if self._progress is not None and now - self._told >= PROGRESS_S:
            self._told = now
            self._progress(min(1.0, self._loop.time() / self._trace.seconds), self._over)
