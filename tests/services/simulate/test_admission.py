"""What a simulated worker promises, whom it refuses, and what routers can know of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from baton.attempts import Attempt
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.need import Need
from baton.scheduler.policy.base import Side
from baton.scheduler.types import Reserved, WorkerRecord
from baton.services.config import SchedulerSettings
from baton.services.simulate.admission import Admission

LIMITS = SchedulerSettings(max_queued_prompt_tokens=100, max_queue_factor=1.5)
CAPACITY = pb.Capacity(block_size=10, num_blocks=101, max_num_seqs=2, max_model_len=900, lookahead_tokens=1)


@dataclass
class Worker:
    """A worker's admission, on a clock that is set by hand."""

    now: float = 0.0
    saves: bool = True
    limits: SchedulerSettings = field(default_factory=lambda: LIMITS)
    admission: Admission = field(init=False)

    def __post_init__(self) -> None:
        identity = pb.WorkerIdentity(worker_id="w", capacity=CAPACITY)
        record = WorkerRecord(identity, pb.WORKER_STATE_READY, None, Reserved(), False, 1.0)
        self.admission = Admission(record, self.limits, lambda: self.now, 8.0, lambda _: self.saves)

    def take(
        self,
        name: str,
        tokens: int = 60,
        side: Side = Side.PREFILL,
        *,
        router: str = "a",
        waited_s: float = 0.0,
        room: float = 1.0,
        expected: Reserved | None = None,
    ) -> bool:
        need = Need(Attempt(name, 1), router, tokens, 10, waited_s=waited_s, room=room)
        share = Reserved(tokens, 1) if side is Side.PREFILL else Reserved(requests=1, blocks=7)
        return self.admission.take(need, side, share, expected)


def test_prompts_are_taken_up_to_the_bound_and_again_when_one_is_prefilled() -> None:
    worker = Worker()
    assert worker.take("first", 250)  # nothing is queued: any prompt
    assert not worker.take("second", 10)
    worker.admission.prefilled("first", decodes=False)
    assert worker.take("second", 60)
    assert not worker.take("third", 41)
    assert worker.take("fourth", 40)
    assert worker.admission.record.reserved == Reserved(100, 2)
    for name in ("second", "fourth", "fourth", "third"):
        worker.admission.end(name)
    assert worker.admission.record.reserved == Reserved()


def test_requests_are_taken_up_to_the_queues_bound_less_for_a_class_that_gives_way() -> None:
    worker = Worker()
    assert worker.take("one", side=Side.DECODE, room=0.5)
    assert not worker.take("two", side=Side.DECODE, room=0.5)
    assert [worker.take(name, side=Side.DECODE) for name in ("two", "three", "four")] == [True, True, False]
    worker.admission.prefilled("one", decodes=True)
    assert worker.admission.record.reserved == Reserved(0, 3, 21, 1)
    assert worker.admission.decodes_for("a")
    worker.admission.end("one")
    assert not worker.admission.decodes_for("a")


def test_a_prompt_whose_kv_finds_no_room_is_refused() -> None:
    assert not Worker(saves=False).take("one")


def test_a_request_is_refused_where_much_more_waits_than_its_router_believes() -> None:
    worker = Worker(limits=SchedulerSettings())
    assert worker.take("first", 600)
    idle = Reserved()
    assert not worker.take("second", 10, expected=idle)
    assert worker.take("third", 10, expected=Reserved(100))
    assert worker.take("fourth", 10)  # whatever waits
    worker.admission.prefilled("first", decodes=True)
    assert worker.take("fifth", 10, expected=idle)
    for name in ("third", "fourth", "fifth"):
        worker.admission.end(name)
    assert not worker.take("sixth", 10, Side.BOTH, expected=idle)  # it was to decode nothing
    assert worker.take("seventh", 10, Side.BOTH, expected=Reserved(decoding=1))


@pytest.mark.parametrize(("later_s", "taken"), [(0.5, False), (2.0, True)])
def test_a_younger_request_leaves_the_place_to_an_elder_one_that_asked_lately(
    later_s: float, taken: bool
) -> None:
    worker = Worker()
    assert worker.take("first", 100)
    assert not worker.take("elder", waited_s=5.0, router="b")
    worker.admission.end("first")
    worker.now += later_s
    assert worker.take("younger", router="c") is taken
    assert worker.take("elder", 30, waited_s=5.0 + later_s, router="b")


def test_a_router_knows_what_was_true_when_it_last_heard_and_its_own() -> None:
    worker = Worker()
    for at, name, router in ((1.0, "early", "b"), (2.0, "mine", "a"), (3.0, "late", "b")):
        worker.now = at
        assert worker.take(name, 20, router=router)
    worker.now = 4.0
    worker.admission.end("early")

    def tokens(at: float, own_at: float, noted_at: float = 0.0, peers: tuple[str, ...] = ()) -> int:
        return worker.admission.as_of(at, "a", own_at, noted_at, peers).prompt_tokens

    assert worker.admission.record.reserved.prompt_tokens == 40
    assert tokens(4.5, 4.5) == 40
    assert tokens(3.5, 4.5) == 60  # not that `early` has ended
    assert tokens(2.5, 4.5) == 40  # nor that `late` has come
    assert tokens(0.5, 4.5) == 20  # its own alone
    assert tokens(0.5, 1.5) == 20  # which it knows before its worker does
    assert tokens(0.5, 4.5, peers=("b",)) == 60  # as where one scheduler advises both
    worker.admission.end("mine")
    assert tokens(0.5, 4.5) == 0
    assert tokens(0.5, 3.5) == 20  # that it has ended is not heard yet
    assert tokens(0.5, 4.5, 3.5) == 40  # what others chose was told to it, not that `early` has ended
