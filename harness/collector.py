"""A trace collector that receives OTLP over gRPC and stores the spans as plain values."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

# Environment of processes whose traces a test waits for; by default they export every five seconds.
SENT_SOON = {"OTEL_BSP_SCHEDULE_DELAY": "200"}  # ms


@dataclass(frozen=True)
class Span:
    """A span, with ids in hex and times in seconds since 1970."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    service: str
    instance: str
    begin: float
    end: float
    error: str
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]


@dataclass
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """A collector and the spans that it received."""

    port: int = 0
    spans: list[Span] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)  # metadata of the last export

    @property
    def settings(self) -> dict[str, Any]:
        """`tracing` settings that export errors, retried requests and requests sampled by clients."""
        return {"endpoint": f"http://127.0.0.1:{self.port}", "sample_ratio": 0.0}

    def trace(self, trace_id: str) -> list[Span]:
        return [span for span in self.spans if span.trace_id == trace_id]

    def Export(self, request: Any, context: Any) -> trace_service_pb2.ExportTraceServiceResponse:
        self.headers = {name: str(value) for name, value in context.invocation_metadata()}
        found: list[Span] = []
        for group in request.resource_spans:
            of = _plain(group.resource.attributes)
            for scope in group.scope_spans:
                found += [_span(one, of) for one in scope.spans]
        self.spans += found  # at once: tests read it meanwhile
        return trace_service_pb2.ExportTraceServiceResponse()


def _span(one: Any, of: dict[str, Any]) -> Span:
    return Span(
        one.trace_id.hex(),
        one.span_id.hex(),
        one.parent_span_id.hex(),
        one.name,
        of["service.name"],
        of["service.instance.id"],
        one.start_time_unix_nano / 1e9,
        one.end_time_unix_nano / 1e9,
        one.status.message if one.status.code else "",
        _plain(one.attributes),
        [(event.name, _plain(event.attributes)) for event in one.events],
    )


def _plain(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


@contextmanager
def collecting(port: int = 0) -> Iterator[Collector]:
    """Serve a collector on loopback, on this port or a free one."""
    server = grpc.server(ThreadPoolExecutor(2))
    collector = Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    collector.port = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()
