import random

import pytest

from baton.services.decode.acceptance import (
    FULL_REQUESTS,
    LEAST_REQUESTS,
    AcceptanceWatch,
    DraftCounts,
    RecentDrafts,
)


def counts(drafts, accepted, length=3):
    """Return drafts of one length, of which `accepted` had only their first token accepted."""
    return DraftCounts(drafts, [drafts] * length, [accepted] + [0] * (length - 1))


class Traffic:
    """Requests with a Beta-distributed acceptance, `spread` = a + b."""

    def __init__(self, seed, mean, *, spread=8.0, drafts=20.0):
        self._random = random.Random(seed)
        self.mean = mean
        self._spread = spread
        self._drafts = drafts

    def request(self):
        share = self._random.betavariate(self.mean * self._spread, (1 - self.mean) * self._spread)
        drafts = max(1, int(self._random.expovariate(1 / self._drafts)))
        return drafts, sum(self._random.random() < share for _ in range(drafts))

    def run(self, watch, requests):
        """Return the numbers of the requests that raised an alarm."""
        raised, was = [], watch.alarm
        for number in range(requests):
            watch.finished(*self.request())
            if watch.alarm and not was:
                raised.append(number)
            was = watch.alarm
        return raised


def test_counts_add_up_by_position():
    total = DraftCounts()
    total.add(DraftCounts(2, [2, 2, 1], [2, 1, 0]))
    total.add(DraftCounts(3, [3], [1]))
    assert total == DraftCounts(5, [5, 2, 1], [3, 1, 0])
    assert (total.drafted_tokens, total.accepted_tokens, total.length) == (8, 4, 3)
    assert total.mean_accepted_length == pytest.approx(1.8)
    assert total.first_acceptance == pytest.approx(0.6)


def test_counts_without_drafts():
    nothing = DraftCounts()
    assert (nothing.mean_accepted_length, nothing.first_acceptance, nothing.length) == (0.0, 0.0, 0)


def test_only_the_last_minute_counts():
    recent = RecentDrafts()
    for second in range(120):
        recent.add(counts(1, 1 if second < 60 else 0), float(second))
    last = recent.total(119.0)
    assert 55 <= last.drafts <= 60
    assert last.first_acceptance == 0.0
    assert recent.total(500.0).drafts == 0


@pytest.mark.parametrize("mean", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("drafts", [4.0, 40.0])
def test_no_false_alarm(mean, drafts):
    """A lucky window does not become the reference: 10 workers with 3,000 requests each."""
    for seed in range(10):
        assert Traffic(seed, mean, drafts=drafts).run(AcceptanceWatch(), 3000) == []


@pytest.mark.parametrize("configured", [None, 0.6])
def test_a_loss_of_a_third_is_detected(configured):
    for seed in range(10):
        watch = AcceptanceWatch(configured=configured)
        traffic = Traffic(seed, 0.6)
        assert traffic.run(watch, 1000) == []
        traffic.mean = 0.36
        began = traffic.run(watch, 400)
        assert len(began) == 1
        assert began[0] < 2 * FULL_REQUESTS
        assert "reference is 0." in watch.why


def test_a_new_worker_is_compared_with_its_peers():
    watch = AcceptanceWatch()
    watch.hear(0.6)
    began = Traffic(1, 0.3).run(watch, 300)
    assert began
    assert began[0] < 2 * LEAST_REQUESTS
    assert watch.learned == 0.0


def alarm_after(watch, requests, accepted):
    """Return whether there is an alarm after requests with so many of 100 drafts accepted."""
    for _ in range(requests):
        watch.finished(100, accepted)
    return watch.alarm


def test_a_small_window_is_not_judged():
    watch = AcceptanceWatch(configured=0.9)
    assert not alarm_after(watch, LEAST_REQUESTS - 1, 10)
    assert alarm_after(watch, 1, 10)


def test_a_rate_slightly_below_the_reference_is_no_alarm():
    """0.85 of the reference, with a small error."""
    assert not alarm_after(AcceptanceWatch(configured=0.6), 2000, 51)


def test_the_alarm_clears_with_hysteresis():
    watch = AcceptanceWatch(configured=0.6)
    assert alarm_after(watch, FULL_REQUESTS, 30)
    assert alarm_after(watch, 2 * FULL_REQUESTS, 50)  # 0.83 of the reference neither raises nor clears it
    assert not alarm_after(watch, 2 * FULL_REQUESTS, 58)


@pytest.mark.parametrize("learns", [True, False])
def test_many_drafts_without_an_accepted_token_raise_the_alarm(learns):
    watch = AcceptanceWatch(learns=learns)
    for _ in range(19):
        watch.drafted(counts(10, 0))
    assert not watch.alarm
    watch.drafted(counts(10, 0))
    assert watch.alarm
    assert "no token of the last 200 drafts" in watch.why
    watch.drafted(counts(10, 1))
    assert watch.alarm  # one lucky token does not end it
    watch.drafted(counts(10, 4))
    assert not watch.alarm


def test_a_matching_method_learns_no_reference():
    """Its acceptance depends on the text."""
    watch = AcceptanceWatch(learns=False)
    traffic = Traffic(3, 0.8)
    traffic.run(watch, 1000)
    traffic.mean = 0.1
    assert traffic.run(watch, 1000) == []
    assert watch.reference == 0.0


def test_a_configured_reference_overrides_a_learned_one():
    watch = AcceptanceWatch(configured=0.4)
    watch.hear(0.9)
    Traffic(4, 0.7).run(watch, 1000)
    assert watch.reference == 0.4
    assert watch.learned > 0.55  # told to peers that have none
