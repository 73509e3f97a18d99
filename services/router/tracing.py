"""Export traces of requests with OpenTelemetry. The router writes the spans of all processes.

The timestamps of other processes come with their messages, so a trace is complete and on one clock when the
router decides whether to keep it. Uses opentelemetry.sdk.trace's ReadableSpan (its constructor) and
BatchSpanProcessor.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import lru_cache
from urllib.parse import urlsplit

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event as SpanEvent
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags, TraceState
from opentelemetry.trace.status import Status, StatusCode

from baton.services.config import TracingSettings
from baton.services.router.record import Record
from baton.services.router.timeline import Stage
from baton.services.router.timings import ROUTER, Event, Process
from baton.services.trace_context import new_span_id

log = logging.getLogger(__name__)

MAX_QUEUED = 8_192  # spans; a request has about 20
EXPORT_TIMEOUT_S = 5.0
_SCOPE = InstrumentationScope("baton")
_KINDS = {"request": SpanKind.SERVER, "place": SpanKind.CLIENT, "schedule": SpanKind.SERVER}


class Traces:
    """Writes the traces of finished requests; a thread exports them."""

    def __init__(
        self, settings: TracingSettings, exporter: SpanExporter, router_id: str, *, slow_s: float
    ) -> None:
        """Write to `exporter`, and keep requests whose first token takes longer than `slow_s`."""
        self.ratio = settings.sample_ratio
        self._slow_s = slow_s
        self._router = Process(ROUTER.service, router_id)
        self._processor = BatchSpanProcessor(exporter, max_queue_size=MAX_QUEUED)

    def keeps(self, record: Record) -> bool:
        return record.trace.sampled or record.failed or record.retried or record.slowness_s > self._slow_s

    def write(self, record: Record) -> None:
        """Queue a request's trace for export if it is worth keeping."""
        if self.keeps(record):
            for span in spans_of(record, self._router):
                self._processor.on_end(span)

    def close(self) -> None:
        """Export the queued spans; takes up to a few seconds."""
        self._processor.shutdown()  # type: ignore[no-untyped-call]


def open_exporter(settings: TracingSettings) -> SpanExporter:
    """Return the exporter for the settings' endpoint. It connects at the first export."""
    url = urlsplit(settings.endpoint)
    # The exporters log every failed batch; _Watched logs only the first.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    if url.path.strip("/"):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as OverHttp

        exporter: SpanExporter = OverHttp(endpoint=settings.endpoint, timeout=EXPORT_TIMEOUT_S)
    else:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as OverGrpc

        exporter = OverGrpc(
            endpoint=settings.endpoint, insecure=url.scheme == "http", timeout=EXPORT_TIMEOUT_S
        )
    return _Watched(exporter, settings.endpoint)


class _Watched(SpanExporter):
    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._fails = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            result = self._exporter.export(spans)
        except Exception as error:  # noqa: BLE001 (any error of an HTTP or gRPC client)
            log.debug("the export failed: %s", error)
            result = SpanExportResult.FAILURE
        fails = result is not SpanExportResult.SUCCESS
        if fails and not self._fails:
            log.warning(
                "tracing.endpoint: %s takes no traces; they are dropped until it does: is it up, is it the "
                "right port (4317 for gRPC, 4318/v1/traces for HTTP)?",
                self._endpoint,
            )
        elif self._fails and not fails:
            log.info("tracing.endpoint: %s takes traces again", self._endpoint)
        self._fails = fails
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)


def spans_of(record: Record, router: Process) -> list[ReadableSpan]:
    """Return a request's spans: the root first, then its stages, nested in their attempts."""
    return _Spans(record, router).made


