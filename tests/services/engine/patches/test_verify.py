"""Our verifier instead of vLLM's, in vLLM's own objects and in a running engine."""

import os
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.sample.states import SamplingStates

from baton.kernels.verify import verify
from baton.services.config import EngineSettings
from baton.services.decode.proposers import validation
from baton.services.engine.patches import named_logprobs, table, verify_v1, verify_v2
from baton.services.engine.patches.named_logprobs import Wanted
from baton.services.engine.patches.replace import install
from baton.services.speculation import SpeculativeSettings
from harness.architectures import dense
from harness.speculation.sampling import Engine, Order, Way, expected, fit, prompt, reference
from harness.support import ROOT
from tests.services.engine.host_buffer import HostBuffer

VOCABULARY = 97
DRAFTED = [[3, 4], [], [5], [6, 7, 8]]
DEMO = ROOT / "deploy" / "demo-model" / "weights-mtp"
SAMPLES = 1_500
CHANCE = 1e-6  # probability that a right sample fails
WAY = Way(0.8, top_k=5, top_p=0.9)


@pytest.fixture(scope="module", autouse=True)
def _as_in_a_worker():
    """Patch vLLM's CPU sampler, which uses uninitialised memory as shipped."""
    table.install()
    with warnings.catch_warnings():  # vLLM looks into every module, and triggers deprecation warnings
        warnings.simplefilter("ignore")
        current_platform.import_kernels()
        current_platform.register_triton_kernel_overrides()


def metadata(**more):
    """Return the metadata of four greedy requests, changed by `more`."""
    requests = len(DRAFTED)
    plain = {
        "temperature": None,
        "all_greedy": True,
        "all_random": False,
        "top_p": None,
        "top_k": None,
        "generators": {},
        "max_num_logprobs": None,
        "no_penalties": True,
        "prompt_token_ids": torch.full((requests, 2), 9),
        "frequency_penalties": torch.full((requests,), 1.5),
        "presence_penalties": torch.zeros(requests),
        "repetition_penalties": torch.ones(requests),
        "output_token_ids": [[11], [12], [13], [14]],
        "allowed_token_ids_mask": None,
        "bad_words_token_ids": {},
        "logitsprocs": LogitsProcessors(),
        "spec_token_ids": DRAFTED,
    }
    return SamplingMetadata(**plain | more)


def step():
    """Return drafts, and logits under which some of the drafts are the most likely tokens."""
    drafts = SpecDecodeMetadata.make_dummy(DRAFTED, torch.device("cpu"))
    ends = drafts.cu_num_sampled_tokens
    rows = torch.arange(int(ends[-1]))
    last = ends.long() - 1
    before = torch.ones(len(rows), dtype=torch.bool)
    before[last] = False
    drafts.bonus_logits_indices, drafts.target_logits_indices = last, rows[before]
    logits = torch.randn(len(rows), VOCABULARY, generator=torch.Generator().manual_seed(1))
    likely = rows[before][[0, 1, 3, 4]]
    logits[likely, drafts.draft_token_ids[[0, 1, 3, 4]].long()] = 9.0
    return drafts, logits


def verifier(method="block"):
    return verify_v1.Verifier(RejectionSampler(Sampler()), method)


KINDS = {
    "plain": {},
    "penalties": {"no_penalties": False},
    "bad words": {"bad_words_token_ids": {0: [[4]], 3: [[6]]}},
    "allowed tokens": {"allowed_token_ids_mask": torch.arange(VOCABULARY).expand(4, -1) % 3 == 0},
    "log-probabilities": {"max_num_logprobs": 2},
    "named tokens": {"max_num_logprobs": Wanted(1, {0: [3, 4, 3], 2: [], 3: [5]}, requests=4)},
    "one is sampled": {"temperature": torch.tensor([0.0, 0.7, 0.0, 0.0]), "all_greedy": False},
}


@pytest.mark.parametrize("more", KINDS.values(), ids=KINDS)
def test_greedy_output_and_log_probabilities_equal_vllms(more):
    install(named_logprobs)
    drafts, logits = step()
    one = verifier()
    wanted = one.shipped(drafts, None, logits.clone(), metadata(**more))
    found = one(drafts, None, logits, metadata(**more))
    greedy = [0, 2, 3]
    assert found.sampled_token_ids[greedy].tolist() == wanted.sampled_token_ids[greedy].tolist()
    if found.logprobs_tensors is not None:
        for ours, theirs in zip(found.logprobs_tensors[:3], wanted.logprobs_tensors[:3], strict=True):
            torch.testing.assert_close(ours, theirs)


def test_seeded_requests_are_left_to_vllm(monkeypatch):
    drafts, logits = step()
    one = verifier()
    monkeypatch.setattr(verify_v1, "verify", None)  # a call would raise
    sampled = {"temperature": torch.full((4,), 0.7), "all_greedy": False, "all_random": True}
    found = one(drafts, None, logits, metadata(**sampled, generators={1: torch.Generator()}))
    assert found.sampled_token_ids.shape == (4, 4)


def test_a_setting_chooses_the_verifier():
    spec = {
        "method": "mtp",
        "num_speculative_tokens": 2,
        "verifier": "baton",
        "rejection_sample_method": "block",
    }
    settings = EngineSettings(model=str(DEMO), speculative_config=spec)
    assert validation.check(settings) is not None
    told = SimpleNamespace(additional_config={"baton": {"speculative": spec}})
    assert verify_v1.method_of(told) == "block"
    told.additional_config["baton"]["speculative"] = spec | {"verifier": "vllm"}
    assert verify_v1.method_of(told) is None
    assert SpeculativeSettings(method="mtp").verifier == "vllm"


