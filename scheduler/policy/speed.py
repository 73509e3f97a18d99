"""The speed at which a worker computes prompts, from its engine's counters."""

from __future__ import annotations

from baton.scheduler.types import WorkerRecord

MEASURED_S = 5.0  # s of work before a worker's own speed is used
GUESSED_SPEED = 5_000.0  # prompt tokens a second


def prompt_speed(worker: WorkerRecord) -> float:
    """Return a worker's prompt tokens per second; a guess until it has computed prompts for a while."""
    counts = worker.load.counts if worker.load else None
    if counts is None or counts.busy_s < MEASURED_S or not counts.computed_tokens:
        return GUESSED_SPEED
    return counts.computed_tokens / counts.busy_s
