import pytest

from baton.services.router import recovery
from baton.services.router.recovery import SHORT_PROMPT_TOKENS, Failure, Trouble, backoff_s

Step = recovery.RecoveryStep


@pytest.mark.parametrize(
    ("trouble", "failures_left", "tokens", "step"),
    [
        (Trouble.LOST, 2, 10, Step.PLACE_AGAIN),
        (Trouble.LOST, 0, 10, Step.GIVE_UP),
        (Trouble.ENGINE, 0, 10, Step.PLACE_AGAIN),  # trials have their own limits
        (Trouble.INVALID, 2, 10, Step.GIVE_UP),
        (Trouble.HANDOFF, 2, SHORT_PROMPT_TOKENS, Step.COMPUTE_HERE),
        (Trouble.HANDOFF, 2, SHORT_PROMPT_TOKENS + 1, Step.PLACE_AGAIN),
        (Trouble.HANDOFF, 0, 10**6, Step.COMPUTE_HERE),
        (Trouble.PREFIX, 0, 10**6, Step.SAME_WORKERS),
        (Trouble.ENCODE, 0, 10**6, Step.SAME_WORKERS),
        (Trouble.NOT_KEPT, 0, 10**6, Step.COMPUTE_HERE),
        (Trouble.REFUSED, 0, 10**6, Step.PLACE_AGAIN),  # it does not count
        (Trouble.FULL, 0, 10**6, Step.PLACE_AGAIN),
        (Trouble.UNREACHABLE, 0, 10**6, Step.PLACE_AGAIN),
    ],
)
def test_next_step(trouble, failures_left, tokens, step):
    failure = Failure(trouble, "w", "")
    assert recovery.next_step(failure, failures_left=failures_left, tokens_to_prefill=tokens) is step


def test_backoff_doubles_up_to_a_limit():
    assert backoff_s(0) == backoff_s(1) == 0
    waits = [backoff_s(retries) for retries in range(2, 30)]
    assert 0.75 * recovery.BACKOFF_S <= waits[0] <= 1.25 * recovery.BACKOFF_S
    assert all(wait <= 1.25 * recovery.MOST_BACKOFF_S for wait in waits)
    assert waits[-1] >= 0.75 * recovery.MOST_BACKOFF_S
    assert sum(waits[:4]) < recovery.MOST_BACKOFF_S


@pytest.mark.parametrize(
    ("failed", "workers"),
    [
        ("", 0),
        ("a", 1),
        ("aa", 1),  # it fell silent, came back, and ended
        ("abab", 2),
        ("abcabc", 3),
        ("aaa", 2),  # a request that breaks the same worker's stream each time must end
        ("aaaaa", 4),
        ("abcd", 4),
        ("aabbccdd", 4),
    ],
)
def test_the_toll_counts_workers_instead_of_attempts(failed, workers):
    toll = recovery.Toll()
    for worker_id in failed:
        toll.add(worker_id)
    assert len(toll) == workers
    toll.clear()
    assert len(toll) == 0


@pytest.mark.parametrize(
    ("prefill", "decode", "begun", "worker_id", "trouble"),
    [
        (None, None, True, "", None),
        (None, None, False, "", None),
        # The attempt fails for the prefill's reason, whatever the decode leg reports.
        (Trouble.LOST, None, False, "p", Trouble.LOST),
        (Trouble.LOST, Trouble.SOURCE, False, "p", Trouble.LOST),
        (Trouble.LOST, Trouble.HANDOFF, False, "p", Trouble.LOST),
        (Trouble.LOST, Trouble.LOST, False, "p", Trouble.LOST),
        (Trouble.NOT_KEPT, Trouble.HANDOFF, True, "p", Trouble.NOT_KEPT),
        (Trouble.PREFIX, None, False, "p", Trouble.PREFIX),
        (Trouble.PREFIX, Trouble.HANDOFF, False, "p", Trouble.PREFIX),
        # But a missing prefix is not the reason if the decode worker is gone too.
        (Trouble.PREFIX, Trouble.LOST, False, "d", Trouble.UNREACHABLE),
        (Trouble.PREFIX, Trouble.FULL, False, "d", Trouble.FULL),
        # During the prefill, the decode worker's failure is the attempt's.
        (None, Trouble.HANDOFF, False, "d", Trouble.HANDOFF),
        (None, Trouble.SOURCE, False, "d", Trouble.SOURCE),
        (None, Trouble.FULL, False, "d", Trouble.FULL),
        (None, Trouble.REFUSED, False, "d", Trouble.REFUSED),
        (None, Trouble.UNREACHABLE, False, "d", Trouble.UNREACHABLE),
        (None, Trouble.STALE, False, "d", Trouble.STALE),
        (None, Trouble.INVALID, False, "d", Trouble.INVALID),
        # A worker that dies before the request could begin there was not killed by it.
        (None, Trouble.LOST, False, "d", Trouble.UNREACHABLE),
        (None, Trouble.ENGINE, False, "d", Trouble.UNREACHABLE),
        (None, Trouble.LOST, True, "d", Trouble.LOST),
        (None, Trouble.ENGINE, True, "d", Trouble.ENGINE),
    ],
)
def test_an_attempt_s_failure_from_its_two_legs(prefill, decode, begun, worker_id, trouble):
    legs = [Failure(why, name, "") if why else None for why, name in ((prefill, "p"), (decode, "d"))]
    failure = recovery.failure_of_pair(*legs, begun=begun)
    assert (failure.trouble if failure else None) is trouble
    assert (failure.worker_id if failure else "") == worker_id
