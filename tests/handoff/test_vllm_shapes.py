"""Engines with a drafter, and with ranks in separate processes. Each hands over to itself."""

from __future__ import annotations

import random
import ssl
from pathlib import Path

import pytest
from cryptography import x509

from baton import addresses
from baton.handoff import transports
from baton.handoff.forms import CacheLayer
from baton.handoff.reports import Loaded
from baton.protos.handoff_pb2 import Manifest
from baton.security import identity
from baton.security.authority import Authority
from baton.security.names import Name, Role
from harness.architectures.experts import deepseek_v3
from harness.engines import Engine, EngineProcess, Options, clear_prompt, decode, generate, prefer, prefill
from tests.handoff import checkpoints
from tests.handoff.engines import loaded_of, manifest_of, rank, read

WRITTEN = 12
ALONE = {"enable_prefix_caching": False}  # otherwise there would be nothing to pull

pytestmark = pytest.mark.timeout(300)


def hand_over(engine: EngineProcess, name: str, length: int) -> tuple[Manifest, Loaded]:
    """Prefill, pull and decode; return the manifest and the load."""
    draw = random.Random(length)
    prompt = clear_prompt(engine, lambda: draw.choices(range(2, checkpoints.VOCAB), k=length), WRITTEN)
    expected = engine.call(generate, f"{name}-alone", prompt, WRITTEN)
    manifest = read(engine, name, prompt)
    written = engine.call(decode, name, prompt, WRITTEN, manifest)
    assert written.tokens == expected
    loaded_of(written)
    return manifest, written.loaded


def cache_layers(engine: Engine) -> tuple[CacheLayer, ...]:
    layers: tuple[CacheLayer, ...] = rank()._cache.layers
    return layers


def fact(engine: Engine, name: str) -> str:
    return str(engine.connector.facts[name])


def test_the_drafters_layers_come_along(tmp_path: Path) -> None:
    """With a drafter, vLLM saves at the end of the step, after it has taken the results."""
    model, drafter = checkpoints.qwen2(tmp_path / "qwen2"), checkpoints.eagle(tmp_path / "eagle")
    with EngineProcess(Options(model, "both", drafter=drafter, engine=ALONE)) as engine:
        for transport in transports.possible():
            engine.call(prefer, transport)
            for length, blocks in ((33, 1), (300, 10)):
                manifest, loaded = hand_over(engine, f"{transport}-{length}", length)
                assert (len(manifest.shards), loaded.transport, loaded.blocks) == (1, transport, blocks)
                layers = f"{checkpoints.LAYERS + 1} ("
                assert engine.call(fact, "KV layers").startswith(layers)


RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


def test_each_rank_serves_and_pulls_its_own_shard_with_its_workers_certificate(tmp_path: Path) -> None:
    """The ranks are separate processes."""
    model = checkpoints.qwen2(tmp_path / "qwen2")
    folder = tmp_path / "identity"
    identity.write(folder, Authority.create(tmp_path / "ca").issue(Name("test", Role.WORKER, "both")))
    secured = Options(
        model,
        "both",
        cores="0|1",
        transports=("tcp",),
        handoff={"identity": str(folder)},
        engine=ALONE | RANKS,
    )
    with EngineProcess(secured) as engine:
        manifest, loaded = hand_over(engine, "over-tls", 300)
        assert (len(manifest.shards), loaded.blocks, loaded.transport) == (2, 10, "tcp")
        mine = x509.load_pem_x509_certificate((folder / identity.CHAIN).read_bytes())
        for shard in manifest.shards:
            shown = ssl.get_server_certificate(addresses.split(shard.address), timeout=10)
            assert x509.load_pem_x509_certificate(shown.encode()) == mine
        assert len({shard.address for shard in manifest.shards}) == 2


def test_a_quantised_latent_has_one_scale_a_token(tmp_path: Path) -> None:
    """With MLA; its drafter also has a latent."""
    model = tmp_path / "deepseek"
    deepseek_v3(model)
    width, element = 512 + 64, 2
    own = ALONE | {
        "attention_backend": "CPU_MLA",  # as in a worker, even on a CPU with AMX
        "block_size": 16,
        "compilation_config": {"custom_ops": ["-rotary_embedding"]},  # the CPU's is wrong for this model
        "speculative_config": {
            "method": "mtp",
            "num_speculative_tokens": 1,
            "attention_backend": "CPU_MLA",
        },
    }
    options = Options(model, "both", handoff={"kv_wire_dtype": "int8"}, engine=own)
    with EngineProcess(options) as engine:
        prompt = random.Random(0).choices(range(2, 300), k=100)
        expected = engine.call(generate, "alone", prompt, WRITTEN)
        first = engine.call(prefill, "r", prompt)
        manifest = manifest_of(first)
        layers = engine.call(cache_layers)
        assert {layer.block_bytes for layer in layers} == {16 * width * element}
        assert {layer.part_bytes(1, "int8") for layer in layers} == {16 * (width + 4)}
        assert any("layers.3" in layer.name for layer in layers)  # the drafter's
        written = engine.call(decode, "r", prompt, WRITTEN, manifest)
        loaded_of(written)
        assert written.loaded.bytes == 7 * manifest.shards[0].record_bytes
        assert written.tokens[0] == expected[0]
