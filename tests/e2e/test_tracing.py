"""A request is one trace over all processes that took part in it, and its stages add up to its time."""

import time

import httpx
import pytest

from harness.deployment import MODEL_NAME
from harness.support import CALL_S, eventually

LAST = "request", "prefill", "handoff.save", "decode", "schedule"  # each process exports by itself
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def stream(one, trace, *, sampled):
    """Read a stream of 24 tokens and return the seconds until its first byte."""
    body = {
        **{"model": MODEL_NAME, "prompt": f"{trace} is a trace. " * 12, "max_tokens": 24, "stream": True},
        **{"temperature": 0, "ignore_eos": True},
    }
    headers = {"traceparent": f"00-{trace}-{SPAN}-{int(sampled):02}"}
    with httpx.Client(timeout=CALL_S) as client:
        client.get(f"{one.url}/health")
        began = time.monotonic()
        with client.stream("POST", f"{one.url}/v1/completions", json=body, headers=headers) as response:
            pieces = response.iter_raw()
            assert next(pieces)
            first = time.monotonic() - began
            assert response.status_code == 200
            assert response.headers["traceresponse"].split("-")[1] == trace
            for _ in pieces:
                pass
    return first


def spans_of(collector, trace, *names):
    """Return a trace's spans once there are some of these names."""

    def whole():
        spans = collector.trace(trace)
        return spans if {one.name for one in spans}.issuperset(names) else []

    return eventually(whole, 15, "the trace is exported")


@pytest.mark.timeout(90)
def test_a_request_of_1p1d_is_one_trace_of_four_processes(one_pair, collector):
    stream(one_pair, "1" * 32, sampled=False)  # warm
    first_s = stream(one_pair, TRACE, sampled=True)
    spans = spans_of(collector, TRACE, *LAST)
    ids = {one.span_id: one for one in spans}
    roots = [one for one in spans if one.parent_id not in ids]
    assert [(one.name, one.parent_id) for one in roots] == [("request", SPAN)]
    (root,) = roots
    decode = one_pair.worker("decode")["identity"]["worker_id"]
    prefill = one_pair.worker("prefill")["identity"]["worker_id"]
    parts = {}
    for one in spans:
        parts.setdefault((one.service, one.instance), set()).add(one.name)
    assert parts.keys() - {("baton-router", root.instance)} == {
        ("baton-prefill", prefill),
        ("baton-decode", decode),
        ("baton-scheduler", one_pair.scheduler_address),
    }
    assert parts["baton-prefill", prefill] == {"queue", "prefill", "handoff.save"}
    assert parts["baton-scheduler", one_pair.scheduler_address] == {"schedule"}
    assert parts["baton-decode", decode] == {
        *("handoff.wait", "handoff.move", "handoff.check", "handoff.load", "decode.first", "decode")
    }
    named = {one.name: one for one in spans}
    leading = ["admit", "receive", "render", "wait", "place", "send", "queue", "prefill", "reply", "deliver"]
    assert parts["baton-router", root.instance] == {
        *("request", "attempt", "handoff", "end"),
        *(name for name in leading if name not in ("queue", "prefill")),
    }
    told = sum(one.end - one.begin for one in spans if one.name in leading)
    assert told == pytest.approx(root.attributes["baton.time_to_first_token_ms"] / 1e3, rel=0.02)
    assert 0 < told <= first_s  # the client takes the rest
    assert named["prefill"].attributes["chunks"] >= 2  # the prompt takes several steps
    assert named["decode"].attributes["tokens"] == 24
    assert root.attributes["gen_ai.usage.output_tokens"] == 24
    assert not root.events
    assert not root.error
    assert all(root.begin - 1e-3 <= one.begin <= one.end <= root.end + 1e-3 for one in spans)
    assert not collector.trace("1" * 32)


def test_a_failure_is_traced_although_it_was_not_sampled(one_pair, collector):
    """A request that times out is an error."""
    trace = "5" * 32
    body = {"model": MODEL_NAME, "prompt": "Once", "max_tokens": 900, "ignore_eos": True}
    headers = {"traceparent": f"00-{trace}-{SPAN}-00", "x-request-timeout": "0.3"}
    got = httpx.post(f"{one_pair.url}/v1/completions", json=body, headers=headers, timeout=CALL_S)
    assert got.status_code == 504
    spans = spans_of(collector, trace, "request")
    (root,) = [one for one in spans if one.name == "request"]
    assert root.error == "error"
    assert root.attributes["http.response.status_code"] == 504
