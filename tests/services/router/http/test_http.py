"""A router's process seen by HTTP clients, in front of fake workers and a real scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

from baton.protos import scheduler_pb2 as pb
from baton.protos.worker_pb2 import PHASE_DECODE, PHASE_PREFILL
from baton.scheduler.service import SchedulerServer
from baton.services.config import SchedulerSettings
from harness import zygote
from harness.checkpoints import tiny_qwen2
from harness.fake_worker import MODEL, FakeWorker, Fault, Seen, answer, until
from harness.router import Members
from harness.support import PATIENCE, eventually, free_port, listening
from harness.zygote import Forked

START_S = 60.0
END_S = 15.0 * PATIENCE
MAX_WAIT_S = 2.0  # of the site's router, which tests of a full house wait for
PROMPT = [72, 105]
# Pairs stay pairs: no idle decode worker prefills.
SCHEDULER: dict[str, Any] = {"placement_lease_s": 2.0, "max_queue_factor": 1.0, "idle_decode_tokens": 0}


@pytest.fixture(scope="module")
def starter() -> Iterator[Starter]:
    made = Starter()
    yield made
    for process in made.started:
        process.kill()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen2(tmp_path_factory.mktemp("model"))


class Starter:
    """Starts routers, and ends them however a test ended."""

    def __init__(self) -> None:
        self.started: list[Forked] = []

    def router(self, folder: Path, **settings: Any) -> Forked:
        """Start a router with these sections of settings; its output goes to router.log."""
        process = zygote.shared().start("router", f"{__name__}:run", folder, settings=settings)
        self.started.append(process)
        return process


def run(settings: dict[str, Any]) -> None:
    """Run a router, in the forked process, until its end."""
    from baton.services.config import load
    from baton.services.router import cluster
    from baton.services.router.app import run_router

    cluster.FRESH_S = 0.05  # or each test would wait twice for half a second, until /health knows
    run_router(load(settings))


def run_scheduler(address: str) -> None:
    """Run a scheduler, in the forked process, until its end."""
    from baton.scheduler import placer, service, servicer
    from baton.scheduler.settling import Settling

    servicer.SNAPSHOT_AGE_S = 0.05  # for the same reason
    placer.VIEW_AGE_S = 0.0  # a worker that has just registered is placed on by the next request
    # One that has just begun may not know all workers: while it says so, routers place from their last
    # snapshots where it finds no room, and such a snapshot may be older than half of a test's pair.
    service.Settling = lambda _settle_s: Settling(0.0)
    asyncio.run(service.serve(SchedulerSettings(address=address, **SCHEDULER)))


class Site:
    """The addresses of one router and its scheduler, and the router's process."""

    def __init__(self, starter: Starter, model: Path, folder: Path, **router: Any) -> None:
        self.port, self.scheduler_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = starter.router(
            folder,
            engine={"model": str(model), "served_model_name": MODEL, "tool_call_parser": "hermes"},
            scheduler={"address": f"127.0.0.1:{self.scheduler_port}"},
            router={"port": self.port, **router},
        )

    @property
    def scheduler_address(self) -> str:
        return f"127.0.0.1:{self.scheduler_port}"

    @contextlib.asynccontextmanager
    async def scheduler(self) -> AsyncIterator[Members]:
        settings = SchedulerSettings(address=self.scheduler_address, **SCHEDULER)
        async with SchedulerServer(settings) as server:
            members = Members(server.address)
            try:
                yield members
            finally:
                await members.close()


