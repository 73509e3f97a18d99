"""The attempts that run here, were seen here, or left a handoff. Plain state; the loop's thread only.

Invariants: an attempt is live under exactly one internal id; a request has at most one live attempt; an
attempt is begun only with an (epoch, phase) above every one seen of its request, so no reply of an older
attempt leaves after a newer one came.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from baton.attempts import EPOCH_KEEP_S, attempt_id
from baton.protos.handoff_pb2 import Manifest
from baton.protos.worker_pb2 import PHASE_DECODE, PHASE_LOAD, PHASE_PREFILL, PHASE_SAVE, Failed, Phase
from baton.services.engine.errors import RequestRefused
from baton.services.worker.admission import Share

_ORDER = {PHASE_SAVE: 1, PHASE_PREFILL: 1, PHASE_LOAD: 2, PHASE_DECODE: 3}  # within one epoch
ENDED_LIMIT = 65_536  # ended requests whose last epoch is remembered, for EPOCH_KEEP_S at most


@dataclass
class RunningAttempt:
    """One phase of one attempt at a request, from its Start to its end here."""

    request_id: str
    epoch: int
    phase: Phase
    session: int  # number of the router's stream; vLLM's client index
    loads: bool  # it waits for KV from another worker
    traceparent: str = ""  # of its request, for log lines
    arrived_s: float = field(default_factory=time.monotonic)
    prepared: Any = None  # requests.Prepared of services/engine, once it is built
    grammar: asyncio.Task[None] | None = None  # compiles its grammar, then submits it
    alone: bool = False  # it must have the engine to itself
    more_alone: bool = False  # its router has another request to try alone
    share: Share = field(default_factory=Share)  # of this worker's room

    @property
    def mark(self) -> tuple[int, int]:
        """The epoch and the phase's place; it rises with each Start of the request."""
        return self.epoch, _ORDER[self.phase]

    @property
    def internal_id(self) -> str:
        """The engine's id of it: another attempt at the same request never meets this one's state."""
        return attempt_id(self.request_id, self.epoch)


@dataclass(frozen=True)
class SavedHandoff:
    """KV that waits here to be pulled. Times are time.monotonic's."""

    epoch: int
    session: int
    until_s: float  # its lease
    manifest: Manifest
    saved_s: float = field(default_factory=time.monotonic)

    @property
    def key(self) -> tuple[str, int]:
        """The key by which the rank that keeps it knows it."""
        return self.manifest.request_id, self.manifest.epoch


class Attempts:
    """All attempts of this worker."""

    def __init__(self) -> None:
        self.on_end: Callable[[RunningAttempt], object] = lambda _: None  # called when an attempt has ended
        self._live: dict[str, RunningAttempt] = {}  # by internal id
        self._of_request: dict[str, RunningAttempt] = {}
        self._ended: OrderedDict[str, tuple[float, tuple[int, int]]] = OrderedDict()  # until when, mark
        self._saved: dict[str, SavedHandoff] = {}  # by request id

    def __len__(self) -> int:
        return len(self._live)

    def begin(self, attempt: RunningAttempt) -> RunningAttempt | None:
        """Make it live; return the older attempt that it replaces, which is live no more.

        Raises RequestRefused(STALE) when the same or a later one was seen.
        """
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

    def loading(self, request_id: str, epoch: int) -> RunningAttempt | None:
        """Return the live attempt that loads its KV while the prompt is still prefilled."""
        attempt = self._of_request.get(request_id)
        found = attempt is not None and attempt.phase == PHASE_LOAD and attempt.epoch == epoch
        return attempt if found else None

    def live(self, engine_id: str) -> RunningAttempt | None:
        """Return the attempt with an engine's request id; None when it was aborted or replaced."""
        return self._live.get(engine_id)

    def is_live(self, attempt: RunningAttempt) -> bool:
        """Return whether it runs or waits here."""
        return self._live.get(attempt.internal_id) is attempt

    def of_request(self, request_id: str) -> RunningAttempt | None:
        """Return the live attempt at a request."""
        return self._of_request.get(request_id)

    def all(self) -> list[RunningAttempt]:
        """Return all live attempts."""
        return list(self._live.values())

    def of_session(self, session: int) -> list[RunningAttempt]:
        """Return the live attempts of a router's stream."""
        return [attempt for attempt in self._live.values() if attempt.session == session]

    def end(self, attempt: RunningAttempt) -> None:
        """Forget it here; further outputs of the engine go nowhere."""
        self._live.pop(attempt.internal_id, None)
        if attempt.grammar is not None:
            attempt.grammar.cancel()  # nobody needs it any more
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

    def saved(self, attempt: RunningAttempt, manifest: Manifest) -> None:
        """Remember a handoff for as long as its lease, so that it can be released when its router is gone."""
        self.forget_expired()
        until_s = time.monotonic() + manifest.lease_s
        self._saved[attempt.request_id] = SavedHandoff(attempt.epoch, attempt.session, until_s, manifest)

    def saved_epoch(self, request_id: str) -> int:
        """Return the epoch of the handoff that waits here; 0 without one."""
        saved = self._saved.get(request_id)
        return saved.epoch if saved else 0

    def take_saved(self, request_id: str) -> SavedHandoff | None:
        """Remove and return a request's handoff."""
        return self._saved.pop(request_id, None)

    def take_saved_of_session(self, session: int) -> list[SavedHandoff]:
        """Remove and return the handoffs of a router's stream."""
        taken = {name: one for name, one in self._saved.items() if one.session == session}
        for name in taken:
            del self._saved[name]
        return list(taken.values())

    def to_renew(self, for_s: float) -> list[SavedHandoff]:
        """Return handoffs whose routers are connected, and that were saved in the last `for_s` seconds."""
        self.forget_expired()
        since = time.monotonic() - for_s
        return [one for one in self._saved.values() if one.saved_s >= since]

    def renewed(self, asked: Iterable[SavedHandoff], held: Collection[tuple[str, int]], at_s: float) -> None:
        """Begin the leases of the `held` anew, of those `asked` at `at_s`; forget the others."""
        gone = {id(one) for one in asked if one.key not in held}
        for name, one in list(self._saved.items()):
            if id(one) in gone:
                del self._saved[name]
            elif one.key in held:
                self._saved[name] = replace(one, until_s=at_s + one.manifest.lease_s)

    def forget_expired(self) -> None:
        """Forget handoffs whose lease is over."""
        # Leases are set in order, so the first one that still runs ends the search.
        now = time.monotonic()
        for name, one in list(self._saved.items()):
            if one.until_s > now:
                break
            del self._saved[name]
