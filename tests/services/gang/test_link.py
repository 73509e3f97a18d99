"""The link of a gang, over real gRPC: its members meet, wake each other, and end together."""

import asyncio
import contextlib
from contextlib import AsyncExitStack, asynccontextmanager

import grpc.aio
import pytest

from baton import rpc
from baton.protos import gang_pb2, gang_pb2_grpc
from baton.security.names import Role
from baton.services.errors import StartError
from baton.services.gang.link import Leader, Member, Seat, Silence, _Outbox
from harness.fake_worker import until
from tests.security.conftest import become as become
from tests.security.conftest import ca as ca

SILENCE_S = 1.0
LONG_S = 30.0  # so that an end is noticed only if it is told
FACTS = {"model": "cafe", "vllm": "0.32.0"}


def seat(rank, size=3, **changes):
    return Seat("prefill-0", rank, size, f"prefill-0.r{rank}.1", FACTS | changes)


class Gang:
    """Links in one loop, and the rings that each got."""

    def __init__(self, silence):
        self.silence = silence
        self.links = []
        self.rings = []
        self.address = ""
        self.opened = 0

    def open_world(self):
        self.opened += 1
        return gang_pb2.World(life="one", host="127.0.0.1", store_port=4711)

    async def find(self):
        return self.address

    def member(self, one):
        self.rings.append([])
        link = Member(one, self.silence, self.rings[-1].append, self.find)
        self.links.append(link)
        return link


@asynccontextmanager
async def led(size=3, silence_s=SILENCE_S, loading_s=None):
    gang = Gang(Silence(loading_s or silence_s, silence_s))
    gang.rings.append([])
    leader = Leader(seat(0, size), gang.silence, gang.rings[0].append, gang.open_world)
    gang.links.append(leader)
    server = rpc.aio_server()
    gang_pb2_grpc.add_GangServicer_to_server(leader, server)
    gang.address = f"127.0.0.1:{rpc.listen(server, 'worker.listen', '127.0.0.1:0')}"
    await server.start()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(server.stop, 0)
        yield gang
        for link in reversed(gang.links):
            await link.close()


async def met(gang, size=3):
    for rank in range(1, size):
        gang.member(seat(rank, size))
    worlds = await asyncio.gather(*(link.meet(10.0) for link in gang.links))
    assert {(world.host, world.store_port) for world in worlds} == {("127.0.0.1", 4711)}


async def until_rung(gang, expected):
    await until(lambda: gang.rings == expected, f"the rings are {expected}")


async def told_lost(link, timeout_s=1.0):
    """Return why the link was lost."""
    return await asyncio.wait_for(asyncio.shield(link.lost), timeout_s)


async def test_they_meet_and_wake_each_other():
    async with led() as gang:
        await met(gang)
        assert gang.opened == 1
        gang.links[0].ring(0)
        await until_rung(gang, [[], [0], [0]])
        gang.links[2].ring(1)
        await until_rung(gang, [[1], [0, 1], [0]])
        assert not any(link.lost.done() for link in gang.links)


async def test_over_tls(become):
    become(Role.WORKER, "prefill-0.r0.1")
    async with led() as gang:
        await met(gang)
        gang.links[2].ring(3)
        await until_rung(gang, [[3], [3], []])


async def test_other_roles_may_not_join(become):
    become(Role.WORKER, "prefill-0.r0.1")
    async with led() as gang:
        become(Role.ROUTER)
        with pytest.raises(StartError, match="a router may not call Gang/Join: a worker may"):
            await gang.member(seat(1)).meet(10.0)


async def test_quiet_members_stay():
    async with led() as gang:
        await met(gang)
        with pytest.raises(TimeoutError):
            await told_lost(gang.links[1], 2 * SILENCE_S)
        gang.links[1].ring(7)
        await until_rung(gang, [[7], [], [7]])


async def test_a_members_end_is_everybodys():
    async with led(silence_s=LONG_S) as gang:
        await met(gang)
        await gang.links[1].close()
        why = await told_lost(gang.links[2])
        assert why == "rank 1 (prefill-0.r1.1) ended or is silent"
        assert gang.links[0].lost.result() == why


async def test_the_leaders_end_is_everybodys():
    async with led(silence_s=LONG_S) as gang:
        await met(gang)
        await gang.links[0].close()
        for link in gang.links[1:]:
            assert await told_lost(link) == "rank 0 leaves"