@pytest.fixture(scope="module")
def site(starter: Starter, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Site:
    made = Site(starter, model, tmp_path_factory.mktemp("router"), replace_wait_s=1.0, max_wait_s=MAX_WAIT_S)
    eventually(lambda: listening(made.port), START_S, "the router listens")
    return made


@pytest.fixture(scope="module")
def scheduler(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run the site's scheduler: a router that has to find one again takes a second for it."""
    folder = tmp_path_factory.mktemp("scheduler")
    call = f"{__name__}:run_scheduler"
    process = zygote.shared().start("scheduler", call, folder, address=site.scheduler_address)
    eventually(lambda: listening(site.scheduler_port), START_S, "the scheduler listens")
    yield
    process.kill()


@pytest.fixture
async def members(site: Site, scheduler: None, http: httpx.AsyncClient) -> AsyncIterator[Members]:
    members = Members(site.scheduler_address)
    try:
        yield members
    finally:
        await members.close()
        await eventually_unhealthy(http, "worker")  # or the router would go on placing on them


@pytest.fixture
async def lonely(starter: Starter, model: Path, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Give a client of a router whose scheduler is away."""
    made = Site(starter, model, tmp_path, max_wait_s=1.0)
    await until(lambda: listening(made.port), "the router listens", START_S)
    async with httpx.AsyncClient(base_url=made.url, timeout=START_S) as client:
        yield client
    made.process.kill()


@pytest.fixture
async def http(site: Site) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=site.url, timeout=START_S) as client:
        yield client


async def pair(
    members: Members, prefill: int = 1, decode: int = 1, step_s: float = 0.002, max_num_seqs: int = 256
) -> list[FakeWorker]:
    roles = [("p", pb.ROLE_PREFILL, prefill), ("d", pb.ROLE_DECODE, decode)]
    return [
        await members.add(
            FakeWorker(
                f"{letter}{number}.{time.monotonic_ns()}", role, step_s=step_s, max_num_seqs=max_num_seqs
            )
        )
        for letter, role, count in roles
        for number in range(count)
    ]


def body(max_tokens: int = 8, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, **more}


def text(count: int, begin: int = 0) -> str:
    return bytes(answer(PROMPT, count, begin)).decode()


async def placeable(http: httpx.AsyncClient) -> None:
    """Wait for a placeable worker: the router may be starting, or backing off from the scheduler."""
    deadline = time.monotonic() + START_S
    while not await healthy(http):
        assert time.monotonic() < deadline, "the router never becomes healthy"
        await asyncio.sleep(0.05)


async def served(http: httpx.AsyncClient, prefill: FakeWorker, *decode: FakeWorker) -> None:
    """Wait until a request passed through both sides; forget what they saw of it.

    Either side serves alone while the router, or its scheduler, does not see the other: on a busy machine
    that may still be so when the first request comes, and a fault that waits for it would hit another one.
    """
    await placeable(http)
    deadline = time.monotonic() + START_S

    def through_both() -> bool:
        began = [{start.request_id for start in one.seen.starts} for one in (prefill, *decode)]
        return bool(began[0] & set().union(*began[1:]))

    while not through_both():
        assert time.monotonic() < deadline, "no request passes through both sides"
        got = await http.post("/v1/completions", json=body(2))
        assert got.status_code == 200, got.text
    for one in (prefill, *decode):
        one.seen = Seen()


async def healthy(http: httpx.AsyncClient) -> bool:
    try:
        return (await http.get("/health")).status_code == 200
    except httpx.ConnectError:  # it is starting
        return False


async def eventually_unhealthy(http: httpx.AsyncClient, reason: str) -> httpx.Response:
    """Wait until the router is unhealthy: it keeps its last snapshot for a moment."""
    deadline = time.monotonic() + 10 * PATIENCE
    while reason not in (health := await http.get("/health")).text:
        assert time.monotonic() < deadline, f"/health says {health.text}"
        await asyncio.sleep(0.05)
    return health


async def events(response: httpx.Response) -> list[Any]:
    return [
        json.loads(line.removeprefix("data: "))
        async for line in response.aiter_lines()
        if line.startswith("data: {")
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_without_workers_it_is_503(members: Members, http: httpx.AsyncClient, stream: bool) -> None:
    del members
    health = await http.get("/health")
    for path, more in (
        ("/v1/completions", body()),
        ("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}),
    ):
        got = await http.post(path, json={**more, "stream": stream})
        assert got.status_code == 503
        assert int(got.headers["retry-after"]) >= 1
        assert got.headers["content-type"] == "application/json"
        error = got.json()["error"]
        assert (error["type"], error["code"]) == ("ServiceUnavailableError", 503)
        assert "worker" in error["message"] or "scheduler" in error["message"]
    assert health.status_code == 503
    assert health.json()["reason"]


@pytest.mark.parametrize("stream", [False, True])
async def test_with_the_scheduler_away_it_is_503(lonely: httpx.AsyncClient, stream: bool) -> None:
    got = await lonely.post("/v1/completions", json=body(stream=stream))
    assert got.status_code == 503
    assert "scheduler" in got.json()["error"]["message"]
    assert "retry-after" in got.headers
    health = await eventually_unhealthy(lonely, "scheduler")
    assert health.status_code == 503


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_house_is_503_after_a_wait(
    members: Members, http: httpx.AsyncClient, stream: bool
) -> None:
    """The error names the limits, and their settings."""
    prefill, decode = await pair(members, max_num_seqs=1)
    await served(http, prefill, decode)
    decode.faults.append(Fault(PHASE_DECODE, silent=True))
    async with http.stream("POST", "/v1/completions", json=body(stream=True)) as first:
        assert first.status_code == 200
        await until(lambda: decode.running, "it has the only slot, and falls silent there")
        got = await http.post("/v1/completions", json=body(stream=stream))
    assert got.status_code == 503
    assert int(got.headers["retry-after"]) >= 1
    said = got.json()["error"]["message"]
    assert f"no room within {MAX_WAIT_S:g} s (router.max_wait_s)" in said
    assert "1 of 1 requests: engine.max_num_seqs, scheduler.max_queue_factor" in said


async def test_a_crowd_is_served_in_turn(members: Members, http: httpx.AsyncClient) -> None:
    await pair(members, max_num_seqs=4)
    await placeable(http)
    deadline = time.monotonic() + 10 * PATIENCE
    while True:
        answers = await asyncio.gather(*(http.post("/v1/completions", json=body()) for _ in range(40)))
        if {got.status_code for got in answers} != {200, 503}:
            break
        assert time.monotonic() < deadline, "none of the crowds was served before router.max_wait_s"
    assert {(got.status_code, got.json()["choices"][0]["text"]) for got in answers} == {(200, text(8))}
    assert "baton_router_waiting_requests 0.0" in (await http.get("/metrics")).text


async def test_clients_exactly_at_the_bound(members: Members, http: httpx.AsyncClient) -> None:
    """Each sends its next request right after its last byte."""
    await pair(members, max_num_seqs=4, step_s=0.0)
    await placeable(http)

    async def client() -> set[int]:
        return {(await http.post("/v1/completions", json=body(3))).status_code for _ in range(25)}

    assert set.union(*await asyncio.gather(*(client() for _ in range(4)))) == {200}


async def sequences(http: httpx.AsyncClient, asked: dict[str, Any]) -> list[Any]:
    """Return the chunks of a completion, or its answer as the only one."""
    async with http.stream("POST", "/v1/completions", json=asked) as response:
        if asked["stream"] and response.status_code == 200:
            return await events(response)
        return [json.loads(await response.aread())]


def no_room(chunks: list[Any]) -> bool:
    """Tell whether the request waited for longer than it may, as on a busy machine. Other errors fail."""
    errors = [chunk["error"]["message"] for chunk in chunks if "error" in chunk]
    assert all("(router.max_wait_s)" in error for error in errors), errors
    return bool(errors)


@pytest.mark.parametrize("many", [{"prompt": [PROMPT] * 33}, {"n": 33, "temperature": 1.0}], ids=str)
@pytest.mark.parametrize("stream", [False, True])
async def test_more_sequences_than_fit_at_once(
    members: Members, http: httpx.AsyncClient, many: dict[str, Any], stream: bool
) -> None:
    """They start as room becomes free."""
    await pair(members, max_num_seqs=4)
    await placeable(http)
    deadline = time.monotonic() + 10 * PATIENCE
    while no_room(chunks := await sequences(http, {**body(stream=stream), **many})):
        assert time.monotonic() < deadline, "none of the crowds was served before router.max_wait_s"
    said = [""] * 33
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        said[choice["index"]] += choice["text"]
    assert said == [text(8)] * 33


async def test_answers(members: Members, http: httpx.AsyncClient) -> None:
    await pair(members)
    await placeable(http)
    got = await http.post("/v1/completions", json=body())
    assert got.status_code == 200
    assert got.json()["choices"][0]["text"] == text(8)
    assert got.json()["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 8,
        "total_tokens": 10,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }
    twice = await http.post("/v1/completions", json=body(n=2, temperature=1))
    assert [choice["text"] for choice in twice.json()["choices"]] == [text(8)] * 2
    stopped = await http.post("/v1/completions", json=body(200, stop=text(2, 5)))
    assert stopped.json()["choices"][0]["text"] == text(5)
    async with http.stream("POST", "/v1/completions", json=body(n=2, temperature=1, stream=True)) as response:
        assert response.status_code == 200
        parts = ["", ""]
        for event in await events(response):
            parts[event["choices"][0]["index"]] += event["choices"][0]["text"]
        assert parts == [text(8)] * 2


async def test_too_long_a_prompt_is_400(members: Members, http: httpx.AsyncClient) -> None:
    await pair(members)
    await placeable(http)
    got = await http.post("/v1/completions", json=body(prompt=[70] * 5000, stream=True))
    assert got.status_code == 400
    assert "retry-after" not in got.headers


async def test_a_client_that_leaves_aborts_both_sides(members: Members, http: httpx.AsyncClient) -> None:
    prefill, decode = await pair(members, step_s=0.02)
    await served(http, prefill, decode)
    async with http.stream("POST", "/v1/completions", json=body(1000, stream=True)) as response:
        lines = response.aiter_lines()  # whose end would close the connection
        await anext(lines)
        await until(lambda: decode.running, "both have it")  # a worker without the request gets no abort
    await until(lambda: prefill.seen.aborts and decode.seen.aborts, "both are told", 2.0)
    assert decode.running == []


async def test_a_client_that_leaves_before_the_first_token(members: Members, http: httpx.AsyncClient) -> None:
    prefill, decode = await pair(members)
    await served(http, prefill, decode)
    prefill.faults.append(Fault(PHASE_PREFILL, silent=True))
    asking = asyncio.create_task(http.post("/v1/completions", json=body(stream=True)))
    await until(lambda: prefill.seen.starts, "it reads")
    asking.cancel()
    await until(lambda: prefill.seen.aborts, "it is told", 2.0)


async def test_a_stop_string_ends_the_decoding(members: Members, http: httpx.AsyncClient) -> None:
    prefill, decode = await pair(members, step_s=0.02)
    await served(http, prefill, decode)
    await http.post("/v1/completions", json=body(1000, stop=text(3, 2)))
    await until(lambda: decode.seen.aborts, "it is told", 1.0)


async def test_a_decode_worker_dies_and_another_goes_on(members: Members, http: httpx.AsyncClient) -> None:
    prefill, first, second = await pair(members, decode=2)
    await served(http, prefill, first, second)
    first.faults = second.faults = deque([Fault(PHASE_DECODE, 5, die=True)])
    async with http.stream("POST", "/v1/completions", json=body(30, stream=True)) as response:
        got = await events(response)
    assert "".join(event["choices"][0]["text"] for event in got) == text(30)
    assert got[-1]["choices"][0]["finish_reason"] == "length"


async def test_no_worker_can_take_over(members: Members, http: httpx.AsyncClient) -> None:
    """The stream ends with the error; no token is made up."""
    prefill, decode = await pair(members)
    for one in (prefill, decode):
        one.faults.append(Fault(PHASE_DECODE, 5, die=True))
    await placeable(http)
    async with http.stream("POST", "/v1/completions", json=body(30, stream=True)) as response:
        assert response.status_code == 200
        lines = [line async for line in response.aiter_lines() if line]
    *tokens, error, done = [line.removeprefix("data: ") for line in lines]
    assert done == "[DONE]"
    assert json.loads(error)["error"]["code"] == 503
    assert "no worker can take over" in json.loads(error)["error"]["message"]
    said = "".join(json.loads(one)["choices"][0]["text"] for one in tokens)
    assert text(30).startswith(said)


@pytest.mark.parametrize("stream", [False, True])
async def test_no_worker_can_begin(members: Members, http: httpx.AsyncClient, stream: bool) -> None:
    """A failure before the first byte is an HTTP error, also of a stream."""
    prefill, decode = await pair(members)
    prefill.faults.append(Fault(PHASE_PREFILL, die=True))
    decode.faults += [Fault(PHASE_DECODE, die=True)] * 2  # it covers for the other, and dies too
    await placeable(http)
    got = await http.post("/v1/completions", json=body(stream=stream))
    assert got.status_code == 503
    assert "retry-after" in got.headers


async def test_reserved_arguments_are_ignored(members: Members, http: httpx.AsyncClient) -> None:
    prefill, decode = await pair(members)
    await served(http, prefill, decode)
    mine = {"kv_transfer_params": {"do_remote_prefill": True, "remote_prefill_cached_tokens": 2}}
    got = await http.post("/v1/completions", json=body(vllm_xargs={"baton_generated": 3, "x": 1}, **mine))
    assert got.status_code == 200
    assert prefill.seen.extra_args == [{"x": 1}]


BATON = {"baton": {"usage": True}}


@pytest.fixture
async def drafting(members: Members) -> list[FakeWorker]:
    prefill = await members.add(FakeWorker(f"p.{time.monotonic_ns()}", pb.ROLE_PREFILL))
    decode = FakeWorker(f"d.{time.monotonic_ns()}", pb.ROLE_DECODE, step_s=0.002)
    decode.speculative_method = "mtp"
    decode.drafts = RequestSpecDecodeMetrics(num_spec_tokens=3, histogram=[4, 3, 1, 2], num_draft_tokens=30)
    return [prefill, await members.add(decode)]


def chat(**more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Hi"}]
    return {"model": MODEL, "messages": messages, "max_tokens": 8, "temperature": 0, **more}


async def usage(http: httpx.AsyncClient, path: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Return the usage of a response, streamed or not. A stream has it once, in its last chunk."""
    got = await http.post(path, json=asked)
    assert got.status_code == 200
    if not asked.get("stream"):
        assert int(got.headers["content-length"]) == len(got.content)
        found: dict[str, Any] = got.json()["usage"]
        return found
    chunks = await events(got)
    assert [bool(chunk.get("usage")) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert got.text.endswith("data: [DONE]\n\n")
    return dict(chunks[-1]["usage"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_usage_on_request(
    drafting: list[FakeWorker], http: httpx.AsyncClient, path: str, stream: bool
) -> None:
    await served(http, *drafting)
    asked = chat() if "chat" in path else body()
    asked |= {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    plain = await usage(http, path, asked)
    assert "baton" not in plain
    with_ours = await usage(http, path, asked | BATON)
    told = with_ours.pop("baton")
    assert with_ours == plain
    times = {key: told.pop(key) for key in list(told) if key.endswith("_ms")}
    assert told == {
        "method": "mtp",
        "draft_steps": 10,
        "drafted_tokens": 30,
        "accepted_tokens": 11,
        "mean_accepted_length": 2.1,
        "acceptance_by_position": [0.6, 0.3, 0.2],
        "prefill_worker": drafting[0].worker_id,
        "decode_worker": drafting[1].worker_id,
        "attempts": 1,
    }
    assert set(times) == {"waiting_ms", "queue_ms", "prefill_ms", "handoff_ms", "decode_ms"}
    assert times["prefill_ms"] > 0
    assert times["decode_ms"] > 0  # six steps of 2 ms, which a busy router may read at once
    assert all(one is None for worker in drafting for one in worker.seen.extra_args)


async def test_usage_of_several_sequences(drafting: list[FakeWorker], http: httpx.AsyncClient) -> None:
    await served(http, *drafting)
    asked = body(n=2, temperature=1, prompt=[PROMPT, PROMPT], **BATON)
    told = (await usage(http, "/v1/completions", asked))["baton"]
    assert (told["draft_steps"], told["drafted_tokens"], told["accepted_tokens"]) == (40, 120, 44)
    assert told["mean_accepted_length"] == 2.1
    assert told["acceptance_by_position"] == [0.6, 0.3, 0.2]


async def test_usage_without_speculation(members: Members, http: httpx.AsyncClient) -> None:
    """The prefill worker generated the only token: no other worker took part."""
    prefill, decode = await pair(members)
    await served(http, prefill, decode)
    told = (await usage(http, "/v1/completions", body(1, **BATON)))["baton"]
    assert (told["method"], told["draft_steps"], told["mean_accepted_length"]) == (None, 0, None)
    assert (told["prefill_worker"], told["decode_worker"]) == (prefill.worker_id, None)
    assert told["handoff_ms"] == told["decode_ms"] == 0


async def test_drafts_are_not_shown_unasked(drafting: list[FakeWorker], http: httpx.AsyncClient) -> None:
    """vLLM would put the engine's figures into every answer."""
    del drafting
    await placeable(http)
    got = (await http.post("/v1/completions", json=body())).json()
    assert got.get("metrics") is None


@pytest.mark.parametrize("wrong", [{"usage": 1}, {"usages": True}, True, []])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_wrong_wish_is_400(
    members: Members, http: httpx.AsyncClient, wrong: Any, stream: bool
) -> None:
    prefill, _ = await pair(members)
    await placeable(http)
    got = await http.post("/v1/completions", json=body(baton=wrong, stream=stream))
    assert got.status_code == 400
    assert got.json()["error"]["message"].startswith("baton")
    assert prefill.seen.starts == []


async def test_a_line_for_each_request(starter: Starter, model: Path, tmp_path: Path) -> None:
    made = Site(starter, model, tmp_path, log_level="info")
    async with httpx.AsyncClient(base_url=made.url, timeout=START_S) as http, made.scheduler() as members:
        await pair(members)
        await placeable(http)
        wrong = await http.post("/v1/completions", json=body(max_tokens=-1))
        assert wrong.status_code == 400
        await http.post("/v1/completions", json=body(stream=True))

        def found() -> list[str]:
            return [line for line in made.process.text.splitlines() if "baton.requests" in line]

        await until(lambda: len(found()) > 1, "its line is written, after its last byte")
        refused, *lines = found()
    assert "status=400 tenant=None path=/v1/completions" in refused
    assert len(lines) == 1
    assert "outcome=length prompt_tokens=2 output_tokens=8" in lines[0]
    assert "draft_steps=0" in lines[0]
    assert "decode_ms=" in lines[0]
    assert "tenant=None class=interactive status=200" in lines[0]
    assert re.search(r" trace_id=[0-9a-f]{32} ", lines[0])
    shown = re.search(r" ttft_ms=([0-9.]+) .* stages_ms=(\{.*\})", lines[0])
    assert shown is not None
    stages = json.loads(shown[2].replace("'", '"'))
    assert sum(stages.values()) == pytest.approx(float(shown[1]), abs=1.0)


async def test_metrics(members: Members, http: httpx.AsyncClient) -> None:
    await pair(members)
    await placeable(http)
    await http.post("/v1/completions", json=body())
    figures = (await http.get("/metrics")).text
    assert "vllm:time_to_first_token_seconds_bucket" in figures
    assert "baton_router_placements_total" in figures
    assert 'baton_router_requests_total{outcome="length"}' in figures


async def test_the_time_to_first_token_by_stage(members: Members, http: httpx.AsyncClient) -> None:
    """As a client sees it: from a stream's request to its first byte. A sampled trace is an exemplar."""
    prefill, decode = await pair(members)
    await served(http, prefill, decode)
    prefill.wire_s = 0.2
    trace, span = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    before = await stage_seconds(http)
    began = time.monotonic()
    headers = {"traceparent": f"00-{trace}-{span}-01"}
    async with http.stream(
        "POST", "/v1/completions", json=body(40, stream=True), headers=headers
    ) as response:
        lines = response.aiter_lines()
        await anext(lines)
        seen = time.monotonic() - began
        async for _ in lines:
            pass
    version, same, own, flags = response.headers["traceresponse"].split("-")
    assert (version, same, flags) == ("00", trace, "01")
    assert own not in ("0" * 16, span)
    spent = {name: seconds - before.get(name, 0.0) for name, seconds in (await stage_seconds(http)).items()}
    assert {name for name, seconds in spent.items() if seconds > 0} >= {
        *("admit", "receive", "render", "wait", "place", "send", "prefill", "reply", "deliver")
    }
    assert 0.1 < spent["reply"] < sum(spent.values()) <= seen  # less what the quickest message took
    assert spent["other"] == 0
    accept = {"accept": "application/openmetrics-text; version=1.0.0"}
    shown = (await http.get("/metrics", headers=accept)).text
    exemplars = [line for line in shown.splitlines() if f'trace_id="{trace}"' in line]
    assert any(line.startswith("baton_router_ttft_stage_seconds_bucket{") for line in exemplars)


async def stage_seconds(http: httpx.AsyncClient) -> dict[str, float]:
    """Return the sums of the stages of the time to first token."""
    found = re.findall(
        r'^baton_router_ttft_stage_seconds_sum\{stage="(\w+)"\} (\S+)$',
        (await http.get("/metrics")).text,
        re.MULTILINE,
    )
    return {name: float(value) for name, value in found}


async def test_sigterm_lets_streams_end(starter: Starter, model: Path, tmp_path: Path) -> None:
    site = Site(starter, model, tmp_path)
    async with (
        site.scheduler() as members,
        httpx.AsyncClient(base_url=site.url, timeout=START_S) as http,
    ):
        workers = await pair(members, step_s=0.1)  # six seconds: it still runs when nothing is accepted
        await placeable(http)
        async with http.stream("POST", "/v1/completions", json=body(60, stream=True)) as response:
            lines = response.aiter_lines()
            first = await anext(lines)
            site.process.terminate()
            await until(lambda: not accepts(site.port), "it accepts nothing more", 3.0)
            assert any(one.running for one in workers)
            for one in workers:
                one.step_s = 0.0
            rest = [first, *[line async for line in lines]]
        choices = [json.loads(line[6:])["choices"][0] for line in rest if line.startswith("data: {")]
        assert "".join(one["text"] for one in choices) == text(60)
        assert choices[-1]["finish_reason"] == "length"
        assert await asyncio.to_thread(site.process.wait, END_S) == 0
    assert "Traceback" not in site.process.text


async def test_a_stream_that_outlasts_the_drain_is_told(
    starter: Starter, model: Path, tmp_path: Path
) -> None:
    site = Site(starter, model, tmp_path, drain_timeout_s=0.3)
    async with (
        site.scheduler() as members,
        httpx.AsyncClient(base_url=site.url, timeout=START_S) as http,
    ):
        _, decode = await pair(members, step_s=0.05)
        await placeable(http)
        async with http.stream("POST", "/v1/completions", json=body(200, stream=True)) as response:
            lines = response.aiter_lines()
            await anext(lines)
            site.process.terminate()
            *_, error, done = [line.removeprefix("data: ") async for line in lines if line]
        assert done == "[DONE]"
        assert (json.loads(error)["error"]["code"], json.loads(error)["error"]["message"]) == (
            503,
            "the router is shutting down",
        )
        await until(lambda: not decode.running, "the worker drops the request", 2.0)
        assert await asyncio.to_thread(site.process.wait, END_S) == 0
    assert "Traceback" not in site.process.text


async def test_a_request_that_takes_too_long(starter: Starter, model: Path, tmp_path: Path) -> None:
    site = Site(starter, model, tmp_path, request_timeout_s=0.5, api_key="s3cret")
    async with (
        site.scheduler() as members,
        httpx.AsyncClient(base_url=site.url, timeout=START_S) as http,
    ):
        prefill, _ = await pair(members)
        prefill.faults.append(Fault(PHASE_PREFILL, silent=True))
        await placeable(http)
        assert (await http.post("/v1/completions", json=body())).status_code == 401
        headers = {"Authorization": "Bearer s3cret"}
        deadline = time.monotonic() + START_S

        async def ask() -> httpx.Response:
            return await http.post("/v1/completions", json=body(stream=True), headers=headers)

        # The decode worker serves alone while the router does not see the other one.
        while (got := await ask()).status_code == 200:
            assert time.monotonic() < deadline, "no request reaches the prefill worker"
        assert got.status_code == 504
        assert got.json()["error"]["type"] == "GatewayTimeoutError"
    site.process.terminate()
    assert await asyncio.to_thread(site.process.wait, END_S) == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_says_how_long_it_waits(
    members: Members, http: httpx.AsyncClient, stream: bool
) -> None:
    prefill, decode = await pair(members)
    await served(http, prefill, decode)
    prefill.faults.append(Fault(PHASE_PREFILL, silent=True))
    got = await http.post("/v1/completions", json=body(stream=stream), headers={"X-Request-Timeout": "0.9"})
    assert (got.status_code, got.json()["error"]["type"]) == (504, "GatewayTimeoutError")
    assert "took longer than 0." in got.json()["error"]["message"]
    await until(lambda: len(prefill.seen.aborts) == 1, "the worker is told", 1.0)


async def test_a_deadline_in_the_middle_of_a_stream(members: Members, http: httpx.AsyncClient) -> None:
    """The tokens sent stand; then the stream ends with the reason, and the worker drops the request."""
    prefill, decode = await pair(members)
    await served(http, prefill, decode)
    decode.faults.append(Fault(PHASE_DECODE, 3, silent=True))
    got = await http.post("/v1/completions", json=body(stream=True), headers={"X-Request-Timeout": "3"})
    assert got.status_code == 200
    *tokens, error, done = [line.removeprefix("data: ") for line in got.text.splitlines() if line]
    assert (json.loads(error)["error"]["code"], done) == (504, "[DONE]")
    assert text(8).startswith("".join(json.loads(one)["choices"][0]["text"] for one in tokens))
    assert tokens
    await until(lambda: len(decode.seen.aborts) == 1, "the worker is told", 1.0)


@pytest.mark.parametrize("wrong", ["0", "-1", "soon", "nan", "inf", ""])
async def test_a_wrong_deadline_is_400(http: httpx.AsyncClient, wrong: str) -> None:
    got = await http.post("/v1/completions", json=body(), headers={"X-Request-Timeout": wrong})
    assert (got.status_code, got.json()["error"]["type"]) == (400, "BadRequestError")
    assert "x-request-timeout" in got.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        ("/v1/completions", {"prompt": ["x"] * 100, "n": 3}),
        ("/v1/completions", {"prompt": [[1]] * 300}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "n": 1000}),
        ("/v1/chat/completions/batch", {"messages": [[{"role": "user", "content": "x"}]] * 300}),
    ],
)
async def test_too_many_answers_at_once_are_400(http: httpx.AsyncClient, path: str, wrong: Any) -> None:
    got = await http.post(path, json={"model": MODEL, **wrong})
    assert got.status_code == 400
    assert "256 are allowed" in got.json()["error"]["message"]


@pytest.mark.parametrize(
    "wish",
    [
        {"structured_outputs": {"choice": [str(number) for number in range(50_000)]}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"d": "x" * 200_000}},
            }
        },
    ],
    ids=["choice", "schema"],
)
async def test_an_absurd_grammar_is_400(http: httpx.AsyncClient, wish: dict[str, Any]) -> None:
    got = await http.post("/v1/chat/completions", json=chat(**wish))
    assert got.status_code == 400
    assert "131072" in got.json()["error"]["message"]


async def test_a_handler_s_unforeseen_error_is_400(http: httpx.AsyncClient, site: Site) -> None:
    """An assistant's message without content: an IndexError in vLLM's conversion."""
    call = {"arguments": "", "name": "", "call_id": "", "type": "function_call"}
    message = {"content": [], "id": "", "role": "assistant", "status": "completed", "type": "message"}
    for _ in range(3):
        got = await http.post("/v1/responses", json={"model": MODEL, "input": [call, message]})
        assert (got.status_code, got.json()["error"]["type"]) == (400, "BadRequestError")
        assert "IndexError" in got.json()["error"]["message"]
    assert site.process.text.count("logged once") == 1


@pytest.mark.parametrize("path", ["/scale_elastic_ep", "/is_scaling_elastic_ep", "/v1/systemone"])
async def test_routes_that_are_not_offered_are_404(http: httpx.AsyncClient, path: str) -> None:
    got = await http.post(path, json={"new_data_parallel_size": 2})
    assert got.status_code == 404
    assert path not in (await http.get("/openapi.json")).json()["paths"]


@pytest.mark.parametrize(
    ("method", "path", "status", "kind", "allowed"),
    [
        ("GET", "/v1/nope", 404, "NotFoundError", ""),
        ("POST", "/v1/nope", 404, "NotFoundError", ""),
        ("GET", "/v1/completions", 405, "MethodNotAllowedError", "POST"),
        ("DELETE", "/v1/chat/completions", 405, "MethodNotAllowedError", "POST"),
        ("POST", "/health", 405, "MethodNotAllowedError", "GET, HEAD"),
    ],
)
async def test_a_missing_route_gets_openai_s_error_object(
    http: httpx.AsyncClient, method: str, path: str, status: int, kind: str, allowed: str
) -> None:
    got = await http.request(method, path)
    assert got.status_code == status
    error = got.json()["error"]
    assert (error["type"], error["code"]) == (kind, status)
    assert error["message"].startswith(f"{method} {path}: ")
    assert set(got.headers.get("allow", "").split(", ")) == set(allowed.split(", "))


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({}, "cannot listen"),
        ({"model": "/no/such"}, "/no/such"),
        ({"tool_call_parser": "hermse"}, "hermse"),
        ({"max_model_len": 1_000_000}, "max_model_len"),
    ],
    ids=["port", "model", "parser", "length"],
)
def test_bad_starts_say_why(
    starter: Starter, model: Path, tmp_path: Path, engine: dict[str, Any], said: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = 0 if engine else taken.getsockname()[1]
        process = starter.router(tmp_path, engine={"model": str(model), **engine}, router={"port": port})
        assert process.wait(END_S) == 1
    [line] = [line for line in process.text.splitlines() if line.startswith("baton: error: ")]
    assert said in line


def accepts(port: int) -> bool:
    with socket.socket() as client:
        client.settimeout(0.5)
        return client.connect_ex(("127.0.0.1", port)) == 0
