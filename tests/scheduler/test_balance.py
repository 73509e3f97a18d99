"""When a worker changes sides: under lasting pressure alone, and never to and fro."""

from __future__ import annotations

import random

import pytest

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.balance import PAUSE, Balance, Flip
from baton.scheduler.types import FleetView, Reserved, WorkerRecord
from harness.scheduling import identity

P, D, M = pb.ROLE_PREFILL, pb.ROLE_DECODE, pb.ROLE_MIXED
AFTER_S = 10.0


def worker(
    name: str, role: pb.Role, reserved: Reserved | None = None, blocks_used: int = -1, **changes: object
) -> WorkerRecord:
    """512 tokens a step, 4 requests in a batch, 99 blocks. A writer has what is booked on it."""
    who = identity(name, role, **changes)  # type: ignore[arg-type]
    booked = reserved or Reserved()
    used = booked.blocks if blocks_used < 0 else blocks_used
    load = pb.WorkerLoad(running=booked.requests if used else 0, free_blocks=max(0, 99 - used))
    return WorkerRecord(who, pb.WORKER_STATE_READY, load, booked, False, 5.0)


class Cluster:
    """Workers and a clock of the test's."""

    def __init__(self, *workers: WorkerRecord) -> None:
        self.now = 0.0
        self.workers = {one.worker_id: one for one in workers}
        self.balance = Balance(AFTER_S, lambda: self.now)

    def look(self) -> Flip | None:
        return self.balance.look(FleetView(self.workers))

    def first_flip(self, seconds: float) -> Flip | None:
        """Within the time, looked for as often as the scheduler does; `now` is then its time."""
        until = self.now + seconds
        while self.now < until:
            if flip := self.look():
                return flip
            self.now += 0.5
        return None


def waiting(tokens: int) -> Reserved:
    return Reserved(prompt_tokens=tokens, requests=tokens // 100)


def writing(requests: int) -> Reserved:
    return Reserved(requests=requests, blocks=requests * 10)


def test_the_idlest_writer_goes_to_read_when_prompts_wait_for_long() -> None:
    one = Cluster(worker("p", P, waiting(2_000)), worker("d1", D, writing(1)), worker("d2", D))
    flip = one.first_flip(60)
    assert flip is not None
    assert (flip.worker.worker_id, flip.role) == ("d2", P)
    assert one.now == AFTER_S
    assert "prefill side was at 3.9 for 10 s" in flip.why


def test_the_idlest_reader_goes_to_write_when_batches_are_full_for_long() -> None:
    one = Cluster(worker("p1", P, waiting(100)), worker("p2", P), worker("d", D, writing(4)))
    flip = one.first_flip(60)
    assert flip is not None
    assert (flip.worker.worker_id, flip.role) == ("p2", D)


def test_a_full_cache_is_pressure_too() -> None:
    blocks = Reserved(requests=1, blocks=95)
    flip = Cluster(worker("p1", P), worker("p2", P), worker("d", D, blocks)).first_flip(60)
    assert flip is not None
    assert flip.role == D


def test_what_waits_for_readers_is_no_pressure_on_writers() -> None:
    coming = Reserved(requests=4, blocks=40)
    flip = Cluster(
        worker("p", P, waiting(2_000)), worker("d1", D, coming, 0), worker("d2", D, coming, 0)
    ).first_flip(60)
    assert flip is not None
    assert flip.role == P


def test_a_moment_of_ease_begins_the_wait_anew() -> None:
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
        [worker("p", P, waiting(2_000)), worker("d", D)],  # the last one of its side
        [worker("p", P, waiting(2_000)), worker("d1", D, writing(2)), worker("d2", D, writing(2))],  # busy
        [worker("p", P, waiting(600)), worker("d1", D), worker("d2", D)],  # not much waits
        [  # one of them could not hold what will come to both
            worker("p", P, waiting(2_000)),
            worker("d1", D, Reserved(requests=6, blocks=60), 0),
            worker("d2", D, Reserved(requests=6, blocks=60), 0),
        ],
        [worker("p1", P), worker("p2", P), worker("d1", D), worker("d2", D)],
        [worker("d1", D), worker("d2", D)],  # the other side covers for a lost one
        [worker("p", P, waiting(2_000)), worker("m1", M), worker("m2", M)],
        [
            worker("p", P, waiting(2_000)),
            worker("d1", D, compatibility_hash=""),
            worker("d2", D, compatibility_hash=""),
        ],
    ],
)
def test_else_nobody_changes(workers: list[WorkerRecord]) -> None:
    assert Cluster(*workers).first_flip(100) is None


@pytest.mark.parametrize("seed", range(200))
def test_what_was_changed_is_not_at_once_changed_back(seed: int) -> None:
    """The same load on the fleet that a change makes is no ground for the opposite change."""
    draw = random.Random(seed)
    readers, writers = draw.randint(1, 6), draw.randint(1, 6)
    tokens, requests = draw.randrange(12_000), draw.randrange(24)

    def fleet(readers: int, writers: int) -> list[WorkerRecord]:
        return [
            *(worker(f"p{n}", P, waiting(tokens // readers)) for n in range(readers)),
            *(worker(f"d{n}", D, writing(requests // writers)) for n in range(writers)),
        ]

    one = Cluster(*fleet(readers, writers))
    flip = one.first_flip(100)
    if flip is None:
        return
    change = 1 if flip.role == P else -1
    one.workers = {worker.worker_id: worker for worker in fleet(readers + change, writers - change)}
    again = one.first_flip(PAUSE * 100)
    assert again is None or again.role == flip.role
