"""Images through a prefill and a decode worker, with drafts, and later an encode worker beside them.

Answers equal those of stock vLLM.
"""

import asyncio
import os

import httpx
import openai
import pytest

from baton.protos.scheduler_pb2 import ROLE_ENCODE
from harness.architectures.registry import VISIONS
from harness.continuation import Comparison, site
from harness.deployment import MODEL_NAME, deployment, idle, stock_vllm
from harness.features import CHAT, Feature
from harness.greedy import GREEDY, token_ids
from harness.pictures import data_url, noise, png, saved
from harness.scheduling import until
from harness.scrape import samples
from harness.support import CALL_S, eventually, freeze

MODEL = VISIONS["qwen2.5-vl"]
TOKENS = 20
LONG = 160
BACK_S = 120.0  # a start takes ten seconds, and many more on a busy machine
A, B = (data_url(saved(noise(seed))) for seed in (1, 2))
TEXT = "Tell me what this is, and do so at some length, please, so that it is long."


def turn(*images, text=TEXT):
    parts = [{"type": "image_url", "image_url": {"url": one}} for one in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def reply(text):
    return {"role": "assistant", "content": text}


ASKED = {
    "text": [turn()],
    "A": [turn(A)],
    "A again": [turn(A)],
    "B": [turn(B)],
    "A, B": [turn(A, B)],
    "B, A": [turn(B, A)],
    "A, A": [turn(A, A)],
    "turn 1": [turn(A)],
    "turn 2": [turn(A), reply("It is a square."), turn(B)],
    "turn 3": [turn(A), reply("It is a square."), turn(B), reply("And this?"), turn(text="Are they equal?")],
}


def encoded():
    """Return conversations with images that no prefix cache has, so that an encode worker computes them.

    Where an image comes after other text than before, its KV is not cached, but its embeddings are kept.
    """
    c, d, e, f, g = (data_url(saved(noise(seed))) for seed in range(3, 8))
    after = {"role": "user", "content": [*turn()["content"], *turn(c, d)["content"]]}
    return {
        "C": [turn(c)],
        "C again": [turn(c)],
        "D, C": [turn(d, c)],
        "later": [turn(d), reply("It is a square."), turn(), reply("And this?"), turn(c)],
        "after text": [after],
        "encode": [turn(c, e)],
        "prefill": [turn(c, f)],
        "decode": [turn(c, g)],
    }


ENCODED = encoded()
VICTIMS = ("encode", "prefill", "decode")


async def ask(client, messages, tokens=TOKENS):
    done = await client.chat.completions.create(
        model=MODEL_NAME, messages=messages, max_tokens=tokens, **GREEDY
    )
    return token_ids(done)


async def answers(client, asked=ASKED):
    """Ask one after another, so that what is cached is the same everywhere."""
    async with client:
        return {name: await ask(client, messages) for name, messages in asked.items()}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Return stock vLLM's answers."""
    folder, model = tmp_path_factory.mktemp("stock"), str(MODEL.target(MODEL.checkpoint()))
    with stock_vllm(folder, {"VLLM_CPU_OMP_THREADS_BIND": "0"}, model=model) as (url, _):
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=CALL_S)
        return asyncio.run(answers(client, ASKED | ENCODED))


@pytest.fixture(scope="module")
def deployed(tmp_path_factory):
    folder = MODEL.checkpoint()
    config = {
        "engine": {
            "model": str(MODEL.target(folder)),
            "speculative_config": MODEL.speculative(folder),
            "tool_call_parser": None,
            "max_num_batched_tokens": 128,  # two images take two steps, so their KV is pulled early
        },
        # Every prompt is handed over.
        "scheduler": {"idle_decode_tokens": 0, "worker_lease_s": 3.0},
        "router": {"media": {"encode_min_tokens": 1}},
    }
    with deployment(tmp_path_factory.mktemp("one-pair"), **config) as one:
        yield one.up()


@pytest.mark.timeout(300)
async def test_token_for_token(deployed, expected):
    found = await answers(deployed.async_client())
    assert [name for name in ASKED if found[name] != expected[name]] == []
    assert len({tuple(expected[name]) for name in ASKED}) == len(ASKED) - 2  # A comes three times

    def handed_over():
        return sum(bool(one.cost.transport) for one in deployed.describe().handoffs)

    eventually(lambda: handed_over() == len(ASKED), CALL_S, "every handoff is reported")


