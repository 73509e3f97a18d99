"""vLLM's CPU functions are wrong as shipped, and right when patched.

A test that fails because vLLM's own function has become right names the patch to delete.
"""

import gc
import logging
import os
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.distributed import distributed_c10d
from vllm import _custom_ops
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler
from vllm.v1.spec_decode import ngram_proposer

from baton.services.engine.patches import table
from baton.services.engine.patches.cpu import amx
from baton.services.engine.patches.replace import located
from harness.engines import EngineProcess, Options, generate
from harness.support import eventually
from tests.handoff import checkpoints

COUNTS = [0, 3, 1, 0, 4, 2, 0]  # drafts of each request
TOKENS = sum(COUNTS)
ENDS = torch.tensor(COUNTS).cumsum(0).to(torch.int32)


@dataclass(frozen=True)
class Patched:
    """A function of vLLM that a row of the table corrects."""

    owner: Any
    name: str
    until: str

    @classmethod
    def by(cls, patch, symbol=0):
        [row] = [one for one in table.PATCHES if one.name == f"cpu.{patch}"]
        return cls(*located(row.symbols[symbol]), row.until)

    @property
    def ours(self):
        return getattr(self.owner, self.name)

    @property
    def shipped(self):
        return self.ours.__wrapped__

    def check_shipped(self, right):
        assert not right, f"vLLM's own function is right now: this patch can go ({self.until})"


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    EXPAND, ROTARY, REBIND = Patched.by("expand_kernel"), Patched.by("rotary"), Patched.by("kernel_binding")
    NGRAMS, AMX = Patched.by("ngrams"), Patched.by("amx")
    INSPECTION, GLOO = Patched.by("inspection"), Patched.by("gloo")
    RANKS, MASKS = Patched.by("uncompiled", 0), Patched.by("uncompiled", 1)
    STAGE = Patched.by("stage_buffers")

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="these patches are for CPU engines")


@pytest.fixture(scope="module", autouse=True)
def kernels():
    """Set this process up like an engine's worker: patched, with CPU kernels in place of Triton's."""
    table.install()
    with warnings.catch_warnings():  # vLLM looks into every module, and triggers deprecation warnings
        warnings.simplefilter("ignore")
        current_platform.import_kernels()
        current_platform.register_triton_kernel_overrides()
    with torch.random.fork_rng():
        yield


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_parameters_are_expanded_from_requests_to_tokens(dtype):
    values = torch.tensor([5, 0, 7, 0, 2, 9, 4]).to(dtype)
    expected = torch.tensor([1, 1, 1, 7, 2, 2, 2, 2, 9, 9]).to(dtype)

    def result(function):
        output = torch.full((TOKENS,), 77).to(dtype)
        function(output, values, ENDS, 0, 1, 128)
        return output

    assert result(EXPAND.ours).tolist() == expected.tolist()
    assert values[1] == 0, "the input was changed"
    if dtype != torch.int64:
        EXPAND.check_shipped(result(EXPAND.shipped).tolist() == expected.tolist())


def test_an_engine_starts_if_numba_was_imported_before():
    import llvmlite.binding  # noqa: F401

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        REBIND.ours([])
        assert "llvmlite.binding.ffi" in sys.modules
        try:
            REBIND.shipped([])
        except AttributeError:
            return
    REBIND.check_shipped(True)


def test_ngrams_are_compiled_when_the_proposer_is_made():
    """If they are not compiled at the start, the first request compiles them while all others wait."""
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(
            prompt_lookup_min=1, prompt_lookup_max=2, num_speculative_tokens=3
        ),
        model_config=SimpleNamespace(max_model_len=64),
        scheduler_config=SimpleNamespace(max_num_seqs=2),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )
    search = ngram_proposer.batch_propose_numba
    before = len(search.signatures)
    if not before:  # nothing was matched in this process yet
        NGRAMS.shipped(object.__new__(ngram_proposer.NgramProposer), config)
        NGRAMS.check_shipped(bool(search.signatures))
    made = ngram_proposer.NgramProposer(config)
    compiled = len(search.signatures)
    assert compiled > 0
    tokens, lengths = np.zeros((2, 64), dtype=np.int32), np.array([9, 7], dtype=np.int32)
    assert made.propose(3, [[0], [0, 0]], lengths, tokens) == [[0, 0, 0], [0, 0, 0]]
    assert len(search.signatures) == compiled


def test_a_model_is_inspected_in_this_process(monkeypatch):
    assert INSPECTION.ours(os.getpid) == os.getpid()

    def run(*_, **__):
        raise ChildProcessError

    monkeypatch.setattr(INSPECTION.owner.subprocess, "run", run)
    with pytest.raises(ChildProcessError):  # a real subprocess would import vLLM for ten seconds
        INSPECTION.check_shipped(INSPECTION.shipped(os.getpid) == os.getpid())


