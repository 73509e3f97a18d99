"""The connector's view of vLLM's groups, and of steps that cannot be saved."""

from contextlib import closing, contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.core.single_type_kv_cache_manager import ChunkedLocalAttentionManager, SlidingWindowManager
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.request import RequestStatus

from baton.handoff.config import HandoffConfig
from baton.handoff.errors import UnsupportedCache
from baton.handoff.groups import CacheGroup
from baton.handoff.params import save_params
from baton.handoff.reports import ShardSave
from baton.handoff.vllm import facts
from baton.handoff.vllm.metadata import RankHandshake, StepResults
from baton.handoff.vllm.scheduler_side import SchedulerSide
from baton.protos.handoff_pb2 import Shard
from baton.rpc import host_id
from baton.services.config import HandoffSettings
from tests.handoff.caches import mixed_cache
from tests.handoff.test_forms import caches

_HEADS = {"block_size": 32, "num_kv_heads": 1, "head_size": 64, "dtype": torch.bfloat16}
FULL = FullAttentionSpec(**_HEADS)
WINDOW = SlidingWindowSpec(**_HEADS, sliding_window=128, extra_retained_tokens=2)
STATE = MambaSpec(block_size=512, shapes=((3, 384), (4, 64, 64)), dtypes=(torch.bfloat16, torch.float32))
CHUNK = ChunkedLocalAttentionSpec(**_HEADS, attention_chunk_size=64)
RING = CircularBufferSpec(**_HEADS | {"block_size": 8, "num_kv_heads": 2}, head_size_v=0)


def cache(*specs):
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=[f"layer.{n}"]) for n, spec in enumerate(specs)]
    return SimpleNamespace(kv_cache_groups=groups)


def test_each_kind_has_its_rule():
    full, window, state, chunk, ring = facts.groups(cache(FULL, WINDOW, STATE, CHUNK, RING))
    assert (full, window) == (CacheGroup(32), CacheGroup(32, window=130))
    assert (chunk, ring) == (CacheGroup(32, chunk=64), CacheGroup(8, state="ring of 8 tokens"))
    assert (state.block_size, state.window) == (512, 0)
    assert str(state).startswith("state of mamba2 (3x384 bfloat16, 4x64x64 float32; convolution by ")
    latent = MLAAttentionSpec(**_HEADS | {"head_size": 576})
    assert facts.row_widths(cache(FULL, STATE, latent)) == {"layer.0": 64, "layer.2": 576}
    several = UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"a": WINDOW, "b": WINDOW})
    assert facts.groups(cache(several)) == (window,)


def config(ranks, *totals):
    """The configuration of a model, and perhaps a drafter, with these total KV heads."""
    models = [SimpleNamespace(get_total_num_kv_heads=lambda total=total: total) for total in totals]
    drafter = SimpleNamespace(draft_model_config=models[1]) if len(models) > 1 else None
    sizes = dict.fromkeys((*facts._PARALLEL_SIZES, "tensor_parallel_size"), 1) | {
        "tensor_parallel_size": ranks
    }
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**sizes), model_config=models[0], speculative_config=drafter
    )


@pytest.mark.parametrize(
    ("ranks", "totals", "heads", "found"),
    [
        (1, (4,), 4, 4),
        (2, (4,), 2, 4),
        (2, (4, 8), 4, 8),
        (4, (2,), 1, 2),
        (4, (4,), 1, 4),
        (4, (2, 8), 1, 2),
        (4, (2, 4), 1, None),  # ambiguous: the model's or the drafter's
    ],
)
def test_all_ranks_heads_are_counted(ranks, totals, heads, found):
    spec = FullAttentionSpec(**_HEADS | {"num_kv_heads": heads})
    latent = MLAAttentionSpec(**_HEADS)
    counted = facts.total_heads(config(ranks, *totals), cache(spec, latent, STATE))
    assert counted == ({"layer.0": found} if found else {}) | {"layer.1": 1}


@pytest.mark.parametrize(
    ("spec", "ranks", "found"),
    [
        (SlidingWindowMLASpec(**_HEADS, sliding_window=128, max_tp_shards=1), 4, 1),
        (MLAAttentionSpec(**_HEADS, max_tp_shards=1), 4, 1),
        (FullAttentionSpec(**_HEADS, max_tp_shards=2), 4, 2),
        (FullAttentionSpec(**_HEADS | {"num_kv_heads": 4}, max_tp_shards=8), 2, 8),
        (RING, 4, 1),
        (replace(STATE, tp_replicated=True), 4, 1),
    ],
)
def test_vllm_says_what_ranks_have_alike(spec, ranks, found):
    """If all ranks have the same heads, the totals of the model and its drafter do not matter."""
    assert facts.total_heads(config(ranks, 2, 4), cache(spec)) == {"layer.0": found}


def test_layers_without_heads_need_equal_numbers_of_ranks():
    """The fact names the layer."""
    (name,) = set(facts.parallel_sizes(config(1, 2), mixed_cache(3))) - set(facts._PARALLEL_SIZES)
    assert name == "tensor_parallel_size (equal on both: full.0 has no heads to divide)"
    assert set(facts.parallel_sizes(config(2, 2), caches(1, 2)[0])) == set(facts._PARALLEL_SIZES)


