"""A long prompt does not stand in front of short ones at a worker, nor they for ever in front of it."""

from __future__ import annotations

import asyncio

from baton.services.prefill import fair_share
from tests.services.worker.fleet import Worker
from tests.services.worker.router import PREFILL, Stream, connected, prompt, request

LONG = 900


def test_short_prompts_overtake_long_ones_for_a_bounded_time() -> None:
    long = fair_share.priority(100.0, LONG)
    assert fair_share.priority(100.1, 40) < long
    assert fair_share.priority(100.0 + LONG / 1000 + 0.01, 1) > long
    endless = fair_share.priority(100.0, 1_000_000)
    assert fair_share.priority(100.0 + fair_share.MOST_MS / 1e3 + 0.01, 1) > endless
    assert fair_share.priority(100.0, 0) < fair_share.priority(100.001, 0)  # the order of arrival


def test_a_step_has_room_for_all_who_write() -> None:
    assert fair_share.step_tokens(16, 4) == fair_share.CPU_STEP_TOKENS
    assert fair_share.step_tokens(128, 8) == 128 * 9
    assert fair_share.share_of(256) == 64
    assert fair_share.share_of(2) == 1


async def test_ten_short_prompts_are_read_before_the_long_ones_that_came_first(prefill: Worker) -> None:
    """One client asks for the front of the queue: it gets no better place by that."""
    longs = [request(f"long {n}", prompt(LONG, seed=300 + n)) for n in range(3)]
    shorts = [request(f"short {n}", prompt(20 + 4 * n, seed=320 + n)) for n in range(10)]
    longs[2].priority = -(2**40)
    over: list[str] = []
    async with connected(prefill.address) as stream:
        for core in (*longs, *shorts):
            await stream.start(core, PREFILL)
        await _all(stream, [core.request_id for core in (*longs, *shorts)], over)
        await stream.abort(*(core.request_id for core in (*longs, *shorts)))
    assert set(over[:10]) == {core.request_id for core in shorts}
    assert set(over[10:]) == {core.request_id for core in longs}


async def _all(stream: Stream, names: list[str], over: list[str]) -> None:
    """Note the names in the order in which their prompts were read."""
    async with asyncio.timeout(30):
        while len(over) < len(names):
            await stream._read()
            over += [name for name in names if name not in over and stream._got[name].tokens]