@pytest.mark.timeout(120)
async def test_many_at_once(deployed, expected):
    async with deployed.async_client() as client:
        found = await asyncio.gather(*(ask(client, messages) for messages in ASKED.values()))
    assert dict(zip(ASKED, found, strict=True)) == {name: expected[name] for name in ASKED}


@pytest.fixture(scope="module")
def undisturbed(deployed):
    async def whole():
        async with deployed.async_client() as client:
            return await ask(client, ASKED["A, B"], LONG)

    return asyncio.run(whole())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_a_worker_dies_in_the_answer(deployed, undisturbed, role):
    eventually(lambda: deployed.workers("prefill") and deployed.workers("decode"), BACK_S, "1P1D is ready")
    victim = deployed.worker_process(deployed.worker(role)["identity"]["worker_id"])
    async with deployed.async_client(timeout=BACK_S) as client:
        stream = await client.chat.completions.create(
            model=MODEL_NAME, messages=ASKED["A, B"], max_tokens=LONG, stream=True, **GREEDY
        )
        ids = []
        async for event in stream:
            for choice in event.choices:
                ids += (choice.model_extra or {}).get("token_ids") or []
            if len(ids) >= LONG // 8 and victim.is_running():
                victim.kill()
                victim.wait(CALL_S)
    assert ids == undisturbed
    eventually(lambda: idle(deployed), BACK_S, "nothing is left")


@pytest.mark.timeout(120)
def test_every_api_refuses_by_name(deployed):
    """Hostile files on all APIs; tests/services/router/media has the whole set."""
    bomb, cut, held = data_url(png(13_000, 13_000)), A[:-400], "baton_router_image_pixels"

    def chat(part):
        return {"messages": [turn(A), reply("?"), {"role": "user", "content": [part]}]}

    def image(url):
        return chat({"type": "image_url", "image_url": {"url": url}})

    source = {"type": "base64", "media_type": "image/png", "data": bomb.partition(",")[2]}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image", "source": source}]}
    asked = [
        ("/v1/chat/completions", image(bomb), "messages[2].content[0]: it has 13000 x 13000 pixels"),
        ("/v1/chat/completions", image(bomb) | {"stream": True}, "messages[2].content[0]: it has 13000"),
        ("/v1/chat/completions", image(cut), "messages[2].content[0]: it cannot be read"),
        ("/v1/chat/completions", image("file:///etc/hostname"), "messages[2].content[0]: 'file:"),
        (
            "/v1/chat/completions",
            image("http://127.0.0.1/a"),
            "messages[2].content[0]: images are not fetched",
        ),
        ("/v1/chat/completions", chat({"type": "image_embeds"}), "embeddings are not"),
        ("/v1/chat/completions", chat({"type": "image_url", "image_url": {"url": A}, "uuid": "x"}), "'uuid'"),
        ("/v1/chat/completions", {"messages": [turn(*[A] * 17)]}, "17 images; 16 are allowed"),
        ("/tokenize", image(bomb), "messages[2].content[0]: it has 13000"),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": bomb}]}]},
            "input[0].content[0]: it has 13000",
        ),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": [result]}], "max_tokens": 1},
            "messages[0].content[0].content[0]: it has 13000",
        ),
    ]
    with httpx.Client(base_url=deployed.url, timeout=CALL_S) as client:
        for path, body, why in asked:
            answer = client.post(path, json={"model": MODEL_NAME, **body})
            assert (answer.status_code, why in answer.text) == (400, True), (path, why, answer.text)
        streamed = {
            "model": MODEL_NAME,
            "messages": [turn(A)],
            "max_tokens": LONG,
            "ignore_eos": True,
            "stream": True,
        }
        with client.stream("POST", "/v1/chat/completions", json=streamed) as stream:
            next(stream.iter_lines())
            eventually(
                lambda: [one.value for one in samples(deployed.url) if one.name == held] == [0],
                10.0,
                "vLLM keeps no decoded image while it answers",
            )


