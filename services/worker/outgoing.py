"""Offer what is computed here, prompts' KV or images' embeddings, to the workers that follow it.

A router draws a key for a PREFILL, a SAVE or an ENCODE, and gives it to this worker and to the worker that
needs the result. At any time, the latter calls `Follow` (protos/worker.proto) with the key. It gets a `begun`
if the KV can be pulled early, and one final reply.

    PROMISED ──begun──► BEGUN ──complete──► KEPT        one step: PROMISED ──complete──► KEPT
       │                  │                   │
       └──────────────────┴───────────────────┴──over──► NOTHING ──REMEMBER_S──► forgotten

Used on the event loop's thread. Invariants: a request has one handoff, of its latest attempt, with at most
one follower; a second one replaces the first. What a handoff keeps is released when the handoff ends: when
its router releases it or the router's stream ends, not when its follower leaves.
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
from baton.protos.handoff_pb2 import EmbeddingManifest, Manifest
from baton.protos.worker_pb2 import Complete, FollowReply, FollowRequest

WAIT_S = 10.0  # how long a follower waits for an attempt that has not arrived yet
MAX_WAITING = 1024  # followers that wait for an attempt; an open call takes 15 KB
REMEMBER_S = 10.0  # how long an attempt's end is remembered for a late follower
MAX_REMEMBERED = 4096
_ENDS = "this worker is shutting down"

Kept = Manifest | EmbeddingManifest


class State(IntEnum):
    """The states of an attempt's KV, in order; it never returns to an earlier one."""

    PROMISED = 0  # nothing can be pulled yet
    BEGUN = 1  # part of it can be pulled
    KEPT = 2  # all of it can be pulled
    NOTHING = 3  # nothing was saved, or it was released


