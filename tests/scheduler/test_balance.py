"""Workers change roles only under lasting pressure, and not back and forth."""

import random

import pytest

from baton.autoscale.balance import PAUSE, Balance
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.autoscaler import seen
from baton.scheduler.types import FleetView, Reserved, Told, WorkerRecord
from harness.scheduling import identity

P, D, M = pb.ROLE_PREFILL, pb.ROLE_DECODE, pb.ROLE_MIXED
AFTER_S = 10.0


def worker(name, role, reserved=None, blocks_used=-1, **changes):
    """Return a worker with steps of 512 tokens, batches of 4 and 99 blocks, which runs its bookings."""
    who = identity(name, role, **changes)
    booked = reserved or Reserved()
    used = booked.blocks if blocks_used < 0 else blocks_used
    load = pb.WorkerLoad(running=booked.requests if used else 0, free_blocks=max(0, 99 - used))
    return WorkerRecord(who, pb.WORKER_STATE_READY, load, booked, False, 5.0)


class Cluster:
    def __init__(self, *workers):
        self.now = 0.0
        self.workers = {one.worker_id: one for one in workers}
        self.balance = Balance(AFTER_S)

    def look(self):
        return self.balance.look(seen(FleetView(self.workers), Told(), self.now))

    def first_flip(self, seconds):
        """Look twice a second; return the first change, at `now`."""
        until = self.now + seconds
        while self.now < until:
            if flip := self.look():
                return flip
            self.now += 0.5
        return None


def waiting(tokens):
    return Reserved(prompt_tokens=tokens, requests=tokens // 100)


def decoding(requests):
    return Reserved(requests=requests, blocks=requests * 10)


def test_the_idlest_decode_worker_changes_when_prompts_queue():
    one = Cluster(worker("p", P, waiting(2_000)), worker("d1", D, decoding(1)), worker("d2", D))
    flip = one.first_flip(60)
    assert (flip.member.worker_id, flip.role) == ("d2", P)
    assert one.now == AFTER_S
    assert one.first_flip(60) is not None
    assert one.now == (1 + PAUSE) * AFTER_S
    assert "prefill side was at 3.9 for 10 s" in flip.why


def test_the_idlest_prefill_worker_changes_when_batches_are_full():
    one = Cluster(worker("p1", P, waiting(100)), worker("p2", P), worker("d", D, decoding(4)))
    flip = one.first_flip(60)
    assert (flip.member.worker_id, flip.role) == ("p2", D)


def test_a_full_cache_is_pressure_too():
    blocks = Reserved(requests=1, blocks=95)
    flip = Cluster(worker("p1", P), worker("p2", P), worker("d", D, blocks)).first_flip(60)
    assert flip.role == D


def test_requests_waiting_for_prefill_are_no_pressure_on_decode_workers():
    coming = Reserved(requests=4, blocks=40)
    flip = Cluster(
        worker("p", P, waiting(2_000)), worker("d1", D, coming, 0), worker("d2", D, coming, 0)
    ).first_flip(60)
    assert flip.role == P


def test_pressure_must_last():
    one = Cluster(worker("p", P, waiting(2_000)), worker("d1", D), worker("d2", D))
    assert one.first_flip(AFTER_S) is None
    one.workers["p"] = worker("p", P, waiting(100))
    assert one.look() is None
    one.workers["p"] = worker("p", P, waiting(2_000))
    assert one.first_flip(AFTER_S) is None
    assert one.first_flip(1) is not None


@pytest.mark.parametrize(
    "workers",
    [
        [worker("p", P, waiting(2_000)), worker("d", D)],  # the last decode worker
        [worker("p", P, waiting(2_000)), worker("d1", D, decoding(2)), worker("d2", D, decoding(2))],  # busy
        [worker("p", P, waiting(600)), worker("d1", D), worker("d2", D)],  # a short queue
        [  # one worker has no room for the bookings of both
            worker("p", P, waiting(2_000)),
            worker("d1", D, Reserved(requests=6, blocks=60), 0),
            worker("d2", D, Reserved(requests=6, blocks=60), 0),
        ],
        [worker("p1", P), worker("p2", P), worker("d1", D), worker("d2", D)],
        [worker("d1", D), worker("d2", D)],  # no prefill worker
        [worker("p", P, waiting(2_000)), worker("m1", M), worker("m2", M)],
        [
            worker("p", P, waiting(2_000)),
            worker("d1", D, compatibility_hash=""),
            worker("d2", D, compatibility_hash=""),
        ],
    ],
)
def test_no_change(workers):
    assert Cluster(*workers).first_flip(100) is None


def gang(name, role, *booked):
    seats = [pb.Gang(name=name, rank=rank, size=len(booked), life="one") for rank in range(len(booked))]
    members = [worker(f"{name}.r{seat.rank}", role, one) for seat, one in zip(seats, booked, strict=True)]
    for one, seat in zip(members, seats, strict=True):
        one.identity.gang.CopyFrom(seat)
        one.__post_init__()
    return members


def test_a_gang_changes_as_a_whole():
    busy = gang("d1", D, decoding(1), Reserved())
    one = Cluster(worker("p", P, waiting(2_000)), *busy, *gang("d2", D, Reserved(), Reserved()))
    flip = one.first_flip(60)
    assert flip.member.worker_id == "d2.r0"
    lone = Cluster(worker("p", P, waiting(2_000)), *gang("d2", D, Reserved(), Reserved()))
    assert lone.first_flip(100) is None, "no other decode worker is left"
    half = Cluster(worker("p", P, waiting(2_000)), *busy, *gang("d2", D, Reserved(), Reserved())[:1])
    assert half.first_flip(100) is None, "it is not whole"


def test_all_workers_of_a_gang_are_missed():
    """The load of two workers does not fit on the other two, although three workers could take it."""
    others = gang("d1", D, decoding(1), decoding(2))
    one = Cluster(worker("p", P, waiting(2_000)), *others, *gang("d2", D, decoding(1), decoding(1)))
    assert one.first_flip(100) is None
    alone = Cluster(worker("p", P, waiting(2_000)), *others, worker("d2", D), worker("d3", D, decoding(1)))
    assert alone.first_flip(100) is not None


@pytest.mark.parametrize("seed", range(200))
def test_a_change_does_not_cause_the_opposite_one(seed):
    draw = random.Random(seed)
    prefills, decodes = draw.randint(1, 6), draw.randint(1, 6)
    tokens, requests = draw.randrange(12_000), draw.randrange(24)

    def fleet(prefills, decodes):
        return [
            *(worker(f"p{n}", P, waiting(tokens // prefills)) for n in range(prefills)),
            *(worker(f"d{n}", D, decoding(requests // decodes)) for n in range(decodes)),
        ]

    one = Cluster(*fleet(prefills, decodes))
    flip = one.first_flip(100)
    if flip is None:
        return
    change = 1 if flip.role == P else -1
    one.workers = {worker.worker_id: worker for worker in fleet(prefills + change, decodes - change)}
    again = one.first_flip(PAUSE * 100)
    assert again is None or again.role == flip.role


def test_encode_workers_are_left_alone():
    idle = [worker(f"e{number}", pb.ROLE_ENCODE) for number in range(3)]
    assert Cluster(worker("p", P, waiting(2_000)), worker("d", D), *idle).first_flip(60) is None
    full = Reserved(prompt_tokens=9_000, requests=9)
    busy = [worker(f"e{number}", pb.ROLE_ENCODE, full) for number in range(3)]
    assert Cluster(worker("p1", P), worker("p2", P), worker("d", D), *busy).first_flip(60) is None