def test_groups_of_one_rank_share_a_thread():
    def polling():
        names = (path.read_text() for path in Path("/proc/self/task").glob("*/comm"))
        return sum(name.startswith("gloo_tcp") for name in names)

    store, groups = torch.distributed.HashStore(), []
    before = polling()
    for number in range(3):
        here = distributed_c10d.PrefixStore(f"mended-{number}", store)
        groups.append(distributed_c10d.ProcessGroupGloo(here, 0, 1, timeout=timedelta(seconds=5)))
    assert polling() <= before + 1
    for number in range(3):
        group = distributed_c10d.ProcessGroupGloo.__new__(distributed_c10d.ProcessGroupGloo)
        here = distributed_c10d.PrefixStore(f"shipped-{number}", store)
        GLOO.shipped(group, here, 0, 1, timedelta(seconds=5))
        groups.append(group)
    # A thread gets its name shortly after it has started.
    eventually(lambda: polling() >= before + 3, 5, f"a thread each: else this patch can go ({GLOO.until})")
    figures = torch.ones(2)
    groups[0].allreduce([figures]).wait()
    assert figures.tolist() == [1, 1]


def compiled(ask):
    """Call a function. Return its result, and how many functions torch.compile captured in it.

    The captured functions run as they are, because compiling C++ would take 15 s.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with mock.patch("torch._inductor.compile_fx.compile_fx", lambda graph, *_, **__: graph.forward):
        found = ask()
    torch._dynamo.reset()
    return found, torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_ranks_gather_and_scatter_unequal_parts():
    gather, scatter = (Patched.by("unequal_gathers", symbol) for symbol in (0, 1))
    for one in (gather, scatter):
        with pytest.raises(NotImplementedError):
            one.shipped(SimpleNamespace(world_size=2), torch.ones(2, 2), 0, [3, 1])
    store, sizes = torch.distributed.HashStore(), [3, 1]

    def parts(rank):
        numbers = torch.arange(sizes[rank] * 8).reshape(-1, 8) + 100 * rank
        return [numbers[:, :3].bfloat16(), numbers[:, 7], numbers.reshape(-1, 2, 4).transpose(1, 2).int()]

    def run(rank):
        group = distributed_c10d.ProcessGroupGloo(store, rank, 2, timeout=timedelta(seconds=20))
        here = SimpleNamespace(world_size=2, rank_in_group=rank, device_group=group)
        both = gather.ours(here, parts(rank), 0, sizes)
        return both, scatter.ours(here, both[1], 0, sizes)

    with ThreadPoolExecutor(2) as pool:
        for rank, (both, own) in enumerate(pool.map(run, range(2))):
            for found, *expected in zip(both, parts(0), parts(1), strict=True):
                assert found.dtype == expected[0].dtype
                assert torch.equal(found, torch.cat(expected))
            assert own.tolist() == [2 * number for number in parts(rank)[1].tolist()]


def test_ranks_are_counted_without_a_compiler():
    logprobs = torch.tensor([[-1.0, -3.0, -2.0], [-0.5, -0.5, -9.0]])
    sampled = logprobs[:, 2:]
    (ranks, graphs) = compiled(lambda: RANKS.ours(logprobs, sampled))
    assert (ranks.tolist(), graphs) == ([2, 3], 0)
    (ranks, graphs) = compiled(lambda: RANKS.shipped(logprobs, sampled))
    assert ranks.tolist() == [2, 3]
    RANKS.check_shipped(graphs == 0)


def test_tokens_of_other_ranks_are_masked_without_a_compiler():
    tokens, masked = torch.tensor([3, 4, 7, 8]), [True, False, False, True]
    ((of_this_rank, elsewhere), graphs) = compiled(lambda: MASKS.ours(tokens, 4, 8, 0, 8, 8))
    assert (of_this_rank.tolist(), elsewhere.tolist(), graphs) == ([0, 0, 3, 0], masked, 0)
    ((same, _), graphs) = compiled(lambda: MASKS.shipped(tokens, 4, 8, 0, 8, 8))
    assert same.tolist() == of_this_rank.tolist()
    MASKS.check_shipped(graphs == 0)


def test_a_later_stage_has_buffers_without_a_warm_up():
    def make(**asked):
        return {"hidden_states": torch.zeros(asked["batch_size"], 2, dtype=asked["dtype"])}

    runner = SimpleNamespace(
        intermediate_tensors=None,
        model=SimpleNamespace(make_empty_intermediate_tensors=make),
        max_num_tokens=4,
        model_config=SimpleNamespace(dtype=torch.float32),
        device=torch.device("cpu"),
    )
    received = {"hidden_states": torch.ones(3, 2)}
    try:
        STAGE.shipped(runner, 3, received, True)
    except AssertionError:
        STAGE.check_shipped(right=False)
    found = STAGE.ours(runner, 3, received, True)
    assert torch.equal(found["hidden_states"], received["hidden_states"])


def test_the_sampler_uses_the_patched_expansion():
    values = torch.tensor([0.5, 0.0, 2.0, 0.25, 1.0, 3.0, 4.0])
    expanded = rejection_sampler.expand_batch_to_tokens(values, ENDS, TOKENS, 0, 1)
    assert expanded.tolist() == [1.0] * 3 + [2.0] + [1.0] * 4 + [3.0] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_queries_with_heads_are_rotated_rightly(tokens, neox, dtype):
    with set_current_vllm_config(VllmConfig()):
        rotary = RotaryEmbedding(64, 64, 256, 10_000.0, neox, dtype)
    positions = torch.randint(1, 256, (tokens,))
    whole = torch.randn(tokens, 4, 192, dtype=dtype)
    query, key = whole[..., 128:], torch.randn(tokens, 1, 64, dtype=dtype)  # a slice, as in MLA
    expected = rotary.forward_native(positions, query.clone(), key.clone())

    def right(function, query, key):
        rotated = function(rotary, positions, query, key)
        in_place = [torch.equal(one, given) for one, given in zip(rotated, (query, key), strict=True)]
        close = [
            torch.allclose(one, wanted, atol=0.04 if dtype == torch.bfloat16 else 1e-5)
            for one, wanted in zip(rotated, expected, strict=True)
        ]
        return all(in_place + close)

    ROTARY.check_shipped(right(ROTARY.shipped, query.clone(), key.clone()))
    assert right(ROTARY.ours, query, key)


@pytest.mark.parametrize("shape", [(6,), (2, 3)])
def test_other_shapes_are_rotated_as_before(shape):
    with set_current_vllm_config(VllmConfig()):
        rotary = RotaryEmbedding(64, 64, 256, 10_000.0, True, torch.float32)
    positions = torch.randint(1, 256, shape)
    query, key = torch.randn(*shape, 256), torch.randn(*shape, 64)
    expected = rotary.forward_native(positions, query.clone(), key.clone())
    rotated = ROTARY.ours(rotary, positions, query.clone(), key.clone())
    assert all(torch.allclose(one, wanted, atol=1e-5) for one, wanted in zip(rotated, expected, strict=True))
    alone, none = ROTARY.ours(rotary, positions, query.clone(), None)
    assert torch.allclose(alone, expected[0], atol=1e-5)
    assert none is None


@pytest.mark.parametrize("granted", [True, False])
def test_amx_is_used_if_the_kernel_permits_it(granted, monkeypatch, caplog):
    asked = 0

    def ask():
        nonlocal asked
        asked += 1
        return granted

    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_tile": True})
    monkeypatch.setattr(torch.cpu, "_init_amx", ask)
    amx.permitted.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert [amx.permitted(AMX.shipped) for _ in range(2)] == [granted, granted]
    amx.permitted.cache_clear()
    assert asked == 1
    told = ["the kernel does not let this process use its AMX" in line for line in caplog.messages]
    assert told == [] if granted else told == [True]
    AMX.shipped()
    AMX.check_shipped(asked > 1)


def test_the_kernel_is_not_asked_for_amx_if_the_cpu_has_none(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_f": True})
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: pytest.fail("it was asked for"))
    amx.permitted.cache_clear()
    assert amx.permitted(AMX.shipped) is False
    amx.permitted.cache_clear()


def amx_without_permission():
    """Pretend that the CPU has AMX and that the kernel refuses its tiles."""
    torch.cpu._is_amx_tile_supported = lambda: True
    torch.cpu._init_amx = lambda: False


@pytest.mark.timeout(240)
def test_an_engine_answers_if_the_kernel_refuses_amx(tmp_path):
    """Without the patch its process would end with SIGILL in the first step."""
    options = Options(checkpoints.qwen2(tmp_path / "qwen2"), "refused", prepare=amx_without_permission)
    with EngineProcess(options) as engine:
        assert len(engine.call(generate, "r", [5] * 40, 4)) == 4
        assert engine.call(facts)["attention kernels"] == "vec"
        assert engine.call(collections_at_its_end) == 0


def collections_at_its_end(engine):
    """Shut the engine down. Return how often all garbage was collected."""
    found = []

    def collected(phase, info):
        found.extend([info] if phase == "start" and info["generation"] == 2 else [])

    gc.callbacks.append(collected)
    engine.core.model_executor.shutdown()
    gc.callbacks.remove(collected)
    return len(found)


def facts(engine):
    return dict(engine.connector.scheduler_side.facts)


def test_amx_keeps_kv_in_a_different_order():
    """The shape is the same, so a handoff must compare the kernels too."""
    given = torch.arange(32 * 64, dtype=torch.float32).to(torch.bfloat16).view(32, 1, 64)
    caches = []
    for isa in ("vec", "amx"):
        cache = torch.zeros(1, 1, 2 * 32, 64, dtype=torch.bfloat16)
        keys, values = cache.chunk(2, dim=2)
        _custom_ops.cpu_attn_reshape_and_cache(given, given, keys, values, torch.arange(32), isa)
        caches.append(cache)
    assert not torch.equal(*caches)
