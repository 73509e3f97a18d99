"""Two routers whose tenants share limits: one reads keys from a file, the other from Redis."""

import asyncio
from types import SimpleNamespace

import httpx
import openai
import pytest

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.service import SchedulerServer
from baton.services.tenants.file_book import FileBook
from baton.services.tenants.model import Book, Tenant
from baton.services.tenants.redis_book import RedisBook
from harness.fake_worker import MODEL, FakeWorker, answer
from harness.router import Members
from harness.scheduling import RedisServer, until, usual
from harness.support import eventually, free_port, listening
from tests.services.router.http.site import START_S, api_key, healthy

PROMPT = [72, 105]

pytestmark = pytest.mark.timeout(240)


def secret(name):
    return f"c4nary-{name}"


def key(name, tenant, **limits):
    return api_key(secret(name), tenant, **limits)


BOOK = Book(
    tenants={
        "slots": Tenant(concurrency=3),
        "tokens": Tenant(tokens_per_min=100),
        "patient": Tenant(default_class="batch", classes=["batch", "interactive"]),
    },
    keys={
        "slots": key("slots", "slots"),
        "slots-too": key("slots-too", "slots", concurrency=1),
        "tokens": key("tokens", "tokens"),
        "plain": key("plain", "plain"),
        "patient": key("patient", "patient"),
        "night": key("night", "patient", classes=["batch"]),
    },
)


async def write_book(file, in_redis):
    await file.edit(lambda _: BOOK)
    await in_redis.edit(lambda _: BOOK)
    await in_redis.close()


@pytest.fixture(scope="module")
def routers(start_router, tmp_path_factory):
    folder = tmp_path_factory.mktemp("routers")
    redis = RedisServer(folder, password="s3cret")
    redis.start()
    book = folder / "keys.yaml"
    made = SimpleNamespace(urls=[], metrics=[], processes=[], scheduler_port=free_port())
    made.file = FileBook(str(book))
    asyncio.run(write_book(made.file, RedisBook(redis.url, "test")))
    for name, keys_file in (("file", str(book)), ("redis", "")):
        ports = {"port": free_port(), "metrics_port": free_port()}
        process = start_router(
            folder / name,
            engine={"served_model_name": MODEL},
            scheduler={"address": f"127.0.0.1:{made.scheduler_port}", "topic": "test"},
            router={**ports, "keys_file": keys_file, "keys_store": redis.url},
        )
        made.processes.append(process)
        made.urls.append(f"http://127.0.0.1:{ports['port']}")
        made.metrics.append(f"http://127.0.0.1:{ports['metrics_port']}/metrics")
    for url in made.urls:
        eventually(lambda url=url: listening(int(url.rpartition(":")[2])), START_S, "it listens")
    yield made
    redis.stop()


@pytest.fixture
async def worker(routers):
    settings = usual(address=f"127.0.0.1:{routers.scheduler_port}", topic="test", placement_lease_s=2.0)
    async with SchedulerServer(settings) as server, Members(server.address) as members:
        made = await members.add(FakeWorker("m0", pb.ROLE_MIXED, step_s=0.002))
        for url in routers.urls:
            async with httpx.AsyncClient(base_url=url, timeout=START_S) as http:
                await until(lambda http=http: healthy(http), START_S)
        yield made