@pytest.fixture
def shipped(monkeypatch):
    """vLLM's rejection sampler on V2, with its own states of 8 slots."""
    monkeypatch.setattr(buffer_utils, "UvaBuffer", HostBuffer)
    sampler = SimpleNamespace(
        sampling_states=SamplingStates(8, VOCABULARY),
        logits_processors=[],
        thinking_budget_state=SimpleNamespace(enabled=False),
    )
    return SimpleNamespace(sampler=sampler, num_speculative_steps=2)


def verify_on_v2(shipped, logits, drafter, fed):
    """Verify two drafts each of the requests in the slots 5 and 2."""
    slots, rows = torch.tensor([5, 2]), torch.arange(6)
    return verify_v2._verify(
        shipped,
        "standard",
        logits,
        drafter,
        fed,
        rows,
        torch.tensor([0, 3, 6], dtype=torch.int32),
        slots,
        slots.numpy(),
        slots.repeat_interleave(3),
        rows % 3,
        None,
        fed,
    )


def test_v2s_states_reach_the_kernel(shipped):
    """One request is greedy, and a filter makes the other one certain."""
    states, shipped.num_speculative_steps = shipped.sampler.sampling_states, 3
    states.temperature.np[[5, 2]] = 0.0, 0.8
    states.top_k.np[2] = 1
    states.seeds.np[[5, 2]] = 1, 2
    states.apply_staged_writes()
    logits = torch.zeros(6, VOCABULARY)
    logits[torch.arange(6), torch.tensor([1, 2, 3, 4, 5, 6])] = 5.0
    fed = torch.tensor([90, 1, 2, 91, 4, 60])  # the drafts 1, 2 and 4 are right, 60 is wrong
    processed, tokens, counts = verify_on_v2(shipped, logits, torch.zeros(8, 3, VOCABULARY + 3), fed)
    assert processed.data_ptr() == logits.data_ptr()
    assert tokens.tolist() == [[1, 2, 3, -1], [4, 5, -1, -1]]
    assert tokens.dtype == torch.int64
    assert counts.tolist() == [3, 2]


@pytest.mark.parametrize("drawn", [False, True], ids=["one-hot", "drawn"])
def test_every_kernel_that_v2_needs_is_compiled_at_the_start(monkeypatch, shipped, drawn):
    """Triton compiles a variant for each combination of dtypes and missing arguments."""
    seen = []

    def noted(logits, drafts, sampling, *, method, positions):
        filters = (sampling.top_k, sampling.top_p, sampling.min_p)
        arrays = (logits, *vars(drafts).values(), *vars(sampling).values(), positions)
        kinds = [one.dtype if isinstance(one, torch.Tensor) else type(one) for one in arrays]
        seen.append((*kinds, *(one is None for one in filters), drafts.row_ends.data_ptr() % 16, method))
        return verify(logits, drafts, sampling, method=method, positions=positions)

    monkeypatch.setattr(verify_v2, "verify", noted)
    drafter = torch.zeros(8, 2, VOCABULARY) if drawn else None
    runner = SimpleNamespace(
        rejection_sampler=shipped,
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        vocab_size=VOCABULARY,
        speculator=SimpleNamespace(draft_logits=drafter),
    )
    verify_v2.compile_kernels(runner, "standard")
    compiled, seen[:] = set(seen), []
    states = shipped.sampler.sampling_states
    for name, values in (("top_k", (1, 97)), ("top_p", (0.5, 1.0)), ("min_p", (0.1, 0.0))):
        for value in values:
            getattr(states, name).np[2] = value
            states.apply_staged_writes()
            for dtype in (torch.bfloat16, torch.float32):
                logits = torch.zeros(6, VOCABULARY, dtype=dtype)
                verify_on_v2(shipped, logits, drafter, torch.arange(6, dtype=torch.int32))
    assert set(seen) == compiled


@pytest.mark.timeout(600)
def test_blocks_are_verified_in_an_engine(tmp_path):
    """Test a draft model whose tokens are drawn and, with WHOLE_TABLE, the demo model with its MTP head."""
    spec = {"num_speculative_tokens": 2, "rejection_sample_method": "block", "verifier": "baton"}
    dense.qwen2(tmp_path / "target", layers=2, gain=1.2)
    dense.small_qwen2(tmp_path / "small")
    drawn = Order(
        tmp_path / "target",
        prompt(74),
        (WAY,),
        SAMPLES,
        {"method": "draft_model", "model": str(tmp_path / "small"), **spec},
        {"draft_sample_method": "probabilistic"},
    )
    demo = replace(
        drawn, model=DEMO, prompt=tuple(range(300, 312)), speculative={"method": "mtp", **spec}, more={}
    )
    for order in (drawn, demo) if "WHOLE_TABLE" in os.environ else (drawn,):
        wanted = expected(reference(order.model), order.prompt, WAY)
        sample = Engine(order).result()
        for length in (1, 2, 3):
            fitting = fit(sample.answers[WAY], wanted, length)
            print(f"{order.model.name}, {length} tokens: {fitting}; {sample.accepted} of {sample.drafted}")
            assert fitting.chance > CHANCE
        assert 0 < sample.accepted < sample.drafted
