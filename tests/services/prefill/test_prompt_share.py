"""A prompt's share of a step follows from measured fixed costs and times per token."""

import random

import pytest

from baton.services.prefill.prompt_share import PromptShare

LEAST, MOST = 512, 2048


def learned(fixed_s, each_s, sizes, steps=60, noise=0.05):
    draw, share = random.Random(7), PromptShare(LEAST, MOST)
    for number in range(steps):
        tokens = sizes[number % len(sizes)]
        share.observe(tokens, (fixed_s + each_s * tokens) * draw.gauss(1.0, noise))
    return share


@pytest.mark.parametrize(
    ("fixed_s", "each_s", "low", "high"),
    [
        (25e-3, 1e-6, MOST, MOST),  # launches dominate
        (5e-3, 350e-6, LEAST, LEAST),  # tokens dominate
        (30e-3, 30e-6, 800, 1250),  # a step of 1,000 tokens takes twice the least time
    ],
)
def test_a_share_takes_as_long_as_a_step_without_tokens(fixed_s, each_s, low, high):
    assert low <= learned(fixed_s, each_s, [64, 512, 300, 2048]).tokens <= high


def test_steps_that_wait_for_a_compiler_are_ignored():
    share = learned(30e-3, 30e-6, [64, 512, 300, 2048])
    before = share.tokens
    for tokens in (64, 2048):
        share.observe(tokens, 4.0)
    assert share.tokens == pytest.approx(before, rel=0.05)


def test_few_steps_or_steps_of_one_size_change_nothing():
    assert learned(25e-3, 0.0, [64, 2048], steps=6).tokens == LEAST
    assert learned(25e-3, 0.0, [512]).tokens == LEAST
