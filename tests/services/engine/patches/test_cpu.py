"""vLLM's CPU back end: functions are wrong as shipped and right when patched; the others are right.

Every kernel of speculation that has a CPU version of its own is compared with a plain reference, for ragged
drafts: requests without a draft, with some, with the most, and with drafts that are padding (-1).
"""

from __future__ import annotations

import functools
import gc
import importlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
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

from baton.services.engine.patches import table
from baton.services.engine.patches.cpu import amx
from harness.engines import Engine, EngineProcess, Options, generate
from harness.support import eventually
from tests.handoff import checkpoints

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm import _custom_ops
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.spec_decode import ngram_proposer
    from vllm.v1.spec_decode import utils as drafting
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

VOCABULARY = 23  # no multiple of a vector's width
COUNTS = [0, 3, 1, 0, 4, 2, 0]  # drafts of each request
WIDEST = max(COUNTS)
TOKENS = sum(COUNTS)


@dataclass(frozen=True)
class Mend:
    """One function of vLLM's that a row of the table puts right."""

    owner: Any
    name: str
    until: str


def mend(patch: str, symbol: int = 0) -> Mend:
    [row] = [one for one in table.PATCHES if one.name == f"cpu.{patch}"]
    module, _, path = row.symbols[symbol].partition(":")
    *owners, name = path.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    return Mend(owner, name, row.until)


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    EXPAND, ROTARY, REBIND = mend("expand_kernel"), mend("rotary"), mend("kernel_binding")
    NGRAMS, AMX, INSPECTION, GLOO = mend("ngrams"), mend("amx"), mend("inspection"), mend("gloo")
    RANKS, MASKS = mend("uncompiled", 0), mend("uncompiled", 1)

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="mends are for CPU engines")


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Iterator[None]:
    """This process as an engine's worker: mended, with the CPU's kernels in place of Triton's."""
    table.install()
    with warnings.catch_warnings():  # it looks into every module there is, deprecated names included
        warnings.simplefilter("ignore")
        current_platform.import_kernels()
        current_platform.register_triton_kernel_overrides()
    with torch.random.fork_rng():
        yield


@pytest.fixture(autouse=True)
def drawn() -> None:
    """Draw the same for a test, whichever others ran before."""
    torch.manual_seed(0)


def shipped(mend: Mend) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(mend.owner, mend.name).__wrapped__
    return found


def mended(mend: Mend) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(mend.owner, mend.name)
    return found


def still_wrong(right: bool, mend: Mend) -> None:
    assert not right, f"vLLM's own function is right now: this patch can go ({mend.until})"


def cumulated(counts: list[int]) -> torch.Tensor:
    return torch.tensor(counts).cumsum(0).to(torch.int32)


# The patched functions.


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_expanding_a_figure_of_requests_to_their_tokens(dtype: torch.dtype) -> None:
    values = torch.tensor([5, 0, 7, 0, 2, 9, 4]).to(dtype)
    expected = torch.tensor([1, 1, 1, 7, 2, 2, 2, 2, 9, 9]).to(dtype)

    def result(function: Callable[..., Any]) -> torch.Tensor:
        output = torch.full((TOKENS,), 77).to(dtype)
        function(output, values, cumulated(COUNTS), 0, 1, 128)
        return output

    assert result(mended(EXPAND)).tolist() == expected.tolist()
    assert values[1] == 0, "the requests' own figures stay"
    if dtype != torch.int64:
        still_wrong(result(shipped(EXPAND)).tolist() == expected.tolist(), EXPAND)


def test_an_engine_starts_where_numba_was_imported() -> None:
    import llvmlite.binding  # noqa: F401

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mended(REBIND)([])
        assert "llvmlite.binding.ffi" in sys.modules
        try:
            shipped(REBIND)([])
        except AttributeError:
            return
    still_wrong(True, REBIND)


