"""Time the parts of an engine step: drafting, the model's forward pass with sampling, the rest.

They are measured in each rank, and carried to the scheduler's process on the step's output: a rank may be
another process. The time is that of the calls. On CPU that is the work itself. On a GPU a call returns when
its work is launched, and the wait for it falls to the first use of a result, which is the sampling.

Leans on: vllm.v1.worker.gpu_worker.Worker (execute_model, sample_tokens, model_runner; the CPU's worker is a
subclass), of model runner V1 `propose_draft_token_ids`, of V2 `speculator.propose`; vllm.v1.outputs.
{ModelRunnerOutput, AsyncModelRunnerOutput.get_output}; vllm.v1.core.sched.scheduler.Scheduler.
update_from_output.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from baton.services.engine.patches.replace import replace
from baton.services.engine.patches.signatures import PROPOSE_DRAFT_TOKEN_IDS, UPDATE_FROM_OUTPUT

_KEY = "_baton_times"  # attribute of a step's output and of a rank's worker


@dataclass(slots=True)
class StepPhases:
    """Seconds of a step's phases. `verify_s`: the target's forward pass and the sampling, which verifies."""

    draft_s: float = 0.0
    verify_s: float = 0.0


_steps = StepPhases()  # the scheduler process's times since `take`
_drafting = StepPhases()  # this rank's times in the current step


def take() -> StepPhases:
    """Return the times of the steps since the last call. For the scheduler's stepping thread."""
    taken = StepPhases(_steps.draft_s, _steps.verify_s)
    _steps.draft_s = _steps.verify_s = 0.0
    return taken


def install() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker

    replace(Worker, "execute_model", _timed_execute, ("self", "scheduler_output"))
    replace(Worker, "sample_tokens", _timed_sample, ("self", "grammar_output"))
    replace(GPUModelRunner, "propose_draft_token_ids", _timed_draft, PROPOSE_DRAFT_TOKEN_IDS)
    replace(Scheduler, "update_from_output", _collecting, ("self", *UPDATE_FROM_OUTPUT))


def _timed_execute(execute_model: Any) -> Any:
    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        began = perf_counter()
        output = execute_model(self, *args, **kwargs)
        # None: the step goes on with sample_tokens. Any other output ends it, without a forward pass.
        setattr(self, _KEY, None if output is not None else perf_counter() - began)
        return output

    return timed


def _timed_sample(sample_tokens: Any) -> Any:
    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        forward_s = getattr(self, _KEY, None)
        if forward_s is None:
            return sample_tokens(self, *args, **kwargs)
        setattr(self, _KEY, None)
        _time_speculator(self.model_runner)
        _drafting.draft_s = 0.0
        began = perf_counter()
        output = sample_tokens(self, *args, **kwargs)
        draft_s = _drafting.draft_s
        return _marked(output, StepPhases(draft_s, forward_s + perf_counter() - began - draft_s))

    return timed


def _time_speculator(runner: Any) -> None:
    """Time model runner V2's speculator, at its first use, as other patches replace it before that."""
    if hasattr(runner, _KEY):
        return
    setattr(runner, _KEY, True)
    if getattr(runner, "speculator", None) is not None:
        runner.speculator.propose = functools.wraps(runner.speculator.propose)(
            _timed_draft(runner.speculator.propose)
        )


def _timed_draft(propose: Any) -> Any:
    def timed(*args: Any, **kwargs: Any) -> Any:
        began = perf_counter()
        try:
            return propose(*args, **kwargs)
        finally:
            _drafting.draft_s += perf_counter() - began

    return timed


def _marked(output: Any, times: StepPhases) -> Any:
    """Put the times on an output, for an unfinished one as soon as it is there. Return the output."""
    if hasattr(output, "get_output"):
        get_output = output.get_output

        def once() -> Any:
            del output.get_output  # else a cycle keeps the step's tensors until a garbage collection
            return _marked(get_output(), times)

        output.get_output = once
    elif output is not None:
        setattr(output, _KEY, times)
    return output


def _collecting(update_from_output: Any) -> Any:
    def collecting(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        times = getattr(model_runner_output, _KEY, None)
        if times is not None:
            _steps.draft_s += times.draft_s
            _steps.verify_s += times.verify_s
        return update_from_output(self, scheduler_output, model_runner_output)

    return collecting
