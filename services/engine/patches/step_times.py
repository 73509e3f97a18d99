"""Time the parts of an engine step: drafting, and the forward pass with sampling.

Each rank measures them, and the step's output carries them to the scheduler's process. The times are those of
the calls. On a CPU a call is the work itself. On a GPU a call returns when its work is launched, and the wait
for that work is counted in sampling, which first uses a result.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Any

from baton.services.engine.patches.drafts_v1 import PROPOSE_DRAFT_TOKEN_IDS
from baton.services.engine.patches.replace import around, replaces

_KEY = "_baton_times"  # attribute of a step's output, of a rank's worker, and of model runner V2


@dataclass(slots=True)
class StepPhases:
    """Seconds of a step's phases. `verify_s`: the target's forward pass and sampling, with verification."""

    draft_s: float = 0.0
    verify_s: float = 0.0


_steps = StepPhases()  # since `take`, in the scheduler's process
_drafting = StepPhases()  # the current step's, in this rank


def take() -> StepPhases:
    """Return the sums over the steps since the last call. For the thread that steps the engine."""
    taken = StepPhases(_steps.draft_s, _steps.verify_s)
    _steps.draft_s = _steps.verify_s = 0.0
    return taken


@replaces("vllm.v1.worker.gpu_worker:Worker.execute_model", "self", "scheduler_output")
def time_execute(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    began = perf_counter()
    output = original(self, *args, **kwargs)
    # None: sample_tokens is called next. Any other output ends the step, without a forward pass.
    setattr(self, _KEY, None if output is not None else perf_counter() - began)
    return output


@replaces("vllm.v1.worker.gpu_worker:Worker.sample_tokens", "self", "grammar_output")
def time_sample(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    forward_s = getattr(self, _KEY, None)
    if forward_s is None:
        return original(self, *args, **kwargs)
    setattr(self, _KEY, None)
    time_speculator(self.model_runner)
    _drafting.draft_s = 0.0
    began = perf_counter()
    output = original(self, *args, **kwargs)
    draft_s = _drafting.draft_s
    return _mark(output, StepPhases(draft_s, forward_s + perf_counter() - began - draft_s))


def time_speculator(runner: Any) -> None:
    """Time model runner V2's speculator from its first use on: until then, other patches replace it."""
    if hasattr(runner, _KEY):
        return
    setattr(runner, _KEY, True)
    if getattr(runner, "speculator", None) is not None:
        runner.speculator.propose = around(runner.speculator.propose, time_draft)


@replaces("vllm.v1.worker.gpu_model_runner:GPUModelRunner.propose_draft_token_ids", *PROPOSE_DRAFT_TOKEN_IDS)
def time_draft(original: Any, *args: Any, **kwargs: Any) -> Any:
    began = perf_counter()
    try:
        return original(*args, **kwargs)
    finally:
        _drafting.draft_s += perf_counter() - began


def _mark(output: Any, times: StepPhases) -> Any:
    """Attach the times to an output; to an asynchronous one once it has arrived. Return the output."""
    if hasattr(output, "get_output"):
        get_output = output.get_output

        def once() -> Any:
            del output.get_output  # else a reference cycle keeps the step's tensors until garbage collection
            return _mark(get_output(), times)

        output.get_output = once
    elif output is not None:
        setattr(output, _KEY, times)
    return output


@replaces("vllm.v1.core.sched.scheduler:Scheduler.update_from_output")
def collect(original: Any, self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
    times = getattr(model_runner_output, _KEY, None)
    if times is not None:
        _steps.draft_s += times.draft_s
        _steps.verify_s += times.verify_s
    return original(self, scheduler_output, model_runner_output)
