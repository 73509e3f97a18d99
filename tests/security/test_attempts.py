"""Forbidden calls and connections, each refused with one line (docs/security.md)."""

import asyncio
from contextlib import closing

import grpc
import pytest

from baton import rpc
from baton.handoff.errors import TransportFailed, WrongTicket
from baton.handoff.transports.tcp import Tcp
from baton.protos import scheduler_pb2 as pb
from baton.protos import scheduler_pb2_grpc
from baton.scheduler.client import SchedulerClient
from baton.scheduler.errors import Refused, SchedulerUnavailable
from baton.scheduler.service import SchedulerServer
from baton.security.authority import Authority
from baton.security.errors import NotSecured
from baton.security.names import Role
from harness.scheduling import Options, identity, place
from tests.handoff.server import Rank
from tests.security.conftest import TOPIC

READY = pb.WORKER_STATE_READY


@pytest.fixture
async def server(become):
    become(Role.SCHEDULER)
    async with SchedulerServer(Options(topic=TOPIC)) as running:
        yield running


async def fails(address, text):
    """Check that a client with this process's identity gets an error with this text."""
    async with SchedulerClient(address) as client:
        with pytest.raises(SchedulerUnavailable) as error:
            await client.describe()
    assert text in str(error.value)


async def refusal(address, *pems):
    """Return the error of a client with these roots, key and chain that does not check the server's name."""
    options = [("grpc.ssl_target_name_override", f"scheduler.{TOPIC}.baton")]
    credentials = grpc.ssl_channel_credentials(*pems)
    async with grpc.aio.secure_channel(address, credentials, options) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await scheduler_pb2_grpc.SchedulerStub(channel).Describe(pb.DescribeRequest(), timeout=5)
    return error.value


def _meant(error):
    """Return the text that Baton's clients show when the server hangs up."""
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    return rpc.tls_problem(error.details() or "")


async def test_allowed_calls(server, become):
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


async def test_without_a_certificate(server, ca, become):
    """The client has the CA's certificate, which is not secret, but no certificate of its own."""
    rpc.act_as(None)
    text = _meant(await refusal(server.address, ca.root_pem))
    assert "it hung up; if it speaks TLS, this process needs security.tls, too" in text


async def test_a_certificate_of_another_ca(server, become, tmp_path):
    become(Role.OPERATOR, by=Authority.create(tmp_path / "other"))
    await fails(server.address, "its certificate has expired, or is not from this process's CA")


async def test_another_ca_that_trusts_the_right_one(server, become, ca, tmp_path):
    """The client trusts the server, which does not trust the client."""
    mine = become(Role.OPERATOR, by=Authority.create(tmp_path / "other")).current().pems
    error = await refusal(server.address, ca.root_pem, mine.key, mine.chain)
    assert "this process's certificate is not from its CA" in _meant(error)


async def test_an_expired_certificate(server, become):
    mine = become(Role.OPERATOR, life_s=1)
    async with asyncio.timeout(10):
        while mine.current().seconds_left() > -0.5:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    await fails(server.address, "it hung up: this process's certificate has expired")


async def test_plain_text_to_a_tls_port(server):
    rpc.act_as(None)
    await fails(server.address, "it hung up; if it speaks TLS, this process needs security.tls, too")


async def test_tls_to_a_plain_port(become):
    rpc.act_as(None)
    async with SchedulerServer(Options(topic=TOPIC)) as plain:
        become(Role.OPERATOR)
        await fails(plain.address, "it speaks plain text, and this process TLS (security.tls)")


async def test_a_worker_in_the_schedulers_place(become):
    """Clients verify the role in the server's certificate."""
    become(Role.WORKER, "w1")
    async with SchedulerServer(Options(topic=TOPIC)) as impostor:
        become(Role.ROUTER)
        await fails(impostor.address, "its certificate is for another role or topic")


async def test_a_worker_that_registers_as_another(server, become):
    become(Role.WORKER, "w1")
    async with SchedulerClient(server.address) as client:
        for call in (
            client.register(identity("w2"), READY),
            client.heartbeat("w2", READY, pb.WorkerLoad(), 0),
            client.deregister("w2", 9),
        ):
            with pytest.raises(Refused, match=r"^worker 'w1' may not speak for worker 'w2'$"):
                await call


async def test_a_certificate_of_another_topic(server, become):
    become(Role.OPERATOR, topic="elsewhere")
    await fails(server.address, "its certificate is for another role or topic")
    # The server refuses a client that does not verify.
    mine = become(Role.OPERATOR, topic="elsewhere").current().pems
    error = await refusal(server.address, mine.roots, mine.key, mine.chain)
    assert error.code() is grpc.StatusCode.PERMISSION_DENIED
    assert error.details() == "this is topic 'test'; the caller's certificate is for topic 'elsewhere'"


def test_pulls(become):
    """Pull with the right ticket, without one, with another request's, and as another role."""
    become(Role.WORKER, "p0")
    with closing(Rank()) as rank:
        rank.save(4)
        become(Role.WORKER, "d0")
        with closing(Tcp()) as tcp:
            for ticket in (b"", rank.staging.tickets.of("other", 1)):
                guess = rank.pull()
                guess.shard.ticket = ticket
                with pytest.raises(WrongTicket, match=r"KV of request 'r', epoch 1: (no|wrong) ticket"):
                    list(tcp.pull(guess))
            assert sum(records.data.sum() for records in tcp.pull(rank.pull())) == rank.data.sum()
        become(Role.ROUTER)
        with closing(Tcp()) as tcp, pytest.raises(TransportFailed, match="a router may not call"):
            list(tcp.pull(rank.pull()))
        rpc.act_as(None)
        with closing(Tcp()) as tcp, pytest.raises(TransportFailed, match="UNAVAILABLE"):
            list(tcp.pull(rank.pull()))
        assert rank.staging.held()[0] == 1


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "fd00::1", "8.8.8.8"])
async def test_listening_to_others_in_plain_text(host):
    server = rpc.aio_server()
    address = f"[{host}]:0" if ":" in host else f"{host}:0"
    with pytest.raises(NotSecured, match=r"worker\.listen: .* turn security\.tls on .*security\.insecure"):
        rpc.listen(server, "worker.listen", address)


async def test_listening_to_others_with_tls_or_insecure(become):
    become(Role.WORKER, "w1")
    assert rpc.listen(rpc.aio_server(), "worker.listen", "0.0.0.0:0") > 0
    rpc.act_as(None, insecure=True)
    assert rpc.listen(rpc.aio_server(), "worker.listen", "0.0.0.0:0") > 0
    rpc.act_as(None)
    for host in ("127.0.0.1", "127.1.2.3", "[::1]", "localhost"):
        assert rpc.listen(rpc.aio_server(), "worker.listen", f"{host}:0") > 0
