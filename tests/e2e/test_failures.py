"""What the first path must survive: a process dies, a client leaves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.deployment import MODEL_NAME, Deployment, deployment
from tests.e2e.prompts import prompts
from tests.support import eventually, free_port, redis_server

LONG = {"max_tokens": 900, "temperature": 0, "extra_body": {"ignore_eos": True, "return_token_ids": True}}


def free_blocks(one: Deployment) -> dict[str, int]:
    """Worker -> free KV blocks, as it said last."""
    return {worker.identity.worker_id: worker.load.free_blocks for worker in one.describe().workers}


def idle(one: Deployment) -> bool:
    """Nothing runs, nothing is placed, nothing is pinned."""
    description = one.describe()
    return not description.attempts and not any(
        worker.load.running or worker.load.waiting or worker.load.pinned_handoffs
        for worker in description.workers
    )


async def test_a_client_that_leaves_frees_both_workers_within_a_second(one_pair: Deployment) -> None:
    client = one_pair.async_client()
    await ask(client, prompts()[0], max_tokens=2)
    eventually(lambda: idle(one_pair), 10, "the deployment is idle")
    before = free_blocks(one_pair)
    # Without a prefix in common with others: blocks that stay cached count as free, as they are.
    streams = await asyncio.gather(
        *(
            client.completions.create(model=MODEL_NAME, prompt=prompt, stream=True, **LONG)
            for prompt in prompts()[40:44]
        )
    )
    for stream in streams:
        assert await anext(aiter(stream))
    eventually(lambda: not idle(one_pair), 2, "the requests are seen to run")
    left = time.monotonic()
    await asyncio.gather(*(stream.close() for stream in streams))
    await client.close()
    eventually(lambda: idle(one_pair) and free_blocks(one_pair) == before, 1.0, "all blocks are free again")
    print(f"free after {time.monotonic() - left:.2f} s, heartbeat of 0.1 s included")


@pytest.fixture(scope="module")
def two_pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """2P2D whose processes these tests kill; `baton up` starts them again."""
    config: dict[str, Any] = {"scheduler": {"worker_lease_s": 2.0, "heartbeat_s": 0.5}}
    with deployment(tmp_path_factory.mktemp("two-pairs"), **config) as one:
        yield one.up(2, 2)


def whole(one: Deployment) -> bool:
    return len(one.workers("prefill")) == 2 and len(one.workers("decode")) == 2 and one.healthy()


async def ask(client: openai.AsyncOpenAI, prompt: list[int], **options: Any) -> list[int]:
    done = await client.completions.create(model=MODEL_NAME, prompt=prompt, **{**LONG, **options})
    ids: list[int] = (done.choices[0].model_extra or {})["token_ids"]
    return ids


@pytest.mark.timeout(200)
async def test_a_killed_prefill_worker_loses_nothing(two_pairs: Deployment) -> None:
    """One of two prefill workers is killed in the middle of reading: all answers come, all right."""
    eventually(lambda: whole(two_pairs), 60, "2P2D is ready")
    async with two_pairs.async_client() as client:
        await _kill_while_reading(two_pairs, client)


async def _kill_while_reading(two_pairs: Deployment, client: openai.AsyncOpenAI) -> None:
    asked = prompts()[-16:]
    expected = await asyncio.gather(*(ask(client, prompt, max_tokens=16) for prompt in asked))
    victim = two_pairs.worker_process(two_pairs.workers("prefill")[0]["identity"]["worker_id"])
    # Other prompts, as the first ones are cached by now: their beginning is cut off.
    again = [prompt[1:] for prompt in asked]
    running = [asyncio.create_task(ask(client, prompt, max_tokens=16)) for prompt in again]
    await asyncio.sleep(0)
    await asyncio.wait(running, timeout=0.05)
    victim.kill()
    got = await asyncio.gather(*running)
    undisturbed = [await ask(client, prompt, max_tokens=16) for prompt in again]
    assert got == undisturbed
    assert await asyncio.gather(*(ask(client, prompt, max_tokens=16) for prompt in asked)) == expected
    eventually(lambda: whole(two_pairs), 60, "the killed worker is back")


@pytest.mark.timeout(200)
async def test_a_killed_decode_worker_is_an_error_or_the_right_answer_never_a_hang(
    two_pairs: Deployment,
) -> None:
    eventually(lambda: whole(two_pairs), 60, "2P2D is ready")
    async with two_pairs.async_client() as client:
        await _kill_while_writing(two_pairs, client)


async def _kill_while_writing(two_pairs: Deployment, client: openai.AsyncOpenAI) -> None:
    asked = prompts()[:8]
    expected = await asyncio.gather(*(ask(client, prompt) for prompt in asked))
    victim = two_pairs.worker_process(two_pairs.workers("decode")[0]["identity"]["worker_id"])

    streams = await asyncio.gather(
        *(client.completions.create(model=MODEL_NAME, prompt=prompt, stream=True, **LONG) for prompt in asked)
    )
    written: list[list[int]] = [[] for _ in asked]
    errors: list[str] = []

    async def read(number: int) -> None:
        try:
            async for chunk in streams[number]:
                written[number] += (chunk.choices[0].model_extra or {}).get("token_ids") or []
        except openai.APIError as error:
            errors.append(error.message)

    # Every answer has begun, none can have ended: the whole takes seconds.
    killed = time.monotonic()
    victim.kill()
    await asyncio.wait_for(asyncio.gather(*(read(number) for number in range(len(asked)))), 30)
    took = time.monotonic() - killed
    right = sum(got == want for got, want in zip(written, expected, strict=True))
    print(
        f"{right} of {len(asked)} answers whole, {len(errors)} errors, all ended {took:.1f} s after the kill"
    )
    for got, want in zip(written, expected, strict=True):
        assert got == want[: len(got)], "a wrong token was sent"
    assert right + len(errors) == len(asked)
    eventually(lambda: whole(two_pairs), 60, "the killed worker is back")


@pytest.mark.timeout(120)
def test_without_a_scheduler_503_and_back_to_work(two_pairs: Deployment) -> None:
    eventually(lambda: whole(two_pairs), 60, "2P2D is ready")
    body = {"model": MODEL_NAME, "prompt": "x", "max_tokens": 2, "stream": True}

    def status() -> tuple[int, str]:
        answer = httpx.post(f"{two_pairs.url}/v1/completions", json=body, timeout=20)
        return answer.status_code, answer.text

    assert status()[0] == 200
    two_pairs.start("standby", "scheduler")  # cannot take the port: the first one has it
    assert two_pairs.processes["standby"].wait(20) != 0
    scheduler = two_pairs.scheduler_process()
    scheduler.suspend()  # a hung scheduler is as away as a killed one
    try:
        code, text = status()
        assert code == 503, text
        assert "scheduler" in text
    finally:
        scheduler.kill()
    eventually(lambda: status()[0] == 200, 30, "a new scheduler serves")


@pytest.mark.timeout(200)
def test_without_redis_503_and_back_to_work(tmp_path_factory: pytest.TempPathFactory) -> None:
    port = free_port()
    config: dict[str, Any] = {
        "scheduler": {"store": f"redis://127.0.0.1:{port}/0", "worker_lease_s": 2.0, "heartbeat_s": 0.5}
    }
    with deployment(tmp_path_factory.mktemp("redis"), **config) as one:

        def answer() -> httpx.Response:
            body = {"model": MODEL_NAME, "prompt": "x", "max_tokens": 2, "stream": True}
            return httpx.post(f"{one.url}/v1/completions", json=body, timeout=20)

        with redis_server(port):
            one.up(0, 0, mixed=1)
            assert answer().status_code == 200
        gone = answer()
        assert gone.status_code == 503
        assert int(gone.headers["retry-after"]) >= 1
        assert "store" in gone.json()["error"]["message"] or "redis" in gone.json()["error"]["message"]
        with redis_server(port):  # an empty one: the worker registers again by itself
            eventually(lambda: answer().status_code == 200, 30, "it serves again")


@pytest.mark.timeout(100)
def test_a_full_house_is_503_before_the_stream_starts(tmp_path_factory: pytest.TempPathFactory) -> None:
    config: dict[str, Any] = {"engine": {"max_num_seqs": 2}, "scheduler": {"max_queue_factor": 1.0}}
    with deployment(tmp_path_factory.mktemp("full"), **config) as one:
        one.up(0, 0, mixed=1)
        client = one.client()
        worker = one.worker_process(one.workers("mixed")[0]["identity"]["worker_id"])
        running = [
            client.completions.create(model=MODEL_NAME, prompt="x", stream=True, **LONG) for _ in range(2)
        ]
        for stream in running:
            next(iter(stream))
        worker.suspend()  # so that neither answer ends before we have asked; its lease is longer than that
        try:
            for stream_wanted in (True, False):
                body = {"model": MODEL_NAME, "prompt": "x", "max_tokens": 2, "stream": stream_wanted}
                refused = httpx.post(f"{one.url}/v1/completions", json=body, timeout=20)
                assert refused.status_code == 503, refused.text
                assert int(refused.headers["retry-after"]) >= 1
                assert refused.json()["error"]["code"] == 503
        finally:
            worker.resume()
        for stream in running:
            stream.close()
        eventually(
            lambda: httpx.post(f"{one.url}/v1/completions", json=body, timeout=20).status_code == 200,
            10,
            "there is room again",
        )
