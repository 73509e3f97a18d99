from array import array

import pytest

from baton.autoscale.histogram import SECONDS, TOKENS, middles, share_below
from baton.autoscale.loads import summed
from baton.services.router.load import RouterCounts
from baton.services.router.state import RequestState


def request(tokens, prompt=100):
    state = RequestState("r", "f", b"", prompt, 1_000, 2_000, 1e9)
    state.tokens = array("I", range(tokens))
    return state


def finish(counts, ttft_s, gap_s, tokens=11):
    state = request(tokens)
    counts.arrived(state)
    state.arrived -= ttft_s
    counts.first_token(state)
    state.timings.last_token = state.first_token + gap_s * (tokens - 1)
    counts.over(state)


def test_each_request_is_counted_at_its_arrival_first_token_and_end():
    counts = RouterCounts()
    for tokens in (1, 5, 11):
        finish(counts, 0.5, 0.02, tokens)
    counts.arrived(request(0, prompt=5_000))
    refused = request(0)
    counts.arrived(refused)
    counts.over(refused)
    counts.image(300)
    counts.image(2_000)
    load = counts.message([1, 2, 3])
    assert (load.over, load.output_tokens, load.waiting) == (4, 17, 3)
    assert load.prompt_tokens == 3 * 100 + 5_000 + 100
    assert middles(load.prompts, TOKENS) == [(96.0, 0.8), (6144.0, 0.2)]
    assert (sum(load.images), load.image_tokens) == (2, 2_300)
    assert sum(load.first_token) == 3
    assert share_below(load.first_token, SECONDS, 0.4) == 0.0
    assert share_below(load.first_token, SECONDS, 0.7) == 1.0
    assert sum(load.gap) == 2  # a single token has none
    assert share_below(load.gap, SECONDS, 0.025) == pytest.approx(1.0)


def test_loads_of_several_models_are_one():
    counts = [RouterCounts() for _ in range(2)]
    for one, tokens in zip(counts, (3, 900), strict=True):
        state = request(0, prompt=tokens)
        one.arrived(state)
        one.first_token(state)
    loads = [one.message([1]) for one in counts]
    whole = summed(loads)
    assert (whole.prompt_tokens, whole.waiting, sum(whole.prompts), sum(whole.first_token)) == (903, 2, 2, 2)
    assert summed(loads[:1]) == loads[0]
