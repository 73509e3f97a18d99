"""Keep the engine running after a step that raised: the step's requests fail, and the others are served.

vLLM ends an engine whose step raises. Most such exceptions are about one request. With one rank, this module
ends every request that was scheduled, evicts their blocks from the prefix cache (they may never have been
written), starts or drops the KV connector's work of the step, and empties the model runner's batch. Requests
that are only waiting stay. The engine must then answer a test request, or it ends as in vLLM. It also ends if
the device or the process may be in an unknown state, because CUDA errors persist.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from baton.handoff.errors import HandoffError
from baton.services.engine.errors import EngineFailed
from baton.services.engine.patches.replace import replace
from baton.services.engine.shapes import shape_of

logger = logging.getLogger(__name__)

# The number of steps and seconds within which an engine must answer its own request for two tokens.
PROBE_STEPS, PROBE_S = 64, 30.0
SHAPES = 16  # maximum number of requests that the log describes
_STICKY = (
    *("cuda error", "cuda runtime", "cuda driver", "triton error", "nccl", "hip error", "device-side assert"),
    *("cublas", "cudnn", "cusolver", "cusparse", "cufft", "curand"),
    *("out of memory", "illegal memory access", "misaligned address", "launch failure", "accelerator"),
)


def is_fatal(error: BaseException | None) -> bool:
    """Return whether an exception leaves the device or the process in an unknown state."""
    import torch

    while error is not None:
        if not isinstance(error, Exception) or isinstance(
            error, MemoryError | EngineFailed | HandoffError | torch.AcceleratorError | torch.OutOfMemoryError
        ):
            return True
        # Device errors are RuntimeErrors. Other errors may quote a client's text.
        if isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _STICKY):
            return True
        error = error.__cause__ or error.__context__
    return False


class FailedStep:
    """Recovers a loaded engine from failed steps. Call it on the engine's thread."""

    def __init__(self, engine: Any) -> None:
        """From now on, record which requests each step in flight has scheduled."""
        self._engine = engine
        self._connector = engine.scheduler.get_kv_connector()
        waiting = engine.batch_queue_size if engine.batch_queue is not None else 0
        self._outputs: deque[Any] = deque(maxlen=1 + waiting)  # outputs of the steps in flight
        self._failing: list[str] = []  # requests that the current recovery has ended
        self._numbers = itertools.count()
        replace(engine.scheduler, "schedule", self._schedule)
        engine.log_error_detail = _without_details

    def recover(self, error: Exception) -> list[str]:
        """Clean up after a failed step; return the requests that it ends. Raises if the engine is broken."""
        import torch

        if is_fatal(error):
            raise error
        began = time.monotonic()
        touched = self._touched()
        if not touched:
            raise error  # no request can be at fault
        self._failing = touched
        self._log(error, touched)
        engine, scheduler = self._engine, self._engine.scheduler
        self._wait_for_steps()
        blocks = {
            block
            for name in touched
            if name in scheduler.requests
            for group in scheduler.kv_cache_manager.get_block_ids(name)
            for block in group
        }
        scheduler.kv_cache_manager.evict_blocks(blocks)
        if self._connector is not None:
            self._connector.step_failed(lambda: self._end(touched), scheduler.requests)
        else:
            self._end(touched)
        # The scheduler may count images as encoded although this step failed to encode them.
        scheduler.reset_encoder_cache()
        engine.model_executor.reset_encoder_cache()
        for output in self._outputs:
            scheduler.finished_req_ids |= output.finished_req_ids  # the runner may not have received them
        if scheduler.defer_block_free:
            scheduler.processed_step_seq = scheduler.sched_step_seq
            scheduler._drain_deferred_frees()
        with torch.inference_mode():  # the runner's tensors were made in this mode
            _clear(engine.model_executor.driver_worker.worker.model_runner)
        self._outputs.clear()
        self._probe()
        self._outputs.clear()
        self._failing = []
        logger.warning(
            "the engine continues after %.0f ms, without %d requests",
            1e3 * (time.monotonic() - began),
            len(touched),
        )
        return touched

    def holding(self) -> set[str]:
        """Return the requests that have run or hold something in the engine, not those only waiting."""
        return set(self._failing or self._touched())

    def _schedule(self, original: Callable[..., Any], throttle_prefills: bool = False) -> Any:
        output = original(throttle_prefills)
        self._outputs.append(output)
        return output

    def _touched(self) -> list[str]:
        """Return all requests that have run or may have run; if there are none, all requests."""
        from vllm.v1.request import RequestStatus

        scheduler = self._engine.scheduler
        untouched = {
            one.request_id
            for one in scheduler.waiting
            if one.status != RequestStatus.PREEMPTED and not one.num_computed_tokens
        }
        untouched |= {
            one.request_id
            for one in scheduler.kv_holding_waiting
            if one.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        }
        known = {
            name
            for name, one in scheduler.requests.items()
            if name not in untouched and not one.is_finished()
        }
        # A step that raised late may have ended some of its requests, whose last outputs are lost.
        known.update(name for output in self._outputs for name in output.num_scheduled_tokens)
        return sorted(known) or sorted(untouched)

    def _log(self, error: Exception, touched: Sequence[str]) -> None:
        logger.error("a step of the engine failed, with %d requests", len(touched), exc_info=error)
        requests = self._engine.scheduler.requests
        for name in touched[:SHAPES]:
            if (request := requests.get(name)) is not None:
                names = {"request_id": name.rpartition("#")[0]}
                logger.error("in the step that failed: %s: %s", name, shape_of(request), extra=names)

    def _wait_for_steps(self) -> None:
        """Wait for the other steps in flight (asynchronous scheduling), which still write to KV blocks."""
        queue = self._engine.batch_queue
        while queue:
            future = queue.pop()[0]
            try:
                future.result()
            except Exception as error:
                if is_fatal(error):
                    raise
                logger.info("a step after the failed one also failed: %s", error)

    def _end(self, names: Sequence[str]) -> None:
        from vllm.v1.request import RequestStatus

        self._engine.scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)

    def _probe(self) -> None:
        engine, scheduler = self._engine, self._engine.scheduler
        request = self._own_request()
        deadline = time.monotonic() + PROBE_S
        with _alone(scheduler):
            engine.add_request(request)
            for _ in range(PROBE_STEPS):
                _, executed = engine.step_fn()
                engine.post_step(executed)
                if request.is_finished() and not engine.batch_queue:
                    break
                if time.monotonic() > deadline:
                    break
        enough = 0 if engine.is_mm_encoder_only else 2  # an encoder makes no tokens
        if not request.is_finished() or request.num_output_tokens < enough:
            raise EngineFailed("it does not answer after a failed step")

    def _own_request(self) -> Any:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        from baton.services.engine import wire

        params = SamplingParams(
            temperature=0.0,
            max_tokens=2,
            ignore_eos=True,
            detokenize=False,
            skip_reading_prefix_cache=True,
        )
        made = wire.new_request(f"baton-probe-{next(self._numbers)}", [1, 1], params)
        return Request.from_engine_core_request(made, self._engine.request_block_hasher)


