"""A worker's prefill speed, from its engine's counters."""

from __future__ import annotations

from baton.scheduler.types import WorkerRecord

MEASURED_S = 5.0  # s of prefill before the measured speed is used
GUESSED_SPEED = 5_000.0  # prompt tokens per second


def prompt_speed(worker: WorkerRecord) -> float:
    """Return prompt tokens per second: measured, or a guess if the worker has hardly prefilled yet."""
    counts = worker.load.counts if worker.load else None
    if counts is None or counts.busy_s < MEASURED_S or not counts.computed_tokens:
        return GUESSED_SPEED
    return counts.computed_tokens / counts.busy_s
