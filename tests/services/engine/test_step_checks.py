"""Fields that would break a step are refused with a reason, and usual fields pass."""

import ast
import re
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import vllm
from vllm.sampling_params import MAX_LOGPROB_TOKEN_IDS, RepetitionDetectionParams, SamplingParams
from vllm.v1.core.sched.utils import check_sequence_repetition
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.sample import bad_words, logit_bias, logprob
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcRequestState
from vllm.v1.worker.gpu.states import RequestState

from baton.protos import worker_pb2 as pb
from baton.services.engine import step_checks, wire
from baton.services.engine.errors import RequestRefused
from baton.services.engine.requests import EngineLimits, prepare
from baton.services.engine.step_checks import StepLimits, problem
from tests.services.engine.host_buffer import HostBuffer
from tests.services.worker.router import request

VOCABULARY = 8192
V1, V2 = StepLimits(VOCABULARY), StepLimits(VOCABULARY, runner_v2=True)
V1_DRAFTING = StepLimits(VOCABULARY, drafts_always=True)
V2_DRAFTING = StepLimits(VOCABULARY, runner_v2=True, drafts_always=True)
FAST_PREFILL = StepLimits(VOCABULARY, prompt_logprobs=False)


def params(**fields):
    inside = {name: fields.pop(name) for name in [*fields] if name.startswith("_")}
    made = SamplingParams(**{"max_tokens": 9, **fields})
    for name, value in inside.items():
        setattr(made, name, value)
    made._all_stop_token_ids.add(2)  # the tokenizer's end of sequence
    return made


REFUSED = [
    ({"logprobs": 8193}, V1, "logprobs is 8193; the model's vocabulary has 8192 tokens"),
    ({"prompt_logprobs": 8193}, V2, "prompt_logprobs is 8193; the model's vocabulary has 8192"),
    ({"seed": 1 << 63}, V2, r"seed is 9223372036854775808 \(.* to 9223372036854775807 are"),
    ({"allowed_token_ids": [1, 8192]}, V1, "allowed_token_ids names token 8192"),
    ({"logit_bias": {-1: 1.0}}, V1, "logit_bias names token -1"),
    ({"stop_token_ids": [9000]}, V1, "stop_token_ids names token 9000"),
    ({"logprob_token_ids": [8192]}, V1, "logprob_token_ids names token 8192"),
    ({"_bad_words_token_ids": [[1, 8192]]}, V1, "bad_words names token 8192"),
    ({"_bad_words_token_ids": [[1], []]}, V1, "bad_words has an entry without tokens"),
    ({"min_tokens": 1, "_all_stop_token_ids": {8200}}, V1, "min_tokens .* names token 8200"),
    ({"stop_token_ids": list(range(4097))}, V1, "stop_token_ids has 4097 entries; 4096 are allowed"),
    ({"repetition_detection": RepetitionDetectionParams(129, 0, 2)}, V1, "max_pattern_size is 129; 128"),
    ({"repetition_detection": RepetitionDetectionParams(100, 0, 11)}, V1, "1100 in all; 1024"),
    ({"trace_decode_token_ids": [1]}, V1, "trace_decode_token_ids is not served"),
    ({"prompt_logprob_token_ids": np.zeros((7, 1), np.int32)}, V1, "only by vLLM's model runner V2"),
    ({"prompt_logprob_token_ids": np.zeros((6, 1), np.int32)}, V2, "has 6 rows; the prompt has 7"),
    ({"prompt_logprob_token_ids": np.full((7, 1), 8192)}, V2, "a token outside the model's"),
    ({"prompt_logprobs": 0}, FAST_PREFILL, "prompt_logprobs is not served with engine.extra.kv_sharing"),
    ({"max_tokens": 1 << 31}, V2, "max_tokens is 2147483648; 1073741824"),
    ({"min_p": 0.1}, V1_DRAFTING, "min_p cannot be combined with speculative decoding"),
    ({"logit_bias": {1: 1.0}}, V1_DRAFTING, "logit_bias cannot be combined with speculative decoding"),
    ({"logprob_token_ids": [1]}, V2_DRAFTING, "logprob_token_ids cannot be combined with speculative"),
]  # fmt: skip

# Limits that V2's classes check when a request joins the batch.
SIZES = [
    ("allowed_token_ids", 1024),
    ("logit_bias", 1024),
    ("stop_token_ids", 127),  # and the end of sequence
    ("bad_words", 128),
    ("tokens of bad_words", 1024),
    ("logprob_token_ids", 128),
]


