"""A vLLM plug-in that lets marked requests break their step (harness/poison/__init__.py)."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Iterable
from typing import Any

MARK = "poison"


def register() -> None:
    """Patch vLLM's scheduler and model runner V1. vLLM calls this in each of its processes."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if getattr(GPUModelRunner, "poisoned", False):
        return
    GPUModelRunner.poisoned = True
    for where, owner, name, doses in (
        ("schedule", Scheduler, "_update_after_schedule", _scheduled),
        ("execute", GPUModelRunner, "execute_model", _executed),
        ("forward", GPUModelRunner, "_model_forward", _batch),
        ("sample", GPUModelRunner, "_sample", _batch),
        ("draft", GPUModelRunner, "propose_draft_token_ids", _batch),
        ("update", Scheduler, "update_from_output", _scheduled),
        ("post", GPUModelRunner, "take_draft_token_ids", _batch),
    ):
        _before(owner, name, where, doses)


def _before(owner: Any, name: str, where: str, doses: Callable[..., Iterable[tuple[str, int]]]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def poisoned(self: Any, *args: Any, **others: Any) -> Any:
        _take(where, doses(self, *args))
        return original(self, *args, **others)

    setattr(owner, name, poisoned)


def _take(where: str, doses: Iterable[tuple[str, int]]) -> None:
    acting = []
    for dose, written in doses:
        kind, at, after = dose.split(":")
        if at == where and written >= int(after):
            acting.append(kind)
    if "kill" in acting:
        os.kill(os.getpid(), signal.SIGKILL)
    if "sticky" in acting:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    if "alone" in acting or acting.count("pair") > 1:
        raise ValueError(f"the poison acts in {where}: shape mismatch of [2, 2] and [2, 4096]")


def _dose(params: Any) -> str:
    found: str = ((params.extra_args if params is not None else None) or {}).get(MARK, "")
    return found


def _scheduled(scheduler: Any, output: Any, *_: Any) -> Iterable[tuple[str, int]]:
    for name in output.num_scheduled_tokens:
        request = scheduler.requests.get(name)
        if request is not None and (dose := _dose(request.sampling_params)):
            yield dose, request.num_output_tokens


def _executed(runner: Any, output: Any, *_: Any) -> Iterable[tuple[str, int]]:
    for one in output.scheduled_new_reqs:
        if dose := _dose(one.sampling_params):
            yield dose, 0
    for name in output.scheduled_cached_reqs.req_ids:
        state = runner.requests[name]
        if dose := _dose(state.sampling_params):
            yield dose, len(state.output_token_ids)


def _batch(runner: Any, *_: Any) -> Iterable[tuple[str, int]]:
    for name in runner.input_batch.req_ids:
        state = runner.requests[name]
        if dose := _dose(state.sampling_params):
            yield dose, len(state.output_token_ids)
