"""A prompt whose KV would find no room is not read for nothing: it waits, or it is read elsewhere."""

from __future__ import annotations

from baton.protos import worker_pb2 as pb
from harness.support import eventually
from harness.workers import Fleet
from tests.services.worker.router import PREFILL, connected, prompt, request

WAITING, PINNED = "baton_worker_requests_waiting", "baton_worker_handoffs_pinned"


async def test_a_prompt_waits_for_room_and_is_sent_elsewhere_if_there_is_none(workers: Fleet) -> None:
    worker = workers.started("prefill", handoff={"staging_mib": 1})  # three of these prompts
    core = {name: request(name, prompt(300, seed=600 + n)) for n, name in enumerate("abcdef")}
    async with connected(worker.address) as stream:
        for name in "abc":
            saved = (await stream.run(core[name], PREFILL)).saved
            assert saved is not None
            assert saved.HasField("manifest"), saved.problem
        await stream.start(core["d"], PREFILL)
        eventually(lambda: worker.figure(WAITING) == 1, 10, "it waits")
        await stream.abort("a")
        saved = (await stream.end("d")).saved
        assert saved is not None
        assert saved.HasField("manifest"), saved.problem
        got = await stream.run(core["e"], PREFILL)  # nobody makes room for it
        assert got.failed is not None
        assert got.failed.code == pb.Failed.CODE_FULL
        assert "StagingFull" in got.failed.message
        assert got.tokens == []
        await stream.abort("b")
        saved = (await stream.run(core["f"], PREFILL)).saved
        assert saved is not None
        assert saved.HasField("manifest"), saved.problem
    eventually(lambda: worker.figure(PINNED) == 0, 10, "all is released")