@pytest.fixture
async def ask(routers):
    async with httpx.AsyncClient(timeout=START_S) as http:

        async def asked(name, at=0, max_tokens=4, **more):
            body = {"model": MODEL, "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, **more}
            headers = {"Authorization": f"Bearer {secret(name)}"}
            return await http.post(f"{routers.urls[at]}/v1/completions", json=body, headers=headers)

        yield asked


async def becomes(status, ask, *asked, **more):
    """Send requests until one gets this status."""

    async def so():
        return (await ask(*asked, **more)).status_code == status

    await until(so)


async def test_the_keys_of_a_file_and_of_redis_open(routers, worker, ask):
    for at in range(2):
        got = await ask("plain", at)
        assert got.json()["choices"][0]["text"] == bytes(answer(PROMPT, 4)).decode()
        for wrong in ("nobody", "plain2"):
            refused = await ask(wrong, at)
            assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_has_openais_form(routers, worker, stream):
    client = openai.AsyncOpenAI(base_url=f"{routers.urls[0]}/v1", api_key=secret("tokens"), max_retries=0)
    async with client:
        with pytest.raises(openai.RateLimitError) as refused:
            await client.completions.create(model=MODEL, prompt=[1] * 101, max_tokens=1, stream=stream)
        error = refused.value
        assert (error.code, error.type, error.param) == ("rate_limit_exceeded", "rate_limit_error", None)
        assert "tenant 'tokens' is limited to 100 tokens a minute (tokens_per_min)" in error.message
        assert "retry-after" not in error.response.headers  # a retry would not help
    assert not worker.seen.starts


async def test_a_token_limit_covers_both_routers(worker, ask):
    """Unused tokens are given back, and a request that no worker got is not charged."""
    worker.eos_at = 3
    for at in (0, 1, 0):  # 82 tokens are charged each time, and 6 used
        await becomes(200, ask, "tokens", at, max_tokens=80)
    assert len(worker.seen.starts) == 3
    refused = await ask("tokens", 1, max_tokens=97)
    assert refused.status_code == 429
    assert 1 <= int(refused.headers["retry-after"]) <= 20
    assert (await ask("tokens", 1, prompt=[[1] * 60, [2] * 60], max_tokens=1)).status_code == 429
    await becomes(200, ask, "tokens", 1, max_tokens=10)


async def test_a_concurrency_limit_covers_both_routers(worker, ask):
    worker.step_s = 0.05
    running = [asyncio.create_task(ask("slots", at, max_tokens=100)) for at in (0, 1)]
    running.append(asyncio.create_task(ask("slots-too", 0, max_tokens=100)))
    await until(lambda: len(worker.running) == 3)
    for at in range(2):
        refused = await ask("slots", at)
        assert refused.status_code == 429
        assert "tenant 'slots' is limited to 3 requests at a time (concurrency)" in refused.text
        assert refused.headers["retry-after"] == "1"
    own = await ask("slots-too", 0)
    assert "key 'slots-too' is limited to 1 requests at a time" in own.text
    running[1].cancel()  # its client leaves
    worker.step_s = 0.002
    await becomes(200, ask, "slots", 0)
    assert {(await one).status_code for one in (running[0], running[2])} == {200}


async def test_keys_are_added_and_removed_without_a_restart(routers, worker, ask):
    assert (await ask("new")).status_code == 401
    await routers.file.edit(lambda book: book.with_key("new", key("new", "newcomers")))
    await becomes(200, ask, "new")
    async with httpx.AsyncClient() as http:
        text = (await http.get(routers.metrics[0])).text
    assert 'baton_router_tenant_requests_total{tenant="newcomers"}' in text
    assert 'baton_router_tenant_tokens_total{kind="prompt",tenant="newcomers"} 2.0' in text
    assert 'baton_router_tenant_refusals_total{limit="concurrency",tenant="slots"}' in text
    await routers.file.edit(lambda book: book.without_key("new"))
    await becomes(401, ask, "new")


def test_no_secret_is_on_a_log_line(routers):
    for process in routers.processes:
        assert "keys of" in process.text
        assert "c4nary" not in process.text
        assert "s3cret" not in process.text


async def test_a_request_gets_a_class_that_its_key_may_use(routers, worker, ask):
    """Workers get the priority: 0 for interactive, 10 for batch."""
    for name, tier, priority in (("plain", "auto", 0), ("plain", "flex", 10), ("patient", "auto", 10)):
        got = await ask(name, service_tier=tier)
        assert got.status_code == 200, got.text
        told = worker.seen.starts[-1].service
        expected = priority, bool(priority), 3_000 * priority
        assert (told.priority, told.preemptible, told.patience_ms) == expected
        assert told.ttft_s == (0.0 if priority else 1.0)  # only interactive has this goal
    await ask("patient", service_tier="priority")
    for tier, status in (("priority", 403), ("slow", 400)):
        refused = await ask("night", service_tier=tier, stream=True)
        assert refused.status_code == status
        assert "service_tier" in refused.json()["error"]["message"]
    async with httpx.AsyncClient() as http:
        page = (await http.get(routers.metrics[0])).text
    counted = [line for line in page.splitlines() if line.startswith("baton_router_class_goals_total")]
    met = 'class="interactive",goal="ttft",kind="alone"'
    assert sum(float(line.rpartition(" ")[2]) for line in counted if met in line) >= 2
    assert not any('class="batch"' in line for line in counted)  # it has no goals


async def test_a_tenants_key_opens_no_metrics_of_all_tenants(routers):
    for url in routers.urls:
        headers = {"Authorization": f"Bearer {secret('plain')}"}
        async with httpx.AsyncClient(base_url=url, headers=headers) as http:
            for path in ("/metrics", "/metrics?all", "/metrics/", "/load"):
                got = await http.get(path)
                assert (got.status_code, got.json()["error"]["code"]) == (403, 403)
                assert "router.metrics_port" in got.text
            assert (await http.get("/v1/models")).status_code == 200
