"""A long prompt does not stand in front of short ones at a worker, nor they for ever in front of it."""

from __future__ import annotations

import asyncio

from baton.services.prefill import fair_share
from harness.support import CALL_S
from harness.workers import Worker
from tests.services.worker.router import PREFILL, Stream, connected, prompt, request

LONG = 900
TURNS = 4


def test_short_prompts_overtake_long_ones_for_a_bounded_time() -> None:
    long = fair_share.priority(100.0, LONG)
    assert fair_share.priority(100.1, 40) < long
    assert fair_share.priority(100.0 + LONG / 1000 + 0.01, 1) > long
    endless = fair_share.priority(100.0, 1_000_000)
    assert fair_share.priority(100.0 + fair_share.MOST_MS / 1e3 + 0.01, 1) > endless
    assert fair_share.priority(100.0, 0) < fair_share.priority(100.001, 0)  # the order of arrival


def test_what_was_handed_over_goes_before_a_burst_but_not_for_ever() -> None:
    """An answer that is computed anew at a decode worker (here at 100 s) does not starve behind handoffs."""
    lead_s = fair_share.HANDED_OVER_MS / 1e3
    reads = fair_share.priority(100.0, 40)
    assert fair_share.priority(100.0 + lead_s - 0.1, 0, handed_over=True) < reads
    assert fair_share.priority(100.0 + lead_s + 0.1, 0, handed_over=True) > reads
    first, second = (fair_share.priority(at, 0, handed_over=True) for at in (100.0, 100.001))
    assert first < second


def test_a_step_has_room_for_all_who_write() -> None:
    assert fair_share.step_tokens(16, 4) == fair_share.CPU_STEP_TOKENS
    assert fair_share.step_tokens(128, 8) == 128 * 9
    assert fair_share.share_of(256) == 64
    assert fair_share.share_of(2) == 1


async def test_ten_short_prompts_are_read_before_the_long_ones_that_came_first(prefill: Worker) -> None:
    """One client asks for the front of the queue: it gets no better place by that.

    Where the machine stands still before the short ones are sent, the long ones are read: then once more.
    """
    for turn in range(TURNS):
        over = await _order(prefill, turn)
        assert len(over) == 13
        if all(name.startswith("short") for name in over[:10]):
            return
    raise AssertionError(f"long ones were first {TURNS} times: {over}")


async def _order(prefill: Worker, turn: int) -> list[str]:
    """Return the names of three long requests and ten short ones, in the order of their prefill."""
    seed = 300 + 20 * turn
    longs = [request(f"long {n} {turn}", prompt(LONG, seed=seed + n)) for n in range(3)]
    shorts = [request(f"short {n} {turn}", prompt(20 + 4 * n, seed=seed + 3 + n)) for n in range(10)]
    longs[2].priority = -(2**40)
    over: list[str] = []
    async with connected(prefill.address) as stream:
        for core in (*longs, *shorts):
            await stream.start(core, PREFILL)
        await _all(stream, [core.request_id for core in (*longs, *shorts)], over)
        await stream.abort(*(core.request_id for core in (*longs, *shorts)))
    return over


async def _all(stream: Stream, names: list[str], over: list[str]) -> None:
    """Note the names in the order in which their prompts were read."""
    async with asyncio.timeout(CALL_S):
        while len(over) < len(names):
            await stream._read()
            over += [name for name in names if name not in over and stream._got[name].tokens]
