"""The table of roles is complete, and servers enforce it."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2

from baton import rpc
from baton.protos import gang_pb2, handoff_pb2, scheduler_pb2, worker_pb2
from baton.security.interceptors import TABLE
from baton.security.names import Role

FILES = (gang_pb2, handoff_pb2, scheduler_pb2, worker_pb2, health_pb2)
METHODS = {
    f"/{service.full_name}/{method.name}": method
    for file in FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
# A second copy of the table, against accidental changes.
HEALTH = {"Health/Check", "Health/List", "Health/Watch"}
MAY = {
    Role.WORKER: {
        *("Scheduler/Register", "Scheduler/Heartbeat", "Scheduler/Deregister", "Scheduler/FindLeader"),
        *("Handoff/Connect", "Handoff/Release", "Handoff/Renew", "Handoff/Taken", "Handoff/Staged"),
        *("Handoff/Sample", "Handoff/Trial", "Worker/Follow", "Gang/Join"),
    },
    Role.ROUTER: {*("Scheduler/Exchange", "Scheduler/Snapshot", "Worker/Hello", "Worker/Run")},
    Role.SCHEDULER: {"Worker/SetRole", "Worker/Inspect", "Worker/TryHandoff"},
    Role.OPERATOR: {
        *("Scheduler/Describe", "Scheduler/Drain", "Scheduler/Undrain", "Scheduler/SetRole"),
        *("Scheduler/Orders", "Scheduler/SetLogLevel", "Scheduler/Inspect", "Scheduler/TryHandoff"),
    },
}
W = "w1"


def test_every_method_of_every_service_is_in_the_table():
    assert set(TABLE) == set(METHODS)


def message(method, worker_id):
    """Return a request that names the worker if it has such a field."""
    made = GetMessageClass(method.input_type)()
    if "worker_id" in method.input_type.fields_by_name:
        made.worker_id = worker_id
    if "identity" in method.input_type.fields_by_name:
        made.identity.worker_id = worker_id
    return bytes(made.SerializeToString())


def handlers(*, later):
    """Yield each service with handlers for its methods that return nothing."""

    def one(request, context):
        return b""

    def many(request, context):
        yield b""

    async def one_later(request, context):
        return b""

    async def many_later(request, context):
        await context.write(b"")

    for file in FILES:
        for service in file.DESCRIPTOR.services_by_name.values():
            made = {}
            for method in service.methods:
                kind = "_".join(
                    "stream" if streams else "unary"
                    for streams in (method.client_streaming, method.server_streaming)
                )
                single, several = (one_later, many_later) if later else (one, many)
                read = GetMessageClass(method.input_type).FromString
                made[method.name] = getattr(grpc, f"{kind}_rpc_method_handler")(
                    several if method.server_streaming else single, read, None
                )
            yield service.full_name, made


@asynccontextmanager
async def served(*, later):
    """Run an asyncio server, or one with threads; yield its address."""
    server = rpc.aio_server() if later else rpc.server(ThreadPoolExecutor(2), 16)
    for service, methods in handlers(later=later):
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))
    port = rpc.listen(server, "test", "127.0.0.1:0")
    started = server.start()
    if later:
        await started
    try:
        yield f"127.0.0.1:{port}"
    finally:
        stopped = server.stop(0)
        if later:
            await stopped
        else:
            stopped.wait(5)


def call(channel, path, request):
    """Return how a call ended."""
    method = METHODS[path]
    try:
        if method.client_streaming:
            list(channel.stream_stream(path)(iter([request]), timeout=5))
        elif method.server_streaming:
            list(channel.unary_stream(path)(request, timeout=5))
        else:
            channel.unary_unary(path)(request, timeout=5)
    except grpc.RpcError as error:
        failed = error
        return failed.code(), failed.details()
    return grpc.StatusCode.OK, ""


@pytest.mark.parametrize("role", list(MAY))
@pytest.mark.parametrize(
    ("later", "own"), [(False, Role.SCHEDULER), (True, Role.WORKER)], ids=["threads", "asyncio"]
)
async def test_servers_enforce_the_table(become, role, later, own):
    def check(address):
        with rpc.Dialler(own).channel(address) as channel:
            for path, method in METHODS.items():
                code, said = call(channel, path, message(method, W))
                if path.rpartition(".")[2] in MAY[role] | HEALTH:
                    assert code is grpc.StatusCode.OK, path
                else:
                    assert code is grpc.StatusCode.PERMISSION_DENIED, path
                    assert said.startswith(f"{role.one} may not call {path.rpartition('.')[2]}"), said
            with pytest.raises(grpc.RpcError) as unknown:
                channel.unary_unary("/baton.scheduler.v1.Scheduler/Nothing")(b"", timeout=5)
            assert unknown.value.code() is grpc.StatusCode.UNIMPLEMENTED

    become(own, "server" if own is Role.WORKER else "")
    async with served(later=later) as address:
        become(role, W if role is Role.WORKER else "")
        await asyncio.to_thread(check, address)


@pytest.mark.parametrize("path", [path for path, rule in TABLE.items() if rule.speaks_for])
async def test_a_worker_speaks_only_for_itself(become, path):
    become(Role.SCHEDULER)
    async with served(later=False) as address:
        become(Role.WORKER, W)
        with rpc.Dialler(Role.SCHEDULER).channel(address) as channel:
            assert call(channel, path, message(METHODS[path], W))[0] is grpc.StatusCode.OK
            for other in ("w2", "", "w1 ", "W1"):
                assert call(channel, path, message(METHODS[path], other)) == (
                    grpc.StatusCode.PERMISSION_DENIED,
                    f"worker 'w1' may not speak for worker {other!r}",
                )
