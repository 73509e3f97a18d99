"""The next step after a failure, and the back-off."""

from __future__ import annotations

import pytest

from baton.services.router.recovery import (
    BACKOFF_S,
    MOST_BACKOFF_S,
    SHORT_PROMPT_TOKENS,
    Failure,
    RecoveryStep,
    Toll,
    Trouble,
    backoff_s,
    next_step,
)


@pytest.mark.parametrize(
    ("trouble", "failures_left", "tokens", "step"),
    [
        (Trouble.LOST, 2, 10, RecoveryStep.PLACE_AGAIN),
        (Trouble.LOST, 0, 10, RecoveryStep.GIVE_UP),
        (Trouble.ENGINE, 0, 10, RecoveryStep.PLACE_AGAIN),  # it is tried alone, and this has its own limits
        (Trouble.INVALID, 2, 10, RecoveryStep.GIVE_UP),
        (Trouble.HANDOFF, 2, SHORT_PROMPT_TOKENS, RecoveryStep.COMPUTE_HERE),
        (Trouble.HANDOFF, 2, SHORT_PROMPT_TOKENS + 1, RecoveryStep.PLACE_AGAIN),
        (Trouble.HANDOFF, 0, 10**6, RecoveryStep.COMPUTE_HERE),
        (Trouble.PREFIX, 0, 10**6, RecoveryStep.WITHOUT_PREFIX),
        (Trouble.NOT_KEPT, 0, 10**6, RecoveryStep.COMPUTE_HERE),
        (Trouble.REFUSED, 0, 10**6, RecoveryStep.PLACE_AGAIN),  # it had not begun
        (Trouble.FULL, 0, 10**6, RecoveryStep.PLACE_AGAIN),
        (Trouble.UNREACHABLE, 0, 10**6, RecoveryStep.PLACE_AGAIN),
    ],
)
def test_next_step(trouble: Trouble, failures_left: int, tokens: int, step: RecoveryStep) -> None:
    failure = Failure(trouble, "w", "")
    assert next_step(failure, failures_left=failures_left, tokens_to_prefill=tokens) is step


def test_backoff_doubles_up_to_a_limit() -> None:
    assert backoff_s(0) == backoff_s(1) == 0
    waits = [backoff_s(retries) for retries in range(2, 30)]
    assert 0.75 * BACKOFF_S <= waits[0] <= 1.25 * BACKOFF_S
    assert all(wait <= 1.25 * MOST_BACKOFF_S for wait in waits)
    assert waits[-1] >= 0.75 * MOST_BACKOFF_S
    assert sum(waits[:4]) < MOST_BACKOFF_S


@pytest.mark.parametrize(
    ("failed", "workers"),
    [
        ("", 0),
        ("a", 1),
        ("aa", 1),  # it fell silent, came back, and ended
        ("abab", 2),
        ("abcabc", 3),
        ("aaa", 2),  # what breaks one worker's stream each time must come to an end, too
        ("aaaaa", 4),
        ("abcd", 4),
        ("aabbccdd", 4),
    ],
)
def test_workers_count_and_not_attempts(failed: str, workers: int) -> None:
    toll = Toll()
    for worker_id in failed:
        toll.add(worker_id)
    assert len(toll) == workers
    toll.clear()
    assert len(toll) == 0
