"""Matches on model runner V2, on the CPU: with V2's own states and batches, and the CPU form of the kernel.

The runner itself needs a GPU, and so do speculators with a draft model; a class that writes given tokens
stands in for them.
"""

import warnings
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.config import CUDAGraphMode, SpeculativeConfig, VllmConfig
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup
from vllm.v1.worker.gpu import buffer_utils, model_runner
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.states import RequestState

from baton.services.engine.patches import drafts_v2, step_times
from baton.services.engine.patches.draft_length import lengths_by_batch
from baton.services.engine.patches.drafts_v2 import Matching
from baton.services.engine.patches.replace import install
from baton.services.errors import StartError
from baton.services.speculation import SpeculativeSettings
from tests.kernels.ngram_match import naive

SLOTS, WIDTH, MOST = 6, 64, 5
CPU = torch.device("cpu")
LONG, SHORT = (4, 8), (2, 3)


@pytest.fixture
def states(monkeypatch):
    """V2's request states, without memory that host and GPU share."""
    monkeypatch.setattr(buffer_utils, "is_uva_available", lambda: False)
    return RequestState(SLOTS, WIDTH, 4 * WIDTH, MOST, 1000, CPU)


class Model:
    """A draft model that writes row r of `tokens` for row r of the batch, as many as it is asked for."""

    def __init__(self, drafts, tokens):
        self.drafts = drafts
        self.tokens = torch.tensor(tokens)
        self.asked = []

    def __call__(self, input_batch, *args, num_speculative_tokens, **kwargs):
        self.asked.append({"tokens": num_speculative_tokens, "positional": len(args), **kwargs})
        requests = input_batch.num_reqs
        drafts = self.drafts[:requests]
        drafts[:, :num_speculative_tokens] = self.tokens[:, :num_speculative_tokens]
        return drafts


def fill(states, texts):
    """Store each text in a random slot, followed by other tokens. Return the slots."""
    states.all_token_ids.gpu.copy_(torch.randint(0, 3, (SLOTS, WIDTH)))
    slots = torch.randperm(SLOTS)[: len(texts)]
    for slot, text in zip(slots.tolist(), texts, strict=True):
        states.all_token_ids.gpu[slot, : len(text)] = torch.tensor(text, dtype=torch.int32)
        states.total_len.gpu[slot] = len(text)
        states.last_sampled_tokens[slot] = text[-1]
    return slots


def propose(matching, states, slots, *, sampled=None, **more):
    """Return a step's drafts, called as the model runner does."""
    requests = len(slots)
    batch = InputBatch.make_dummy(requests, requests, InputBuffers(SLOTS, 4 * SLOTS, CPU))
    batch.idx_mapping = slots
    counts = torch.tensor(sampled or [1] * requests, dtype=torch.int32)
    others = (states.next_prefill_tokens, torch.zeros(SLOTS), torch.zeros(SLOTS, dtype=torch.int64))
    with torch.inference_mode():
        found = matching(
            *(batch, {}, {}, torch.zeros(requests, 8), None, counts, torch.zeros_like(counts)),
            *(states.last_sampled_tokens, *others),
            dp_sync_state=None,
            mm_inputs=None,
            **more,
        )
    return found.tolist()


def hybrid(states, made, *, cut=True):
    drafts = torch.full((SLOTS, MOST), 9, dtype=torch.int64)
    model = Model(drafts, made)
    steps = len(made[0])
    return Matching(states, drafts, first=LONG, then=SHORT, model=model, steps=steps, cut=cut), model


def ngram(states, *, cut=True):
    return Matching(states, torch.zeros(SLOTS, MOST, dtype=torch.int64), then=SHORT, cut=cut)


def test_a_match_continues_the_models_drafts(states):
    slots = fill(states, [[1, 2, 3, 4, 5, 8, 2], [1, 2, 3]])
    matching, _ = hybrid(states, [[3], [7]])
    assert propose(matching, states, slots) == [[3, 4, 5, 8, 2], [7] * 5]
    assert matching.counts() == [5, 1]


def test_a_long_match_replaces_the_models_drafts(states):
    slots = fill(states, [[1, 2, 3, 4, 5, 9, 9, 2, 3, 4, 5], [1, 2, 3, 4, 5, 9, 9, 3, 4, 5]])
    matching, _ = hybrid(states, [[70, 71], [70, 71]])
    assert propose(matching, states, slots) == [[9, 9, 2, 3, 4], [70, 71, 71, 71, 71]]
    assert matching.counts() == [5, 2]


