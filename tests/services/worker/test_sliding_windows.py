"""Sliding windows on mixed workers, with and without handoffs: the same text and as many KV blocks."""

import warnings

import grpc
import pytest

from baton.protos import scheduler_pb2, worker_pb2, worker_pb2_grpc
from baton.services import roles
from baton.services.config import Settings
from baton.services.errors import ConfigError
from harness.checkpoints import byte_tokenizer
from harness.support import CALL_S
from harness.workers import fleet
from tests.services.worker.router import DECODE, PREFILL, connected, hello, prompt, request

VOCABULARY, WINDOW, WRITTEN = 320, 64, 24
ENGINE = {"kv_cache_gib": 0.0625, "max_model_len": 1024, "enable_prefix_caching": False}
# If each layer kept all tokens: 4 layers, 32 tokens, keys and values of 64 float32.
BLOCKS_OF_ALL = 2**26 // (4 * 32 * 2 * 64 * 4)
PROMPTS = [prompt(200, seed) for seed in (1, 2)]


def gemma(folder):
    """Save a tiny Gemma 3 with windows in every other layer; return transformers' output for each prompt."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        from transformers import Gemma3ForCausalLM, Gemma3TextConfig

        torch.manual_seed(0)
        model = Gemma3ForCausalLM(
            Gemma3TextConfig(
                vocab_size=VOCABULARY,
                hidden_size=128,
                intermediate_size=256,
                num_hidden_layers=4,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=64,
                query_pre_attn_scalar=64,
                sliding_window=WINDOW,
                layer_types=["sliding_attention", "full_attention"] * 2,
                max_position_embeddings=2048,
                bos_token_id=256,
                eos_token_id=256,
                pad_token_id=256,
                dtype="float32",
            )
        ).eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                # Larger than usual, so that prompts get different answers.
                weight.normal_(0, 0.1 if "norm" in name else 0.2)
            model.save_pretrained(folder)
            model.generation_config.eos_token_id = None
            answers = [
                model.generate(torch.tensor([one]), max_new_tokens=WRITTEN, do_sample=False)
                for one in PROMPTS
            ]
    byte_tokenizer(folder, VOCABULARY)
    return [whole[0, len(one) :].tolist() for one, whole in zip(PROMPTS, answers, strict=True)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return a fleet for its workers, and transformers' output."""
    folder = tmp_path_factory.mktemp("windows")
    answers = gemma(folder / "gemma")
    with fleet(folder / "gemma", folder) as workers:
        yield workers, answers


async def test_windows_save_blocks_with_and_without_handoffs(model):
    workers, expected = model
    blocks = {}
    for enabled in (None, False):
        worker = workers.started("mixed", engine=ENGINE, handoff={"enabled": enabled})
        capacity = (await hello(worker.address)).identity.capacity
        assert bool(capacity.compatibility_hash) == bool(capacity.transports) == (enabled is None)
        blocks[enabled] = capacity.num_blocks
        async with connected(worker.address) as stream:
            for number, (tokens, answer) in enumerate(zip(PROMPTS, expected, strict=True)):
                got = await stream.run(request(f"whole {number}", tokens, max_tokens=WRITTEN), DECODE)
                assert got.tokens == answer
                # Resumed without KV, as after a failure.
                rest = request(f"rest {number}", tokens, max_tokens=WRITTEN)
                got = await stream.run(rest, DECODE, epoch=2, written=answer[:9])
                assert got.tokens == answer[9:]
                if enabled is None:
                    read = await stream.run(request(f"over {number}", tokens, max_tokens=WRITTEN), PREFILL)
                    assert read.saved is not None
                    over = request(f"over {number}", tokens, max_tokens=WRITTEN)
                    got = await stream.run(over, DECODE, source=stream.source(over))
                    assert got.admitted is not None
                    assert read.tokens + got.tokens == answer
        if enabled is False:
            with grpc.insecure_channel(worker.address) as channel:
                stub = worker_pb2_grpc.WorkerStub(channel)
                asked = worker_pb2.SetRoleRequest(role=scheduler_pb2.ROLE_DECODE)
                refusal = stub.SetRole(asked, timeout=CALL_S).refusal
            assert "was started without handoffs (handoff.enabled)" in refusal
    assert len({tuple(answer) for answer in expected}) == len(expected)
    # The longest request has 32 blocks in the full layers, and 11 in the others.
    assert blocks[False] == blocks[None] > 1.4 * BLOCKS_OF_ALL


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_prefill_and_decode_workers_need_handoffs(name):
    settings = Settings(handoff={"enabled": False})
    with pytest.raises(ConfigError, match=rf"handoff\.enabled is false, but a {name} worker needs handoffs"):
        roles.check(roles.role(name), settings)
    roles.check(roles.role("mixed"), settings)
