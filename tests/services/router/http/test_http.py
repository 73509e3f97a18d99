"""A router's process seen by HTTP clients, in front of fake workers and a real scheduler."""

import asyncio
import json
import re
import time
from functools import partial

import pytest
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

from baton.protos import scheduler_pb2 as pb
from baton.protos.worker_pb2 import PHASE_DECODE, PHASE_PREFILL
from harness.fake_worker import MODEL, FakeWorker, Fault, until
from harness.router import Members
from harness.support import PATIENCE, listening
from tests.services.router.http.site import MAX_WAIT_S, PROMPT, Site, body, events, pair, serving, text

END_S = 15.0 * PATIENCE


@pytest.mark.parametrize("stream", [False, True])
async def test_without_workers_it_is_503(members, http, stream):
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


async def test_a_full_house_is_503_after_a_wait(members, http):
    _, decode = await pair(members, http, max_num_seqs=1)
    decode.faults.append(Fault(PHASE_DECODE, silent=True))
    async with http.stream("POST", "/v1/completions", json=body(stream=True)) as first:
        assert first.status_code == 200
        await until(lambda: decode.running, "the first request has the only slot")
        asked = [http.post("/v1/completions", json=body(stream=stream)) for stream in (False, True)]
        refused = await asyncio.gather(*asked)
    for got in refused:
        assert got.status_code == 503
        assert int(got.headers["retry-after"]) >= 1
        said = got.json()["error"]["message"]
        assert f"no room within {MAX_WAIT_S:g} s (half of router.request_timeout_s)" in said
        assert "1 of 1 requests: engine.max_num_seqs" in said


async def sequences(http, asked):
    async with http.stream("POST", "/v1/completions", json=asked) as response:
        if asked["stream"] and response.status_code == 200:
            return await events(response)
        return [json.loads(await response.aread())]


def no_room(chunks):
    """Return whether the request waited too long, which a busy machine can cause. Other errors fail."""
    errors = [chunk["error"]["message"] for chunk in chunks if "error" in chunk]
    assert all("(half of router.request_timeout_s)" in error for error in errors), errors
    return bool(errors)


@pytest.mark.parametrize("many", [{"prompt": [PROMPT] * 33}, {"n": 33, "temperature": 1.0}], ids=str)
@pytest.mark.parametrize("stream", [False, True])
async def test_more_sequences_than_fit_at_once(members, http, many, stream):
    """They start as slots become free."""
    await pair(members, http, max_num_seqs=4)
    deadline = time.monotonic() + 10 * PATIENCE
    while no_room(chunks := await sequences(http, {**body(stream=stream), **many})):
        assert time.monotonic() < deadline, "no request was served in time"
    said = [""] * 33
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        said[choice["index"]] += choice["text"]
    assert said == [text(8)] * 33


async def test_answers(members, http):
    _, decode = await pair(members, http)
    got = await http.post("/v1/completions", json=body())
    assert (got.status_code, got.json()["choices"][0]["text"]) == (200, text(8))
    details = dict.fromkeys(("prompt_tokens_details", "completion_tokens_details"))
    counts = {"prompt_tokens": 2, "completion_tokens": 8, "total_tokens": 10}
    assert got.json()["usage"] == counts | details
    stopped = await http.post("/v1/completions", json=body(200, stop=text(2, 5)))
    assert stopped.json()["choices"][0]["text"] == text(5)
    await until(lambda: decode.seen.aborts, "the stop string ends the decoding", 1.0)
    metrics = (await http.get("/metrics")).text
    assert "vllm:time_to_first_token_seconds_bucket" in metrics
    assert "baton_router_placements_total" in metrics
    assert 'baton_router_requests_total{outcome="length"}' in metrics


