"""Failures that requests survive: a process dies, a client disconnects."""

import asyncio
import contextlib
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from harness.collector import SENT_SOON
from harness.deployment import MODEL_NAME, deployment, free_blocks, idle
from harness.fake_worker import until
from harness.greedy import GREEDY, ask
from harness.prompts import prompts
from harness.scrape import total
from harness.support import CALL_S, PATIENCE, QUICK, eventually, freeze

LONG = {"max_tokens": 900, **GREEDY}
LEASE_S = 2.0  # lease of workers; a hung one is noticed after this
BACK_S = 120.0  # a start takes ten seconds, and many more on a busy machine
LONGEST_PAUSE_S = 15.0  # for a busy machine; an idle one takes a lease and a fraction of a second


@pytest.fixture(scope="module")
def two_pairs(tmp_path_factory, collector):
    """Start 2P2D. These tests kill its processes, and `baton up` restarts them."""
    config = {
        "scheduler": {"worker_lease_s": LEASE_S},
        "constants": QUICK,
        "tracing": collector.settings,
        "slo": {"ttft_ms": 1e6},  # no request is traced for being slow
    }
    with deployment(tmp_path_factory.mktemp("two-pairs"), environment=SENT_SOON, **config) as one:
        yield one.up(2, 2)


async def test_a_client_that_leaves_frees_its_workers_within_a_second(two_pairs):
    client = two_pairs.async_client()
    await ask(client, prompts()[0], max_tokens=2)
    eventually(lambda: idle(two_pairs), 10, "the deployment is idle")
    before = free_blocks(two_pairs)
    watch = asyncio.to_thread(eventually, lambda: not idle(two_pairs), 20, "the requests run")
    seen = asyncio.create_task(watch)  # starts before the requests, which may be short
    # Prompts without a cached prefix, because cached blocks count as free.
    streams = await asyncio.gather(
        *(
            client.completions.create(model=MODEL_NAME, prompt=prompt, stream=True, **LONG)
            for prompt in prompts()[40:44]
        )
    )
    for stream in streams:
        assert await anext(aiter(stream))
    await seen
    left = time.monotonic()
    await asyncio.gather(*(stream.close() for stream in streams))
    await client.close()
    eventually(lambda: idle(two_pairs) and free_blocks(two_pairs) == before, 1.0, "all blocks are free again")
    print(f"free after {time.monotonic() - left:.2f} s, including a heartbeat of 0.2 s")


def whole(one):
    return len(one.workers("prefill")) == 2 and len(one.workers("decode")) == 2 and one.healthy()


@contextlib.contextmanager
def dead(victim, how):
    """Kill a process, or stop it during the block."""
    if how == "killed":
        victim.kill()
        yield
        return
    freeze(victim.pid)
    try:
        yield
    finally:
        victim.resume()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["killed", "hung"])
async def test_a_dead_prefill_worker_loses_nothing(two_pairs, how):
    """One of two prefill workers dies during a prefill; all answers are right."""
    eventually(lambda: whole(two_pairs), BACK_S, "2P2D is ready")
    asked = prompts()[-16::4]
    if how == "hung":
        asked = [prompt[3:] for prompt in asked]  # not cached by the other case
    victim = two_pairs.worker_process(two_pairs.worker("prefill")["identity"]["worker_id"])
    async with two_pairs.async_client(timeout=BACK_S) as client:
        running = [asyncio.create_task(ask(client, prompt, max_tokens=16)) for prompt in asked]
        await asyncio.wait(running, timeout=0.05)
        with dead(victim, how):
            got = await asyncio.gather(*running)
        assert got == await asyncio.gather(*(ask(client, prompt, max_tokens=16) for prompt in asked))
    eventually(lambda: whole(two_pairs) and idle(two_pairs), BACK_S, "the worker is back and all is idle")


