import json
import re
import time

import pytest
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

from baton.protos import scheduler_pb2 as pb
from harness.fake_worker import MODEL, FakeWorker, until
from tests.services.router.http.site import PROMPT, body, events, pair, serving

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


async def test_draft_metrics_are_shown_only_on_request(drafting, http):
    """vLLM would put the engine's metrics into every answer."""
    del drafting
    got = (await http.post("/v1/completions", json=body())).json()
    assert got.get("metrics") is None


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
    assert 0.1 < spent["reply"] < sum(spent.values()) <= seen  # less the time of the fastest message
    assert spent["other"] == 0
    accept = {"accept": "application/openmetrics-text; version=1.0.0"}
    shown = (await http.get("/metrics", headers=accept)).text
    exemplars = [line for line in shown.splitlines() if f'trace_id="{trace}"' in line]
    assert any(line.startswith("baton_router_ttft_stage_seconds_bucket{") for line in exemplars)


async def stage_seconds(http):
    """Return the sums of the stages of the time to first token."""
    found = re.findall(
        r'^baton_router_ttft_stage_seconds_sum\{stage="(\w+)"\} (\S+)$',
        (await http.get("/metrics")).text,
        re.MULTILINE,
    )
    return {name: float(value) for name, value in found}