@contextlib.contextmanager
def _without_details(scheduler_output: Any) -> Iterator[None]:
    """Replace vLLM's report of a step, which prints the content of its requests."""
    del scheduler_output
    yield


@contextlib.contextmanager
def _alone(scheduler: Any) -> Iterator[None]:
    from vllm.v1.core.sched.request_queue import create_request_queue

    waiting, holding = scheduler.waiting, scheduler.kv_holding_waiting
    scheduler.waiting = create_request_queue(scheduler.policy)
    scheduler.kv_holding_waiting = create_request_queue(scheduler.policy)
    try:
        yield
    finally:
        for one in scheduler.waiting:
            waiting.add_request(one)
        scheduler.waiting, scheduler.kv_holding_waiting = waiting, holding


def _clear(runner: Any) -> None:
    """Empty the model runner's batch. The rest goes once the scheduler reports requests as finished."""
    from vllm.v1.sample.logits_processor import BatchUpdate

    runner.execute_model_state = None
    if not hasattr(runner, "input_batch"):
        return  # V2 keeps no batch from step to step
    runner.kv_connector_output = None
    runner._draft_token_ids = runner._draft_token_req_ids = None
    batch = runner.input_batch
    batch.batch_update_builder.reset()
    for name in list(batch.req_id_to_index):
        batch.remove_request(name)
    # condense() does the same for an empty batch, but may not know which rows this step removed.
    for rows in (batch._req_ids, batch.req_output_token_ids, batch.spec_token_ids):
        rows.clear()
    batch.prev_sampled_token_ids = batch.prev_req_id_to_index = None
    batch.refresh_metadata()
    # The logits processors forget all rows, because they may have missed the last moves.
    update = BatchUpdate(batch_size=0, removed=range(batch.max_num_reqs), added=(), moved=())
    if batch.thinking_budget_state_holder is not None:
        batch.thinking_budget_state_holder.sync_batch(update)
    for one in batch.logitsprocs.all:
        one.update_state(update)


def install(engine: Any) -> FailedStep | None:
    """Set up the recovery; None with several ranks, as it is unknown how much of a step each has done."""
    if engine.vllm_config.parallel_config.world_size > 1:
        return None
    return FailedStep(engine)