def test_the_model_makes_no_more_than_its_steps(states):
    slots = fill(states, [[1, 2, 3]])
    matching, model = hybrid(states, [[70, 71]])
    for wanted, steps in ((None, 2), (5, 2), (2, 2), (1, 1), (0, 0)):
        propose(matching, states, slots, num_speculative_tokens=wanted)
        assert model.asked[-1]["tokens"] == steps
        assert model.asked[-1]["positional"] == 10


def test_the_last_position_is_left_to_the_target(states):
    for free in range(1, MOST + 3):
        text = [1, 2] * WIDTH
        slots = fill(states, [text[: WIDTH - free]])
        matching = ngram(states)
        propose(matching, states, slots)
        assert matching.counts() == [min(free - 1, MOST)]


def test_nothing_is_matched_during_a_prefill(states):
    slots = fill(states, [[1, 2, 1, 2], [1, 2, 1, 2]])
    matching = ngram(states)
    propose(matching, states, slots, sampled=[0, 1])
    assert matching.counts() == [0, 5]


def test_ngram_has_no_model_and_pads_with_a_token(states):
    slots = fill(states, [[5, 6, 7, 5, 6], [1, 2, 3]])
    matching = ngram(states)
    assert propose(matching, states, slots) == [[7, 5, 6, 7, 5], [3] * 5]
    assert matching.counts() == [5, 0]


def test_a_dummy_run_only_runs_the_model(states):
    slots = fill(states, [[1, 2, 1, 2]])
    matching, model = hybrid(states, [[7]])
    assert propose(matching, states, slots, dummy_run=True, is_profile=True) == [[7, 9, 9, 9, 9]]
    assert model.asked[-1] | {"tokens": 1, "dummy_run": True, "is_profile": True} == model.asked[-1]


TEXT = st.lists(st.integers(0, 2), min_size=1, max_size=40)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(TEXT, min_size=1, max_size=SLOTS), st.integers(1, 3), st.integers(0, MOST), st.data())
def test_drafts_equal_those_of_the_naive_form(states, texts, steps, wanted, data):
    made = [data.draw(st.lists(st.integers(0, 2), min_size=steps, max_size=steps)) for _ in texts]
    matching, _ = hybrid(states, made)
    found = propose(matching, states, fill(states, texts), num_speculative_tokens=wanted)
    for row, (text, drafted) in enumerate(zip(texts, made, strict=True)):
        expected = naive.continuation(text, wanted, *LONG)
        if not expected:
            expected = drafted[:wanted]
            expected += naive.continuation(text + expected, wanted - len(expected), *SHORT)
        assert found[row][: matching.counts()[row]] == expected
        assert all(0 <= token <= 2 for token in found[row][:wanted])  # padding is also a valid token


def config(strategy="default", method="mtp", *, asynchronous=False):
    spec = SpeculativeSettings.model_validate(
        {"method": method, "mtp_strategy": strategy, "num_speculative_tokens": MOST, "num_model_steps": 2}
        if method == "mtp"
        else {"method": method, "num_speculative_tokens": MOST}
    )
    theirs = SimpleNamespace(
        use_ngram=lambda: method == "ngram",
        prompt_lookup_min=2,
        prompt_lookup_max=3,
        num_speculative_tokens=MOST,
        num_speculative_tokens_per_batch_size=None,  # as with data parallelism
    )
    return SimpleNamespace(
        additional_config={"baton": {"speculative": spec.model_dump()}},
        speculative_config=theirs,
        scheduler_config=SimpleNamespace(async_scheduling=asynchronous, max_num_seqs=SLOTS),
    )


class Speculator:
    """The parts of a speculator with a draft model that are used."""

    draft_logits = None
    decode_cudagraph_manager = None

    def __init__(self):
        self.draft_tokens = torch.zeros(SLOTS, MOST, dtype=torch.int64)

    def propose(self, *_, **__):
        return self.draft_tokens

    def init_cudagraph_manager(self, mode):
        self.decode_cudagraph_manager = SimpleNamespace(vllm_config=None, mode=mode)


@pytest.fixture
def made(monkeypatch, states):
    """Return a function that makes a speculator for a config, with our patch around a stand-in for vLLM's."""

    def init_speculator(vllm_config, device, req_states):
        return Speculator()

    monkeypatch.setattr(model_runner, "init_speculator", init_speculator)
    monkeypatch.setattr(
        model_runner.GPUModelRunner, "take_draft_token_ids", model_runner.GPUModelRunner.take_draft_token_ids
    )
    for _ in range(2):  # it does nothing the second time
        install(drafts_v2)
    return lambda vllm_config: model_runner.init_speculator(vllm_config, CPU, states)


