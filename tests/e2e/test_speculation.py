"""Speculation through prefill and decode workers: the same answers; what does not fit is refused by name."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.e2e.deployment import MODEL_NAME, Deployment, deployment
from tests.e2e.prompts import prompts
from tests.support import ROOT, eventually

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 1}
MTP_MODEL = ROOT / "deploy" / "demo-model" / "weights-mtp"
MAX_TOKENS = 48


async def answers(client: openai.AsyncOpenAI) -> list[list[int]]:
    """Token ids of every prompt's greedy answer, four at a time."""
    slots = asyncio.Semaphore(4)

    async def answer(prompt: list[int]) -> list[int]:
        async with slots:
            done = await client.completions.create(
                model=MODEL_NAME,
                prompt=prompt,
                max_tokens=MAX_TOKENS,
                temperature=0,
                extra_body={"return_token_ids": True},
            )
        tokens: list[int] = (done.choices[0].model_extra or {})["token_ids"]
        return tokens

    async with client:
        return list(await asyncio.gather(*(answer(prompt) for prompt in prompts())))


@pytest.fixture(scope="module")
def speculating(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with deployment(tmp_path_factory.mktemp("ngram"), engine={"speculative_config": NGRAM}) as one:
        yield one.up()


@pytest.mark.timeout(240)
async def test_the_answers_are_those_without_speculation(speculating: Deployment, reference: str) -> None:
    stock = openai.AsyncOpenAI(base_url=f"{reference}/v1", api_key="none", timeout=60)
    expected = await answers(stock)
    assert await answers(speculating.async_client()) == expected
    assert len({tuple(tokens) for tokens in expected}) > len(expected) // 2


@pytest.mark.timeout(60)
def test_workers_differ_in_their_role_alone(speculating: Deployment) -> None:
    prefill, decode = (speculating.workers(role)[0]["identity"]["capacity"] for role in ("prefill", "decode"))
    assert decode["lookahead_tokens"] == 5
    assert prefill == decode


@pytest.mark.timeout(240)
def test_sides_that_draft_differently_name_what_differs(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A prefill worker without the drafter has none of its KV: such a cache would silence the drafts."""
    spec = '{"method": "mtp", "num_speculative_tokens": 2}'
    folder = tmp_path_factory.mktemp("mismatch")
    with deployment(folder, engine={"model": str(MTP_MODEL)}, router={"request_timeout_s": 20}) as one:
        one.start("scheduler", "scheduler")
        one.start("prefill", "prefill", "--speculative-config", "none")
        one.start("decode", "decode", "--speculative-config", spec)
        one.start("router", "router", "--speculative-config", spec)
        eventually(lambda: one.workers("prefill") and one.workers("decode"), 120, "both workers are ready")
        eventually(lambda: refused(one), 60, "the router names the difference")


def refused(one: Deployment) -> bool:
    """Whether a request is refused, as it has to be, for the drafter's sake."""
    body = {"model": MODEL_NAME, "prompt": "a", "max_tokens": 2}
    try:
        answer = httpx.post(f"{one.url}/v1/completions", json=body, timeout=30)
    except httpx.TransportError:
        return False  # the router is not there yet
    assert answer.status_code == 503, answer.text
    return "speculative method: none on prefill, mtp on decode" in answer.text
