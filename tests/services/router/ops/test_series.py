import pytest

from baton.autoscale.histogram import SECONDS, Histogram, quantile
from baton.services.overview.workers import Sums
from baton.services.router.load import RouterCounts
from baton.services.router.ops.feed import KEPT_SAMPLES as KEPT
from baton.services.router.ops.feed import SERIES_COLUMNS as COLUMNS
from baton.services.router.ops.feed import Series
from harness.scheduling import Clock
from tests.services.router.test_load import finish


def series():
    """Return a router's counts, a clock, and the series that follows them."""
    counts, now = RouterCounts(), Clock()
    return counts, now, Series(lambda: counts.message([1, 2]), lambda: 7, now)


def named(sample):
    return dict(zip(COLUMNS, sample, strict=True))


def test_a_sample_covers_the_last_ten_seconds():
    counts, now, samples = series()
    samples.sample(Sums())
    now.now += 1
    for _ in range(10):
        finish(counts, 0.5, 0.02)
    one = named(samples.sample(Sums(100.0, 50.0, 0.75)))
    assert one["ttft_p50_ms"] == pytest.approx(500, rel=0.25)
    assert one["itl_p99_ms"] == pytest.approx(20, rel=0.25)
    assert (one["requests_per_s"], one["waiting"], one["live"]) == (10.0, 2, 7)
    assert (one["output_tokens_per_s"], one["prefill_tokens_per_s"], one["acceptance"]) == (50.0, 100.0, 0.75)


def test_old_requests_do_not_count():
    counts, now, samples = series()
    samples.sample(Sums())
    finish(counts, 5.0, 0.5)
    for _ in range(12):
        now.now += 1
        samples.sample(Sums())
    last = named(samples.samples[-1])
    assert (last["ttft_p50_ms"], last["requests_per_s"]) == (None, 0.0)


def test_a_quarter_of_an_hour_is_kept():
    _, now, samples = series()
    for _ in range(KEPT + 5):
        now.now += 1
        samples.sample(Sums())
    assert (len(samples.samples), samples.samples[-1][0]) == (KEPT, 1_000 + KEPT + 5)


def test_quantiles_of_buckets():
    counted = Histogram(SECONDS)
    assert quantile(counted.counts, SECONDS, 0.5) is None
    for number in range(1, 101):
        counted.add(number / 100)
    for share in (0.1, 0.5, 0.9, 0.99):
        assert quantile(counted.counts, SECONDS, share) == pytest.approx(share, rel=0.15)
    counted.add(1_000.0)
    assert quantile(counted.counts, SECONDS, 1.0) == pytest.approx(2 * SECONDS[-1])