def test_ngrams_are_compiled_when_the_proposer_is_made() -> None:
    """Else by the first request, while all others wait."""
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
    if not before:  # nobody matched in this process yet
        shipped(NGRAMS)(object.__new__(ngram_proposer.NgramProposer), config)
        still_wrong(bool(search.signatures), NGRAMS)
    made = ngram_proposer.NgramProposer(config)
    compiled = len(search.signatures)
    assert compiled > 0
    tokens, lengths = np.zeros((2, 64), dtype=np.int32), np.array([9, 7], dtype=np.int32)
    assert made.propose(3, [[0], [0, 0]], lengths, tokens) == [[0, 0, 0], [0, 0, 0]]
    assert len(search.signatures) == compiled


def test_a_model_is_inspected_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert mended(INSPECTION)(os.getpid) == os.getpid()

    def run(*_: object, **__: object) -> None:
        raise ChildProcessError

    monkeypatch.setattr(INSPECTION.owner.subprocess, "run", run)
    with pytest.raises(ChildProcessError):  # vLLM imported anew would take ten seconds
        still_wrong(shipped(INSPECTION)(os.getpid) == os.getpid(), INSPECTION)


def test_groups_of_one_rank_share_a_thread() -> None:
    def polling() -> int:
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
        shipped(GLOO)(group, here, 0, 1, timedelta(seconds=5))
        groups.append(group)
    # A thread has its name a moment after it has begun.
    eventually(lambda: polling() >= before + 3, 5, f"a thread each: else this patch can go ({GLOO.until})")
    figures = torch.ones(2)
    groups[0].allreduce([figures]).wait()
    assert figures.tolist() == [1, 1]


def compiled(ask: Callable[[], Any]) -> tuple[Any, int]:
    """Return its result, and how many functions torch.compile captured meanwhile.

    They are run as captured: to have C++ made of them would take 15 s.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with mock.patch("torch._inductor.compile_fx.compile_fx", lambda graph, *_, **__: graph.forward):
        found = ask()
    torch._dynamo.reset()
    return found, torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_ranks_are_counted_without_a_compiler() -> None:
    logprobs = torch.tensor([[-1.0, -3.0, -2.0], [-0.5, -0.5, -9.0]])
    sampled = logprobs[:, 2:]
    (ranks, graphs) = compiled(lambda: mended(RANKS)(logprobs, sampled))
    assert (ranks.tolist(), graphs) == ([2, 3], 0)
    (ranks, graphs) = compiled(lambda: shipped(RANKS)(logprobs, sampled))
    assert ranks.tolist() == [2, 3]
    still_wrong(graphs == 0, RANKS)


def test_tokens_of_other_ranks_are_masked_without_a_compiler() -> None:
    tokens, masked = torch.tensor([3, 4, 7, 8]), [True, False, False, True]
    ((of_this_rank, elsewhere), graphs) = compiled(lambda: mended(MASKS)(tokens, 4, 8, 0, 8, 8))
    assert (of_this_rank.tolist(), elsewhere.tolist(), graphs) == ([0, 0, 3, 0], masked, 0)
    ((same, _), graphs) = compiled(lambda: shipped(MASKS)(tokens, 4, 8, 0, 8, 8))
    assert same.tolist() == of_this_rank.tolist()
    still_wrong(graphs == 0, MASKS)


def test_the_sampler_uses_the_mended_expansion() -> None:
    values = torch.tensor([0.5, 0.0, 2.0, 0.25, 1.0, 3.0, 4.0])
    expanded = rejection_sampler.expand_batch_to_tokens(values, cumulated(COUNTS), TOKENS, 0, 1)
    assert expanded.tolist() == [1.0] * 3 + [2.0] + [1.0] * 4 + [3.0] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_rotating_a_query_of_heads(tokens: int, neox: bool, dtype: torch.dtype) -> None:
    with set_current_vllm_config(VllmConfig()):
        rotary = RotaryEmbedding(64, 64, 256, 10_000.0, neox, dtype)
    positions = torch.randint(1, 256, (tokens,))
    whole = torch.randn(tokens, 4, 192, dtype=dtype)
    query, key = whole[..., 128:], torch.randn(tokens, 1, 64, dtype=dtype)  # a slice, as in MLA
    expected = rotary.forward_native(positions, query.clone(), key.clone())

    def right(function: Callable[..., Any], query: torch.Tensor, key: torch.Tensor) -> bool:
        rotated = function(rotary, positions, query, key)
        in_place = [torch.equal(one, given) for one, given in zip(rotated, (query, key), strict=True)]
        close = [
            torch.allclose(one, wanted, atol=0.04 if dtype == torch.bfloat16 else 1e-5)
            for one, wanted in zip(rotated, expected, strict=True)
        ]
        return all(in_place + close)

    still_wrong(right(shipped(ROTARY), query.clone(), key.clone()), ROTARY)
    assert right(mended(ROTARY), query, key)


@pytest.mark.parametrize("shape", [(6,), (2, 3)])
def test_other_shapes_are_rotated_as_before(shape: tuple[int, ...]) -> None:
    with set_current_vllm_config(VllmConfig()):
        rotary = RotaryEmbedding(64, 64, 256, 10_000.0, True, torch.float32)
    positions = torch.randint(1, 256, shape)
    query, key = torch.randn(*shape, 256), torch.randn(*shape, 64)
    expected = rotary.forward_native(positions, query.clone(), key.clone())
    rotated = mended(ROTARY)(rotary, positions, query.clone(), key.clone())
    assert all(torch.allclose(one, wanted, atol=1e-5) for one, wanted in zip(rotated, expected, strict=True))
    alone, none = mended(ROTARY)(rotary, positions, query.clone(), None)
    assert torch.allclose(alone, expected[0], atol=1e-5)
    assert none is None


@pytest.mark.parametrize("granted", [True, False])
def test_amx_is_used_where_the_kernel_permits_it(
    granted: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The machine's CPU and kernel are made up."""
    asked = 0

    def ask() -> bool:
        nonlocal asked
        asked += 1
        return granted

    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_tile": True})
    monkeypatch.setattr(torch.cpu, "_init_amx", ask)
    anew = amx.permitted(shipped(AMX))  # another process, to which nothing was said yet
    with caplog.at_level(logging.WARNING):
        assert [anew(), anew()] == [granted, granted]
    assert asked == 1
    told = ["the kernel does not let this process use its AMX" in line for line in caplog.messages]
    assert told == [] if granted else told == [True]
    shipped(AMX)()
    still_wrong(asked > 1, AMX)


