"""The length of steps that first-class prompts must wait for."""

import pytest

from baton.services.prefill.step_length import LEAST_TOKENS, PART, StepLength

TTFT_S = 0.1
MOST = 256


def settled(fixed_s, token_s, ttft_s=TTFT_S):
    """Run steps of `fixed_s` and `token_s` per token; return the last one's tokens and seconds."""
    length, tokens, seconds = StepLength(MOST), 0, 0.0
    for _ in range(100):
        tokens = length.tokens
        seconds = fixed_s + tokens * token_s
        length.observe(tokens, seconds, ttft_s)
    return tokens, seconds


def test_steps_are_limited_to_a_part_of_the_goal():
    tokens, seconds = settled(0.004, 0.0003)
    assert LEAST_TOKENS < tokens < MOST
    assert seconds == pytest.approx(PART * TTFT_S, rel=0.1)


def test_quick_steps_are_not_limited():
    assert settled(0.004, 0.00005)[0] == MOST
    assert settled(0.004, 0.0003, ttft_s=1.0)[0] == MOST


def test_an_impossible_goal_gives_the_shortest_step():
    assert settled(0.5, 0.001)[0] == LEAST_TOKENS


def test_a_step_that_is_not_full_does_not_raise_the_limit():
    length = StepLength(MOST)
    while length.tokens > 64:
        length.observe(length.tokens, 1.0, TTFT_S)
    before = length.tokens
    for _ in range(10):
        length.observe(8, 0.001, TTFT_S)
        length.observe(0, 9.0, TTFT_S)
    assert length.tokens == before
    length.observe(before, 0.001, TTFT_S)
    assert length.tokens > before
