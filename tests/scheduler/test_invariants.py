"""Random requests and workers with two schedulers, whose messages are late, duplicated or lost."""

import random
from collections import deque
from collections.abc import Sized
from dataclasses import dataclass, field, replace

import pytest

from baton.attempts import EPOCH_KEEP_S
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.booking import Assignment, max_requests, usable_blocks
from baton.scheduler.ledger import Ledger
from baton.scheduler.placer import Placer
from baton.scheduler.policy import Policy
from baton.scheduler.roster import Roster
from baton.scheduler.types import Booking, Reserved, RouterReport
from harness.scheduling import LIMITS, Clock, held, identity, need, report

WORKERS = {"p1": pb.ROLE_PREFILL, "p2": pb.ROLE_PREFILL, "d1": pb.ROLE_DECODE, "d2": pb.ROLE_DECODE}
WORKERS |= {"m": pb.ROLE_MIXED, "e1": pb.ROLE_ENCODE, "e2": pb.ROLE_ENCODE}
WORKER_LEASE_S, BOOKING_LEASE_S = 3.0, 6.0
QUEUED = 30  # reports in flight to a scheduler; the oldest are dropped
STEPS = 500


class Scheduler:
    """A scheduler that checks its invariants."""

    def __init__(self, clock, draw):
        self.ledger = Ledger(BOOKING_LEASE_S, clock)
        self.roster = Roster("t", WORKER_LEASE_S, self.ledger, clock)
        self.placer = Placer(self.roster, self.ledger, Policy(LIMITS, LIMITS.policy, draw), clock=clock)
        self._clock = clock
        self._last = {}  # and since when

    def check(self):
        assert not self.ledger.live.keys() & self.ledger._past.keys()
        live = [replace(one.booking, prefilled=one.prefilled) for one in self.ledger.live.values()]
        sums = held(live)
        booked = {name: one for name, one in self.ledger._reserved.items() if not one.empty}
        assert booked == {name: one for name, one in sums.items() if not one.empty}
        for router in ("r0", "r1"):
            own = held(one for one in live if one.router_id == router)
            assert self.ledger.booked_by(router) == {name: one for name, one in own.items() if not one.empty}
        for name, worker in self.roster.view().workers.items():
            assert worker.reserved is self.ledger._reserved[name]
        for request_id, (last, since) in self._last.items():
            now = self.ledger.last(request_id)
            if now != last:
                forgotten = now == (0, False) and self._clock.now - since >= EPOCH_KEEP_S
                assert forgotten or now > last  # a later epoch, or the end of the same one
                self._last[request_id] = now, self._clock.now

    def within_limits(self, worker_id, *, prompts=True, decodes=True):
        worker = self.roster.view().workers[worker_id]
        assert not prompts or worker.reserved.prompt_tokens <= LIMITS.max_queued_prompt_tokens
        assert not decodes or worker.reserved.blocks <= usable_blocks(worker.capacity)
        limited = decodes and worker.role != pb.ROLE_ENCODE  # there prompt tokens are the limit
        assert not limited or worker.reserved.requests <= max_requests(worker.capacity, LIMITS)

    def place(self, request_id, epoch, router, prompt):
        encode = request_id.endswith(("3", "7"))
        outcome = self.placer.place(need(request_id, epoch, prompt, 100, router_id=router, encode=encode))
        if not isinstance(outcome, Assignment):
            return None
        booking = outcome.booking
        assert {WORKERS[one] == pb.ROLE_ENCODE for one in booking.worker_ids} == {encode}
        self.within_limits(booking.decode_id, prompts=booking.prompt_worker_id == booking.decode_id)
        self.within_limits(booking.prompt_worker_id, decodes=booking.prompt_worker_id == booking.decode_id)
        self._last[request_id] = (epoch, False), self._clock.now
        return booking


@dataclass
class Link:
    """Reports in flight from a router to a scheduler."""

    waiting: deque[RouterReport] = field(default_factory=deque)
    cut: bool = False
    generation: str = ""  # the scheduler's generation

    def add(self, what):
        if len(self.waiting) == QUEUED:
            self.waiting.popleft()
            self.generation = ""  # everything is reported again
        self.waiting.append(what)


@dataclass
class Router:
    """A router's bookings, and the reports that tell schedulers of them."""

    name: str
    links: list[Link]
    held: dict[str, Booking] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=dict)
    renewed_at: float = 0.0

    def tell(self, what):
        for link in self.links:
            link.add(what)

    def deliver(self, at, scheduler, *, reply_lost=False):
        """Deliver the next report. If the reply is lost, the report stays in flight."""
        link = self.links[at]
        result = scheduler.ledger.report(link.waiting[0])
        live = {one.attempt: one for one in self.held.values()}
        assert not live.keys() & set(result.fenced)  # running requests are never fenced
        if reply_lost:
            return
        link.waiting.popleft()
        if lost := tuple(live[one] for one in result.lost if one in live):
            link.add(RouterReport(placed=lost))
        if scheduler.ledger.generation != link.generation:
            link.generation = scheduler.ledger.generation
            link.add(RouterReport(placed=tuple(self.held.values())))


