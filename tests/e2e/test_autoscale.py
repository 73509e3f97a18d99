"""`baton up` with autoscaling: a worker starts when the load needs it and ends when it does not."""

import asyncio

import pytest

from baton.protos import scheduler_pb2, worker_pb2, worker_pb2_grpc
from baton.rpc import aio_channel
from baton.security.names import Role
from harness.deployment import MODEL_NAME, deployment
from harness.support import CALL_S, eventually

STREAMS = 8  # twice one worker's slots
TOKENS = 80
DECODE = scheduler_pb2.ROLE_DECODE


@pytest.fixture
def scaled(tmp_path_factory):
    config = {
        "engine": {"max_num_seqs": 4},
        "autoscale": {"mode": "on", "prefill": "1-1", "decode": "1-2"},
        "constants": {"baton.services.fleet.goals:DOWN_AFTER_S": 2.0},
    }
    with deployment(tmp_path_factory.mktemp("scaled"), **config) as one:
        yield one.up(1, 1)


async def set_role(address, fence):
    """Set a decode worker's role to decode, as an autoscaler with this fence does. Return its refusal."""
    async with aio_channel(address, Role.WORKER) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        request = worker_pb2.SetRoleRequest(role=DECODE, fence=fence)
        reply = await stub.SetRole(request, timeout=CALL_S)
        return reply.refusal


@pytest.mark.timeout(90)
async def test_a_decode_worker_comes_and_goes_with_the_load(scaled):
    stop = asyncio.Event()
    answers = []

    async def one_after_another(client):
        while not stop.is_set():
            answer = await client.completions.create(
                model=MODEL_NAME, prompt="def main(", max_tokens=TOKENS, extra_body={"ignore_eos": True}
            )
            answers.append(answer.usage.completion_tokens)

    async with scaled.async_client() as client:
        load = [asyncio.create_task(one_after_another(client)) for _ in range(STREAMS)]

        def second_decodes():
            if any(task.done() for task in load):
                raise AssertionError("a request failed") from next(t for t in load if t.done()).exception()
            busy = [one for one in scaled.workers("decode") if one.get("load", {}).get("running")]
            return len(busy) == 2

        await asyncio.to_thread(eventually, second_decodes, 25, "a second decode worker decodes")
        stop.set()
        await asyncio.gather(*load)
    print(f"{len(answers)} answers")
    assert set(answers) == {TOKENS}
    address = scaled.worker("decode")["identity"]["address"]
    assert await set_role(address, 7) == ""
    assert await set_role(address, 7) == ""
    assert "the order is from an earlier autoscaler (fence 6, now 7)" in await set_role(address, 6)

    def log():
        return scaled.processes["up"].text

    await asyncio.to_thread(eventually, lambda: "ended" in log(), 20, "one of them drains and ends")
    assert len(scaled.workers("decode")) == 1
    assert "worker-2     ordered: decode worker" in log()
    assert "died" not in log()
    decided = (scaled.folder / "logs" / "scheduler.log").read_text()
    assert "1 prefill + 1 decode -> 1 prefill + 2 decode: worker-2 starts (decode)" in decided
    assert "drains and ends (decode)" in decided