def sized(name, size):
    ids = list(range(100, 100 + size))
    fields = {
        "logit_bias": {"logit_bias": dict.fromkeys(ids, 1.0)},
        "stop_token_ids": {"stop_token_ids": ids, "min_tokens": 1},
        "bad_words": {"_bad_words_token_ids": [[one] for one in ids]},
        "tokens of bad_words": {"_bad_words_token_ids": [ids[:500], ids[500:]]},
    }
    return params(**fields.get(name, {name: ids}))


@pytest.mark.parametrize(("fields", "limits", "words"), REFUSED, ids=[words for _, _, words in REFUSED])
def test_fields_are_refused_by_name(fields, limits, words):
    assert re.search(words, problem(params(**fields), 8, limits))
    core = request("r", list(range(8)))
    core.sampling_params = params(**fields)
    start = pb.Start(request_id="r", phase=pb.PHASE_DECODE, engine_request=wire.encode_request(core))
    with pytest.raises(RequestRefused, match=words) as refused:
        prepare(start, "r#1", 1, EngineLimits(1024, VOCABULARY, None, limits))
    assert refused.value.code == pb.Failed.CODE_INVALID


@pytest.mark.parametrize("limits", [V1, V2, V2_DRAFTING, StepLimits()])
def test_usual_fields_pass(limits):
    assert not problem(params(), 8, limits)
    plain = {"temperature": 1.0, "top_k": 1 << 40, "seed": -(1 << 63), "stop_token_ids": [5], "min_tokens": 2}
    repeated = RepetitionDetectionParams(64, 1, 16)
    assert not problem(params(**plain, logprobs=20, repetition_detection=repeated), 8, limits)


@pytest.mark.parametrize("limits", [V1, V2, V2_DRAFTING])
def test_min_p_and_logit_bias_pass_if_they_are_applied_to_drafts(limits):
    assert not problem(params(min_p=0.1, logit_bias={1: 1.0}), 8, limits)


@pytest.fixture
def v2(monkeypatch):
    """Return a function that adds a request to V2's own states, on the CPU."""
    monkeypatch.setattr(buffer_utils, "UvaBuffer", HostBuffer)
    monkeypatch.setattr(buffer_utils, "is_uva_available", lambda: False)
    device = torch.device("cpu")
    states = LogitsProcRequestState.from_request_state(RequestState(2, 64, 64, 0, VOCABULARY, device))
    config = SimpleNamespace()
    biases, words = logit_bias.LogitBiasState(config, states), bad_words.BadWordsState(config, states)
    parts = biases, words, logprob.LogprobTokenIdsState(2, device)

    def add(one):
        for part in parts:
            part.add_request(0, one)

    return add


@pytest.mark.parametrize(("name", "most"), SIZES)
def test_v2s_limits_are_those_of_its_buffers(name, most, v2):
    """V2's classes raise exactly where we refuse. V1 takes more."""
    v2(sized(name, most))
    assert not problem(sized(name, most), 8, V2)
    with pytest.raises(ValueError, match="Too many"):
        v2(sized(name, most + 1))
    assert name.split()[-1] in problem(sized(name, most + 1), 8, V2)
    assert not problem(sized(name, most + 1), 8, V1)


def test_the_limits_are_vllms():
    assert step_checks.V2_ALLOWED_TOKENS == logit_bias.MAX_NUM_ALLOWED_TOKEN_IDS
    assert step_checks.V2_BIASED_TOKENS == logit_bias.MAX_NUM_LOGIT_BIAS_TOKENS
    assert step_checks.V2_STOP_TOKENS == logit_bias.MAX_NUM_STOP_TOKEN_IDS
    assert step_checks.NAMED_TOKENS == MAX_LOGPROB_TOKEN_IDS


def test_more_log_probabilities_than_tokens_would_break_a_step():
    """vLLM's front end only compares the number with engine.extra.max_logprobs."""
    with pytest.raises(RuntimeError, match="out of range"):
        Sampler.gather_logprobs(torch.zeros(1, 8), 9, torch.tensor([1]))