class World:
    """Two schedulers, a router with its home at each, and workers."""

    def __init__(self, seed):
        self.draw = random.Random(seed)
        self.clock = Clock()
        self.schedulers = [Scheduler(self.clock, self.draw) for _ in range(2)]
        self.routers = [Router(f"r{number}", [Link(), Link()]) for number in range(2)]
        self.silent = set()  # (worker, scheduler) whose heartbeats are lost
        self.tick()

    def tick(self):
        """Pass half a second: send heartbeats, and renewals three times per lease."""
        self.clock.now += 0.5
        for number, scheduler in enumerate(self.schedulers):
            for name in WORKERS:
                if (name, number) in self.silent:
                    continue
                load = pb.WorkerLoad(free_blocks=99)
                if not scheduler.roster.heartbeat(name, pb.WORKER_STATE_READY, load).known:
                    self.comes(name, number)
        for router in self.routers:
            if self.clock.now - router.renewed_at >= BOOKING_LEASE_S / 3:
                router.renewed_at = self.clock.now
                router.tell(report(renewed=[one.attempt for one in router.held.values()]))

    def comes(self, name, number):
        role = WORKERS[name]
        assert not self.schedulers[number].roster.register(identity(name, role), pb.WORKER_STATE_READY)

    def place(self, router, request_id):
        """Ask the home scheduler. If its reply is lost, the router gives up the epoch."""
        epoch = router.epochs[request_id] = router.epochs.get(request_id, 0) + 1
        home = self.schedulers[self.routers.index(router)]
        placed = home.place(request_id, epoch, router.name, self.draw.randint(1, 700))
        if placed is None:
            return
        router.held.pop(request_id, None)
        if self.draw.random() < 0.1:
            router.tell(report(finished=[placed.attempt]))
            return
        router.held[request_id] = placed
        router.links[1 - self.routers.index(router)].add(RouterReport(placed=(placed,)))

    def step(self):
        draw = self.draw
        router, at = draw.choice(self.routers), draw.randrange(2)
        link, request_id = router.links[at], f"{router.name}.{draw.randrange(8)}"
        known = router.held.get(request_id)
        what = draw.random()
        if what < 0.2:
            self.place(router, request_id)
        elif what < 0.3 and known:
            router.held[request_id] = replace(known, prefilled=True)
            router.tell(report(prefilled=[known.attempt]))
        elif what < 0.35 and known:
            blocks = draw.randint(0, 60)
            if blocks < known.blocks:
                router.held[request_id] = replace(known, blocks=blocks)
                router.tell(report(shared=[(known.attempt, blocks)]))
        elif what < 0.45 and known:
            del router.held[request_id]
            router.tell(report(finished=[known.attempt]))
        elif what < 0.8 and link.waiting and not link.cut:
            router.deliver(at, self.schedulers[at], reply_lost=draw.random() < 0.2)
        elif what < 0.9:
            self.tick()
        elif what < 0.94:
            link.cut = not link.cut
        elif what < 0.97:
            self.silent ^= {(draw.choice(sorted(WORKERS)), at)}
        elif what < 0.99:
            self.schedulers[at].roster.deregister(draw.choice(sorted(WORKERS)))
        elif what < 0.995:
            self.schedulers[at] = Scheduler(self.clock, draw)

    def settle(self):
        """Deliver all messages for a lease."""
        self.silent.clear()
        for router in self.routers:
            for link in router.links:
                link.cut = False
        for _ in range(int(2 * BOOKING_LEASE_S / 0.5) + 4):
            self.tick()
            for router in self.routers:
                for at, scheduler in enumerate(self.schedulers):
                    while router.links[at].waiting:
                        router.deliver(at, scheduler)
                        scheduler.check()


def sizes(one):
    """Return the sizes of all containers that are not empty: a leak would grow with each request."""
    found = {name: len(value) for name, value in vars(one).items() if isinstance(value, Sized) and value}
    return {name: size for name, size in found.items() if name not in ("generation", "_handoffs", "_topic")}


@pytest.mark.parametrize("seed", range(30))
def test_schedulers_agree_after_late_and_lost_messages(seed):
    world = World(seed)
    for _ in range(STEPS):
        world.step()
        for scheduler in world.schedulers:
            scheduler.check()
    world.settle()
    truth = {one.attempt: one for router in world.routers for one in router.held.values()}
    sums = held(truth.values())
    for scheduler in world.schedulers:
        live = scheduler.ledger.live.values()
        assert {one.booking.attempt: one.prefilled for one in live} == {
            key: one.prefilled for key, one in truth.items()
        }
        workers = scheduler.roster.view().workers
        assert {name: one.reserved for name, one in workers.items()} == {
            name: sums.get(name, Reserved()) for name in WORKERS
        }
    for router in world.routers:
        router.tell(report(finished=[one.attempt for one in router.held.values()]))
        router.held.clear()
    world.settle()
    for scheduler in world.schedulers:
        assert all(one.reserved == Reserved() for one in scheduler.roster.view().workers.values())
        world.clock.now += EPOCH_KEEP_S
        for name in WORKERS:
            scheduler.roster.deregister(name)
        scheduler.ledger.sweep()
        assert sizes(scheduler.ledger) == {}
        world.clock.now += EPOCH_KEEP_S
        scheduler.roster.view()
        assert sizes(scheduler.roster) == {}


@pytest.mark.parametrize("seed", range(5))
def test_one_scheduler_never_exceeds_a_limit(seed):
    draw, clock = random.Random(seed), Clock()
    scheduler = Scheduler(clock, draw)
    for name, role in WORKERS.items():
        scheduler.roster.register(identity(name, role), pb.WORKER_STATE_READY)
    full = 0
    for number in range(STEPS):
        placed = scheduler.place(f"{draw.randrange(60)}", number + 1, "r0", draw.randint(1, 400))
        full += placed is None
        live = [one.booking.attempt for one in scheduler.ledger.live.values()]
        prefilled = draw.sample(live, min(len(live), draw.randrange(3)))
        finished = draw.sample(live, draw.randrange(2)) if live else []
        scheduler.ledger.report(report(prefilled=prefilled, finished=finished))
        scheduler.check()
        for name, role in WORKERS.items():
            scheduler.within_limits(name, decodes=role != pb.ROLE_PREFILL)
    assert full > STEPS / 10
