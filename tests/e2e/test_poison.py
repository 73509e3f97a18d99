"""Requests that break an engine's step together with streams: only they fail, and others are served."""

import asyncio

import aiohttp
import pytest

from harness.deployment import MODEL_NAME, deployment, free_blocks, idle
from harness.poison import FOLDER, dose
from harness.support import CALL_S, QUICK, eventually

pytestmark = pytest.mark.timeout(300)

STREAMS, TOKENS = 4, 40
FAILED = "its engine failed"  # printed by `baton up`
KILLED = "died (signal SIGKILL)"  # likewise


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    with deployment(tmp_path_factory.mktemp("poison"), path=FOLDER, constants=QUICK) as one:
        yield one.up()


def body(number, **more):
    prompt = [100 + number, *range(20, 60)]
    given = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    return {"model": MODEL_NAME, "return_token_ids": True, **given, **more}


async def _ask(http, asked):
    """Return the status and the answer's tokens, or the error's text."""
    async with http.post("/v1/completions", json=asked) as response:
        got = await response.json()
        if response.status != 200:
            return response.status, got["error"]["message"]
        return 200, got["choices"][0]["token_ids"]


def ask(one, bodies, delay_s=0.0):
    """Send all at once, the poisonous ones after `delay_s`."""

    async def run():
        timeout = aiohttp.ClientTimeout(total=4 * CALL_S)
        async with aiohttp.ClientSession(one.url, timeout=timeout) as http:

            async def send(asked):
                if "vllm_xargs" in asked:
                    await asyncio.sleep(delay_s)
                return await _ask(http, asked)

            return list(await asyncio.gather(*(send(asked) for asked in bodies)))

    return asyncio.run(run())


@pytest.fixture(scope="module")
def expected(one):
    found = [ask(one, [body(number)])[0] for number in range(STREAMS)]
    assert {status for status, _ in found} == {200}
    return found


def said(one):
    return one.processes["up"].text


def test_streams_continue_beside_requests_that_break_steps(one, expected):
    eventually(lambda: idle(one), CALL_S, "the deployment is idle")
    workers = [one.worker(role)["identity"]["worker_id"] for role in ("prefill", "decode")]
    blocks = free_blocks(one)
    doses = [dose("alone", where, after) for where, after in (("sample", 0), ("sample", 9), ("update", 5))]
    single = [body(50 + number, vllm_xargs=one) for number, one in enumerate(doses)]
    pair = [body(70 + number, vllm_xargs=dose("pair", "sample", 3)) for number in range(2)]
    found = ask(one, [*map(body, range(STREAMS)), *single, *pair], delay_s=0.3)
    assert found[:STREAMS] == expected, "token for token as alone"
    for status, text in found[STREAMS : STREAMS + len(single)]:
        assert status == 500
        assert "while it ran this request alone" in text
        assert "the poison acts in" in text
    assert [status for status, _ in found[STREAMS + len(single) :]] == [200, 200], "poison only together"
    for status, text in ask(one, single):
        assert status == 422
        assert "made an engine fail a short while ago" in text
    assert [one.worker(role)["identity"]["worker_id"] for role in ("prefill", "decode")] == workers
    assert "restarting" not in said(one)
    eventually(lambda: idle(one) and free_blocks(one) == blocks, CALL_S, "all blocks are free again")


def test_a_request_that_ends_processes_takes_two_and_uses_up_no_restart(one, expected):
    before = said(one).count(FAILED)
    fatal = body(90, vllm_xargs=dose("sticky", "sample", 3))
    found = ask(one, [*map(body, range(STREAMS)), fatal], delay_s=0.3)
    assert found[:STREAMS] == expected
    status, text = found[-1]
    assert status == 500
    assert "CUDA error" in text
    eventually(lambda: said(one).count(FAILED) > before, CALL_S, "the supervisor has seen a failed engine")
    both = ("prefill", "decode")
    eventually(lambda: all(one.workers(role) for role in both), 2 * CALL_S, "both workers are back")
    assert said(one).count(FAILED) - before <= 2
    assert "within 10 min" not in said(one), "no restart is counted"
    assert ask(one, [body(0)]) == expected[:1]


def test_a_request_that_kills_processes_is_given_up_and_its_neighbours_continue(one, expected):
    """A kill does not name its request, so later requests are not refused."""
    before = said(one).count(KILLED)
    kills = body(91, vllm_xargs=dose("kill", "sample", 3))
    found = ask(one, [*map(body, range(STREAMS)), kills], delay_s=0.3)
    assert found[:STREAMS] == expected
    status, text = found[-1]
    assert status == 503
    assert "4 workers of at most 4 failed under the request" in text
    eventually(lambda: all(one.workers(role) for role in ("prefill", "decode")), 2 * CALL_S, "both are back")
    eventually(lambda: said(one).count(KILLED) - before == 4, CALL_S, "the supervisor has seen four deaths")
    assert ask(one, [body(0)]) == expected[:1]