@dataclass
class Read:
    """A stream's output, keyed by the index of the choice, and its longest pause."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)
    usage: Any = None
    pause_s: float = 0.0

    def take(self, chunk):
        self.usage = chunk.usage or self.usage
        for choice in chunk.choices:
            at = choice.index
            self.tokens.setdefault(at, []).extend((choice.model_extra or {}).get("token_ids") or [])
            self.text[at] = self.text.get(at, "") + choice.text
            if choice.logprobs is not None:
                self.logprobs.setdefault(at, []).extend(choice.logprobs.token_logprobs)
            if choice.finish_reason:
                self.ends[at] = choice.finish_reason

    def differs(self, other):
        """Return the difference from an undisturbed stream, or ""."""
        for name in ("tokens", "text", "ends", "usage"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name}: {mine} is not {theirs}"
        for at, values in self.logprobs.items():
            if values != pytest.approx(other.logprobs[at], abs=1e-3):
                return f"log-probabilities of choice {at}"
        return ""


async def read(stream, into):
    last = time.monotonic()
    async for chunk in stream:
        now = time.monotonic()
        into.pause_s = max(into.pause_s, now - last)
        last = now
        into.take(chunk)
    return into


STREAM = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 200}
ROUNDS = 8  # on a busy machine all streams may end before their worker dies
KINDS = [
    {},
    {"logprobs": 2},
    {"frequency_penalty": 0.7, "presence_penalty": 0.4},
    {"n": 3, "temperature": 1.0, "seed": 7},
    {"temperature": 0.9, "seed": 11, "top_p": 0.9},
    {"stop": ["\x00 never \x00"]},
    {"logit_bias": {"300": 3.0}, "max_tokens": 400},
    {"structured_outputs": {"regex": "[a-m]{30}[0-9]{60}x{30}"}},
]


@pytest.fixture(scope="module")
def undisturbed():
    """Return the streams without a failure; the first test fills the list."""
    return []


@pytest.mark.timeout(200)
@pytest.mark.parametrize("how", ["killed", "hung"])
async def test_a_dead_decode_worker_is_a_pause(two_pairs, undisturbed, collector, how):
    """Streams of all kinds, half of them on the worker that dies, end as they should."""
    eventually(lambda: whole(two_pairs), 60, "2P2D is ready")
    began = time.time()
    asked = list(zip(prompts()[:8], KINDS, strict=True))

    async def begin(client, prompt, kind):
        extra = {**LONG["extra_body"], **{key: kind[key] for key in kind if key == "structured_outputs"}}
        plain = {key: kind[key] for key in kind if key not in extra}
        body = {**LONG, **STREAM, **plain, "extra_body": extra}
        return await client.completions.create(model=MODEL_NAME, prompt=prompt, **body)

    async with two_pairs.async_client() as client:

        async def whole_stream(prompt, kind, into):
            return await read(await begin(client, prompt, kind), into)

        if not undisturbed:  # this also opens the connections, so that the others begin together
            undisturbed.extend(await asyncio.gather(*(whole_stream(*one, Read()) for one in asked)))
        before, lost = retries(two_pairs), ""
        for _ in range(ROUNDS):
            got = [Read() for _ in asked]
            running = [
                asyncio.create_task(whole_stream(*one, into)) for one, into in zip(asked, got, strict=True)
            ]
            await until(lambda got=got: all(one.tokens.get(0, [])[1:] for one in got), "all decode", CALL_S)
            decoding = Counter(one.decode_worker_id for one in two_pairs.describe(wait=False).attempts)
            if decoding:
                lost = decoding.most_common(1)[0][0]
                with dead(two_pairs.worker_process(lost), how):
                    await asyncio.gather(*running)
            await asyncio.gather(*running)
            for kind, one, right in zip(KINDS, got, undisturbed, strict=True):
                assert one.differs(right) == "", kind
            if retries(two_pairs) > before:
                break
            await until(lambda: whole(two_pairs), "2P2D is ready again", BACK_S)
    pause_s = max(one.pause_s for one in got)
    print(f"{how}: the longest pause is {pause_s:.2f} s")
    assert pause_s < LONGEST_PAUSE_S
    retries_are_traced(collector, lost, began)
    eventually(lambda: whole(two_pairs) and idle(two_pairs), 60, "the worker is back and all is idle")


def retries(one):
    return total(one.url, "baton_router_retries_total")


def retries_are_traced(collector, lost, since):
    """Check the trace of a request that lost this decode worker at or after `since`."""

    def decoded_by(root):
        spans = collector.trace(root.trace_id)
        return {one.instance: one.attributes["tokens"] for one in spans if one.name == "decode"}

    def found():
        roots = [
            one
            for one in collector.spans
            if one.name == "request"
            and one.begin > since  # an earlier test may have lost the same worker
            and any(attributes["worker"] == lost for _, attributes in one.events)
        ]
        return [one for one in roots if lost in decoded_by(one)]  # some lose it before they decode

    root = eventually(found, 20, "a request that lost its worker is traced")[0]
    spans = collector.trace(root.trace_id)
    name, cause = root.events[0]
    assert (name, cause["trouble"], cause["attempt"]) == ("failed", "lost", 1)
    children = [one for one in spans if one.name == "attempt" and one.parent_id == root.span_id]
    first, *_, last = sorted(children, key=lambda one: one.begin)
    went_on = last.attributes["baton.decode_worker"]
    assert first.attributes["baton.decode_worker"] == lost != went_on, root.events
    assert first.error == cause["message"]
    assert not last.error
    decoded = decoded_by(root)
    assert decoded[lost] > 0
    assert decoded.get(went_on, 1) > 0  # missing if the prefill generated the last token


@pytest.mark.timeout(200)
async def test_the_only_decode_worker_may_die(one_pair):
    """In 1P1D, running answers and waiting requests continue when the worker is back."""
    victim = one_pair.worker_process(one_pair.worker("decode")["identity"]["worker_id"])
    async with one_pair.async_client() as client:
        asked = prompts()[:6]
        running = [asyncio.create_task(ask(client, prompt, max_tokens=60)) for prompt in asked]
        await asyncio.to_thread(eventually, lambda: not idle(one_pair), 20, "they run")
        victim.kill()
        got = await asyncio.gather(*running)
        assert got == await asyncio.gather(*(ask(client, prompt, max_tokens=60) for prompt in asked))
    eventually(lambda: idle(one_pair), 20, "the deployment is idle")


@pytest.mark.timeout(120)
def test_without_a_scheduler_requests_continue(two_pairs):
    """The scheduler hangs, dies and is replaced; routers place from their snapshot until then."""
    eventually(lambda: whole(two_pairs), 60, "2P2D is ready")
    body = {"model": MODEL_NAME, "prompt": "x", "max_tokens": 2, "stream": True}

    def status():
        answer = httpx.post(f"{two_pairs.url}/v1/completions", json=body, timeout=CALL_S)
        return answer.status_code, answer.text

    assert status()[0] == 200
    two_pairs.start("standby", "scheduler")  # fails: the port is taken
    assert two_pairs.processes["standby"].wait(20 * PATIENCE) != 0
    scheduler = two_pairs.scheduler_process()
    freeze(scheduler.pid)
    try:
        for _ in range(4):
            code, text = status()
            assert code == 200, text
        assert two_pairs.healthy()
    finally:
        scheduler.kill()
    for _ in range(20):  # while the new one starts and workers register
        code, text = status()
        assert code == 200, text
    eventually(lambda: whole(two_pairs), 30, "the new scheduler knows all workers")
    eventually(lambda: idle(two_pairs), 30, "it holds nothing for ended requests")
