"""Run one EngineCore and the thread that steps it.

The thread loads the engine, handles messages between steps, steps while there is work and otherwise blocks.
It passes the results of a step to the asyncio loop in one call. Only this thread uses the engine, with one
exception: the loop's thread begins loads, so that they need not wait for a step. The public methods of
EngineHost may be called from the loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from baton.handoff.errors import HandoffError
from baton.handoff.load.embeddings import EmbeddingPuller
from baton.handoff.params import asks_for_load
from baton.handoff.reports import Staged
from baton.handoff.save import sizing
from baton.handoff.save.shelf import Shelf
from baton.handoff.vllm import ec_connector
from baton.handoff.vllm.scheduler_side import SchedulerSide
from baton.protos.handoff_pb2 import Manifest, TrialReply
from baton.protos.scheduler_pb2 import BlockHashing
from baton.protos.worker_pb2 import Failed
from baton.services.engine import cache_events
from baton.services.engine.build import EnginePlan, build_engine, measures_share
from baton.services.engine.data_parallel import GangRank, lockstep_of
from baton.services.engine.errors import EngineFailed, RankLost, RequestRefused
from baton.services.engine.grammars.engine import EngineGrammars
from baton.services.engine.info import EngineInfo, info_of, load_of
from baton.services.engine.lockstep import Lockstep
from baton.services.engine.patches import (
    draft_length,
    early_loads,
    failed_step,
    first_drafts,
    giving_way,
    step_times,
)
from baton.services.engine.step import EngineLoad, EngineStep, Listener
from baton.services.errors import describe

logger = logging.getLogger(__name__)

# Seconds. While KV is on its way and there is nothing else to do, the engine polls for it, ever less often,
# because each poll takes 0.1 ms of Python time from the pull. A message ends the wait at once.
_POLL_S = 0.0005
_POLL_GROWTH = 1.05
_POLL_MOST_S = 0.005
_POLL_WOKEN_S = 1.0  # while it waits only for loads, because a message reports their end
_STOP_TIMEOUT_S = 10.0
# In a gang, a step fails when another member ends. The gang's link reports that end within this time, so that
# no request is suspected here. The traceback is written only then, because writing it delays the event loop.
_SIBLING_S = 1.0
# After a ring the engine's thread sleeps, so that the event loop gets the GIL and sends the ring at once.
_SEND_S = 0.0002


class EngineHost:
    """The engine and its thread. One per process."""

    def __init__(self, plan: EnginePlan) -> None:
        self._plan = plan
        # Limited by services/worker/admission.py, which counts the requests it lets in.
        self._messages: queue.SimpleQueue[Callable[[], bool | None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._started: Future[EngineInfo] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listener: Listener | None = None
        self._engine: Any = None
        self._connector: Any = None
        self._handoffs: SchedulerSide | None = None  # the connector's scheduler side
        self._grammars: EngineGrammars | None = None
        self._woken = False  # whether the end of a load sends a message
        self._steps_left = 1  # steps to try before the thread waits for a message
        self._draft_length: draft_length.DraftLengthSeam | None = None
        self._first_drafts: first_drafts.FirstDrafts | None = None
        self._giving_way: giving_way.GivingWay | None = None
        self._failed_step: failed_step.FailedStep | None = None
        self._cache_events: cache_events.CacheEvents | None = None
        self.shelf: Shelf | None = None  # only in an encode worker
        self._lockstep: Lockstep | None = None  # None: not in a gang
        self._ring: Callable[[int], None] | None = None
        self._last_load = EngineLoad()
        self._info: EngineInfo  # set when it is loaded
        self._step_began = 0.0  # time.monotonic; 0 between steps
        self._unseen: set[str] = set()  # requests without any output yet

    async def start(
        self, listener: Listener, gang: GangRank | None = None, ring: Callable[[int], None] | None = None
    ) -> EngineInfo:
        """Start the thread and load the engine. Raises StartError or ConfigError.

        gang: the engine's rank, if it is in a gang. ring: tells the gang's other members about a wave with
        work; called in the event loop
        """
        self._plan, self._ring = replace(self._plan, gang=gang), ring
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._thread.start()
        return await asyncio.wrap_future(self._started)

    def submit(self, request: Any) -> None:
        self._messages.put(lambda: self._add(request))

    def begin_load(self, internal_id: str, epoch: int, manifest: Manifest) -> None:
        """Start to pull the available KV of a waiting request, alongside any running step."""
        if self._connector is not None:
            self._connector.begin_now(internal_id, epoch, manifest)
            self._messages.put(lambda: self._begin_load(internal_id, epoch, manifest))

    def resume(
        self, internal_id: str, epoch: int, manifest: Manifest, give_tokens: Callable[[], None]
    ) -> None:
        """Continue a waiting request whose prompt is complete; the engine's thread calls `give_tokens`."""
        if self._connector is not None:
            self._connector.begin_now(internal_id, epoch, manifest)
        self._messages.put(lambda: self._resume(internal_id, epoch, manifest, give_tokens))

    def abort(self, internal_ids: list[str]) -> None:
        """End requests silently, without a last output. Unknown ids are ignored."""
        self._messages.put(lambda: self._abort(internal_ids))

    def rung(self, wave: int) -> None:
        self._messages.put(lambda: self._rung(wave))

    def stop(self) -> bool:
        """Finish the step or, in a gang, the wave, and shut down. Return whether that took less than 10 s."""
        if self._thread.ident is None:
            return True
        self._messages.put(None)
        self._thread.join(_STOP_TIMEOUT_S)
        return not self._thread.is_alive()

    @property
    def step_s(self) -> float:
        """Seconds since the current step began, or 0 between steps."""
        began = self._step_began
        return time.monotonic() - began if began else 0.0

    @property
    def dummy_steps(self) -> int:
        """The number of forward passes without requests that this engine has computed for its gang."""
        return self._lockstep.dummies if self._lockstep is not None else 0

    @property
    def grammars(self) -> EngineGrammars:
        """The grammar compilers. Raises EngineFailed before the engine is loaded."""
        if self._grammars is None:
            raise EngineFailed("the engine is not loaded")
        return self._grammars

    @property
    def block_hasher(self) -> Any:
        return self._engine.request_block_hasher

    @property
    def compatibility_hash(self) -> str:
        """Hex digest of everything that KV depends on, for both ends to compare. Empty without handoffs."""
        return self._handoffs.compatibility_hash if self._handoffs is not None else ""

    @property
    def facts(self) -> Mapping[str, str]:
        return self._handoffs.facts if self._handoffs is not None else {}

    @property
    def hashing(self) -> BlockHashing | None:
        return self._cache_events.hashing if self._cache_events is not None else None

    @property
    def reports_blocks(self) -> bool:
        return self._cache_events is not None or self.shelf is not None

    def embedding_puller(self) -> EmbeddingPuller:
        plan, form = self._plan, ec_connector.form_of(self._engine.vllm_config, self._plan.fingerprint)
        room = sizing.embeddings_bytes()
        return EmbeddingPuller(plan.worker_id, form, plan.settings.handoff.transports, room)

    def staged(self, timeout_s: float) -> Staged | None:
        """Return what is waiting to be pulled, or None if a rank does not answer in time. Blocks."""
        if self._handoffs is None:
            return self.shelf.staged() if self.shelf is not None else Staged()
        try:
            return self._handoffs.staged(timeout_s)
        except HandoffError as error:
            logger.warning("%s", error)
            return None

    @property
    def kv_addresses(self) -> list[str]:
        """Addresses of the ranks' Handoff services, as other machines dial them."""
        return self._handoffs.published_addresses if self._handoffs is not None else []

    def try_handoff(self, sources: Sequence[str], transport: str, size: int, timeout_s: float) -> TrialReply:
        """Have the ranks pull test payloads from another worker's ranks. Blocks."""
        if (side := self._handoffs) is None:
            return TrialReply(problem="this worker hands no KV over")
        return side.client.try_handoff(side.addresses, sources, transport, size, timeout_s)

    def _run(self) -> None:
        try:
            self._engine = build_engine(self._plan, lambda: self._messages.put(_rank_lost))
            self._connector = self._engine.scheduler.get_kv_connector()
            self.shelf = ec_connector.shelf_of(self._engine.vllm_config)
            self._grammars = EngineGrammars(self._engine.structured_output_manager)
            if self._connector is not None:
                self._handoffs = self._connector.scheduler_side
                self._woken = self._connector.wake_on_loads(lambda: self._messages.put(lambda: None))
            spec = self._plan.settings.engine.speculative_config
            self._draft_length = draft_length.install(self._engine, spec)
            self._first_drafts = first_drafts.install(self._engine, spec)
            self._giving_way = giving_way.install(self._engine, measured_share=measures_share(self._plan))
            early_loads.install(self._engine)
            self._cache_events = cache_events.install(self._engine)
            self._failed_step = failed_step.install(self._engine)  # last, so that it wraps the other patches
            self._lockstep = lockstep_of(self._engine, self._ring_others)
        except BaseException as error:  # noqa: BLE001 (raised where `start` is awaited)
            self._started.set_exception(error)
            return
        self._info = info_of(self._engine)
        self._started.set_result(self._info)
        try:
            self._step_until_stopped()
        except BaseException as error:
            if self._plan.gang is not None:
                time.sleep(_SIBLING_S)
            logger.critical("the engine failed", exc_info=error)
            failure: BaseException = error
            if getattr(self._engine.model_executor, "is_failed", False) and not isinstance(error, RankLost):
                failure = RankLost(f"the process of a rank died: {describe(error)}")
            running = self._holding()
            self._tell(lambda listener: listener.on_failure(failure, running))
            return
        # EngineCore.shutdown would also spend 1.4 s on collecting a gigabyte of garbage just before the exit.
        self._engine.model_executor.shutdown()
        self._engine.scheduler.shutdown()
        self.grammars.close()

    def _step_until_stopped(self) -> None:
        engine, scheduler = self._engine, self._engine.scheduler
        poll_s = _POLL_S
        # With several steps in flight, a later call returns a step's results, and must not be delayed.
        burst = engine.batch_queue_size if engine.batch_queue is not None else 1
        self._steps_left = burst
        while True:
            idle = not scheduler.has_requests() and not engine.batch_queue
            running = self._lockstep is not None and self._lockstep.running
            wait = not running and (idle or not self._steps_left)
            if not self._take(wait, None if idle else poll_s, burst):
                break
            executed = False
            if self._steps_left and (scheduler.has_requests() or engine.batch_queue):
                if self._lockstep is not None and scheduler.get_num_unfinished_requests():
                    self._lockstep.start()
                step = self._step(engine)
                executed = step.executed
                advanced = executed or bool(step.loaded)  # loaded requests can run in the next step
                self._steps_left = burst if advanced else self._steps_left - 1
                poll_s = _POLL_S if advanced else self._next_poll_s(poll_s)
            if self._lockstep is not None and self._lockstep.running:
                self._step_began = time.monotonic()
                busy = bool(engine.batch_queue) or not self._waits
                self._lockstep.finish_turn(executed=executed, busy=busy)
                self._step_began = 0.0
        if self._lockstep is not None:
            self._lockstep.finish_wave()

    def _next_poll_s(self, poll_s: float) -> float:
        unfinished = self._engine.scheduler.get_num_unfinished_requests()
        return _POLL_WOKEN_S if unfinished and self._waits else min(poll_s * _POLL_GROWTH, _POLL_MOST_S)

    @property
    def _waits(self) -> bool:
        """Whether nothing can be computed until a message arrives: every request is waiting for a load."""
        loads = self._handoffs.idle_loads(told=self._woken) if self._handoffs is not None else 0
        return bool(loads >= self._engine.scheduler.get_num_unfinished_requests())

    def _rung(self, wave: int) -> bool:
        if self._lockstep is not None:
            self._lockstep.rung(wave)
        return False

    def _ring_others(self, wave: int) -> None:
        if self._loop is not None and self._ring is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._ring, wave)
            time.sleep(_SEND_S)

    def _take(self, block: bool, timeout: float | None, burst: int) -> bool:
        """Run the pending messages; a message returns False if it needs no step. Return False at the end."""
        try:
            message = self._messages.get(block, timeout)
        except queue.Empty:
            self._steps_left = self._steps_left or burst
            return True
        try:
            while message is not None:
                if message() is not False:
                    self._steps_left = burst
                message = self._messages.get_nowait()
        except queue.Empty:
            return True
        return False

    def _add(self, request: Any) -> None:
        if request.request_id in self._engine.scheduler.requests:
            # The same attempt was aborted while its KV was loading, and vLLM keeps its blocks until the end
            # of the load is reported.
            held = RequestRefused(Failed.CODE_FULL, "an abandoned load still holds its blocks")
            self._tell(lambda listener: listener.on_refused(request.request_id, held))
            return
        if self._connector is None and asks_for_load(request.kv_transfer_params):
            lacks = RequestRefused(Failed.CODE_HANDOFF, "this worker hands no KV over (handoff.enabled)")
            self._tell(lambda listener: listener.on_refused(request.request_id, lacks))
            return
        try:
            self._engine.add_request(request)
        except Exception as error:
            # Every worker would raise the same error, so the request must not take them all down.
            logger.exception(
                "the engine refuses request %s",
                request.request_id,
                extra={"request_id": request.request_id.rpartition("#")[0]},
            )
            self._engine.abort_requests([request.request_id])  # it may have been added in part
            refusal = error
            self._tell(lambda listener: listener.on_refused(request.request_id, refusal))
        else:
            self._unseen.add(request.request_id)

    def _begin_load(self, internal_id: str, epoch: int, manifest: Manifest) -> bool:
        """Return whether a step is needed to tell the ranks. Otherwise the end of the pull triggers one."""
        self._connector.begin_load(internal_id, epoch, manifest)
        return not self._woken

    def _resume(
        self, internal_id: str, epoch: int, manifest: Manifest, give_tokens: Callable[[], None]
    ) -> bool:
        request = self._engine.scheduler.requests.get(internal_id)
        if request is not None and not request.is_finished():  # else its load has just failed
            give_tokens()
            self._connector.complete_load(internal_id, epoch, manifest)
        return not self._woken

    def _abort(self, internal_ids: list[str]) -> None:
        self._engine.abort_requests(internal_ids)
        self._unseen.difference_update(internal_ids)

    def _step(self, engine: Any) -> EngineStep:
        began = self._step_began = time.monotonic()
        step = EngineStep()
        try:
            if self._connector is not None:
                self._connector.promote(engine.scheduler)
            outputs, step.executed = engine.step_fn()
            step.outputs = outputs or {}
            engine.post_step(step.executed)
        except Exception as error:  # noqa: BLE001 (raised again if the engine cannot recover)
            self._recover(error, step)
        self._step_began, step.seconds = 0.0, time.monotonic() - began
        step.times = step_times.take()
        step.counts.take(step.outputs.values(), step.seconds if step.executed else 0.0)
        if self._draft_length is not None:
            self._draft_length.observe(step.seconds)
            step.draft_length = self._draft_length.choice.limit
        if self._first_drafts is not None:
            step.drafts = self._first_drafts.take()
        if self._giving_way is not None:
            self._giving_way.observe(step.seconds)
            step.yielded = self._giving_way.take_counts()
        if self._handoffs is not None:
            reports = self._handoffs.take_reports()
            step.begun, step.saved, step.loaded = reports.begun, reports.saved, reports.loaded
        if self._cache_events is not None:
            step.blocks = self._cache_events.take()
        elif self.shelf is not None:
            step.blocks = self.shelf.take_changes()
        step.shared = self._shared(step)
        step.load = load_of(engine, self._info)
        if step.matters or step.load != self._last_load:
            self._last_load = step.load
            self._tell(lambda listener: listener.on_step(step))
        return step

    def _recover(self, error: Exception, step: EngineStep) -> None:
        """Drop a failed step's requests. Raises in a gang, where others are waiting, or if recovery fails."""
        if self._failed_step is None or self._lockstep is not None:
            raise error
        step.failed = self._failed_step.recover(error)
        step.problem = f"a step of the engine failed: {describe(error)}"
        self._unseen.difference_update(step.failed)
        if self._giving_way is not None:
            self._giving_way.step_failed()

    def _holding(self) -> set[str] | None:
        try:
            return self._failed_step.holding() if self._failed_step is not None else None
        except Exception as error:  # noqa: BLE001 (the engine may be in any state)
            logger.warning("unknown which requests ran when the engine failed: %s", error)
            return None

    def _shared(self, step: EngineStep) -> dict[str, int]:
        """Return how many KV blocks each request shares with others, if it began to decode in this step."""
        found = {}
        for outputs in step.outputs.values() if self._unseen else ():
            for output in outputs.outputs:
                if output.request_id not in self._unseen:
                    continue
                self._unseen.discard(output.request_id)
                groups = self._engine.scheduler.kv_cache_manager.get_blocks(output.request_id).blocks
                shared = sum(one.ref_cnt > 1 and not one.is_null for group in groups for one in group)
                if shared and output.finish_reason is None:
                    found[output.request_id] = int(shared * self._info.block_share)
        return found

    def _tell(self, what: Callable[[Listener], None]) -> None:
        loop, listener = self._loop, self._listener
        if loop is not None and listener is not None and not loop.is_closed():
            loop.call_soon_threadsafe(what, listener)


def _rank_lost() -> None:
    raise RankLost("the process of a rank died")
