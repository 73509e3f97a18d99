"""Requests that give way fill a step up to the goal, and do not starve."""

import math

import pytest

from baton.services.decode.step_share import MOST_ALONE_S, Contest, StepShare

GOAL_S = 0.1


def decoding(rows=1, goal_s=GOAL_S, share=0.1):
    return Contest(rows, prompts=False, goal_s=goal_s, share=share)


def settled(step_s, row_s, contest, steps=400):
    """Run steps of `step_s` and `row_s` per request that gives way; return the last time and number."""
    share, seconds = StepShare(), 0.0
    for _ in range(steps):
        rows = min(64, int(share.rows(contest)))
        seconds = step_s + rows * row_s
        share.observe(contest, seconds, 0.0, rows, held=rows < 64)
    return seconds, rows


def test_steps_become_as_full_as_the_goal_allows():
    seconds, rows = settled(0.05, 0.001, decoding())
    assert 0.85 * GOAL_S < seconds <= GOAL_S
    assert rows >= 36
    assert settled(0.05, 0.0, decoding())[1] == 64  # nothing is gained by leaving requests out


def test_a_share_stays_if_the_goal_cannot_be_met():
    assert settled(0.2, 0.001, decoding())[1] == 1
    assert settled(0.2, 0.001, decoding(rows=30))[1] == 4  # a tenth
    assert settled(0.2, 0.001, decoding(share=0.5, rows=8))[1] == 8


def test_without_a_goal_all_take_part():
    assert StepShare().rows(decoding(goal_s=0)) == math.inf


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_time_is_shared_while_there_are_prompts(share):
    """However long a step takes, requests that give way get their share in the long run."""
    shares, contest = StepShare(), Contest(0, prompts=True, goal_s=0, share=share)
    had = total = 0.0
    for number in range(2_000):
        seconds, part = (0.05 + 0.01 * (number % 7), 0.3) if shares.may_prefill else (0.08, 0.0)
        assert (shares.rows(contest) == math.inf) == shares.may_prefill
        shares.observe(contest, seconds, part, 0, held=False)
        had, total = had + seconds * part, total + seconds
    assert had / total == pytest.approx(min(share, 0.3), rel=0.1)


def test_time_alone_counts_against_the_share_of_the_next_prompt():
    shares, contest = StepShare(), Contest(0, prompts=True, goal_s=0, share=0.1)
    shares.observe_alone(0.05, 0.0)  # no prompts in it
    assert shares.may_prefill
    for _ in range(1_000):
        shares.observe_alone(0.05, 1.0)
    paid_s = 0.0
    while not shares.may_prefill:
        shares.observe(contest, 0.05, 0.0, 0, held=True)
        paid_s += 0.05
    assert paid_s == pytest.approx(0.9 / 0.1 * MOST_ALONE_S, rel=0.02)
