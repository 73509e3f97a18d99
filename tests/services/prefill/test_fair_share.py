"""The order of prompts in an engine's queue, and their shares of a step."""

from baton.services.prefill import fair_share


def test_short_prompts_overtake_long_ones_for_a_bounded_time():
    long = fair_share.priority(100.0, 900)
    assert fair_share.priority(100.1, 40) < long
    assert fair_share.priority(100.0 + 900 / 1000 + 0.01, 1) > long
    endless = fair_share.priority(100.0, 1_000_000)
    assert fair_share.priority(100.0 + fair_share.MOST_MS / 1e3 + 0.01, 1) > endless
    assert fair_share.priority(100.0, 0) < fair_share.priority(100.001, 0)  # the order of arrival


def test_handed_over_requests_go_first_for_a_bounded_time():
    """A prompt that is computed at a decode worker does not starve."""
    lead_s = fair_share.HANDED_OVER_MS / 1e3
    computed = fair_share.priority(100.0, 40)
    assert fair_share.priority(100.0 + lead_s - 0.1, 0, handed_over=True) < computed
    assert fair_share.priority(100.0 + lead_s + 0.1, 0, handed_over=True) > computed
    first, second = (fair_share.priority(at, 0, handed_over=True) for at in (100.0, 100.001))
    assert first < second


def test_a_step_has_room_for_all_decoding_requests():
    assert fair_share.step_tokens(16, 4) == fair_share.CPU_STEP_TOKENS
    assert fair_share.step_tokens(128, 8) == 128 * 9
    assert fair_share.share_of(256) == 64
    assert fair_share.share_of(2) == 1
