"""W3C Trace Context: headers from clients, and headers that are passed on."""

import pytest

from baton.services.trace_context import begin, trace_id_of

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_a_clients_trace_is_continued():
    headers = [(b"traceparent", f"00-{TRACE}-{SPAN}-01".encode()), (b"tracestate", b"vendor=1,other=2")]
    trace = begin(headers)
    assert (trace.trace_id, trace.parent_id, trace.sampled) == (TRACE, SPAN, True)
    assert trace.state == "vendor=1,other=2"
    assert trace.traceparent == f"00-{TRACE}-{trace.span_id}-01"
    assert trace.span_id not in (SPAN, "0" * 16)
    assert trace_id_of(trace.traceparent) == TRACE


def test_its_decision_is_the_clients():
    assert not begin([(b"traceparent", f"00-{TRACE}-{SPAN}-00".encode())], ratio=1.0).sampled
    assert begin([(b"traceparent", f"00-{TRACE}-{SPAN}-03".encode())], ratio=0.0).sampled


@pytest.mark.parametrize(
    "value",
    [
        "",
        "nonsense",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}",
    ],
)
def test_an_invalid_one_counts_as_none(value):
    trace = begin([(b"traceparent", value.encode()), (b"tracestate", b"a=1")])
    assert trace.trace_id != TRACE
    assert (trace.parent_id, trace.state, trace.sampled) == ("", "", False)


def test_a_later_version_may_add_fields():
    assert begin([(b"traceparent", f"01-{TRACE}-{SPAN}-01-more".encode())]).trace_id == TRACE


def test_new_traces_are_sampled_by_the_ratio():
    kept = sum(begin(ratio=0.25).sampled for _ in range(4000))
    assert 800 < kept < 1200  # seven standard errors
    assert not any(begin(ratio=0.0).sampled for _ in range(1000))
    assert all(begin(ratio=1.0).sampled for _ in range(1000))
