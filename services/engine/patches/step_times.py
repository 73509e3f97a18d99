"""How long the parts of an engine step take: drafting, the model's forward pass with sampling, the rest.

Measured in each rank, and carried to the scheduler's process on the step's output: a rank may be another
process. What is measured is the time of the calls. On CPU that is the work itself. On a GPU a call returns
when its work is launched, and the wait for it falls to whoever first reads a result, which is the sampling.

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

_KEY = "_baton_times"  # on a step's output and on a rank's worker


@dataclass(slots=True)
class StepTimes:
    """Seconds. `verify_s`: the forward pass of the target and the sampling, which verifies drafts."""

    draft_s: float = 0.0
    verify_s: float = 0.0


_steps = StepTimes()  # of the scheduler's process, since `take`
_drafting = StepTimes()  # of this rank, in the step under way


def take() -> StepTimes:
    """What the steps since the last call took. In the scheduler's process, by the thread that steps."""
    taken = StepTimes(_steps.draft_s, _steps.verify_s)
    _steps.draft_s = _steps.verify_s = 0.0
    return taken


def install() -> None:
    """Time the steps of this process from now on; harmless when called again."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.gpu_worker import Worker

    if hasattr(Worker.execute_model, _KEY):
        return
    Worker.execute_model = _timed_execute(Worker.execute_model)
    Worker.sample_tokens = _timed_sample(Worker.sample_tokens)
    Scheduler.update_from_output = _collecting(Scheduler.update_from_output)


def _timed_execute(execute_model: Any) -> Any:
    @functools.wraps(execute_model)
    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        began = perf_counter()
        output = execute_model(self, *args, **kwargs)
        # None: the step goes on with sample_tokens. Any other output ends it, without a forward pass.
        setattr(self, _KEY, None if output is not None else perf_counter() - began)
        return output

    setattr(timed, _KEY, True)
    return timed


def _timed_sample(sample_tokens: Any) -> Any:
    @functools.wraps(sample_tokens)
    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        forward_s = getattr(self, _KEY, None)
        if forward_s is None:
            return sample_tokens(self, *args, **kwargs)
        setattr(self, _KEY, None)
        _time_drafter(self.model_runner)
        _drafting.draft_s = 0.0
        began = perf_counter()
        output = sample_tokens(self, *args, **kwargs)
        draft_s = _drafting.draft_s
        return _marked(output, StepTimes(draft_s, forward_s + perf_counter() - began - draft_s))

    return timed


def _time_drafter(runner: Any) -> None:
    """Wrap who drafts, once; found when it is first used, as runners differ and others wrap it too."""
    if hasattr(runner, _KEY):
        return
    setattr(runner, _KEY, True)
    if hasattr(runner, "propose_draft_token_ids"):
        runner.propose_draft_token_ids = _timed_draft(runner.propose_draft_token_ids)
    elif getattr(runner, "speculator", None) is not None:
        runner.speculator.propose = _timed_draft(runner.speculator.propose)


def _timed_draft(propose: Any) -> Any:
    @functools.wraps(propose)
    def timed(*args: Any, **kwargs: Any) -> Any:
        began = perf_counter()
        try:
            return propose(*args, **kwargs)
        finally:
            _drafting.draft_s += perf_counter() - began

    return timed


def _marked(output: Any, times: StepTimes) -> Any:
    """The output with the times on it; one that is still being computed gets them when it is there."""
    if hasattr(output, "get_output"):
        get_output = output.get_output
        output.get_output = lambda: _marked(get_output(), times)
    elif output is not None:
        setattr(output, _KEY, times)
    return output


def _collecting(update_from_output: Any) -> Any:
    @functools.wraps(update_from_output)
    def collecting(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        times = getattr(model_runner_output, _KEY, None)
        if times is not None:
            _steps.draft_s += times.draft_s
            _steps.verify_s += times.verify_s
        return update_from_output(self, scheduler_output, model_runner_output)

    return collecting
