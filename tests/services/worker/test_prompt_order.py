"""Short prompts overtake long ones at a real worker."""

from baton.attempts import attempt_id
from tests.services.worker.router import PREFILL, prompt, request

LONG = 900
TURNS = 4


async def test_ten_short_prompts_are_computed_before_earlier_long_ones(source):
    """A priority set by a client has no effect.

    Tried again if the machine stalled before the short prompts were sent.
    """
    for turn in range(TURNS):
        over = await _order(source, turn)
        if all(name.startswith("short") for name in over[:10]):
            return
    raise AssertionError(f"long ones were first {TURNS} times: {over}")


async def _order(source, turn):
    """Return the names of three long and ten short requests, in the order of their first tokens."""
    seed = 300 + 20 * turn
    longs = [request(f"long {n} {turn}", prompt(LONG, seed=seed + n)) for n in range(3)]
    shorts = [request(f"short {n} {turn}", prompt(20 + 4 * n, seed=seed + 3 + n)) for n in range(10)]
    longs[2].priority = -(2**40)
    for core in (*longs, *shorts):
        await source.start(core, PREFILL)
    names = [core.request_id for core in (*longs, *shorts)]
    for name in names:
        await source.some(name, 1)
    await source.abort(*names)
    return sorted(names, key=lambda name: source.begun.index(attempt_id(name, 1)))
