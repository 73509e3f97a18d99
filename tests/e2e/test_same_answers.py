"""Greedy float32 answers through prefill and decode workers equal those of one engine, token for token."""

import asyncio
from dataclasses import dataclass

import openai
import pytest

from harness.deployment import MODEL, MODEL_NAME, deployment
from harness.greedy import token_ids
from harness.prompts import LENGTHS, prompts
from harness.scheduling import RedisServer
from harness.support import CALL_S

MAX_TOKENS = 14
EVERY = 4  # use every fourth prompt


@dataclass(frozen=True)
class Setup:
    """A deployment's settings. SETUPS covers each choice at least once."""

    pairs: int
    store: str
    transport: str
    prefix_caching: bool
    drafts: str
    tls: bool = False  # mutual TLS

    def __str__(self):
        cache = "cache" if self.prefix_caching else "no-cache"
        tls = "-tls" if self.tls else ""
        return f"{self.pairs}P{self.pairs}D-{self.store}-{self.transport}-{cache}-{self.drafts}{tls}"


SETUPS = [
    Setup(1, "memory", "shm", prefix_caching=True, drafts="none"),
    Setup(1, "redis", "tcp", prefix_caching=False, drafts="hybrid", tls=True),
    Setup(2, "memory", "tcp", prefix_caching=True, drafts="eagle3"),
]
DRAFTS = {  # engine settings; test_api compares MTP of an automatic length
    "none": {"speculative_config": None},
    "hybrid": {
        "speculative_config": {"method": "mtp", "mtp_strategy": "with_ngram", "num_speculative_tokens": 5}
    },
    "eagle3": {
        "model": str(MODEL),
        "speculative_config": {
            "method": "eagle3",
            "num_speculative_tokens": 3,
            "model": str(MODEL.parent / "eagle3"),
        },
    },
}


@pytest.fixture(scope="module", params=SETUPS, ids=str)
def setup(request):
    return request.param


@pytest.fixture(scope="module")
def deployed(setup, tmp_path_factory):
    config = {
        "engine": {"enable_prefix_caching": setup.prefix_caching, **DRAFTS[setup.drafts]},
        "handoff": {"transports": [setup.transport]},
        "scheduler": {"idle_decode_tokens": 0},  # every prompt is handed over
    }
    folder = tmp_path_factory.mktemp(str(setup))
    if setup.tls:
        config["security"] = {"tls": True, "ca": str(folder / "ca")}
    if setup.store == "memory":
        with deployment(folder, **config) as one:
            yield one.up(setup.pairs, setup.pairs)
        return
    redis = RedisServer(folder, password="secret")
    config["scheduler"] |= {"store": redis.url, "topic": "same-answers"}
    with redis, deployment(folder, **config) as one:
        yield one.up(setup.pairs, setup.pairs)


@pytest.fixture(scope="module")
def expected(reference):
    """Return stock vLLM's answers."""
    client = openai.AsyncOpenAI(base_url=f"{reference}/v1", api_key="none", timeout=CALL_S)
    return asyncio.run(answers(client, prompts()[::EVERY], at_a_time=8))


async def answers(client, asked, at_a_time):
    """Return each answer's token ids, finish reason and (prompt tokens, completion tokens), in order."""
    slots = asyncio.Semaphore(at_a_time)

    async def answer(prompt):
        async with slots:
            done = await client.completions.create(
                model=MODEL_NAME,
                prompt=prompt,
                max_tokens=MAX_TOKENS,
                temperature=0,
                extra_body={"return_token_ids": True},
            )
        choice = done.choices[0]
        assert done.usage is not None
        usage = (done.usage.prompt_tokens, done.usage.completion_tokens)
        return token_ids(done), choice.finish_reason, usage

    async with client:
        return list(await asyncio.gather(*(answer(prompt) for prompt in asked)))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("at_a_time", "every"), [(1, 6), (8, 1)], ids=["alone", "together"])
async def test_token_for_token(deployed, expected, at_a_time, every):
    """Send some prompts one at a time, and all of them eight at a time."""
    got = await answers(deployed.async_client(), prompts()[::EVERY][::every], at_a_time)
    asked = zip(LENGTHS[::EVERY][::every], got, expected[::every], strict=True)
    wrong = [length for length, one, other in asked if one != other]
    print(f"{len(got) - len(wrong)} of {len(got)} equal")
    assert wrong == []
    assert len({tuple(ids) for ids, _, _ in expected}) > len(expected) // 2  # the model's answers do differ


@pytest.mark.timeout(60)
def test_the_prompts_were_read_by_the_prefill_workers(deployed, setup):
    """The requests of the test above were handed over by the chosen transport."""
    status = deployed.status()
    workers = [worker["identity"] for worker in status["workers"]]
    prefill = {one["worker_id"] for one in workers if one["role"] == "ROLE_PREFILL"}
    decode = {one["worker_id"] for one in workers if one["role"] == "ROLE_DECODE"}
    assert (len(prefill), len(decode)) == (setup.pairs, setup.pairs)
    done = [past for past in status["handoffs"] if int(past["cost"].get("output_tokens", 0)) > 1]
    assert len(done) > 10
    assert {past["prefill_worker_id"] for past in done} == prefill
    assert {past["decode_worker_id"] for past in done} == decode
    assert {past["cost"].get("transport") for past in done} <= {setup.transport, "", None}
    assert sum(past["cost"].get("transport") == setup.transport for past in done) > len(done) // 2
