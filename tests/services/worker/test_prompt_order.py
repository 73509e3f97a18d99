"""Short prompts overtake long ones at a real worker."""

import asyncio

from baton.attempts import attempt_id
from harness.support import CALL_S
from tests.services.worker.router import PREFILL, connected, prompt, request

LONG = 900
TURNS = 4


async def test_ten_short_prompts_are_computed_before_earlier_long_ones(prefill):
    """A priority set by a client has no effect.

    Tried again if the machine stalled before the short prompts were sent.
    """
    for turn in range(TURNS):
        over = await _order(prefill, turn)
        assert len(over) == 13
        if all(name.startswith("short") for name in over[:10]):
            return
    raise AssertionError(f"long ones were first {TURNS} times: {over}")


async def _order(prefill, turn):
    """Return the names of three long and ten short requests, in the order of their prefill."""
    seed = 300 + 20 * turn
    longs = [request(f"long {n} {turn}", prompt(LONG, seed=seed + n)) for n in range(3)]
    shorts = [request(f"short {n} {turn}", prompt(20 + 4 * n, seed=seed + 3 + n)) for n in range(10)]
    longs[2].priority = -(2**40)
    over = []
    async with connected(prefill.address) as stream:
        for core in (*longs, *shorts):
            await stream.start(core, PREFILL)
        await _all(stream, [core.request_id for core in (*longs, *shorts)], over)
        await stream.abort(*(core.request_id for core in (*longs, *shorts)))
    return over


async def _all(stream, names, over):
    """Add the names in the order of their first tokens."""
    async with asyncio.timeout(CALL_S):
        while not all(stream._got[name].tokens for name in names):
            await stream._read()
    over += sorted(names, key=lambda name: stream.begun.index(attempt_id(name, 1)))
