"""Options of gRPC connections."""

import asyncio
from contextlib import asynccontextmanager

import dns.message
import dns.rdatatype
import dns.rrset
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from baton import rpc
from baton.rpc import SERVER_OPTIONS, aio_channel
from baton.security.names import Role
from harness.support import PATIENCE

FOUND_AGAIN_S = 5.0  # gRPC's own default would take 30 s


class NameServer(asyncio.DatagramProtocol):
    """A DNS server on loopback that answers every question with `address`."""

    def __init__(self, address):
        self.address = address

    def connection_made(self, transport):
        self.transport = transport

    def datagram_received(self, data, addr):
        answer = dns.message.make_response(dns.message.from_wire(data))
        (asked,) = answer.question
        if asked.rdtype == dns.rdatatype.A:
            answer.answer.append(dns.rrset.from_text(asked.name, 1, "IN", "A", self.address))
        self.transport.sendto(answer.to_wire(), addr)


@asynccontextmanager
async def serving(address):
    """Serve gRPC's health service at host:port; yield the port."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    port = server.add_insecure_port(address)
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0)


async def test_a_moved_name_is_found_at_its_new_address():
    """A replaced pod has the same name and port, and another address."""
    loop = asyncio.get_running_loop()
    transport, names = await loop.create_datagram_endpoint(
        lambda: NameServer("127.0.0.1"), local_addr=("127.0.0.1", 0)
    )
    dns_port = transport.get_extra_info("sockname")[1]
    request = health_pb2.HealthCheckRequest()
    async with serving("127.0.0.1:0") as port:
        channel = aio_channel(f"dns://127.0.0.1:{dns_port}/scheduler.test:{port}", Role.SCHEDULER)
        check = health_pb2_grpc.HealthStub(channel).Check
        await check(request, timeout=5.0 * PATIENCE)
    names.address = "127.0.0.2"
    async with serving(f"127.0.0.2:{port}"):
        await check(request, timeout=FOUND_AGAIN_S * PATIENCE, wait_for_ready=True)
    await channel.close(None)
    transport.close()


async def test_a_silent_connection_is_closed(monkeypatch):
    options = dict(rpc.SERVER_OPTIONS)
    assert "grpc.server_handshake_timeout_ms" in options
    options["grpc.server_handshake_timeout_ms"] = 500
    monkeypatch.setattr(rpc, "SERVER_OPTIONS", list(options.items()))
    server = rpc.aio_server()
    port = rpc.listen(server, "worker.listen", "127.0.0.1:0")
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        while await asyncio.wait_for(reader.read(1000), 20):
            pass  # skip the server's first message
    finally:
        writer.close()
        await server.stop(None)
