"""No field of a request changes another request's answer, with or without drafts.

Every field of the OpenAI requests and of vLLM's SamplingParams is listed here; a new one makes a test fail.
"""

from dataclasses import dataclass

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams

from harness.engines import EngineProcess, Options
from harness.support import ROOT
from tests.services.engine.neighbours import Told, together

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(not current_platform.is_cpu(), reason="engines of a CPU"),
]

THINK = {"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}
ENGINE = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "kv_transfer_config": None,
    "skip_tokenizer_init": False,  # grammars and bad words need it
    "reasoning_config": THINK,
    "max_logprobs": -1,
}
DRAFTS = {
    "no drafts": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1},
    "mtp": {"method": "mtp", "num_speculative_tokens": 3},
}
TOKENS = 8  # per neighbour; the odd request ends earlier, so that rows move

# The fields of the odd request, with values that have different effects.
ODD = {
    "allowed_token_ids": {"allowed_token_ids": [300, 301, 302]},
    "bad_words": {"bad_words": ["the", "and so on", "time"]},
    "echo": {"echo": True, "logprobs": 2},
    "penalties": {"frequency_penalty": 2.0, "presence_penalty": -2.0, "repetition_penalty": 2.0},
    "logit_bias": {"logit_bias": {"300": 100, "301": -100}},
    "one named token": {"logprobs": 1, "logprob_token_ids": [5]},
    "named tokens, of the prompt the best": {
        "logprobs": 1,
        "logprob_token_ids": list(range(100, 120)),
        "prompt_logprobs": 2,
    },
    "sampled and named": {"logprobs": 0, "logprob_token_ids": [7, 7, 9], "temperature": 1, "seed": 3},
    "no logprobs": {"logprobs": 0},
    "all logprobs": {"logprobs": -1},
    "prompt_logprobs": {"prompt_logprobs": 5},
    "min_p": {"min_p": 0.5, "temperature": 1},
    "min_tokens": {"min_tokens": 4, "stop_token_ids": list(range(0, 4096, 2))},
    "stopped": {
        "stop_token_ids": list(range(0, 4096, 2)),
        "ignore_eos": False,
        "repetition_detection": {"max_pattern_size": 4, "min_pattern_size": 1, "min_count": 2},
    },
    "one token": {
        "max_tokens": 1,
        "cache_salt": "s",
        "vllm_xargs": {"a": [1, "b"]},
        "routed_experts_prompt_start": 1,
    },
    "json": {"response_format": {"type": "json_object"}},
    "regex": {"structured_outputs": {"regex": "[a-f]{3}[0-9]{9}"}},
    "greedy with a seed": {"seed": 1},
    "seed": {"seed": -(2**63), "temperature": 2, "top_k": 5, "top_p": 0.9},
    "sampled": {"temperature": 2, "top_k": 9, "top_p": 0.2},
    "thinking_token_budget": {"thinking_token_budget": 2},
    "no thinking": {"thinking_token_budget": 0},
}
# Other names of fields above.
SAME = {"max_completion_tokens": "max_tokens", "max_output_tokens": "max_tokens", "top_logprobs": "logprobs"}
# Fields that do not reach an engine's step.
BY_THE_FRONT_END = {
    *("add_generation_prompt", "add_special_tokens", "background", "chat_template"),
    *("chat_template_kwargs", "continue_final_message", "documents", "enable_response_messages"),
    *("include", "include_reasoning", "include_stop_str_in_output", "input", "instructions"),
    *("length_penalty", "max_tool_calls", "media_io_kwargs", "messages", "metadata", "mm_payload"),
    *("mm_processor_kwargs", "model", "n", "parallel_tool_calls", "previous_input_messages"),
    *("previous_response_id", "prompt", "prompt_cache_key", "reasoning", "reasoning_effort"),
    *("request_id", "return_mm_kwargs", "return_prompt_text", "return_token_ids"),
    *("return_token_offsets", "return_tokens_as_token_ids", "service_tier", "session_id"),
    *("skip_special_tokens", "spaces_between_special_tokens", "stop", "store", "stream"),
    *("stream_interval", "stream_options", "suffix", "text", "tool_choice", "tools"),
    *("truncate_prompt_tokens", "truncation", "truncation_side", "use_beam_search", "user"),
}
# Fields that the router refuses or removes.
BY_THE_ROUTER = {"ec_transfer_params", "kv_transfer_params", "priority", "prompt_embeds"}
UNUSED = {"watermarking"}  # only for engines with a watermark, which Baton does not build
# Fields of SamplingParams that none of these requests has, or that follow from others.
INSIDE = {
    *("detokenize", "flat_logprobs", "output_kind", "output_text_buffer_length"),
    *("prompt_logprob_start", "prompt_logprob_token_ids", "skip_clone", "skip_reading_prefix_cache"),
    *("trace_decode_token_ids", "extra_args", "_all_stop_token_ids", "_bad_words_token_ids"),
    *("_eos_token_id", "_watermarking_skipped"),
}