def test_amx_is_not_asked_for_where_the_cpu_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_f": True})
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: pytest.fail("it was asked for"))
    assert amx.permitted(shipped(AMX))() is False


def amx_without_permission() -> None:
    """The CPU says that it has AMX; no tile may be used. So it is without a mend at any bfloat16 step."""
    torch.cpu._is_amx_tile_supported = lambda: True
    torch.cpu._init_amx = lambda: False


@pytest.mark.timeout(240)
def test_an_engine_answers_where_the_kernel_refuses_amx(tmp_path: Path) -> None:
    """Unmended, its process ends with SIGILL in the first step."""
    options = Options(checkpoints.qwen2(tmp_path / "qwen2"), "refused", prepare=amx_without_permission)
    with EngineProcess(options) as engine:
        assert len(engine.call(generate, "r", [5] * 40, 4)) == 4
        assert engine.call(told)["attention kernels"] == "vec"
        assert engine.call(collections_at_its_end) == 0


def collections_at_its_end(engine: Engine) -> int:
    """Shut the engine down. Return how often all garbage was collected, which takes a second."""
    found = []

    def collected(phase: str, info: dict[str, int]) -> None:
        found.extend([info] if phase == "start" and info["generation"] == 2 else [])

    gc.callbacks.append(collected)
    engine.core.model_executor.shutdown()
    gc.callbacks.remove(collected)
    return len(found)


def told(engine: Engine) -> dict[str, str]:
    """To whom it hands KV over."""
    return dict(engine.connector.facts)


# Functions that are not patched.