def test_only_matching_strategies_replace_the_speculator(made):
    assert isinstance(made(config("with_ngram")).propose, Matching)
    assert isinstance(made(config(method="ngram")).propose, Matching)
    assert not isinstance(made(config("default")).propose, Matching)
    reader = config("with_ngram")
    reader.additional_config = {}  # a rank that does not draft
    assert not isinstance(made(reader).propose, Matching)


def test_suffixes_are_refused(made):
    with pytest.raises(StartError, match=r"with_suffix.*on the host.*with_ngram.*VLLM_USE_V2_MODEL_RUNNER=0"):
        made(config("with_suffix"))


def test_drafts_with_distributions_are_refused(made, monkeypatch):
    monkeypatch.setattr(Speculator, "draft_logits", torch.zeros(1))
    with pytest.raises(StartError, match="draft_sample_method"):
        made(config("with_ngram"))


def test_the_sequences_move_to_the_device(made, states):
    before = states.all_token_ids
    made(config("default"))
    assert states.all_token_ids is before
    made(config("with_ngram"))
    assert states.all_token_ids is not before
    assert states.all_token_ids.gpu.shape == before.gpu.shape
    assert states.all_token_ids.gpu.dtype == before.gpu.dtype


def real_config(most, lengths):
    """Return vLLM's own configuration, with draft lengths by batch. The method does not matter here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = VllmConfig()
        theirs.scheduler_config.max_num_seqs = most
        theirs.speculative_config = SpeculativeConfig(
            method="ngram", num_speculative_tokens=MOST, num_speculative_tokens_per_batch_size=lengths
        )
    return theirs


def test_graphs_are_captured_for_the_models_passes(made):
    theirs = real_config(SLOTS, [(1, SLOTS, MOST)])
    theirs.additional_config = config("with_ngram").additional_config
    speculator = made(theirs)
    speculator.init_cudagraph_manager("mode")
    for captured, tokens in ((speculator.decode_cudagraph_manager.vllm_config, 2), (theirs, MOST)):
        table = captured.speculative_config.num_speculative_tokens_per_batch_size
        lookup = build_dynamic_sd_schedule_lookup(table, SLOTS, captured.num_speculative_tokens)
        assert captured.num_speculative_tokens == tokens
        assert set(lookup[1:]) == {tokens}


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("most", [64, 4, 1])
def test_every_length_that_may_be_chosen_has_full_graphs(most, adaptive):
    """Checked in vLLM's own table of captured graphs."""
    theirs = real_config(most, lengths_by_batch(MOST, most, adaptive=adaptive))
    theirs.compilation_config.cudagraph_capture_sizes = list(range(1, most * (MOST + 1) + 1))
    theirs.compilation_config.max_cudagraph_capture_size = most * (MOST + 1)
    manager = object.__new__(CudaGraphManager)
    manager.vllm_config, manager.compilation_config = theirs, theirs.compilation_config
    manager.max_num_reqs, manager.decode_query_len = most, MOST + 1
    manager.cudagraph_mode, manager.varlen_decode = CUDAGraphMode.FULL_DECODE_ONLY, False
    manager.lora_capture_cases, manager.ubatch_runner = [0], None
    manager._candidates, manager._capture_descs = {}, {}
    manager._init_candidates()
    full = {
        length
        for length in range(MOST + 1)
        if any(one.uniform_token_count == length + 1 for one in manager._candidates.get((length + 1, 0), ()))
    }
    chosen = range(MOST + 1) if adaptive else [MOST]
    assert full == {length for length in chosen if length == MOST or length < most - 1}


@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_scheduler_gets_as_many_drafts_as_there_are(made, states, asynchronous, timed):
    from vllm.v1.outputs import DraftTokenIds

    speculator = made(config(method="ngram", asynchronous=asynchronous))
    if timed:  # step_times has wrapped it after the first step
        step_times.time_speculator(SimpleNamespace(speculator=speculator))
    propose(speculator.propose, states, fill(states, [[1, 2, 1, 2], [1, 2, 3], [4, 4, 4]]))
    taken = DraftTokenIds(["a", "b", "c"], [[-1] * MOST for _ in range(3)])
    runner = SimpleNamespace(
        speculator=speculator, draft_tokens_handler=SimpleNamespace(get_draft_tokens=lambda: taken)
    )
    lengths = [len(row) for row in model_runner.GPUModelRunner.take_draft_token_ids(runner).draft_token_ids]
    assert lengths == ([MOST] * 3 if asynchronous else [MOST, 0, MOST])


def test_long_limits_have_graphs_for_a_few_lengths():
    lengths = [tokens for _, _, tokens in lengths_by_batch(32, 64, adaptive=True)]
    assert lengths == [0, 6, 12, 19, 25, 32]
    assert lengths_by_batch(1, 8, adaptive=True) == [(1, 1, 0), (2, 8, 1)]