PROMPTS = {name: [(seed * 37 + number % 9) % 900 + 200 for number in range(24)] for seed, name in
           enumerate(("odd", "plain", "scored", "seeded", "read", "bound", "biased", "regular"))}  # fmt: skip
NEIGHBOURS = {
    "plain": {},
    "scored": {"logprobs": 3},
    "seeded": {"temperature": 1, "seed": 11, "logprobs": 2},
    "read": {"prompt_logprobs": 1, "logprobs": 0},
    "bound": {
        "frequency_penalty": 1.5,
        "bad_words": ["the", "of course", "."],
        "allowed_token_ids": list(range(200, 1200)),
        "min_tokens": 5,
        "stop_token_ids": list(range(0, 4096, 3)),
        "logprobs": 1,
    },
    "biased": {
        "logit_bias": {str(token): 5 for token in range(300, 320)},
        "temperature": 1,
        "seed": 6,
        "top_p": 0.9,
    },
    "regular": {"structured_outputs": {"regex": "[a-f]{4}[0-9]{9}"}, "logprobs": 2},
}


def body(name, more):
    return PROMPTS[name], {"temperature": 0, "ignore_eos": True, "max_tokens": TOKENS, **more}


@dataclass
class Running:
    engine: EngineProcess
    alone: dict[str, Told]


@pytest.fixture(scope="module", params=DRAFTS.values(), ids=DRAFTS)
def running(request):
    spec = request.param
    engine = ENGINE | ({"speculative_config": spec} if spec else {})
    model = ROOT / "deploy" / "demo-model" / "weights-mtp"
    with EngineProcess(Options(model, "neighbours", cores="1", engine=engine)) as process:
        alone = {}
        for name, more in NEIGHBOURS.items():
            alone |= process.call(together, {name: body(name, more)})
        assert (max(one.longest for one in alone.values()) > 1) == (spec is not None)  # drafts are accepted
        yield Running(process, alone)


def test_every_field_is_listed():
    models = (ChatCompletionRequest, CompletionRequest, ResponsesRequest)
    odd = {name for one in ODD.values() for name in one}
    asked = {name for model in models for name in model.model_fields}
    assert asked == {*odd, *SAME, *BY_THE_FRONT_END, *BY_THE_ROUTER, *UNUSED}
    assert set(SamplingParams.__struct_fields__) <= asked | INSIDE


@pytest.mark.parametrize("fields", ODD.values(), ids=ODD)
def test_neighbours_get_what_they_get_alone(running, fields):
    """The odd request is in a middle row and ends before the others, so that rows move."""
    odd = body("odd", {"max_tokens": 5, **fields})
    first, *others = ((name, body(name, more)) for name, more in NEIGHBOURS.items())
    told = running.engine.call(together, dict([first, ("odd", odd), *others]))
    for name, alone in running.alone.items():
        same(told[name], alone)
    assert told["odd"].tokens
    if odd[1]["temperature"] == 0 or "seed" in odd[1]:
        same(told["odd"], running.engine.call(together, {"odd": odd})["odd"])
    if named := odd[1].get("logprob_token_ids"):
        rest = {key: value for key, value in odd[1].items() if key != "logprob_token_ids"}
        whole = running.engine.call(together, {"whole": (odd[0], rest | {"logprobs": -1})})["whole"]
        assert whole.tokens == told["odd"].tokens
        for token, row, values in zip(whole.tokens, told["odd"].logprobs, whole.logprobs, strict=True):
            assert row == pytest.approx({one: values[one] for one in (token, *named)}, abs=1e-4)


def same(found, alone):
    assert found.tokens == alone.tokens
    assert (found.finish, found.stop) == (alone.finish, alone.stop)
    for ours, theirs in ((found.logprobs, alone.logprobs), (found.prompt_logprobs, alone.prompt_logprobs)):
        assert [set(row) for row in ours] == [set(row) for row in theirs]
        for row, expected in zip(ours, theirs, strict=True):
            assert row == pytest.approx(expected, abs=1e-4)