def test_amx_keeps_kv_in_an_order_of_its_own() -> None:
    """Its shape is that of other kernels: a handoff has to tell them apart."""
    given = torch.arange(32 * 64, dtype=torch.float32).to(torch.bfloat16).view(32, 1, 64)
    caches = []
    for isa in ("vec", "amx"):
        cache = torch.zeros(1, 1, 2 * 32, 64, dtype=torch.bfloat16)
        keys, values = cache.chunk(2, dim=2)
        _custom_ops.cpu_attn_reshape_and_cache(given, given, keys, values, torch.arange(32), isa)
        caches.append(cache)
    assert not torch.equal(*caches)


def sampling(**given: Any) -> SamplingMetadata:
    """Sample len(COUNTS) requests at temperature 1, but for what is given."""
    requests = len(COUNTS if given.get("temperature") is None else given["temperature"])
    one = torch.ones(requests)
    return SamplingMetadata(
        **{
            "temperature": one,
            "all_greedy": False,
            "all_random": True,
            "top_p": None,
            "top_k": None,
            "generators": {},
            "max_num_logprobs": None,
            "no_penalties": True,
            "prompt_token_ids": None,
            "frequency_penalties": one * 0,
            "presence_penalties": one * 0,
            "repetition_penalties": one,
            "output_token_ids": [[] for _ in range(requests)],
            "allowed_token_ids_mask": None,
            "bad_words_token_ids": {},
            "logitsprocs": LogitsProcessors(),
        }
        | given
    )


def test_greedy_verification() -> None:
    drafts = torch.randint(0, VOCABULARY, (TOKENS,), dtype=torch.int32)
    best = drafts.to(torch.int64)
    best[2] = (best[2] + 1) % VOCABULARY  # request 1: two of three accepted
    best[4] = (best[4] + 1) % VOCABULARY  # request 4: none of four
    drafts[9] = -1  # request 5: one, then padding
    logits = torch.nn.functional.one_hot(best, VOCABULARY).float()
    bonus = torch.arange(len(COUNTS)).unsqueeze(1)
    got = rejection_sampler.rejection_sample(
        drafts, COUNTS, WIDEST, cumulated(COUNTS), None, logits, bonus,
        sampling(temperature=None, all_greedy=True, all_random=False),
    )  # fmt: skip
    expected = []
    for request, count in enumerate(COUNTS):
        row, start = [], sum(COUNTS[:request])
        for place in range(start, start + count):
            row.append(int(best[place]))
            if drafts[place] != best[place]:
                break
        else:
            row.append(request)
        expected.append(row + [-1] * (WIDEST + 1 - len(row)))
    assert got.tolist() == expected


def firsts(counts: list[int]) -> torch.Tensor:
    """Return, for each request, the row of the logits that its first token is sampled from."""
    return torch.tensor([0, *counts[:-1]]).cumsum(0) + torch.arange(len(counts))


def verified(
    drafts: torch.Tensor,
    draft_probs: torch.Tensor | None,
    logits: torch.Tensor,  # [tokens + requests, vocabulary]: a request's drafts, then its bonus
    metadata: SamplingMetadata,
    counts: list[int] = COUNTS,
) -> torch.Tensor:
    """Return the tokens of one step of vLLM's sampler: [requests, WIDEST + 1]."""
    bonus = firsts(counts) + torch.tensor(counts)
    step = SpecDecodeMetadata(
        draft_token_ids=drafts,
        num_draft_tokens=counts,
        cu_num_draft_tokens=cumulated(counts),
        cu_num_sampled_tokens=(bonus + 1).to(torch.int32),
        target_logits_indices=torch.tensor(sorted({*range(len(logits))} - {*bonus.tolist()})),
        bonus_logits_indices=bonus,
        logits_indices=torch.arange(len(logits)),
    )
    sampler = rejection_sampler.RejectionSampler(Sampler())
    tokens: torch.Tensor = sampler(step, draft_probs, logits.clone(), metadata).sampled_token_ids
    return tokens