async def test_a_client_that_leaves_aborts_both_sides(members, http):
    prefill, decode = await pair(members, http, step_s=0.02)
    async with http.stream("POST", "/v1/completions", json=body(1000, stream=True)) as response:
        lines = response.aiter_lines()  # keep it: closing it would close the connection
        await anext(lines)
        await until(lambda: decode.running, "both workers have the request")
    await until(lambda: prefill.seen.aborts and decode.seen.aborts, "both workers get an abort", 2.0)
    assert decode.running == []


async def test_a_client_that_leaves_before_the_first_token(members, http):
    prefill, _ = await pair(members, http)
    prefill.faults.append(Fault(PHASE_PREFILL, silent=True))
    asking = asyncio.create_task(http.post("/v1/completions", json=body(stream=True)))
    await until(lambda: prefill.seen.starts, "the prefill begins")
    asking.cancel()
    await until(lambda: prefill.seen.aborts, "the worker gets an abort", 2.0)


async def test_the_settings_limit_the_time(start_router, tmp_path):
    """router.request_timeout_s, and half of it while no scheduler answers."""
    site = Site(start_router, tmp_path, request_timeout_s=3.0)
    async with site.client() as http:
        got = await http.post("/v1/completions", json=body(stream=True))
        assert (got.status_code, "retry-after" in got.headers) == (503, True)
        assert "scheduler" in got.json()["error"]["message"]
        assert "scheduler" in (await http.get("/health")).json()["reason"]
        async with site.scheduler() as members:
            prefill, _ = await pair(members, http)
            prefill.faults.append(Fault(PHASE_PREFILL, silent=True))
            got = await http.post("/v1/completions", json=body(stream=True))
            assert (got.status_code, got.json()["error"]["type"]) == (504, "GatewayTimeoutError")


@pytest.mark.parametrize("wrong", ["0", "-1", "soon", "nan", "inf", ""])
async def test_a_wrong_deadline_is_400(http, wrong):
    got = await http.post("/v1/completions", json=body(), headers={"X-Request-Timeout": wrong})
    assert (got.status_code, got.json()["error"]["type"]) == (400, "BadRequestError")
    assert "x-request-timeout" in got.json()["error"]["message"]


async def test_an_unforeseen_error_of_a_handler_is_400(http, site):
    """An assistant's message without content raises IndexError in vLLM's conversion."""
    call = {"arguments": "", "name": "", "call_id": "", "type": "function_call"}
    message = {"content": [], "id": "", "role": "assistant", "status": "completed", "type": "message"}
    for _ in range(3):
        got = await http.post("/v1/responses", json={"model": MODEL, "input": [call, message]})
        assert (got.status_code, got.json()["error"]["type"]) == (400, "BadRequestError")
        assert "IndexError" in got.json()["error"]["message"]
    assert site.process.text.count("logged once") == 1


@pytest.mark.parametrize(
    ("method", "path", "status", "kind", "allowed"),
    [
        ("GET", "/v1/nope", 404, "NotFoundError", ""),
        ("POST", "/v1/nope", 404, "NotFoundError", ""),
        # vLLM's routes that are closed here
        ("POST", "/scale_elastic_ep", 404, "NotFoundError", ""),
        ("POST", "/is_scaling_elastic_ep", 404, "NotFoundError", ""),
        ("POST", "/v1/systemone", 404, "NotFoundError", ""),
        ("GET", "/v1/completions", 405, "MethodNotAllowedError", "POST"),
        ("DELETE", "/v1/chat/completions", 405, "MethodNotAllowedError", "POST"),
        ("POST", "/health", 405, "MethodNotAllowedError", "GET, HEAD"),
    ],
)
async def test_a_missing_route_gets_openai_s_error_object(http, method, path, status, kind, allowed):
    got = await http.request(method, path)
    assert got.status_code == status
    error = got.json()["error"]
    assert (error["type"], error["code"]) == (kind, status)
    assert error["message"].startswith(f"{method} {path}: ")
    assert set(got.headers.get("allow", "").split(", ")) == set(allowed.split(", "))
    if status == 404:
        assert path not in (await http.get("/openapi.json")).json()["paths"]


