"""Several models behind one router: a scheduler and a fake worker for each, and clients in front."""

from contextlib import AsyncExitStack

import httpx
import openai
import pytest

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.service import SchedulerServer
from baton.services.config import SchedulerSettings
from harness.fake_worker import FakeWorker
from harness.router import Members
from harness.scheduling import until
from harness.support import eventually, free_port, listening
from tests.services.router.http.site import SHORT, START_S, healthy

NAMES = ("chat", "code")
PROMPT = [72, 105]


@pytest.fixture(scope="module")
def ports():
    return [free_port(), *(free_port() for _ in NAMES)]


@pytest.fixture(scope="module")
def url(ports, start_router, tmp_path_factory):
    named = zip(NAMES, ports[1:], strict=True)
    models = {name: {"scheduler": {"address": f"127.0.0.1:{port}"}} for name, port in named}
    own = {"frontend": {"enable_force_include_usage": True}}
    models["code"] |= {"engine": {"max_model_len": 512}, "router": own}
    router = {"port": ports[0]}
    start_router(tmp_path_factory.mktemp("models"), constants=SHORT, router=router, models=models)
    eventually(lambda: listening(ports[0]), START_S, "the router listens")
    return f"http://127.0.0.1:{ports[0]}"


@pytest.fixture
async def workers(url, ports):
    async with AsyncExitStack() as stack:
        found = {}
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=START_S))
        for name, port in zip(NAMES, ports[1:], strict=True):
            settings = SchedulerSettings(address=f"127.0.0.1:{port}", topic=f"baton.{name}")
            server = await stack.enter_async_context(SchedulerServer(settings))
            members = await stack.enter_async_context(Members(server.address))
            found[name] = FakeWorker(f"{name}-0", pb.ROLE_MIXED, step_s=0.001)
            found[name].model = name
            await members.add(found[name])
            found[name].members = members
        for name in NAMES:
            await until(lambda name=name: healthy(http, model=name), START_S)
        yield found


@pytest.fixture
async def client(url):
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as one:
        yield one


async def test_each_request_goes_to_the_model_that_it_names(workers, client):
    with_usage = set()
    for name in (*NAMES, "chat"):
        stream = await client.completions.create(model=name, prompt=PROMPT, max_tokens=4, stream=True)
        chunks = [chunk async for chunk in stream]
        assert {chunk.model for chunk in chunks} == {name}
        with_usage |= {name} if chunks[-1].usage else set()
    assert [len(workers[name].seen.starts) for name in NAMES] == [2, 1]
    assert [one.id for one in (await client.models.list()).data] == list(NAMES)
    # Each model's own settings apply to its requests.
    assert with_usage == {"code"}
    lengths = {one.id: one.max_model_len for one in (await client.models.list()).data}
    assert lengths["code"] == 512 < lengths["chat"]


async def test_an_unknown_model_is_404_and_none_400(workers, client, url):
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.completions.create(model="chatt", prompt=PROMPT, max_tokens=1)
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    assert unknown.value.type == "invalid_request_error"
    assert "`chatt` does not exist. Served here: chat, code." in str(unknown.value)
    is_json = {"content-type": "application/json"}
    async with httpx.AsyncClient(base_url=url) as http:
        got = await http.post("/v1/completions", json={"prompt": "x"})
        assert (got.status_code, "chat, code" in got.text) == (400, True)
        for wrong in ("{", "[]", '{"model": 7, "prompt": "x"}'):
            got = await http.post("/v1/completions", content=wrong, headers=is_json)
            assert got.status_code == 400, wrong
        assert (await http.post("/v1/nothing", json={})).status_code == 404
        named = await http.post("/tokenize", json={"model": "code", "prompt": "x"})
        assert named.json()["max_model_len"] == 512
    assert not any(worker.seen.starts for worker in workers.values())


async def test_one_model_may_lack_workers_while_the_other_serves(workers, client, url):
    code = workers["code"]
    await code.members.leave(code)
    async with httpx.AsyncClient(base_url=url) as http:

        async def gone():
            return not await healthy(http, model="code")

        await until(gone, START_S)
        with pytest.raises(openai.InternalServerError, match="model 'code': ") as refused:
            await client.completions.create(model="code", prompt=PROMPT, max_tokens=1, stream=True)
        assert (refused.value.status_code, "retry-after" in refused.value.response.headers) == (503, True)
        await client.completions.create(model="chat", prompt=PROMPT, max_tokens=1)
        health = await http.get("/health")
        assert (health.status_code, health.json()["models"]["chat"]) == (200, "ok")
        assert health.json()["models"]["code"] != "ok"
        assert (await http.get("/health", params={"model": "x"})).json()["error"]["code"] == "model_not_found"
        metrics = (await http.get("/metrics")).text
        assert 'baton_router_ready_workers{model="chat"} 1.0' in metrics
        assert 'baton_router_ready_workers{model="code"} 0.0' in metrics
        done = [line for line in metrics.splitlines() if line.startswith("vllm:request_success_total")]
        assert sum(float(line.split()[-1]) for line in done if '"chat"' in line) > 0
        assert metrics.count("# TYPE vllm:request_success_total ") == 1
        assert metrics.count("# TYPE vllm:num_requests_running ") == 1