def target_probabilities(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """By the definitions, a row at a time."""
    rows = []
    for row in (logits / temperature).softmax(-1):
        order = row.argsort(descending=True)
        kept = row[order].clone()
        kept[top_k:] = 0
        kept = kept / kept.sum()
        kept[(kept.cumsum(0) - kept) >= top_p] = 0
        rows.append(torch.zeros_like(row).scatter(0, order, kept / kept.sum()))
    return torch.stack(rows)


WAYS = [
    (0.25, VOCABULARY, 1.0),
    (0.8, 4, 1.0),
    (1.0, VOCABULARY, 0.7),
    (0.25, 6, 0.8),
    (1.0, VOCABULARY, 1.0),
]


@pytest.mark.parametrize("probabilistic", [False, True])
@pytest.mark.parametrize(("temperature", "top_k", "top_p"), WAYS)
def test_sampled_tokens_have_the_targets_distribution(
    temperature: float, top_k: int, top_p: float, probabilistic: bool
) -> None:
    """The first token of every request of a batch with ragged drafts: accepted, recovered or bonus."""
    copies, steps = 500, 4
    counts, requests = COUNTS * copies, len(COUNTS)
    logits = torch.randn(TOKENS + requests, VOCABULARY) * 1.5 * temperature
    proposal = torch.randn(TOKENS, VOCABULARY).softmax(-1).repeat(copies, 1)
    fixed = logits[[0] * TOKENS].topk(3).indices[:, 1].repeat(copies).to(torch.int32)
    metadata = sampling(
        temperature=torch.full((len(counts),), temperature),
        top_k=torch.full((len(counts),), top_k, dtype=torch.int32) if top_k < VOCABULARY else None,
        top_p=torch.full((len(counts),), top_p) if top_p < 1 else None,
    )
    found = torch.zeros(requests, VOCABULARY)
    for _ in range(steps):
        drafts = proposal.multinomial(1)[:, 0].to(torch.int32) if probabilistic else fixed
        tokens = verified(
            drafts, proposal if probabilistic else None, logits.repeat(copies, 1), metadata, counts
        )
        first = tokens[:, 0].view(copies, requests).long()
        found += torch.nn.functional.one_hot(first, VOCABULARY).sum(0)
    expected = steps * copies * target_probabilities(logits[firsts(COUNTS)], temperature, top_k, top_p)
    possible = expected > 0
    assert found[~possible].sum() == 0, "a token outside top-k or top-p"
    chi = ((found - expected) ** 2 / expected)[possible].sum()
    freedom = int(possible.sum()) - requests
    assert chi < freedom + 5 * (2 * freedom) ** 0.5, f"chi-square {chi:.0f} at {freedom} degrees of freedom"


def test_padding_is_never_accepted() -> None:
    logits = torch.randn(TOKENS + len(COUNTS), VOCABULARY)
    drafts = torch.full((TOKENS,), -1, dtype=torch.int32)
    tokens = verified(drafts, None, logits, sampling())
    assert ((tokens >= 0).sum(1) == 1).all()
    assert (tokens[:, 0] < VOCABULARY).all()


def test_greedy_and_sampled_requests_in_one_batch() -> None:
    logits = torch.randn(TOKENS + len(COUNTS), VOCABULARY)
    cold = torch.tensor([0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0])
    best = logits[firsts(COUNTS)].argmax(-1)
    drafts = torch.randint(0, VOCABULARY, (TOKENS,), dtype=torch.int32)
    for _ in range(20):
        tokens = verified(drafts, None, logits, sampling(temperature=cold, all_random=False))
        assert (tokens[cold == 0, 0] == best[cold == 0]).all()


def test_what_an_eagle_drafter_goes_on_from() -> None:
    sampled = torch.tensor([[3, -1, -1], [5, 6, -1], [1, 2, 3], [9, -1, -1], [VOCABULARY, -1, -1]])
    sampled = sampled.to(torch.int32)
    discarded = torch.tensor([False, False, False, True, False])
    backup = torch.tensor([11, 12, 13, 14, 15], dtype=torch.int32)
    following, counts = torch.zeros(2, 5, dtype=torch.int32).unbind()
    drafting._eagle_prepare_next_token_padded(
        sampled, discarded, backup, following, counts, VOCABULARY, 3, 5, 3, BLOCK_SIZE_TOKENS=4
    )
    assert following.tolist() == [3, 6, 3, 14, 15]
    assert counts.tolist() == [1, 2, 3, 0, 0]


def test_where_an_eagle_drafter_samples() -> None:
    counts = [0, 2, 1, 0]
    starts = torch.tensor([0, 5, 8, 10, 11], dtype=torch.int32)  # a prompt of 5, then 1 + drafts each
    valid = torch.tensor([1, 1, 2, 1], dtype=torch.int32)
    where, rejected = torch.zeros(2, 4, dtype=torch.int32).unbind()
    drafting._eagle_prepare_inputs_padded(cumulated(counts), valid, starts, where, rejected, 4)
    assert rejected.tolist() == [0, 2, 0, 0]
    assert where.tolist() == [4, 5, 9, 10]


def test_where_a_drafters_next_step_writes() -> None:
    block, longest = 4, 14
    table = torch.tensor([[7, 3, 9, 2], [1, 8, 5, 4], [6, 0, 11, 10]], dtype=torch.int32)
    positions = torch.tensor([3, 8, 13])
    lengths = torch.tensor([4, 9, 14], dtype=torch.int32)
    moved, slots = torch.zeros(2, 3, dtype=torch.int64).unbind()
    drafting.eagle_step_update_slot_mapping_and_metadata(
        positions, table, lengths, block, longest, moved, slots
    )
    assert moved.tolist() == [4, 9, 0]
    assert slots.tolist() == [3 * 4, 5 * 4 + 1, drafting.PADDING_SLOT_ID]
    assert lengths.tolist() == [5, 10, 1]


@pytest.mark.parametrize("shifted", [True, False])
def test_what_a_draft_model_reads(shifted: bool) -> None:
    """Two requests, the second with one rejected token; no slots beyond the one for the new token."""
    extra = 0 if shifted else 1
    tokens, positions = torch.tensor([1, 2, 3, 4, 5, 6], dtype=torch.int32), torch.tensor([0, 1, 2, 7, 8, 9])
    following = torch.tensor([31, 32], dtype=torch.int32)
    starts, ends = torch.tensor([0, 3, 6], dtype=torch.int32), torch.tensor([2, 4], dtype=torch.int32)
    width = 6 + 2 * extra
    out_tokens = torch.zeros(width, dtype=torch.int32)
    out_positions = torch.zeros(width, dtype=torch.int64)
    rejected, masked = torch.zeros(2, width, dtype=torch.bool).unbind()
    sampled = torch.zeros(2, dtype=torch.int32)
    hidden = torch.zeros(6, dtype=torch.int32)
    drafting._copy_and_expand_eagle_inputs(
        target_token_ids_ptr=tokens, target_positions_ptr=positions, next_token_ids_ptr=following,
        out_input_ids_ptr=out_tokens, out_positions_ptr=out_positions,
        out_is_rejected_token_mask_ptr=rejected, out_is_masked_token_mask_ptr=masked,
        out_new_token_indices_ptr=sampled, out_hidden_state_mapping_ptr=hidden,
        query_start_loc_ptr=starts, query_end_loc_ptr=ends, padding_token_id=0,
        parallel_drafting_token_id=99, total_input_tokens=6, num_padding_slots_per_request=1,
        shift_input_ids=shifted, BLOCK_SIZE_TOKENS=4, batch_size=2, num_blocks=1,
    )  # fmt: skip
    if shifted:
        assert out_tokens.tolist() == [2, 3, 31, 5, 32, 0]
        assert hidden.tolist() == [0, 1, 2, 3, 4, 5]
        assert sampled.tolist() == [2, 4]
        assert rejected.tolist() == [False] * 5 + [True]
    else:
        assert out_tokens.tolist() == [1, 2, 3, 31, 4, 5, 32, 0]
        assert sampled.tolist() == [3, 6]
        assert rejected.tolist() == [False] * 7 + [True]
        assert out_positions.tolist()[:7] == [0, 1, 2, 3, 7, 8, 9]
    assert not masked.any()