@pytest.mark.parametrize(
    ("spec", "manager"), [(WINDOW, SlidingWindowManager), (CHUNK, ChunkedLocalAttentionManager)]
)
def test_live_blocks_are_those_that_vllm_keeps(spec, manager):
    (group,) = facts.groups(cache(spec))
    for tokens in range(1, 300):
        dropped = manager.get_num_skipped_tokens(spec, tokens)
        assert group.live(tokens) == range(dropped // 32, -(-tokens // 32))


def test_the_order_of_a_convolutions_state_counts(monkeypatch):
    """VLLM_SSM_CONV_STATE_LAYOUT sets it."""
    found = []
    for first in (True, False):
        monkeypatch.setattr(facts, "is_conv_state_dim_first", lambda first=first: first)
        found += facts.groups(cache(STATE))
    assert found[0] != found[1]


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (
            CrossAttentionSpec(**_HEADS),
            "keeps a CrossAttentionSpec, which cannot be handed over: serve it with mixed",
        ),
        (
            MambaSpec(block_size=32, shapes=((1,),), dtypes=(torch.float32,), mamba_cache_mode="align"),
            "set engine.enable_prefix_caching to false",
        ),
    ],
)
def test_unsupported_kinds_are_refused_by_name(spec, why):
    with pytest.raises(UnsupportedCache, match=why):
        facts.groups(cache(FULL, spec))


class Step(SimpleNamespace):
    """A step that ends the prompt of request `r`, with its blocks by group."""

    def __init__(self, scheduled, *tables):
        state = SimpleNamespace(get_block_ids=lambda _: tables)
        super().__init__(
            num_scheduled_tokens={"r": scheduled}, kv_connector_block_state=state, preempted_req_ids=set()
        )


PREEMPTED = Step(0, [])
PREEMPTED.preempted_req_ids = {"r"}


@contextmanager
def side_with(*groups):
    extra = HandoffSettings(listen="127.0.0.1:0").connector
    config = HandoffConfig.from_extra_config(extra | {"worker_id": "w"})
    with closing(SchedulerSide(config, groups, 100)) as side:
        yield side


def request(tokens, max_tokens=1):
    """A request to save, which ends with `max_tokens`."""
    return SimpleNamespace(
        request_id="r",
        num_tokens=tokens,
        num_computed_tokens=0,
        num_output_tokens=0,
        max_tokens=max_tokens,
        kv_transfer_params=save_params(1),
        status=RequestStatus.FINISHED_LENGTH_CAPPED,
    )


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (Step(70, [1, 2, 3], [0, 0, 0], [4]), "a block that the next token needs is no longer kept"),
        (Step(71, [1, 2, 3], [1, 2, 3], [4]), "its state is 1 tokens beyond the prompt's end"),
        (Step(70, [1, 2, 3], [0, 2, 3], [4]), None),
    ],
)
def test_a_step_that_overwrites_what_is_to_be_saved_saves_nothing(step, why):
    with side_with(CacheGroup(32), CacheGroup(32, window=33), CacheGroup(512, state="s")) as side:
        side.add(asked := request(70))
        assert side.loadable_tokens(asked, 0) == 0
        jobs = side.build_step(step)
        problems = [str(saved.problem) for saved in side.take_reports().saved]
    if why is None:
        assert [len(part.block_ids) for part in jobs.saves[0].parts] == [3, 2, 1]
        assert problems == []
    else:
        assert jobs.saves == []
        assert problems == [f"SaveFailed: KV of request 'r', epoch 1: {why}"]


@pytest.mark.parametrize(("max_tokens", "slots"), [(1, 2), (2, 10)])
def test_a_window_is_for_a_request_that_ends_with_its_prompt(max_tokens, slots):
    with side_with(CacheGroup(32)) as side:
        side.set_ranks({0: RankHandshake(0, "", "nowhere:0", "nowhere:0", 8, True, "00", {})})
        side.add(asked := request(320, max_tokens))
        (job,) = side.build_step(Step(320, list(range(1, 11)))).saves
        assert job.slots == slots
        # steps may overlap: the next one may take its blocks before its end is known
        windowed = [("r", 1)] if slots == 2 else []
        assert side.build_step(PREEMPTED).preempted == windowed
        assert side.finished(asked) == bool(windowed)
        assert side.build_step(Step(0, [])).ended == windowed


def test_ranks_on_another_machine():
    """They are dialled at their published addresses, and their clocks are ignored here."""
    here = RankHandshake(0, host_id(), "127.0.0.1:1", "a:1", 8, True, "00", {})
    there = RankHandshake(1, "elsewhere", "127.0.0.1:1", "b:1", 8, True, "00", {})
    with side_with(CacheGroup(32)) as side:
        side.set_ranks({0: here, 1: there})
        assert side.addresses == ["127.0.0.1:1", "b:1"]
        assert side.published_addresses == ["a:1", "b:1"]
        side.add(request(32))
        side.build_step(Step(32, [1]))
        shard = Shard().SerializeToString()
        saves = [ShardSave("r", 1, rank, shard, saved_at_s) for rank, saved_at_s in enumerate((7.0, 1e9))]
        side.update(StepResults(saves=saves))
        (saved,) = side.take_reports().saved
        assert saved.manifest.saved_at_s == 7.0
