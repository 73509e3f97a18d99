"""The bench of the scheduler over Redis fails where its figures would be of something else."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from threading import Timer

import pytest

from baton.scheduler.store.redis import CALL_TIMEOUT_S
from bench import scheduler_cpu
from bench.scheduler import _identity


@pytest.mark.timeout(120)
def test_a_run_in_which_the_scheduler_loses_its_store_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    measure = scheduler_cpu._measure

    def disturbed(
        rate: int, hold_s: float, address: str, schedulers: list[int], redis: int, folder: Path
    ) -> dict[str, float]:
        stop = Timer(0.5, os.kill, (redis, signal.SIGSTOP))
        go_on = Timer(0.5 + 2 * CALL_TIMEOUT_S, os.kill, (redis, signal.SIGCONT))
        for timer in (stop, go_on):
            timer.start()
        return measure(rate, hold_s, address, schedulers, redis, folder)

    monkeypatch.setattr(scheduler_cpu, "_measure", disturbed)
    workers = [_identity(number) for number in range(2)]
    with pytest.raises(SystemExit, match=r"the store was lost \d+ times") as failed:
        scheduler_cpu.measure(20, 3.0, workers)
    assert "'asked_per_s': 20, 'placed_per_s': " in str(failed.value)  # all else was measured
    assert "'failed': 0" in str(failed.value)
