"""How many tokens of prompts a step has that nobody can overtake."""

from __future__ import annotations

import pytest

from baton.services.prefill.step_length import LEAST_TOKENS, PART, StepLength

TTFT_S = 0.1
MOST = 256


def settled(fixed_s: float, token_s: float, ttft_s: float = TTFT_S) -> tuple[int, float]:
    """Let steps take `fixed_s`, and `token_s` for each token; return the last one's tokens and seconds."""
    length, tokens, seconds = StepLength(MOST), 0, 0.0
    for _ in range(100):
        tokens = length.tokens
        seconds = fixed_s + tokens * token_s
        length.observe(tokens, seconds, ttft_s)
    return tokens, seconds


def test_steps_become_a_part_of_the_goal() -> None:
    tokens, seconds = settled(0.004, 0.0003)
    assert LEAST_TOKENS < tokens < MOST
    assert seconds == pytest.approx(PART * TTFT_S, rel=0.1)


def test_quick_steps_keep_all_their_tokens() -> None:
    assert settled(0.004, 0.00005)[0] == MOST
    assert settled(0.004, 0.0003, ttft_s=1.0)[0] == MOST


def test_a_goal_that_no_step_meets_leaves_the_least() -> None:
    assert settled(0.5, 0.001)[0] == LEAST_TOKENS


def test_a_step_that_was_not_full_says_nothing_of_more_tokens() -> None:
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