# -- usage: the cost and the time of a request, as clients, the log and the metrics show them

BATON = {"baton": {"usage": True}}


@pytest.fixture
async def drafting(members, http):
    prefill = FakeWorker(f"p.{time.monotonic_ns()}", pb.ROLE_PREFILL)
    decode = FakeWorker(f"d.{time.monotonic_ns()}", pb.ROLE_DECODE, step_s=0.002)
    decode.speculative_method = "mtp"
    decode.drafts = RequestSpecDecodeMetrics(num_spec_tokens=3, histogram=[4, 3, 1, 2], num_draft_tokens=30)
    return await serving(members, http, prefill, decode)


def chat(**more):
    messages = [{"role": "user", "content": "Hi"}]
    return {"model": MODEL, "messages": messages, "max_tokens": 8, "temperature": 0, **more}


async def usage(http, path, asked):
    """Return the usage of a whole answer or of a stream, which has it once, in its last chunk."""
    got = await http.post(path, json=asked)
    assert got.status_code == 200
    if not asked.get("stream"):
        assert int(got.headers["content-length"]) == len(got.content)
        assert got.json().get("metrics") is None  # vLLM would put the engine's into every answer
        return got.json()["usage"]
    chunks = await events(got)
    assert [bool(chunk.get("usage")) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert got.text.endswith("data: [DONE]\n\n")
    return dict(chunks[-1]["usage"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_usage_on_request(drafting, http, path, stream):
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
    assert times["decode_ms"] > 0  # six steps of 2 ms, which a busy router may read together
    assert all(one is None for worker in drafting for one in worker.seen.extra_args)


async def test_usage_of_several_sequences(drafting, http):
    asked = body(n=2, temperature=1, prompt=[PROMPT, PROMPT], **BATON)
    told = (await usage(http, "/v1/completions", asked))["baton"]
    assert (told["draft_steps"], told["drafted_tokens"], told["accepted_tokens"]) == (40, 120, 44)
    assert told["mean_accepted_length"] == 2.1
    assert told["acceptance_by_position"] == [0.6, 0.3, 0.2]


async def test_usage_without_speculation(members, http):
    """The prefill worker generates the only token, so no decode worker takes part."""
    prefill, _ = await pair(members, http)
    told = (await usage(http, "/v1/completions", body(1, **BATON)))["baton"]
    assert (told["method"], told["draft_steps"], told["mean_accepted_length"]) == (None, 0, None)
    assert (told["prefill_worker"], told["decode_worker"]) == (prefill.worker_id, None)
    assert told["handoff_ms"] == told["decode_ms"] == 0


@pytest.mark.parametrize("wrong", [{"usage": 1}, {"usages": True}, True, []])
async def test_wrong_usage_options_are_400(members, http, wrong):
    prefill, _ = await pair(members, http)
    got = await http.post("/v1/completions", json=body(baton=wrong, stream=True))
    assert got.status_code == 400
    assert got.json()["error"]["message"].startswith("baton")
    assert prefill.seen.starts == []


async def test_each_request_has_a_log_line(site, members, http):
    await pair(members, http)
    wrong = await http.post("/v1/completions", json=body(max_tokens=-1))
    assert wrong.status_code == 400
    answered = await http.post("/v1/completions", json=body(stream=True))
    trace = answered.headers["traceresponse"].split("-")[1]

    def lines():
        found = site.process.text.splitlines()
        return [line for line in found if "baton.requests" in line and f" trace_id={trace} " in line]

    await until(lines, "its line is written, after its last byte")
    (line,) = lines()
    assert "outcome=length prompt_tokens=2 output_tokens=8" in line
    assert "draft_steps=0" in line
    assert "decode_ms=" in line
    assert "tenant=None class=interactive status=200" in line
    shown = re.search(r" ttft_ms=([0-9.]+) .* stages_ms=(\{.*\})", line)
    stages = json.loads(shown[2].replace("'", '"'))
    assert sum(stages.values()) == pytest.approx(float(shown[1]), abs=1.0)
    assert "status=400 tenant=None path=/v1/completions" in site.process.text


async def test_the_time_to_first_token_by_stage(members, http):
    """The stages add up to the client's time to first token. A sampled trace is an exemplar."""
    prefill, _ = await pair(members, http)
    prefill.wire.clear()
    prefill.before_step = lambda: asyncio.get_running_loop().call_later(0.2, prefill.wire.set)
    trace, span = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    before = await stage_seconds(http)
    began = time.monotonic()
    headers, asked = {"traceparent": f"00-{trace}-{span}-01"}, body(40, stream=True)
    async with http.stream("POST", "/v1/completions", json=asked, headers=headers) as response:
        lines = response.aiter_lines()
        await anext(lines)
        seen = time.monotonic() - began
        async for _ in lines:
            pass
    version, same, own, flags = response.headers["traceresponse"].split("-")
    assert (version, same, flags) == ("00", trace, "01")
    assert own not in ("0" * 16, span)
    spent = {name: seconds - before.get(name, 0.0) for name, seconds in (await stage_seconds(http)).items()}
    stages = ("admit", "receive", "render", "wait", "place", "send", "prefill", "reply", "deliver")
    assert all(spent[name] > 0 for name in stages), spent
    assert 0.1 < spent["reply"] < sum(spent.values()) <= seen  # less the time of the fastest message
    assert spent["other"] == 0
    accept = {"accept": "application/openmetrics-text; version=1.0.0"}
    shown = (await http.get("/metrics", headers=accept)).text
    exemplars = [line for line in shown.splitlines() if f'trace_id="{trace}"' in line]
    assert any(line.startswith("baton_router_ttft_stage_seconds_bucket{") for line in exemplars)


async def stage_seconds(http):
    page = (await http.get("/metrics")).text
    found = re.findall(r'^baton_router_ttft_stage_seconds_sum\{stage="(\w+)"\} (\S+)$', page, re.MULTILINE)
    return {name: float(value) for name, value in found}


async def test_sigterm_lets_streams_end_within_the_drain(site, scheduler):
    """A stream that outlasts the drain ends with an error. No test may follow: this one ends the router."""
    assert site.process.poll() is None, "another test ended it: run this one last"
    before = len(site.process.text)
    async with Members(scheduler) as members, site.client() as http:
        workers = await pair(members, http, step_s=0.1)  # six seconds for 60 tokens
        workers[1].faults.append(Fault(PHASE_DECODE, 2, silent=True))
        ask = partial(http.stream, "POST", "/v1/completions")
        async with ask(json=body(60, stream=True)) as outlasts, ask(json=body(60, stream=True)) as response:
            endless, lines = outlasts.aiter_lines(), response.aiter_lines()
            first, _ = await anext(lines), await anext(endless)
            site.process.terminate()
            await until(lambda: not listening(site.port), "the router accepts no more connections", 3.0)
            assert any(one.running for one in workers)
            for one in workers:
                one.step_s = 0.0
            rest = [first, *[line async for line in lines]]
            *_, last, done = [line.removeprefix("data: ") async for line in endless if line]
        choices = [json.loads(line[6:])["choices"][0] for line in rest if line.startswith("data: {")]
        assert "".join(one["text"] for one in choices) == text(60)
        assert choices[-1]["finish_reason"] == "length"
        error = json.loads(last)["error"]
        assert (error["code"], error["message"], done) == (503, "the router is shutting down", "[DONE]")
        await until(lambda: not workers[1].running, "the worker drops the request", 2.0)
        assert await asyncio.to_thread(site.process.wait, END_S) == 0
    assert "Traceback" not in site.process.text[before:]
