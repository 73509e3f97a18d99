"""Attempts to do what one may not, each refused and told in one line; docs/security.md has the table."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton import rpc
from baton.handoff.errors import TransportFailed, WrongTicket
from baton.protos import scheduler_pb2 as pb
from baton.protos import scheduler_pb2_grpc
from baton.scheduler.client import SchedulerClient
from baton.scheduler.errors import Refused, SchedulerUnavailable
from baton.scheduler.service import SchedulerServer
from baton.security.authority import Authority
from baton.security.errors import NotSecured
from baton.security.names import Role
from harness.scheduling import Options, identity, place
from tests.security import saves
from tests.security.conftest import TOPIC, Become

READY = pb.WORKER_STATE_READY


@pytest.fixture
async def server(become: Become) -> AsyncIterator[SchedulerServer]:
    become(Role.SCHEDULER)
    async with SchedulerServer(Options(topic=TOPIC)) as running:
        yield running


async def said(address: str, kind: type[Exception], call: Any) -> str:
    """Return what a client of this process's identity is told."""
    async with SchedulerClient(address, router_id="r") as client:
        with pytest.raises(kind) as error:
            await call(client)
    return str(error.value)


def describe(client: SchedulerClient) -> Any:
    return client.describe()


def _meant(error: grpc.aio.AioRpcError) -> str:
    """Return what Baton's own clients make of such an error."""
    return rpc.tls_problem(error.details() or "")


async def test_each_does_its_part(server: SchedulerServer, become: Become) -> None:
    become(Role.WORKER, "w1")
    async with SchedulerClient(server.address) as worker:
        await worker.register(identity("w1"), READY)
        assert (await worker.heartbeat("w1", READY, pb.WorkerLoad(), 0)).known
    become(Role.ROUTER)
    async with SchedulerClient(server.address, router_id="r") as router:
        placed = await place(router, "q", 1, 10, 5)
        assert placed.decode.worker_id == "w1"
    become(Role.OPERATOR)
    async with SchedulerClient(server.address) as operator:
        assert (await operator.drain("w1")).worker_id == "w1"
        assert (await operator.describe()).drained == ["w1"]


async def test_without_a_certificate(server: SchedulerServer, ca: Authority, become: Become) -> None:
    """Someone who has the CA's certificate, which is no secret, but none of his own."""
    rpc.act_as(None)
    options = [("grpc.ssl_target_name_override", f"scheduler.{TOPIC}.baton")]
    credentials = grpc.ssl_channel_credentials(ca.root_pem)
    async with grpc.aio.secure_channel(server.address, credentials, options) as channel:
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.Describe(pb.DescribeRequest(), timeout=5)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "it hung up; if it speaks TLS, this process needs security.tls, too" in _meant(error.value)


async def test_a_certificate_of_another_ca(server: SchedulerServer, become: Become, tmp_path: Path) -> None:
    become(Role.OPERATOR, by=Authority.create(tmp_path / "other"))
    text = await said(server.address, SchedulerUnavailable, describe)
    assert "its certificate is over, or not of this process's CA" in text


async def test_another_ca_that_trusts_the_right_one(
    server: SchedulerServer, become: Become, ca: Authority, tmp_path: Path
) -> None:
    """He knows the deployment's CA, and so gets as far as the server, which does not know his."""
    mine = become(Role.OPERATOR, by=Authority.create(tmp_path / "other")).current().pems
    options = [("grpc.ssl_target_name_override", f"scheduler.{TOPIC}.baton")]
    credentials = grpc.ssl_channel_credentials(ca.root_pem, mine.key, mine.chain)
    async with grpc.aio.secure_channel(server.address, credentials, options) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await scheduler_pb2_grpc.SchedulerStub(channel).Describe(pb.DescribeRequest(), timeout=5)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "this process's certificate is not of its CA" in _meant(error.value)


async def test_a_certificate_that_is_over(server: SchedulerServer, become: Become) -> None:
    mine = become(Role.OPERATOR, life_s=1)
    async with asyncio.timeout(10):
        while mine.current().seconds_left() > -0.5:  # noqa: ASYNC110 (no event: it is the clock that moves)
            await asyncio.sleep(0.05)
    text = await said(server.address, SchedulerUnavailable, describe)
    assert "it hung up: this process's certificate is over" in text


async def test_plain_text_to_a_tls_port(server: SchedulerServer) -> None:
    rpc.act_as(None)
    text = await said(server.address, SchedulerUnavailable, describe)
    assert "it hung up; if it speaks TLS, this process needs security.tls, too" in text


async def test_tls_to_a_plain_port(become: Become) -> None:
    rpc.act_as(None)
    async with SchedulerServer(Options(topic=TOPIC)) as plain:
        become(Role.OPERATOR)
        text = await said(plain.address, SchedulerUnavailable, describe)
    assert "it speaks plain text, and this process TLS (security.tls)" in text


