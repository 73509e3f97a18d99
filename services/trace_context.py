"""Read and write W3C Trace Context headers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from random import getrandbits

_TRACEPARENT = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(-.*)?"
)
_SAMPLED = 0x01
_MOST_STATE = 512  # characters of a tracestate; longer ones are dropped, as the standard allows


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A request's position in a trace. Ids are lower-case hex, as on the wire."""

    trace_id: str  # 32 digits
    span_id: str  # 16 digits; the request's own span
    parent_id: str = ""  # the client's span; empty if the trace begins here
    sampled: bool = False
    state: str = ""  # tracestate, passed on unchanged

    @property
    def traceparent(self) -> str:
        """The header that passes this request's span on as a parent."""
        return f"00-{self.trace_id}-{self.span_id}-{int(self.sampled):02x}"


def new_span_id() -> str:
    """Return the id of a new span. The id is not a secret."""
    return f"{getrandbits(64) or 1:016x}"


def begin(headers: Iterable[tuple[bytes, bytes]] = (), ratio: float = 0.0) -> TraceContext:
    """Return a request's place in its client's trace, or in a new one.

    A client's trace is sampled if its flags say so, a new trace with probability `ratio`. An invalid
    traceparent is ignored.
    """
    parent, state = "", ""
    for name, value in headers:
        if name == b"traceparent":
            parent = value.decode("latin-1").strip()
        elif name == b"tracestate":
            state = value.decode("latin-1").strip()
    match = _TRACEPARENT.fullmatch(parent) if parent else None
    if match is None or not _is_valid(match):
        trace_id = getrandbits(128) or 1
        # The lower half decides, as in OpenTelemetry's TraceIdRatioBased: services with the same ratio agree.
        sampled = trace_id & (1 << 64) - 1 < ratio * (1 << 64)
        return TraceContext(f"{trace_id:032x}", new_span_id(), sampled=sampled)
    return TraceContext(
        match["trace"],
        new_span_id(),
        match["span"],
        bool(int(match["flags"], 16) & _SAMPLED),
        state if len(state) <= _MOST_STATE else "",
    )


def trace_id_of(traceparent: str) -> str:
    """Return the trace id in a traceparent, or "" if the header is invalid."""
    match = _TRACEPARENT.fullmatch(traceparent)
    return match["trace"] if match else ""


def _is_valid(match: re.Match[str]) -> bool:
    later = match[5] is not None  # only later versions may have more fields
    return (
        match["version"] != "ff"
        and not (match["version"] == "00" and later)
        and int(match["trace"], 16) != 0
        and int(match["span"], 16) != 0
    )