class NotFollowedError(BatonError):
    """A follower is refused, with a gRPC status."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code


class Follower:
    """One open Follow call of another worker."""

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.timer: asyncio.TimerHandle | None = None  # set while it waits for its attempt
        self._said: list[FollowReply] = []
        self._refusal: NotFollowedError | None = None
        self._news: asyncio.Future[None] | None = None

    @property
    def is_refused(self) -> bool:
        """Whether the follower was refused; its call may still be open."""
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
    """The KV of one attempt. Times are those of time.monotonic."""

    request_id: str
    epoch: int
    session: int  # identifies the router's stream
    key: bytes
    ends_s: float  # the deadline of its request
    state: State = State.PROMISED
    manifest: Kept | None = None  # describes what can be pulled
    end: FollowReply | None = None
    until_s: float = 0.0  # the end of its lease; in NOTHING, when to forget it
    follower: Follower | None = None

    def move(self, to: State) -> bool:
        """Move to a later state; return False, unchanged, if `to` is not later."""
        if to <= self.state:
            return False
        self.state = to
        return True

    def tell(self, reply: FollowReply) -> None:
        if self.follower is not None:
            self.follower.say(reply)


class Outgoing:
    def __init__(self, release: Callable[[Kept], object]) -> None:
        """Use `release` to release KV and embeddings; it must not block."""
        self._release = release
        self._handoffs: dict[str, _Handoff] = {}  # keyed by request id
        self._leased: OrderedDict[str, _Handoff] = OrderedDict()  # sorted by the end of the lease
        self._past: OrderedDict[str, _Handoff] = OrderedDict()  # handoffs in state NOTHING; oldest first
        self._waiting: dict[tuple[str, int], list[Follower]] = {}  # keyed by request id and epoch
        self._waiters = 0
        self._ends = False  # new followers are refused

    # Progress of an attempt.

    def begin(self, request_id: str, epoch: int, key: bytes, session: int, left_s: float) -> None:
        """Register an attempt of a new epoch, whose KV will be saved. left_s: time until its deadline."""
        if (older := self._handoffs.get(request_id)) is not None and older.epoch >= epoch:
            return
        self.supersede(request_id, epoch)
        self._forget(request_id)
        handoff = self._handoffs[request_id] = _Handoff(
            request_id, epoch, session, key, time.monotonic() + left_s
        )
        for follower in self._waiting.pop((request_id, epoch), ()):
            self._stop_waiting(follower)
            if follower.is_refused:  # its wait timed out a moment ago
                continue
            try:
                self._attach(handoff, follower)
            except NotFollowedError as error:
                follower.refuse(error.code, str(error))

    def begun(self, request_id: str, epoch: int, manifest: Manifest) -> None:
        """Tell the follower that it can begin to pull. This lease may end before the prompt does."""
        handoff = self._of(request_id, epoch)
        if handoff is not None and handoff.move(State.BEGUN):
            self._lease(handoff, manifest, manifest.lease_s)
            handoff.tell(FollowReply(begun=manifest))

    def complete(self, request_id: str, epoch: int, complete: Complete) -> None:
        handoff = self._of(request_id, epoch)
        manifest = complete.embedding if complete.HasField("embedding") else complete.manifest
        if handoff is None or not handoff.move(State.KEPT):
            self._release(manifest)  # its router has released it already
            return
        self._lease(handoff, manifest, manifest.lease_s)
        handoff.end = FollowReply(complete=complete)
        handoff.tell(handoff.end)

    def over(self, request_id: str, epoch: int, problem: Problem | None = None) -> None:
        """Tell the follower that the attempt ended without a save.

        problem: why; by default, because its first token was its last, or it was aborted. Has no effect if
        the KV was saved or the handoff has ended.
        """
        handoff = self._of(request_id, epoch)
        if handoff is not None and handoff.state is not State.KEPT:
            self._end(
                handoff,
                problem or Problem.of(NothingSaved("its first token was its last, or it was aborted")),
            )

    # Release.

    def release(self, request_id: str) -> None:
        if (handoff := self._handoffs.get(request_id)) is not None:
            self._end(handoff, Problem.of(UnknownHandoff("its router has released it")))

    def release_of_session(self, session: int) -> None:
        for handoff in [one for one in self._handoffs.values() if one.session == session]:
            self._end(handoff, Problem.of(UnknownHandoff("the stream of its router has ended")))

    def supersede(self, request_id: str, epoch: int) -> None:
        handoff = self._handoffs.get(request_id)
        if handoff is not None and handoff.epoch < epoch:
            self._end(handoff, Problem.of(StaleEpoch(f"attempt {epoch} has taken its place")))

    def hang_up(self) -> None:
        """Refuse all followers, present and future, because this worker is shutting down."""
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

    @property
    def leased(self) -> bool:
        """Whether anything is kept that a router has not released."""
        self.forget_expired()
        return bool(self._leased)

    def to_renew(self) -> list[Manifest]:
        """Return the manifests of KV that has not been released and whose request may still run."""
        self.forget_expired()
        now = time.monotonic()
        leased = ((one.manifest, one.ends_s) for one in self._leased.values())
        return [kept for kept, ends_s in leased if isinstance(kept, Manifest) and ends_s >= now]

    def renewed(self, asked: Iterable[Manifest], held: Collection[tuple[str, int]], at_s: float) -> None:
        """Renew, as of `at_s`, the leases in `held`, and end those in `asked` that are not in `held`."""
        gone = {id(one) for one in asked if (one.request_id, one.epoch) not in held}
        for handoff in list(self._leased.values()):
            manifest = handoff.manifest
            if not isinstance(manifest, Manifest):
                continue
            if id(manifest) in gone:
                self._lapse(handoff, UnknownHandoff("it was pulled, or its lease has ended"))
            elif (manifest.request_id, manifest.epoch) in held:
                handoff.until_s = at_s + manifest.lease_s

    def forget_expired(self) -> None:
        """End handoffs whose lease has expired, and forget handoffs that ended long ago."""
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
        """Serve a follower for the duration of the context. Raises NotFollowedError."""
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
        return self._waiters + sum(one.follower is not None for one in self._handoffs.values())

    def _wait(self, name: tuple[str, int], follower: Follower) -> None:
        if self._waiters >= MAX_WAITING:
            raise NotFollowedError(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_WAITING} followers already wait for attempts"
            )
        self._waiting.setdefault(name, []).append(follower)
        self._waiters += 1
        follower.timer = asyncio.get_running_loop().call_later(
            WAIT_S,
            follower.refuse,
            grpc.StatusCode.NOT_FOUND,
            f"attempt {name[1]} at request {name[0]} did not arrive within {WAIT_S:g} s",
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
            handoff.follower.refuse(grpc.StatusCode.ABORTED, "another call has taken over")
        handoff.follower = follower
        if handoff.end is not None:
            follower.say(handoff.end)
        elif isinstance(handoff.manifest, Manifest):
            follower.say(FollowReply(begun=handoff.manifest))

    def _leave(self, name: tuple[str, int], follower: Follower) -> None:
        if follower.timer is not None:
            self._stop_waiting(follower)
            self._waiting[name].remove(follower)
            if not self._waiting[name]:
                del self._waiting[name]
        elif (handoff := self._of(*name)) is not None and handoff.follower is follower:
            handoff.follower = None

    # Internals.

    def _of(self, request_id: str, epoch: int) -> _Handoff | None:
        handoff = self._handoffs.get(request_id)
        return handoff if handoff is not None and handoff.epoch == epoch else None

    def _lease(self, handoff: _Handoff, manifest: Kept, lease_s: float) -> None:
        self.forget_expired()
        handoff.manifest, handoff.until_s = manifest, time.monotonic() + lease_s
        self._leased[handoff.request_id] = handoff
        self._leased.move_to_end(handoff.request_id)

    def _lapse(self, handoff: _Handoff, error: HandoffError) -> None:
        """End a handoff whose KV the ranks no longer hold; one still in prefill only loses its lease."""
        del self._leased[handoff.request_id]
        if handoff.state is State.KEPT:
            if isinstance(handoff.manifest, Manifest):
                handoff.manifest = None
            self._end(handoff, Problem.of(error))

    def _end(self, handoff: _Handoff, problem: Problem) -> None:
        told = handoff.state is State.KEPT  # its follower has its final reply
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