class _Spans:
    def __init__(self, record: Record, router: Process) -> None:
        self._record = record
        self._router = router
        self.made: list[ReadableSpan] = []
        root = self._root()
        self._stages([stage for stage in record.stages if not stage.attempt], root)
        for attempt in record.attempts:
            stages = [stage for stage in record.stages if stage.attempt == attempt.number]
            if not stages:
                continue
            outer = [stage for stage in stages if not stage.within]
            failed = [one for one in record.events if one.attempt == attempt.number and one.name == "failed"]
            attributes = {
                "baton.attempt": attempt.number,
                "baton.prefill_worker": attempt.prefill_worker,
                "baton.decode_worker": attempt.decode_worker,
            }
            whole = Stage(
                "attempt",
                min(stage.begin for stage in outer),
                max(stage.end for stage in outer),
                attributes=attributes,
            )
            self._stages(stages, self._add(whole, root, failed[-1].attributes["message"] if failed else None))

    def _root(self) -> SpanContext:
        record, trace = self._record, self._record.trace
        parent = self._context(trace.parent_id, is_remote=True) if trace.parent_id else None
        attributes: dict[str, str | int | float] = {
            "baton.request_id": record.request_id,
            "baton.response_id": record.response_id,
            "baton.outcome": record.outcome,
            "baton.tenant": record.tenant,
            "baton.class": record.service,
            "baton.attempts": len(record.attempts),
            "baton.time_to_first_token_ms": round(1e3 * record.first_token_s, 3),
            "baton.client_wait_ms": round(1e3 * record.client_s, 3),
            "baton.speculative_method": record.method,
            "baton.draft_steps": record.draft_steps,
            "baton.drafted_tokens": record.drafted_tokens,
            "baton.accepted_tokens": record.accepted_tokens,
            "gen_ai.request.model": record.model,
            "gen_ai.usage.input_tokens": record.prompt_tokens,
            "gen_ai.usage.output_tokens": record.output_tokens,
            "http.response.status_code": record.status,
        }
        known = {name: value for name, value in attributes.items() if value != ""}
        whole = Stage("request", record.arrived, record.ended, attributes=known)
        error = record.outcome if record.failed else None
        return self._add(whole, parent, error, trace.span_id, record.events)

    def _stages(self, stages: Iterable[Stage], parent: SpanContext) -> None:
        contexts: dict[str, SpanContext] = {}
        for stage in sorted(stages, key=lambda one: (bool(one.within), one.begin)):
            contexts[stage.name] = self._add(stage, contexts.get(stage.within, parent))

    def _add(
        self,
        stage: Stage,
        parent: SpanContext | None,
        error: str | None = None,
        span_id: str = "",
        events: Iterable[Event] = (),
    ) -> SpanContext:
        context = self._context(span_id or new_span_id())
        self.made.append(
            ReadableSpan(
                stage.name,
                context=context,
                parent=parent,
                resource=_resource(self._router if stage.process == ROUTER else stage.process),
                attributes=dict(stage.attributes),
                events=[
                    SpanEvent(one.name, {"attempt": one.attempt, **one.attributes}, self._ns(one.at))
                    for one in events
                ],
                kind=_KINDS.get(stage.name, SpanKind.INTERNAL),
                status=Status() if error is None else Status(StatusCode.ERROR, error),
                start_time=self._ns(stage.begin),
                end_time=self._ns(stage.end),
                instrumentation_scope=_SCOPE,
            )
        )
        return context

    def _context(self, span_id: str, *, is_remote: bool = False) -> SpanContext:
        trace = self._record.trace
        state = TraceState.from_header([trace.state]) if trace.state else None
        flags = TraceFlags(TraceFlags.SAMPLED)
        return SpanContext(int(trace.trace_id, 16), int(span_id, 16), is_remote, flags, state)

    def _ns(self, moment: float) -> int:
        return int(1e9 * self._record.at_s(moment))


@lru_cache(maxsize=1024)
def _resource(process: Process) -> Resource:
    return Resource(
        {
            "service.name": process.service,
            "service.namespace": "baton",
            "service.instance.id": process.instance,
        }
    )
