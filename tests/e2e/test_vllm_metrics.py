"""The router serves vLLM's own metrics of the engines, for dashboards and autoscalers."""

import asyncio
import functools

import pytest

from harness.deployment import MODEL_NAME, idle
from harness.prompts import prompts
from harness.scrape import samples, total
from harness.support import eventually

STREAMS = 3
RUNNING = "vllm:num_requests_running"


def figures(one):
    """Return name -> engine -> value, summed over an engine's series."""
    found = {}
    for sample in samples(one.url):
        if sample.name.startswith("vllm:") and "engine" in sample.labels:
            of = found.setdefault(sample.name, {})
            engine = sample.labels["engine"]
            of[engine] = of.get(engine, 0) + sample.value
    return found


def loads(one, *path):
    return {
        worker.identity.worker_id: float(functools.reduce(getattr, path, worker.load))
        for worker in one.describe().workers
    }


@pytest.mark.timeout(120)
async def test_the_gauges_show_what_runs(one_pair):
    client = one_pair.async_client()
    long = {"max_tokens": 900, "temperature": 0, "extra_body": {"ignore_eos": True}}

    async def keep_running(prompt):
        while True:  # a stream may end before the test looks
            async with await client.completions.create(
                model=MODEL_NAME, prompt=prompt, stream=True, **long
            ) as stream:
                async for _ in stream:
                    pass

    running = [asyncio.create_task(keep_running(prompt)) for prompt in prompts()[20 : 20 + STREAMS]]
    decode = one_pair.worker("decode")["identity"]["worker_id"]

    def shown():
        now = figures(one_pair)
        right = now[RUNNING].get(decode) == STREAMS and now[RUNNING] == loads(one_pair, "running")
        return now if right else None

    now = await asyncio.to_thread(eventually, shown, 20, "the router's gauge counts the streams")
    assert 0 < now["vllm:kv_cache_usage_perc"][decode] < 1
    for one in running:
        one.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await client.close()
    eventually(lambda: idle(one_pair), 20, "the deployment is idle")
    eventually(lambda: set(figures(one_pair)[RUNNING].values()) == {0}, 20, "the gauge is 0 again")
    assert set(figures(one_pair)["vllm:kv_cache_usage_perc"].values()) == {0}


def test_the_counters_are_the_engines(one_pair):
    eventually(lambda: idle(one_pair), 20, "the deployment is idle")
    prefill, decode = (one_pair.workers(role)[0]["identity"]["worker_id"] for role in ("prefill", "decode"))

    client = one_pair.client()
    asked = {"max_tokens": 40, "temperature": 0, "extra_body": {"ignore_eos": True}}

    def ask_and_see(before):
        def shown():
            counted, now = loads(one_pair, "counts", "prefix_queries"), figures(one_pair)
            queries = now["vllm:prefix_cache_queries_total"]
            arrived = (
                queries == counted and queries[prefill] > before["vllm:prefix_cache_queries_total"][prefill]
            )
            return now if arrived and idle(one_pair) else None

        def drafted():
            """Ask again: `auto` pauses drafting while drafts do not pay."""
            client.completions.create(model=MODEL_NAME, prompt="Twice the same. " * 20, **asked)
            now = eventually(shown, 20, "the router shows the workers' counters, with this request's")
            counter = "vllm:spec_decode_num_drafts_total"
            return now if now[counter][decode] > before[counter][decode] else None

        return eventually(drafted, 30, "a request has drafts")

    first = ask_and_see(figures(one_pair))
    second = ask_and_see(first)
    for name in ("vllm:prefix_cache_hits_total", "vllm:prompt_tokens_cached_by_source_total"):
        assert second[name][prefill] >= first[name][prefill] + 64, name  # two blocks
    assert second["vllm:external_prefix_cache_hits_total"][decode] > 0
    # Earlier requests may have pulled a prefix, but these did not.
    external = "vllm:external_prefix_cache_hits_total"
    assert second[external][prefill] == first[external][prefill]
    assert second["vllm:spec_decode_num_accepted_tokens_total"] == {
        prefill: 0,
        decode: second["vllm:spec_decode_num_accepted_tokens_per_pos_total"][decode],
    }


def test_figures_that_no_router_knows_are_not_served(one_pair):
    now = figures(one_pair)
    workers = set(now["vllm:cache_config_info"])
    assert workers == {worker.identity.worker_id for worker in one_pair.describe().workers}
    unknown = ("iteration_tokens", "sleep_state", "per_gpu")
    assert not [name for name in now if any(one in name for one in unknown)]
    # The front end's metrics have one series for all workers.
    assert set(now["vllm:time_to_first_token_seconds_count"]) == {"0"}


def test_the_scheduler_knows_what_an_engine_has_cached(one_pair):
    """The engine's cache events and the router's block hashes must match."""
    processes = one_pair.describe().processes
    address = next(one.metrics_address for one in processes if one.kind == "scheduler")

    def known_tokens():
        return total(f"http://{address}", "baton_scheduler_prefix_tokens_total")

    client = one_pair.client()
    prompt = "A prompt that is asked again and again, so that its blocks are in the prefix cache. " * 8

    def known():
        before = known_tokens()
        client.completions.create(model=MODEL_NAME, prompt=prompt, max_tokens=1)
        return known_tokens() >= before + 64

    eventually(known, 20, "the scheduler knows the prompt's blocks")
