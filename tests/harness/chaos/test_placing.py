"""The placing plan on real schedulers without engines, and its checks."""

import contextlib
from dataclasses import replace

import grpc.aio
import pytest

from baton.attempts import Attempt
from baton.protos import scheduler_pb2 as pb
from baton.protos import scheduler_pb2_grpc
from baton.scheduler.client import SchedulerClient
from baton.scheduler.service import SchedulerServer
from baton.scheduler.types import Booking
from harness.chaos import placing
from harness.chaos.placing import Placing, registered
from harness.chaos.placing_judge import Left, Placed, Workers
from harness.chaos.site import Site
from harness.chaos.victims import Part, Shape
from harness.scheduling import Options, capacity, place, until
from tests.harness.chaos.test_chaos import idle


def a_booking(request, *, prefill="p", tokens=100, blocks=10):
    return Booking(Attempt(request, 1), "router", prefill, "d", tokens, blocks)


def workers():
    """Return workers with 4 requests, 99 blocks and 300 queued prompt tokens each."""
    limits = Options(max_queued_prompt_tokens=300, max_queue_factor=1.0)
    return Workers(capacity(max_num_seqs=4, num_blocks=100), limits)


@pytest.mark.parametrize(
    ("most", "full", "changes"),
    [(4, "d", {"tokens": 10}), (3, "p", {"tokens": 100}), (2, "d", {"tokens": 10, "blocks": 45})],
)
def test_a_full_worker_refuses_until_attempts_end(most, full, changes):
    one = workers()
    stays = [one.take(a_booking(f"{number}", **changes), 1.0) for number in range(most)]
    assert {refused for _, refused in stays} == {""}
    assert one.take(a_booking("more", **changes), 1.0)[1] == full
    assert 0.3 < one.fullest <= 1.0
    for stay, _ in stays:
        one.prefilled(stay, 1.0)
        one.end(stay, 1.0)
    assert one.take(a_booking("long", tokens=900), 1.0)[1] == ""  # any prompt fits into an empty queue


def test_a_sum_may_lag_but_has_every_older_attempt():
    one = workers()
    stay, _ = one.take(a_booking("one"), 10.0)
    one.prefilled(stay, 20.0)
    one.end(stay, 30.0)

    def unlike(worker_id, at, tokens, requests, blocks, *, knows=True):
        told = pb.Description()
        worker = told.workers.add(
            reserved_prompt_tokens=tokens, reserved_requests=requests, reserved_blocks=blocks
        )
        worker.identity.worker_id = worker_id
        if knows:
            told.attempts.add(attempt=pb.Attempt(request_id="one", epoch=1))
        return one.unlike(told, at, at)

    assert unlike("p", 9.5, 0, 0, 0) == unlike("p", 9.5, 100, 1, 0) == unlike("p", 15.0, 100, 1, 0) == []
    assert "p: 0 prompt tokens, which can only be 100 to 100" in unlike("p", 15.0, 0, 0, 0)
    assert "p: 0 requests, which can only be 1 to 1" in unlike("p", 15.0, 0, 0, 0)
    assert unlike("p", 20.5, 0, 0, 0) == unlike("p", 20.5, 100, 1, 0) == unlike("d", 25.0, 0, 1, 10) == []
    assert unlike("d", 25.0, 0, 1, 11) == ["d: 11 blocks, which can only be 10 to 10"]
    assert unlike("p", 25.0, 0, 1, 0) == ["p: 1 requests, which can only be 0 to 0"]
    assert unlike("d", 25.0, 0, 1, 10, knows=False) == ["d: it lacks Attempt(request_id='one', epoch=1)"]
    assert unlike("d", 30.5, 0, 1, 10) == unlike("d", 30.5, 0, 0, 0) == []
    assert unlike("d", 33.0, 0, 1, 10) != []


def test_placements_are_judged():
    def told(placed=1, compared=1):
        return Placed("p", 1, 500, 20, 2, 2, placed=placed, compared=compared)

    assert told().good
    assert not told(placed=0).good
    assert not told(compared=0).good
    live = idle()
    live.attempts.add()
    live.workers[0].reserved_requests = 3
    left = Left.of([live, None])
    assert (left.attempts, left.requests, left.silent) == (1, 3, 1)
    assert not Left.of([idle(), idle()]).any
    for name in ("failed", "twice", "unlike", "crashes", "unhealed", "left"):
        one = told()
        setattr(one, name, {"left": left, "crashes": ["x"], "unhealed": ["x"]}.get(name, 1))
        assert not one.good
    one = told()
    one.add([(1.0, 1.1), (2.9, 3.1), (3.5, 3.6), (3.9, 5.0), (5.0, 5.2)], [(3.0, 4.0)])
    assert (one.calm.count, one.disturbed.count) == (2, 3)


class _Schedulers(Site):
    def __init__(self, server, folder):
        super().__init__(Shape(0, 0, routers=0), folder)
        self._addresses = [server.address]
        self.channel = grpc.aio.insecure_channel(server.address)
        self._stubs = [scheduler_pb2_grpc.SchedulerStub(self.channel)]
        self.parts = [Part("scheduler-0", "scheduler", {}, self, wanted=True)]

    def _bury(self):
        """Do nothing: there is no process to end."""


@contextlib.asynccontextmanager
async def _scheduled(folder):
    async with SchedulerServer(Options(max_queued_prompt_tokens=32_768, max_queue_factor=1.25)) as server:
        site = _Schedulers(server, folder)
        yield site
        await site.channel.close(None)


async def test_placements_come_at_a_rate_and_leave_nothing(tmp_path, monkeypatch):
    """Place with a real scheduler in this process; then corrupt the routers' memory, which is noticed."""
    monkeypatch.setattr(placing, "LONG_LIFE_S", placing.LIFE_S)  # no scheduler dies
    monkeypatch.setattr(placing, "TOLD_S", 0.5)
    told = Placed("p", 1, 200, 20, 2, 1)
    async with _scheduled(tmp_path) as site, registered(site):
        async with Placing(site, told, "s") as load:
            await until(lambda: told.placed > 100 and told.late > 0 and told.compared > 0, 15.0)
            assert told.unlike == 0, told.messages

            async def noticed():
                for attempt in load._pairs:  # repeatedly, because attempts are short
                    load._pairs[attempt] = ("nobody", "nobody")
                return told.twice > 0

            await until(noticed)
            load._workers.take(replace(a_booking("lost"), decode_id="worker-0"), 0.0)  # never reported
            await until(lambda: told.unlike > 0, 10.0)
        assert (told.failed, told.dropped) == (0, 0)
        assert told.placed - told.alone > 100
        assert 0.0 < told.fullest <= 1.0
        assert len(load.over) == told.placed
        await until(lambda: _nothing(site))
        async with SchedulerClient(site.scheduler_address) as client:
            await place(client, "kept", 1, 100, 10)
            left = Left.of(await site.describe_each())
        assert (left.attempts, left.prompt_tokens) == (1, 100)
        assert left.blocks > 0
        assert any("but is booked on" in message for message in told.messages)


async def _nothing(site):
    return not Left.of(await site.describe_each()).any
