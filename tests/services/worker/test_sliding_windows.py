"""Sliding windows on mixed workers, with and without handoffs: transformers' answers, as many blocks."""

import grpc
import pytest
import torch
import transformers

from baton.protos import scheduler_pb2, worker_pb2, worker_pb2_grpc
from baton.services import roles
from baton.services.config import Settings
from baton.services.errors import ConfigError
from harness.architectures.registry import ARCHITECTURES
from harness.support import CALL_S
from harness.workers import fleet
from tests.services.worker.router import DECODE, connected, hello, request

GEMMA, WRITTEN = ARCHITECTURES["ngram-gemma3"], 24
ENGINE = {"kv_cache_gib": 0.0625, "max_model_len": 1024, "enable_prefix_caching": False}
# If each layer kept all tokens: 4 layers, 32 tokens, keys and values of 64 float32.
BLOCKS_OF_ALL = 2**26 // (4 * 32 * 2 * 64 * 4)


def transformers_answers(prompts):
    folder = GEMMA.target(GEMMA.checkpoint())
    model = transformers.Gemma3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    for tokens in prompts:
        whole = model.generate(torch.tensor([tokens]), max_new_tokens=WRITTEN, do_sample=False)
        yield whole[0, len(tokens) :].tolist()


async def test_windows_save_blocks_with_and_without_handoffs(tmp_path):
    prompts, blocks = GEMMA.prompts(2), {}
    answers = list(transformers_answers(prompts))
    with fleet(GEMMA.target(GEMMA.checkpoint()), tmp_path) as workers:
        for enabled in (None, False):
            worker = workers.started("mixed", engine=ENGINE, handoff={"enabled": enabled})
            capacity = (await hello(worker.address)).identity.capacity
            assert bool(capacity.compatibility_hash) == bool(capacity.transports) == (enabled is None)
            blocks[enabled] = capacity.num_blocks
            async with connected(worker.address) as stream:
                for number, (tokens, answer) in enumerate(zip(prompts, answers, strict=True)):
                    core = request(f"whole {number}", tokens, max_tokens=WRITTEN)
                    got = await stream.run(core, DECODE)
                    assert got.tokens == answer
                    # Resumed without KV, as after a failure.
                    got = await stream.run(core, DECODE, epoch=2, written=answer[:9])
                    assert got.tokens == answer[9:]
                    if enabled is None:
                        over = request(f"over {number}", tokens, max_tokens=WRITTEN)
                        read = await stream.prefill(over)
                        got = await stream.run(over, DECODE, source=stream.source(over))
                        assert read.tokens + got.tokens == answer
        with grpc.insecure_channel(worker.address) as channel:
            asked = worker_pb2.SetRoleRequest(role=scheduler_pb2.ROLE_DECODE)
            refusal = worker_pb2_grpc.WorkerStub(channel).SetRole(asked, timeout=CALL_S).refusal
        assert "was started without handoffs (handoff.enabled)" in refusal
    assert answers[0] != answers[1]
    # The longest request has 32 blocks in the full layers, and fewer in the others.
    assert blocks[False] == blocks[None] > 1.4 * BLOCKS_OF_ALL


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_prefill_and_decode_workers_need_handoffs(name):
    settings = Settings(handoff={"enabled": False})
    with pytest.raises(ConfigError, match=rf"handoff\.enabled is false, but a {name} worker needs handoffs"):
        roles.check(roles.role(name), settings)
    roles.check(roles.role("mixed"), settings)
