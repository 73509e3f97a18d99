"""1P1D on separate hosts, over wires with delay and loss that are cut between the workers for a while.

Both workers can always reach the router and the scheduler, so every request is answered, with the same tokens
as one engine, even while the wire is cut.
"""

import asyncio
import os
import time
from dataclasses import dataclass

import openai
import pytest

from harness.deployment import MODEL_NAME
from harness.greedy import token_ids
from harness.links import Wire, why_not
from harness.prompts import prompts
from harness.support import CALL_S, PATIENCE, eventually
from harness.wired import wired

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
MAX_TOKENS = 24
LEASE_S = 2.0
FOUND_DEAD_S = 12.0  # until TCP gives up a dead connection, on an idle machine; see baton/rpc.py
CLIENTS = 4


@dataclass
class Told:
    """An answer and its handoff."""

    tokens: list[int]
    prefilled_by: str
    handoff_ms: float


@pytest.fixture(scope="module")
def deployed(tmp_path_factory):
    scheduler = {"worker_lease_s": LEASE_S, "idle_decode_tokens": 0}
    with wired(tmp_path_factory.mktemp("links"), {"scheduler": scheduler}) as one:
        yield one


async def ask(url, asked, **body):
    slots = asyncio.Semaphore(CLIENTS)

    async def one(client, prompt):
        async with slots:
            done = await client.completions.create(
                model=MODEL_NAME,
                prompt=prompt,
                max_tokens=MAX_TOKENS,
                temperature=0,
                extra_body={"return_token_ids": True, **body},
            )
        cost = (done.usage.model_extra or {}).get("baton", {}) if done.usage else {}
        return Told(token_ids(done), cost.get("prefill_worker", ""), cost.get("handoff_ms", 0.0))

    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", timeout=CALL_S, max_retries=0
    ) as client:
        return list(await asyncio.gather(*(one(client, prompt) for prompt in asked)))


def through(one, asked):
    """Ask the deployment with a new cache salt, so that every prompt is computed."""
    salt = f"{one.links.counts()['passed']}"
    with one.network.inside():
        return asyncio.run(ask(one.url, asked, baton={"usage": True}, cache_salt=salt))


@pytest.mark.skipif("WHOLE_TABLE" not in os.environ, reason="set WHOLE_TABLE: a cut takes its time")
@pytest.mark.timeout(300)
def test_nothing_is_lost_while_prefill_and_decode_do_not_reach_each_other(deployed, reference):
    asked = prompts()[::9][:12]
    expected = [told.tokens for told in asyncio.run(ask(reference, asked))]

    def right(told):
        assert [one.tokens for one in told] == expected[: len(told)]
        return told

    deployed.links.be(Wire(delay_ms=10, loss=0.01))
    told = right(through(deployed, asked))
    assert {one.prefilled_by for one in told} == {"prefill-0"}
    assert min(one.handoff_ms for one in told) > 20  # the wire's round trip
    with deployed.links.cut(("prefill-0", "decode-0")):
        began = time.monotonic()
        first = right(through(deployed, asked))
        assert time.monotonic() - began < FOUND_DEAD_S * PATIENCE
        assert {one.prefilled_by for one in first} <= {"prefill-0, decode-0", "decode-0"}
        assert "decode-0" in {one.prefilled_by for one in first[-CLIENTS:]}  # the pair is avoided by then
        right(through(deployed, asked[:4]))
    deployed.links.be(Wire())

    def joined():
        return through(deployed, asked[:1])[0].prefilled_by == "prefill-0"

    eventually(joined, 30, "KV is handed over again", every_s=0.2)
    right(through(deployed, asked))