@pytest.fixture(scope="module")
def with_encoder(deployed):
    """Add an encode worker."""
    deployed.start("node", "node", "--encode", "1", "--log-dir", str(deployed.folder / "node"))
    deployed.worker("encode")
    return deployed


def computed(one):
    """Return how many images were computed, by where."""
    name = "baton_router_images_computed_total"
    return {found.labels["where"]: found.value for found in samples(one.url) if found.name == name}


@pytest.mark.timeout(120)
async def test_an_encode_worker_computes_images(with_encoder, expected):
    before, wanted = computed(with_encoder), [name for name in ENCODED if name not in VICTIMS]
    found = await answers(with_encoder.async_client(), {name: ENCODED[name] for name in wanted})
    assert [name for name in wanted if found[name] != expected[name]] == []
    after = computed(with_encoder)
    assert after["prompt"] == before["prompt"]
    assert after["encode"] - before["encode"] == 2
    assert after["held"] - before["held"] >= 3

    def kept():
        return with_encoder.worker("encode")["load"]["embeddings"]

    eventually(
        lambda: kept().get("images") == int(kept().get("computed", 0)) == 2, CALL_S, "a heartbeat reports it"
    )

    def counted():
        """Return whether the scheduler knows what autoscaling needs."""
        described = with_encoder.describe()
        [counts] = [one.load.counts for one in described.workers if one.identity.role == ROLE_ENCODE]
        tokens = sum(one.load.image_tokens for one in described.routers)
        return counts.busy_s > 0 and 0 < counts.computed_tokens < tokens

    eventually(counted, 5.0, "it is reported")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("role", VICTIMS)
async def test_a_worker_dies_before_the_answer(with_encoder, expected, role):
    """Kill it while it has the request. What it did is done by others."""
    for each in VICTIMS:
        with_encoder.worker(each)
    victim = with_encoder.worker_process(with_encoder.worker(role)["identity"]["worker_id"])
    async with with_encoder.async_client(timeout=BACK_S) as client:
        freeze(victim.pid)
        asking = asyncio.create_task(ask(client, ENCODED[role]))

        async def booked():
            status = [
                one
                for one in with_encoder.describe().workers
                if one.identity.worker_id.endswith(f".{victim.pid}")
            ]
            return bool(status and status[0].reserved_requests)

        await until(booked, CALL_S)
        victim.kill()
        assert await asking == expected[role]
    eventually(lambda: idle(with_encoder), BACK_S, "nothing is left")


def test_an_encode_worker_drains_at_once(with_encoder):
    """Embeddings stay for half a minute after their last use, but nobody waits for these."""
    assert with_encoder.processes["node"].end(15.0) == 0


WHOLE = "WHOLE_TABLE" in os.environ
ANSWERS, EVERY = (2, 1) if WHOLE else (1, 8)
# What fails, while images that nobody has seen are computed (harness/cutting.py).
PHASES = ("0e", "1e", "2e", "3e", "0", "0p", "1p")
# Answers about each of these images and the next have no near-ties, which bfloat16 would decide by chance.
CLEAR = (31, 53, 106, 116, 24, 64, 139)


def new(number, _):
    images = (data_url(saved(noise(CLEAR[number] + one))) for one in (0, 1))
    return {"messages": [turn(*images)], "ignore_eos": True}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", list(VISIONS) if WHOLE else ["smolvlm"])
async def test_goes_on_at_every_position(name, tmp_path):
    """WHOLE_TABLE=1 tests all families, and all positions."""
    model = VISIONS[name]
    plain = Feature("plain", "/v1/completions", {"prompt": TEXT})
    with site(tmp_path / "site", architecture=model) as where:
        async with httpx.AsyncClient(base_url=where.url, timeout=CALL_S) as client:
            comparison = Comparison(where, client, EVERY, plain)
            first = await comparison.score_new(Feature("images, new", CHAT, new), PHASES)
            score = await comparison.score(Feature("images", CHAT, new), range(ANSWERS))
    print(name, first, score, sep="\n")
    assert not first.wrong + score.wrong
    assert first.equal == len(PHASES)
    assert score.equal == score.tried > ANSWERS * TOKENS / EVERY