async def test_a_worker_in_the_schedulers_place(become: Become) -> None:
    """A worker's certificate is of the same CA; whoever dials a scheduler wants a scheduler's."""
    become(Role.WORKER, "w1")
    async with SchedulerServer(Options(topic=TOPIC)) as impostor:
        become(Role.ROUTER)
        text = await said(impostor.address, SchedulerUnavailable, describe)
    assert "its certificate is of another role or topic" in text


async def test_a_worker_that_registers_as_another(server: SchedulerServer, become: Become) -> None:
    become(Role.WORKER, "w1")
    calls = {
        "register": lambda client: client.register(identity("w2"), READY),
        "heartbeat": lambda client: client.heartbeat("w2", READY, pb.WorkerLoad(), 0),
        "deregister": lambda client: client.deregister("w2", 9),
    }
    for call in calls.values():
        text = await said(server.address, Refused, call)
        assert text == "worker 'w1' may not speak for worker 'w2'"


async def test_a_router_that_drains_and_a_worker_that_places(server: SchedulerServer, become: Become) -> None:
    become(Role.ROUTER)
    for call, method in (
        (lambda client: client.drain("w1"), "Drain"),
        (lambda client: client.set_role("w1", pb.ROLE_PREFILL), "SetRole"),
        (lambda client: client.register(identity("w1"), READY), "Register"),
    ):
        assert (await said(server.address, Refused, call)).startswith(
            f"a router may not call Scheduler/{method}: "
        )
    become(Role.WORKER, "w1")
    text = await said(server.address, Refused, lambda client: place(client, "q", 1, 1, 1))
    assert text == "a worker may not call Scheduler/Exchange: a router may"


async def test_a_certificate_of_another_topic(server: SchedulerServer, become: Become) -> None:
    become(Role.OPERATOR, topic="elsewhere")
    text = await said(server.address, SchedulerUnavailable, describe)
    assert "its certificate is of another role or topic" in text
    # A client that does not look is refused by the server.
    mine = become(Role.OPERATOR, topic="elsewhere").current().pems
    options = [("grpc.ssl_target_name_override", f"scheduler.{TOPIC}.baton")]
    credentials = grpc.ssl_channel_credentials(mine.roots, mine.key, mine.chain)
    async with grpc.aio.secure_channel(server.address, credentials, options) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await scheduler_pb2_grpc.SchedulerStub(channel).Describe(pb.DescribeRequest(), timeout=5)
    assert error.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert error.value.details() == ("this is topic 'test'; the caller's certificate is of topic 'elsewhere'")


def test_pulls(become: Become) -> None:
    """With its ticket, without, with another's, and by whom it is none of the business."""
    become(Role.WORKER, "p0")
    with saves.source() as source:
        wanted, other = source.save("wanted"), source.save("other")
        become(Role.WORKER, "d0")
        with closing(saves.Puller()) as puller:
            for ticket in (b"", other.shards[0].ticket):
                guess = type(wanted)()
                guess.CopyFrom(wanted)
                guess.shards[0].ticket = ticket
                with pytest.raises(WrongTicket, match=r"KV of request 'wanted', epoch 1: (no|wrong) ticket"):
                    puller.pull(guess)
            assert puller.pull(wanted) == saves.RECORD * saves.BLOCKS
        become(Role.ROUTER)
        with closing(saves.Puller()) as puller, pytest.raises(TransportFailed, match="a router may not call"):
            puller.pull(wanted)
        rpc.act_as(None)
        with closing(saves.Puller()) as puller, pytest.raises(TransportFailed, match="UNAVAILABLE"):
            puller.pull(wanted)
        assert source.staging.held()[0] == 2


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "fd00::1", "8.8.8.8"])
async def test_listening_to_others_in_plain_text(host: str) -> None:
    server = rpc.aio_server()
    address = f"[{host}]:0" if ":" in host else f"{host}:0"
    with pytest.raises(NotSecured, match=r"worker\.listen: .* turn security\.tls on .*security\.insecure"):
        rpc.listen(server, "worker.listen", address)


async def test_listening_to_others_with_tls_or_on_ones_own_word(become: Become) -> None:
    become(Role.WORKER, "w1")
    assert rpc.listen(rpc.aio_server(), "worker.listen", "0.0.0.0:0") > 0
    rpc.act_as(None, insecure=True)
    assert rpc.listen(rpc.aio_server(), "worker.listen", "0.0.0.0:0") > 0
    rpc.act_as(None)
    for host in ("127.0.0.1", "127.1.2.3", "[::1]", "localhost"):
        assert rpc.listen(rpc.aio_server(), "worker.listen", f"{host}:0") > 0
