"""Track the attempts that are running here, and the last epoch of those that have ended.

Not thread-safe: use it in the event loop's thread. Invariants: an attempt is live under exactly one internal
id; a request has at most one live attempt; an attempt starts only if its (epoch, phase) is above all earlier
ones of its request, so no reply of an older attempt is sent after a newer one has started.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.attempts import EPOCH_KEEP_S, attempt_id
from baton.protos.worker_pb2 import PHASE_DECODE, PHASE_ENCODE, PHASE_PREFILL, PHASE_SAVE, Failed, Phase
from baton.services.engine.errors import RequestRefused
from baton.services.trace_context import trace_id_of
from baton.services.worker.admission import Share
from baton.services.worker.incoming import Incoming
from baton.services.worker.media import Received

_ORDER = {PHASE_SAVE: 1, PHASE_ENCODE: 1, PHASE_PREFILL: 1, PHASE_DECODE: 2}  # the order within one epoch
ENDED_LIMIT = 65_536  # ended requests whose last epoch is remembered, for EPOCH_KEEP_S at most


@dataclass
class RunningAttempt:
    """One phase of one attempt at a request, from Start to end."""

    request_id: str
    epoch: int
    phase: Phase
    session: int  # number of the router's stream; vLLM's client index
    incoming: Incoming | None = None  # KV that comes from another worker
    traceparent: str = ""  # appears in log lines
    arrived_s: float = field(default_factory=time.monotonic)
    prepared: Any = None  # services/engine/requests.py: Prepared
    preparing: asyncio.Task[None] | None = None  # brings embeddings or compiles the grammar, then submits
    inside: bool = False  # engine steps may include it
    alone: bool = False  # it must run without other requests in the engine
    more_alone: bool = False  # its router has another such request
    share: Share = field(default_factory=Share)
    received: Received | None = None  # images that came on its router's stream
    images: dict[str, Any] | None = None  # name -> prepared image, or its embeddings; None: find them here
    embedding_bytes: int = 0  # taken from EmbeddingRoom

    @property
    def mark(self) -> tuple[int, int]:
        """The epoch and the rank of the phase; the mark rises with each Start of the request."""
        return self.epoch, _ORDER[self.phase]

    @property
    def internal_id(self) -> str:
        return attempt_id(self.request_id, self.epoch)

    @property
    def log_fields(self) -> dict[str, str]:
        return {"request_id": self.request_id, "trace_id": trace_id_of(self.traceparent)}

    def failed(self, code: Failed.Code, message: str, images: Sequence[str] = ()) -> Failed:
        return Failed(request_id=self.request_id, epoch=self.epoch, code=code, message=message, images=images)


class Attempts:
    def __init__(self) -> None:
        self.on_end: Callable[[RunningAttempt], object] = lambda _: None  # called after an attempt has ended
        self._live: dict[str, RunningAttempt] = {}  # keyed by internal id
        self._of_request: dict[str, RunningAttempt] = {}
        self._ended: OrderedDict[str, tuple[float, tuple[int, int]]] = OrderedDict()  # (kept until, mark)

    def __len__(self) -> int:
        return len(self._live)

    def begin(self, attempt: RunningAttempt) -> RunningAttempt | None:
        """Start an attempt; end and return an older one, if any. Raises RequestRefused(STALE)."""
        older = self._of_request.get(attempt.request_id)
        _, ended = self._ended.get(attempt.request_id, (0.0, (0, 0)))
        seen = max(ended, older.mark if older is not None else (0, 0))
        if attempt.mark <= seen:
            raise RequestRefused(
                Failed.CODE_STALE,
                f"request {attempt.request_id}: epoch {attempt.epoch} is late, epoch {seen[0]} was seen here",
            )
        if older is not None:
            self.end(older)
        self._live[attempt.internal_id] = attempt
        self._of_request[attempt.request_id] = attempt
        return older

    def live(self, engine_id: str) -> RunningAttempt | None:
        """Return the attempt with this internal id; None if it has ended."""
        return self._live.get(engine_id)

    def is_live(self, attempt: RunningAttempt) -> bool:
        return self._live.get(attempt.internal_id) is attempt

    def of_request(self, request_id: str) -> RunningAttempt | None:
        return self._of_request.get(request_id)

    def all(self) -> list[RunningAttempt]:
        return list(self._live.values())

    def of_session(self, session: int) -> list[RunningAttempt]:
        return [attempt for attempt in self._live.values() if attempt.session == session]

    def end(self, attempt: RunningAttempt) -> None:
        """End an attempt; later outputs of the engine for it are dropped."""
        self._live.pop(attempt.internal_id, None)
        if attempt.preparing is not None:
            attempt.preparing.cancel()
        if self._of_request.get(attempt.request_id) is attempt:
            del self._of_request[attempt.request_id]
            self._remember(attempt)
        self.on_end(attempt)

    def _remember(self, ended: RunningAttempt) -> None:
        now = time.monotonic()
        self._ended[ended.request_id] = (now + EPOCH_KEEP_S, ended.mark)
        self._ended.move_to_end(ended.request_id)
        while self._ended:
            oldest, _ = next(iter(self._ended.values()))
            if oldest > now and len(self._ended) <= ENDED_LIMIT:
                break
            self._ended.popitem(last=False)
