"""Random lives of requests and workers, against a model of what must hold, on each store."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from baton.attempts import Attempt
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.booking import claim, max_requests, usable_blocks
from baton.scheduler.store import Store
from baton.scheduler.store.memory import MemoryStore
from baton.scheduler.store.redis import RedisStore
from baton.scheduler.types import Booking, Reserved, ReserveOutcome
from harness.scheduling import LEASE_S, LIMITS, RedisServer, identity, need, register, report, until

T = TypeVar("T")
WORKERS = {"p1": pb.ROLE_PREFILL, "p2": pb.ROLE_PREFILL, "d1": pb.ROLE_DECODE, "d2": pb.ROLE_DECODE}
REQUESTS = st.sampled_from([f"r{number}" for number in range(6)])
READERS = st.sampled_from(["p1", "p2", ""])
WRITERS = st.sampled_from(["d1", "d2"])
EPOCHS = st.integers(1, 4)


class Lives(RuleBasedStateMachine):
    """The model: who holds what, by request, and the last epoch of each."""

    url = ""  # of a Redis; empty: the memory store

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        topic = uuid.uuid4().hex
        self.store: Store = RedisStore(self.url, topic) if self.url else MemoryStore(topic)
        self.follower = MemoryStore(topic)  # learns what changed since `revision`, now and then
        self.revision = 0
        self.live: dict[str, Booking] = {}
        self.unread: set[str] = set()
        self.epochs: dict[str, int] = {}
        self.over: set[Attempt] = set()  # told by a router, or taken over by a later epoch
        for name, role in WORKERS.items():
            self.run(register(self.store, name, role))

    def run(self, what: Any) -> Any:
        return self.loop.run_until_complete(what)

    def teardown(self) -> None:
        self.follows()
        for known in (self.run(one.export()).requests for one in (self.store, self.follower)):
            held = {one.attempt: one.prefilled for one in known if one.booking}
            assert held == {
                one.attempt: one.attempt.request_id not in self.unread for one in self.live.values()
            }
            assert {one.attempt for one in known if one.over} == {
                one for one in self.over if one.epoch == self.epochs[one.request_id]
            }
        everything = [one.attempt for one in self.live.values()]
        self.run(self.store.report(report(finished=everything), LEASE_S))
        view = self.run(self.store.view())
        assert view.live_attempts == 0
        assert all(worker.reserved == Reserved() for worker in view.workers.values()), "something leaked"
        self.run(self.store.close())
        self.loop.close()

    def forget(self, request_id: str) -> None:
        self.live.pop(request_id, None)
        self.unread.discard(request_id)

    def end(self, request_id: str) -> None:
        """Not for want of a lease."""
        if request_id in self.live:
            self.over.add(self.live[request_id].attempt)
        self.forget(request_id)

    @rule(
        request=REQUESTS,
        epoch=EPOCHS,
        prefill=READERS,
        decode=WRITERS,
        prompt=st.integers(1, 700),
        short=st.booleans(),
    )
    def place(self, request: str, epoch: int, prefill: str, decode: str, prompt: int, short: bool) -> None:
        view = self.run(self.store.view())
        if not {decode, prefill or decode} <= view.workers.keys():
            return
        what = need(request, epoch, prompt, 100)
        wanted = claim(what, view.workers[prefill] if prefill else None, view.workers[decode], LIMITS)
        # A short lease stands for a router that died: swept before the next rule.
        result = self.run(self.store.reserve(wanted, 0.001 if short else LEASE_S))
        if epoch <= self.epochs.get(request, 0):
            assert result.outcome is ReserveOutcome.STALE
            return
        assert result.outcome in (ReserveOutcome.BOOKED, ReserveOutcome.FULL)
        self.end(request)
        if result.outcome is ReserveOutcome.BOOKED:
            self.epochs[request] = epoch
            if short:
                self.run(self.swept())
            else:
                self.live[request] = wanted.booking
                self.unread.add(request)

    async def swept(self) -> None:
        async def expired() -> bool:
            return bool((await self.store.view()).expired)

        await until(expired)

    @rule(request=REQUESTS, epoch=EPOCHS)
    def prefilled(self, request: str, epoch: int) -> None:
        attempt = Attempt(request, epoch)
        result = self.run(self.store.report(report(prefilled=[attempt]), LEASE_S))
        assert result.stale == (epoch < self.epochs.get(request, 0))
        if request in self.live and self.live[request].attempt == attempt:
            self.unread.discard(request)

    @rule(request=REQUESTS, epoch=EPOCHS)
    def finished(self, request: str, epoch: int) -> None:
        attempt = Attempt(request, epoch)
        result = self.run(self.store.report(report(finished=[attempt]), LEASE_S))
        assert result.stale == (epoch < self.epochs.get(request, 0))
        if epoch >= self.epochs.get(request, 0):  # also of one that was not placed here
            self.end(request)
            self.epochs[request] = epoch
            self.over.add(attempt)

    @rule(request=REQUESTS, epoch=EPOCHS)
    def renewed(self, request: str, epoch: int) -> None:
        attempt = Attempt(request, epoch)
        result = self.run(self.store.report(report(renewed=[attempt]), LEASE_S))
        held = request in self.live and self.live[request].attempt == attempt
        assert result.lost + result.fenced == ([] if held else [attempt])
        assert bool(result.fenced) == (attempt in self.over or epoch < self.epochs.get(request, 0))

    @rule(request=REQUESTS, epoch=EPOCHS, blocks=st.integers(0, 60))
    def shared(self, request: str, epoch: int, blocks: int) -> None:
        attempt = Attempt(request, epoch)
        result = self.run(self.store.report(report(shared=[(attempt, blocks)]), LEASE_S))
        assert result.stale == (epoch < self.epochs.get(request, 0))
        held = self.live.get(request)
        if held and held.attempt == attempt:
            self.live[request] = replace(held, blocks=min(held.blocks, blocks))

    @rule()
    def follows(self) -> None:
        state = self.run(self.store.export(self.revision))
        self.revision = state.revision
        self.run(self.follower.merge(state))

    @rule(worker=st.sampled_from(sorted(WORKERS)))
    def leaves(self, worker: str) -> None:
        self.run(self.store.deregister(worker))

    @rule(worker=st.sampled_from(sorted(WORKERS)))
    def comes(self, worker: str) -> None:
        self.run(register(self.store, worker, WORKERS[worker]))

    @invariant()
    def bookings_are_those_of_live_attempts_and_within_limits(self) -> None:
        expected = {name: Reserved() for name in WORKERS}
        for request, held in self.live.items():
            unread = request in self.unread
            for name in held.worker_ids:
                if name == held.decode_id or unread:
                    expected[name].requests += 1
            if unread:
                expected[held.prompt_worker_id].prompt_tokens += held.prompt_tokens
            else:
                expected[held.decode_id].decoding += 1
            expected[held.decode_id].blocks += held.blocks
        view = self.run(self.store.view())
        assert view.live_attempts == len(self.live)
        assert self.run(self.store.booked_by("router")) == {
            name: one for name, one in expected.items() if not one.empty
        }
        for name, worker in view.workers.items():
            assert worker.reserved == expected[name], name
            capacity = identity(name).capacity
            assert worker.reserved.blocks <= usable_blocks(capacity)
            assert worker.reserved.prompt_tokens <= LIMITS.max_queued_prompt_tokens
            if WORKERS[name] == pb.ROLE_DECODE:
                assert worker.reserved.requests <= max_requests(capacity, LIMITS)


@pytest.mark.parametrize("kind", ["memory", "redis"])
def test_nothing_is_booked_twice_or_leaks(kind: str, redis_server: RedisServer) -> None:
    class Machine(Lives):
        url = redis_server.url if kind == "redis" else ""

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=60 if kind == "memory" else 25,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=True,
            database=None,
        ),
    )