async def test_silence_lasts_less_long_once_all_serve():
    async with led(size=2, silence_s=0.3, loading_s=LONG_S) as gang:
        leader = gang.links[0]
        async with rpc.aio_channel(gang.address, Role.WORKER) as channel:
            call = gang_pb2_grpc.GangStub(channel).Join()
            await call.write(gang_pb2.FromMember(join=seat(1, size=2).join()))
            await leader.meet(10.0)
            leader.tell(gang_pb2.STAGE_SERVING)
            with pytest.raises(TimeoutError):  # the other one still loads
                await told_lost(leader, 0.9)
            await call.write(gang_pb2.FromMember(stage=gang_pb2.STAGE_SERVING))
            assert await told_lost(leader, 5.0) == "rank 1 (prefill-0.r1.1) ended or is silent"
            said = [one async for one in _until_over(call)]
            assert gang_pb2.FromLeader(stage=gang_pb2.STAGE_SERVING) in said


async def test_a_member_misses_a_leader_that_serves():
    async with led(size=2, silence_s=0.5, loading_s=LONG_S) as gang:
        await met(gang, size=2)
        leader, member = gang.links
        for link in gang.links:
            link.tell(gang_pb2.STAGE_SERVING)
        leader._members[1].next = lambda _: asyncio.sleep(LONG_S, {})
        assert await told_lost(member, 5.0) == "rank 0 was silent for 0.5 s"


@pytest.mark.parametrize("first", [0, 1])
async def test_all_drain_with_one_and_end_together(first):
    async with led(silence_s=LONG_S) as gang:
        await met(gang)
        gang.links[first].tell(gang_pb2.STAGE_DRAINING)
        for link in gang.links:
            await asyncio.wait_for(link.draining.wait(), 1.0)
        for link in gang.links[1:]:
            link.tell(gang_pb2.STAGE_DRAINED)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(gang.links[1].drained.wait(), 0.1)
        gang.links[0].tell(gang_pb2.STAGE_DRAINED)
        for link in gang.links:
            await asyncio.wait_for(link.drained.wait(), 1.0)
        await gang.links[1].close()
        with pytest.raises(TimeoutError):
            await told_lost(gang.links[0], 0.1)


async def test_a_member_that_leaves_before_all_have_met_is_awaited_again():
    async with led() as gang:
        early = gang.member(seat(1))
        meeting = asyncio.create_task(early.meet(10.0))
        await until(lambda: gang.links[0]._members.keys() == {1}, "rank 1 has joined")
        meeting.cancel()
        await early.close()
        gang.links.remove(early)
        gang.rings.pop()
        await met(gang)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (seat(1, model="beef"), "model is 'beef' at rank 1 and 'cafe' at rank 0: start all alike"),
        (seat(1, size=2), "this is gang prefill-0 of 3, not gang prefill-0 of 2"),
        (seat(3), "rank 3 is not one of 1 to 2"),
    ],
)
async def test_who_does_not_belong_is_refused(other, why):
    async with led() as gang:
        with pytest.raises(StartError, match=why):
            await gang.member(other).meet(10.0)


async def test_a_place_that_is_taken():
    async with led() as gang:
        await met(gang)
        with pytest.raises(StartError, match=r"within 1 s: rank 1 of gang prefill-0 is here already"):
            await gang.member(seat(1)).meet(1.0)
        assert not gang.links[0].lost.done()


async def test_a_rank_that_never_comes_is_named():
    async with led() as gang:
        member = gang.member(seat(2))
        assert gang.links[0].missing == "1, 2"
        meetings = asyncio.gather(gang.links[0].meet(1.0), member.meet(1.0), return_exceptions=True)
        await until(lambda: gang.links[0].missing == "1", "rank 2 has joined")
        leader, other = await meetings
        assert "rank 1 of 3 did not join within 1 s" in str(leader)
        assert "rank 2 did not meet the others within 1 s: not all members joined" in str(other)


async def test_a_late_ring_hides_no_newer_one():
    outbox = _Outbox()
    outbox.put(stage=gang_pb2.STAGE_DRAINED)
    outbox.put(ring=8)
    outbox.put(ring=7)
    assert [await outbox.next(1.0) for _ in range(2)] == [{"ring": 8}, {"stage": gang_pb2.STAGE_DRAINED}]


async def _until_over(call):
    with contextlib.suppress(grpc.aio.AioRpcError):
        while (message := await call.read()) is not grpc.aio.EOF:
            yield message
