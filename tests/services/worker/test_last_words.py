"""A router that reads late still gets the last replies of a worker that shuts down."""

import contextlib

import grpc.aio
import pytest

from baton.protos import worker_pb2_grpc as rpc
from baton.protos.worker_pb2 import Abort, Failed, RunRequest
from baton.rpc import aio_channel
from baton.security.names import Role
from harness.fake_worker import until
from tests.services.worker.idle_worker import start
from tests.services.worker.test_following import serving

NAMES = "abcd"
RUNNING = {f"{name}#1" for name in NAMES}


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (lambda one: one.on_failure(RuntimeError("CUDA error"), RUNNING), Failed.CODE_ENGINE),
        (lambda one: one.abort_all(), Failed.CODE_DRAINING),
    ],
    ids=["engine failed", "drain timed out"],
)
async def test_a_router_is_told_of_all_its_requests(end, code):
    """gRPC drops unread replies if a client writes to a stream that the server has ended."""
    async with serving() as worker, aio_channel(f"127.0.0.1:{worker.port}", Role.WORKER) as channel:
        call = rpc.WorkerStub(channel).Run()
        for name in NAMES:
            await call.write(RunRequest(start=start(name)))
        await until(lambda: len(worker.engine.submitted) == len(NAMES), "all are in the engine")
        end(worker.dispatcher)
        await until(lambda: worker.dispatcher.flushed, "gRPC has all replies")
        worker.dispatcher.hang_up()
        await worker.server.stop(5)
        heard = list((await call.read()).failed)
        with contextlib.suppress(grpc.aio.AioRpcError):
            await call.write(RunRequest(abort=Abort(request_ids=[heard[0].request_id])))
        with contextlib.suppress(grpc.aio.AioRpcError):
            while (reply := await call.read()) is not grpc.aio.EOF:
                heard += reply.failed
    assert {one.request_id: one.code for one in heard} == dict.fromkeys(NAMES, code)
