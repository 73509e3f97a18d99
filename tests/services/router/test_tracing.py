import logging

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from baton.services.config import TracingSettings
from baton.services.router.record import record_of
from baton.services.router.timings import ROUTER, Event, Process
from baton.services.router.tracing import Traces, open_exporter, spans_of
from baton.services.trace_context import begin
from harness.collector import collecting
from harness.support import eventually, free_port
from tests.services.router.test_timeline import attempt, request

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CAUSE = {"trouble": "lost", "worker": "d0", "message": "worker d0: its stream ended"}


def finished(outcome="stop", *, sampled=False, **fields):
    usual = {"first_token": 1.22, "ended": 1.5, "outcome": outcome}
    state = request(attempt(last_token=1.4), **(usual | fields))
    state.http.first_byte, state.http.ended, state.http.status = 1.25, 1.6, 200
    headers = [(b"traceparent", f"00-{TRACE}-{SPAN}-{int(sampled):02}".encode())]
    state.trace = begin(headers)
    return state


def retried():
    state = finished(ended=2.5)
    state.before.append(attempt(ended=1.3, last_token=1.29, held=True))
    state.timings = attempt(1.4, number=2, last_token=2.4)
    state.attempts = 2
    state.events.append(Event("failed", 1.3, 1, CAUSE))
    return record_of(state)


@pytest.fixture
def traces():
    made = Traces(TracingSettings(sample_ratio=0.0), InMemorySpanExporter(), "router-1", slow_s=1.0)
    yield made
    made.close()


def test_traces_kept_at_a_ratio_of_0(traces):
    assert not traces.keeps(record_of(finished()))
    assert traces.keeps(record_of(finished(sampled=True)))
    assert traces.keeps(record_of(finished("error")))
    assert traces.keeps(record_of(finished("refused")))
    assert traces.keeps(retried())
    slow = finished()
    slow.http.first_byte = 1.6  # 1.1 s after its arrival
    assert traces.keeps(record_of(slow))
    assert not traces.keeps(record_of(finished("abort")))


def test_the_spans_of_a_retried_request():
    record = retried()
    spans = spans_of(record, Process(ROUTER.service, "router-1"))
    root = spans[0]
    assert f"{root.context.trace_id:032x}" == TRACE
    assert f"{root.parent.span_id:016x}" == SPAN
    [event] = root.events
    assert (event.name, dict(event.attributes)) == ("failed", {"attempt": 1, **CAUSE})
    ids = {one.context.span_id: one for one in spans}
    assert len(ids) == len(spans)
    names = {one.name: ids[one.parent.span_id].name for one in spans[1:] if one.parent is not None}
    assert names["attempt"] == names["render"] == names["deliver"] == "request"
    assert names["prefill"] == names["decode"] == "attempt"
    assert names["schedule"] == "place"
    attempts = [one for one in spans if one.name == "attempt"]
    assert [one.status.is_ok for one in attempts] == [False, True]
    assert attempts[0].status.description == CAUSE["message"]
    assert all(one.start_time is not None and one.start_time <= (one.end_time or 0) for one in spans)
    found = {(one.name, str(one.resource.attributes["service.name"])) for one in spans}
    assert {("queue", "baton-prefill"), ("decode", "baton-decode"), ("schedule", "baton-scheduler")} <= found
    routers = {one.resource.attributes["service.instance.id"] for one in spans if one.name == "place"}
    assert routers == {"router-1"}


@pytest.mark.parametrize("path", ["", "/v1/traces"])
def test_an_endpoint_chooses_its_protocol(path):
    exporter = open_exporter(TracingSettings(endpoint=f"http://127.0.0.1:4317{path}"))
    assert ("http" if path else "grpc") in type(exporter._exporter).__module__
    exporter.shutdown()


def test_a_collector_gets_the_kept_traces(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "X-Key=secret")
    with collecting() as collector:
        settings = TracingSettings(**collector.settings)
        traces = Traces(settings, open_exporter(settings), "router-1", slow_s=1e3)
        traces.write(record_of(finished()))
        traces.write(record_of(finished(sampled=True)))
        traces.close()
        services = {"baton-router", "baton-scheduler", "baton-prefill", "baton-decode"}
        assert {span.service for span in collector.spans} == services
        assert sum(span.name == "request" for span in collector.spans) == 1
        assert collector.headers["x-key"] == "secret"


def test_an_unreachable_endpoint_is_logged_once_and_when_it_returns(caplog):
    port = free_port()
    settings = TracingSettings(endpoint=f"http://127.0.0.1:{port}")
    exporter = open_exporter(settings)
    exporter._exporter._timeout = 0.2
    spans = spans_of(record_of(finished()), Process(ROUTER.service, "router-1"))
    with caplog.at_level(logging.INFO, "baton"):
        for _ in range(3):
            exporter.export(spans)
        told = [one.getMessage() for one in caplog.records]
        assert len(told) == 1
        assert told[0].startswith(f"tracing.endpoint: http://127.0.0.1:{port} takes no traces")
        with collecting(port) as collector:
            exporter._exporter._timeout = 5.0
            eventually(lambda: exporter.export(spans) and collector.spans, 20, "the collector has spans")
        assert caplog.records[-1].getMessage().endswith("takes traces again")
    exporter.shutdown()


@pytest.mark.parametrize(
    ("endpoint", "said"),
    [
        *((one, "use http://host:4317") for one in ("localhost:4317", "ftp://x:1", "http://")),
        # The endpoint is logged, and included in the debug bundle.
        *(
            (f"http{one}", "OTEL_EXPORTER_OTLP_HEADERS")
            for one in ("s://user:pw@h", "s://key@h:1/v1", "://h?api-key=x")
        ),
    ],
)
def test_an_endpoint_is_a_url_without_a_key(endpoint, said):
    with pytest.raises(ValueError, match=said):
        TracingSettings(endpoint=endpoint)
