"""Offer the KV of prompts computed here to the workers that follow them.

A router draws a key for a PREFILL or a SAVE, and gives it to this worker and to the worker that needs the KV.
That worker calls `Follow` (protos/worker.proto) with the key: it may hear of a beginning, and always hears of
one end. The call may come before the attempt does, while the prompt is computed, or when its KV is kept; the
follower hears at once how far the attempt is.

    PROMISED ──begun──► BEGUN ──complete──► KEPT        one step: PROMISED ──complete──► KEPT
       │                  │                   │
       └──────────────────┴───────────────────┴──over──► NOTHING ──REMEMBER_S──► forgotten

Plain state, except for the waiting calls; loop's thread only. Invariants:

- A request has one handoff, of the latest attempt seen here.
- A handoff has at most one follower: a second one replaces the first. Each hears exactly one end.
- KV is released when its handoff is over, whatever the reason. A follower that leaves ends nothing: its
  router says what is no longer wanted, or the end of the router's stream does.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum

import grpc

from baton.errors import BatonError
from baton.handoff.errors import HandoffError, LeaseExpired, NothingSaved, StaleEpoch, UnknownHandoff
from baton.handoff.reports import Problem
from baton.protos import worker_pb2
from baton.protos.handoff_pb2 import Manifest
from baton.protos.worker_pb2 import Complete, FollowReply, FollowRequest

WAIT_S = 10.0  # how long a follower waits for its attempt: the router sends both Starts at once
MAX_WAITING = 1024  # followers waiting for an attempt: an open call takes 15 KB
REMEMBER_S = 10.0  # how long an attempt's end is remembered for a late follower: as long as WAIT_S
MAX_REMEMBERED = 4096
_ENDS = "this worker ends"


class State(IntEnum):
    """The states of an attempt's KV. It never goes back to an earlier one."""

    PROMISED = 0  # the attempt is here
    BEGUN = 1  # part of it can be pulled
    KEPT = 2  # all of it can be pulled
    NOTHING = 3  # none, or none any more