def test_repetitions_are_detected_quickly():
    """The worst answer for the longest allowed patterns takes 6 ms of a core."""
    longest = step_checks.PATTERN_TOKENS
    asked = RepetitionDetectionParams(longest, 1, step_checks.PATTERNS_TOKENS // longest)
    tokens = [7] * 1024 + [8] + [7] * 340
    assert not problem(params(repetition_detection=asked), 8, V1)
    began = time.thread_time()
    check_sequence_repetition(tokens, asked)
    assert time.thread_time() - began < 0.1


# vLLM's functions with a `raise`. Read each new one, and list it in docs/limits.md if a request's fields can
# trigger it. Functions without a comment are called when an engine or a request is made.
RAISING = {
    "v1/sample": {
        "logits_processor/__init__.py": {
            *("_load_logitsprocs_plugins", "_load_logitsprocs_by_fqcns", "build_logitsprocs"),
            *("validate_logits_processors_parameters", "new_req_logits_processor"),
            "_new_state",  # in a step, for an operator's own processors
        },
        "logits_processor/interface.py": {"__init__", "apply", "is_argmax_invariant", "update_state"},
        "logits_processor/state.py": {"removed_append"},
        "ops/topk_topp_sampler.py": {"flashinfer_sampler_supported", "aiter_sample"},
    },
    "v1/worker/gpu/sample": {
        "bad_words.py": {"add_request"},  # in a step
        "gumbel.py": {"gumbel_sample"},
        "logit_bias.py": {"add_request"},  # in a step
        "logits_processor/interface.py": {"apply"},
        "logits_processor/loader.py": {
            *("_load_v2_logitsprocs_by_fqcns", "_load_v2_logitsprocs_plugins", "validate_params"),
            *("build_custom_logits_processors", "build_custom_logits_processors_params_validator"),
        },
        "logprob.py": {"add_request"},  # in a step
        "watermark.py": {"philox_gumbel_sample", "repeated_context_mask"},
    },
    "v1/structured_output": {
        "__init__.py": {"_create_grammar", "grammar_init"},
        "backend_guidance.py": {"__post_init__", "serialize_guidance_grammar", "validate_guidance_grammar"},
        "backend_lm_format_enforcer.py": {
            *("compile_grammar", "validate_structured_output_request_lm_format_enforcer")
        },
        "backend_outlines.py": {
            *("_check_unsupported", "compile_grammar", "validate_regex_is_buildable"),
            "validate_structured_output_request_outlines",
        },
        "backend_xgrammar.py": {"validate_xgrammar_grammar", "compile_grammar"},
        "request.py": {"get_structured_output_key"},
        "utils.py": {"__getitem__", "_reduced_vocabulary", "compile_regex_with_timeout"},
    },
    "v1/spec_decode": {
        "custom_class_proposer.py": {"create_custom_proposer"},
        "draft_model.py": {"_raise_if_draft_tp_mismatch"},
        "dynamic/utils.py": {
            "build_dynamic_sd_schedule_lookup",
            "validate_and_normalize_dynamic_sd_schedule",
        },
        "extract_hidden_states.py": {
            *("__init__", "_build_attn_metadata_builder", "validate_same_kv_cache_group")
        },
        "gemma4.py": {"_maybe_share_embeddings"},
        "llm_base_proposer.py": {
            *("_init_parallel_drafting_params", "_maybe_share_embeddings", "_maybe_share_lm_head"),
            *("_raise_if_mrope", "_raise_if_padded_drafter_batch_disabled", "propose"),
        },
        "step3p5.py": {"propose"},
        "vocab_mapping.py": {"_get_unk_token_id"},
    },
    "v1/worker/gpu/spec_decode": {
        "__init__.py": {"init_speculator"},
        "adaptive_verification.py": {"maybe_create_adaptive_verification_manager", "set_cost_curves"},
        "dflash/speculator.py": {"__init__"},
        "eagle/eagle3_utils.py": {
            *("set_eagle3_aux_hidden_state_layers", "verify_supports_aux_hidden_states_over_pp")
        },
        "eagle/utils.py": {"maybe_share_target_embed"},
        "extract_hidden_states.py": {"propose", "__init__", "load_model"},
        "lilicorr/speculator.py": {"load_draft_model"},
        "ngram/speculator.py": {"__init__"},
        "speculator.py": {"_validate_local_argmax_reduction", "load_model"},
        "utils.py": {"get_parallel_drafting_token_id"},
    },
}


def raising(folder):
    root = Path(vllm.__file__).parent / folder
    found = {}
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any(
                isinstance(one, ast.Raise) for one in ast.walk(node)
            ):
                found.setdefault(path.relative_to(root).as_posix(), set()).add(node.name)
    return found


@pytest.mark.parametrize("folder", RAISING)
def test_every_raise_is_known(folder):
    assert raising(folder) == RAISING[folder]
