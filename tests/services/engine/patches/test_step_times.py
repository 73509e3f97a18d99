"""Step times, measured on stand-ins for vLLM's classes: which calls are timed, and where the times arrive."""

import pickle
import time
from dataclasses import dataclass

import pytest

from baton.services.engine.patches import step_times
from baton.services.engine.patches.replace import around

DRAFT_S, SAMPLE_S, FORWARD_S = 0.006, 0.003, 0.009


def busy(seconds):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


@dataclass
class Output:
    """Like vLLM's ModelRunnerOutput, which is pickled on its way from a rank."""

    tokens: int = 1


class LateOutput:
    """Like its AsyncModelRunnerOutput."""

    def get_output(self):
        return Output()


class Runner:
    def propose_draft_token_ids(self):
        busy(DRAFT_S)


class Speculator:
    def propose(self):
        busy(DRAFT_S)


class RunnerV2:
    def __init__(self):
        self.speculator = Speculator()


class Worker:
    def __init__(self, runner, late=False):
        self.model_runner = runner
        self._late = late

    def execute_model(self, idle=False):
        if idle:
            return Output()
        busy(FORWARD_S)
        return None

    def sample_tokens(self):
        busy(SAMPLE_S)
        runner = self.model_runner
        propose = (
            runner.speculator.propose if isinstance(runner, RunnerV2) else runner.propose_draft_token_ids
        )
        propose()
        return LateOutput() if self._late else Output()


class Scheduler:
    def update_from_output(self, scheduler_output, output):
        del scheduler_output
        return output


@pytest.fixture(autouse=True)
def _timed(monkeypatch):
    for owner, name, ours in (
        (Worker, "execute_model", step_times.time_execute),
        (Worker, "sample_tokens", step_times.time_sample),
        (Runner, "propose_draft_token_ids", step_times.time_draft),
        (Scheduler, "update_from_output", step_times.collect),
    ):
        monkeypatch.setattr(owner, name, around(getattr(owner, name), ours))
    step_times.take()


@pytest.mark.parametrize("runner", [Runner, RunnerV2])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("other_process", [False, True])
def test_the_parts_of_steps(runner, late, other_process):
    worker, scheduler = Worker(runner(), late), Scheduler()
    began = time.perf_counter()
    for _ in range(3):
        assert worker.execute_model() is None
        output = worker.sample_tokens()
        output = output.get_output() if late else output
        output = pickle.loads(pickle.dumps(output)) if other_process else output
        scheduler.update_from_output(None, output)
    times = step_times.take()
    assert times.draft_s >= 3 * DRAFT_S
    assert times.verify_s >= 3 * (FORWARD_S + SAMPLE_S)
    assert times.draft_s + times.verify_s <= time.perf_counter() - began
    assert step_times.take() == step_times.StepPhases()


def test_a_step_without_a_forward_pass_takes_no_time():
    worker, scheduler = Worker(Runner()), Scheduler()
    scheduler.update_from_output(None, worker.execute_model(idle=True))
    assert step_times.take() == step_times.StepPhases()