class NotFollowedError(BatonError):
    """A follower is sent away; `code` is its call's status."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code


class Follower:
    """One open call of another worker."""

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.timer: asyncio.TimerHandle | None = None  # runs while it waits for its attempt
        self._said: list[FollowReply] = []
        self._refusal: NotFollowedError | None = None
        self._news: asyncio.Future[None] | None = None

    @property
    def is_refused(self) -> bool:
        """Whether it is sent away, though its call may not have ended."""
        return self._refusal is not None

    def say(self, reply: FollowReply) -> None:
        self._said.append(reply)
        self._wake()

    def refuse(self, code: grpc.StatusCode, text: str) -> None:
        """Make `next` raise NotFollowedError, after all queued replies."""
        self._refusal = NotFollowedError(code, text)
        self._wake()

    async def next(self) -> FollowReply:
        """Wait for the next reply. Raises NotFollowedError."""
        while not self._said:
            if self._refusal is not None:
                raise self._refusal
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        return self._said.pop(0)

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)


@dataclass(eq=False)
class _Handoff:
    """The KV of one attempt. Times are on the clock of time.monotonic."""

    request_id: str
    epoch: int
    session: int  # its router's
    key: bytes
    state: State = State.PROMISED
    manifest: Manifest | None = None  # manifest of what can be pulled
    end: FollowReply | None = None
    saved_s: float = 0.0
    until_s: float = 0.0  # the end of its lease; in NOTHING, until when that is remembered
    follower: Follower | None = None

    def move(self, to: State) -> bool:
        """Move to a later state and return True; ignore a state that is not later."""
        if to <= self.state:
            return False
        self.state = to
        return True

    def tell(self, reply: FollowReply) -> None:
        if self.follower is not None:
            self.follower.say(reply)


class Outgoing:
    """All handoffs of this worker, and their followers."""

    def __init__(self, release: Callable[[Manifest], object]) -> None:
        """Begin empty. release: lets go of KV, without waiting."""
        self._release = release
        self._handoffs: dict[str, _Handoff] = {}  # keyed by request id
        self._leased: OrderedDict[str, _Handoff] = OrderedDict()  # handoffs whose KV is under a lease
        self._past: OrderedDict[str, _Handoff] = OrderedDict()  # handoffs in NOTHING, oldest first
        self._waiting: dict[tuple[str, int], list[Follower]] = {}  # keyed by request id and epoch
        self._waiters = 0
        self._ends = False  # no follower hears more than the end

    # An attempt's way.

    def begin(self, request_id: str, epoch: int, key: bytes, session: int) -> None:
        """Note an attempt whose KV is wanted, of a later epoch than all before."""
        if (older := self._handoffs.get(request_id)) is not None and older.epoch >= epoch:
            return
        self.supersede(request_id, epoch)
        self._forget(request_id)
        handoff = self._handoffs[request_id] = _Handoff(request_id, epoch, session, key)
        for follower in self._waiting.pop((request_id, epoch), ()):
            self._stop_waiting(follower)
            if follower.is_refused:  # its time was up a moment ago
                continue
            try:
                self._attach(handoff, follower)
            except NotFollowedError as error:
                follower.refuse(error.code, str(error))

    def begun(self, request_id: str, epoch: int, manifest: Manifest) -> None:
        """Report that the first records can be pulled. Their lease may end before the prompt does."""
        handoff = self._of(request_id, epoch)
        if handoff is not None and handoff.move(State.BEGUN):
            self._lease(handoff, manifest)
            handoff.tell(FollowReply(begun=manifest))

    def complete(self, request_id: str, epoch: int, complete: Complete) -> None:
        """Report that all of it is kept, and keep that answer for as long as the KV."""
        handoff = self._of(request_id, epoch)
        if handoff is None or not handoff.move(State.KEPT):
            self._release(complete.manifest)  # nobody is left to say that it is not wanted
            return
        self._lease(handoff, complete.manifest)
        handoff.end = FollowReply(complete=complete)
        handoff.tell(handoff.end)

    def over(self, request_id: str, epoch: int, problem: Problem | None = None) -> None:
        """Report that the attempt ended without a save: its first token was its last, or it was aborted.

        Has no effect if its KV is kept or it was already over.
        """
        handoff = self._of(request_id, epoch)
        if handoff is not None and handoff.state is not State.KEPT:
            self._end(
                handoff,
                problem or Problem.of(NothingSaved("its first token was its last, or it was aborted")),
            )

    # Its end.

    def release(self, request_id: str) -> None:
        """Let go of a request's KV, which its router no longer wants."""
        if (handoff := self._handoffs.get(request_id)) is not None:
            self._end(handoff, Problem.of(UnknownHandoff("its router has released it")))

    def release_of_session(self, session: int) -> None:
        """Let go of the KV that a router's stream has asked for."""
        for handoff in [one for one in self._handoffs.values() if one.session == session]:
            self._end(handoff, Problem.of(UnknownHandoff("the stream of its router has ended")))

    def supersede(self, request_id: str, epoch: int) -> None:
        """Let go of the KV of earlier attempts at a request."""
        handoff = self._handoffs.get(request_id)
        if handoff is not None and handoff.epoch < epoch:
            self._end(handoff, Problem.of(StaleEpoch(f"attempt {epoch} has taken its place")))

    def hang_up(self) -> None:
        """Send all followers away, including later ones: this worker ends."""
        self._ends = True
        for handoff in self._handoffs.values():
            if handoff.follower is not None:
                handoff.follower.refuse(grpc.StatusCode.UNAVAILABLE, _ENDS)
        for followers in self._waiting.values():
            for follower in followers:
                self._stop_waiting(follower)
                follower.refuse(grpc.StatusCode.UNAVAILABLE, _ENDS)
        self._waiting.clear()

    # Leases.

    def to_renew(self, for_s: float) -> list[Manifest]:
        """Return the KV held for connected routers that was saved in the last `for_s` seconds."""
        self.forget_expired()
        since = time.monotonic() - for_s
        return [
            one.manifest for one in self._leased.values() if one.manifest is not None and one.saved_s >= since
        ]

    def renewed(self, asked: Iterable[Manifest], held: Collection[tuple[str, int]], at_s: float) -> None:
        """Renew the leases of the `held`, among those `asked` at `at_s`; the others are gone."""
        gone = {id(one) for one in asked if (one.request_id, one.epoch) not in held}
        for handoff in list(self._leased.values()):
            manifest = handoff.manifest
            if manifest is None:
                continue
            if id(manifest) in gone:
                self._lapse(handoff, UnknownHandoff("it was pulled, or its lease is over"))
            elif (manifest.request_id, manifest.epoch) in held:
                handoff.until_s = at_s + manifest.lease_s

    def forget_expired(self) -> None:
        """Forget KV that has lost its lease, and handoffs that were over long ago."""
        now = time.monotonic()
        while self._leased:  # ordered by the ends of their leases
            oldest = next(iter(self._leased.values()))
            if oldest.until_s > now:
                break
            self._lapse(oldest, LeaseExpired("it was not pulled before its lease ended"))
        self._forget_past(now)

    # Followers.

    @contextmanager
    def follower(self, request: FollowRequest) -> Iterator[Follower]:
        """Let another worker follow an attempt while the context lasts. Raises NotFollowedError."""
        if self._ends:
            raise NotFollowedError(grpc.StatusCode.UNAVAILABLE, _ENDS)
        self.forget_expired()
        follower = Follower(request.key)
        name = request.request_id, request.epoch
        handoff = self._handoffs.get(request.request_id)
        if handoff is None or handoff.epoch < request.epoch:
            self._wait(name, follower)
        elif handoff.epoch > request.epoch:
            raise NotFollowedError(grpc.StatusCode.NOT_FOUND, "a later attempt at this request is here")
        else:
            self._attach(handoff, follower)
        try:
            yield follower
        finally:
            self._leave(name, follower)

    @property
    def followers(self) -> int:
        """The number of followers that have not left."""
        return self._waiters + sum(one.follower is not None for one in self._handoffs.values())

    def _wait(self, name: tuple[str, int], follower: Follower) -> None:
        if self._waiters >= MAX_WAITING:
            raise NotFollowedError(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_WAITING} others already wait here for attempts"
            )
        self._waiting.setdefault(name, []).append(follower)
        self._waiters += 1
        follower.timer = asyncio.get_running_loop().call_later(
            WAIT_S,
            follower.refuse,
            grpc.StatusCode.NOT_FOUND,
            f"no attempt {name[1]} at request {name[0]} came here within {WAIT_S:g} s",
        )

    def _stop_waiting(self, follower: Follower) -> None:
        if follower.timer is not None:
            follower.timer.cancel()
            follower.timer = None
            self._waiters -= 1

    def _attach(self, handoff: _Handoff, follower: Follower) -> None:
        if not handoff.key or not hmac.compare_digest(handoff.key, follower.key):
            raise NotFollowedError(grpc.StatusCode.PERMISSION_DENIED, "the key is not this attempt's")
        if handoff.follower is not None:
            handoff.follower.refuse(grpc.StatusCode.ABORTED, "another call follows this attempt now")
        handoff.follower = follower
        if handoff.end is not None:
            follower.say(handoff.end)
        elif handoff.manifest is not None:
            follower.say(FollowReply(begun=handoff.manifest))

    def _leave(self, name: tuple[str, int], follower: Follower) -> None:
        if follower.timer is not None:
            self._stop_waiting(follower)
            self._waiting[name].remove(follower)
            if not self._waiting[name]:
                del self._waiting[name]
        elif (handoff := self._of(*name)) is not None and handoff.follower is follower:
            handoff.follower = None

    # Inside.

    def _of(self, request_id: str, epoch: int) -> _Handoff | None:
        handoff = self._handoffs.get(request_id)
        return handoff if handoff is not None and handoff.epoch == epoch else None

    def _lease(self, handoff: _Handoff, manifest: Manifest) -> None:
        self.forget_expired()
        now = time.monotonic()
        handoff.manifest, handoff.saved_s, handoff.until_s = manifest, now, now + manifest.lease_s
        self._leased[handoff.request_id] = handoff
        self._leased.move_to_end(handoff.request_id)

    def _lapse(self, handoff: _Handoff, error: HandoffError) -> None:
        """Note that the ranks no longer hold its KV; during the prompt they may hold some again."""
        del self._leased[handoff.request_id]
        if handoff.state is State.KEPT:
            handoff.manifest = None
            self._end(handoff, Problem.of(error))

    def _end(self, handoff: _Handoff, problem: Problem) -> None:
        """Keep nothing but the problem, and that for a while."""
        told = handoff.state is State.KEPT  # its follower has heard its end
        if not handoff.move(State.NOTHING):
            return
        manifest, handoff.manifest = handoff.manifest, None
        self._leased.pop(handoff.request_id, None)
        handoff.end = FollowReply(problem=worker_pb2.Problem(name=problem.name, text=problem.text))
        if not told:
            handoff.tell(handoff.end)
        handoff.until_s = time.monotonic() + REMEMBER_S
        self._past[handoff.request_id] = handoff
        if manifest is not None:
            self._release(manifest)
        self._forget_past(time.monotonic())

    def _forget_past(self, now: float) -> None:
        while self._past:
            oldest = next(iter(self._past.values()))
            if oldest.until_s > now and len(self._past) <= MAX_REMEMBERED:
                break
            self._forget(oldest.request_id)

    def _forget(self, request_id: str) -> None:
        self._past.pop(request_id, None)
        self._leased.pop(request_id, None)
        self._handoffs.pop(request_id, None)
