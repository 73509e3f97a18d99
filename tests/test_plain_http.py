"""HTTP and gRPC between Baton's processes ignore proxies."""

import asyncio

import grpc
import pytest
from aiohttp import web
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from baton import plain_http
from baton.rpc import SERVER_OPTIONS, Dialler
from baton.security.names import Role
from harness.serving import serving
from harness.support import CALL_S, free_port

NAMES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")


@pytest.fixture(autouse=True)
def dead_proxy(monkeypatch):
    """Name a dead proxy in all variables."""
    proxy = f"http://127.0.0.1:{free_port()}"
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in NAMES:
        monkeypatch.setenv(name, proxy)
        monkeypatch.setenv(name.upper(), proxy)


async def test_http_ignores_proxies():
    async def page(_request):
        return web.Response(text="here")

    def got(url):
        with plain_http.get(url, CALL_S) as answer:
            return answer.read()

    async with serving(page) as address:
        assert await asyncio.to_thread(got, f"http://{address}/") == b"here"


async def test_grpc_ignores_proxies():
    server = grpc.aio.server(options=SERVER_OPTIONS)
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = Dialler(Role.SCHEDULER).aio_channel(f"127.0.0.1:{port}")
    check = health_pb2_grpc.HealthStub(channel).Check
    await check(health_pb2.HealthCheckRequest(), timeout=CALL_S)
    await channel.close(None)
    await server.stop(0)


def test_proxy_variables():
    assert plain_http.proxy_variables() == [one for name in NAMES for one in (name, name.upper())]
