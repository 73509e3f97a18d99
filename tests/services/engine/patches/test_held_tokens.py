"""In streams with stop strings, text and token ids arrive together."""

import random

import pytest
from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import ParserManager
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor

from baton.services.engine import wire
from baton.services.engine.patches import held_tokens
from baton.services.engine.patches.replace import install
from harness.api_site import spelled, thinking_model

THOUGHT, SAID = "Let me see, it is a town. ", "It is Paris, of coursé."
TOKENS = spelled(THOUGHT, "</think>", SAID)
STOPS = ["the end of this all", "zz", "x" * 200]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    install(held_tokens)
    return AutoTokenizer.from_pretrained(thinking_model(tmp_path_factory.mktemp("model") / "model"))


def streamed(tokenizer, groups, stop, **params):
    """Return the outputs of a stream whose tokens come in these groups."""
    processor = OutputProcessor(tokenizer, log_stats=False)
    sampling = SamplingParams(max_tokens=1000, stop=stop, output_kind=RequestOutputKind.DELTA, **params)
    request = wire.new_request("r", [72], sampling, external_req_id="r")
    processor.add_request(request, None)
    found = []
    for number, group in enumerate(groups):
        last = number == len(groups) - 1
        output = EngineCoreOutput("r", list(group), finish_reason=FinishReason.LENGTH if last else None)
        made = processor.process_outputs([output]).request_outputs
        found += [one.outputs[0] for one in made]
        if not processor.request_states:
            break
    return found


def cut(tokens, rng):
    """Split tokens into groups of random sizes."""
    groups, begin = [], 0
    while begin < len(tokens):
        size = rng.choice([1, 1, 2, 3, 6, 25])
        groups.append(tokens[begin : begin + size])
        begin += size
    return groups


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("seed", range(20))
def test_reasoning_is_parsed_with_stop_strings(tokenizer, stop, seed):
    parser_class = ParserManager.get_parser(
        tool_parser_name=None, reasoning_parser_name="deepseek_r1", enable_auto_tools=False, model_name="tiny"
    )
    assert parser_class is not None
    parser = parser_class(tokenizer, None)
    request = ChatCompletionRequest(messages=[{"role": "user", "content": "x"}])
    reasoning = content = ""
    outputs = streamed(tokenizer, cut(TOKENS, random.Random(seed)), [stop])
    for output in outputs:
        delta = parser.parse_delta(
            output.text, list(output.token_ids), request, [72], finished=output.finish_reason is not None
        )
        if delta is not None:
            reasoning += delta.reasoning or ""
            content += delta.content or ""
    assert (reasoning, content) == (THOUGHT, SAID)
    assert [one for output in outputs for one in output.token_ids] == TOKENS


@pytest.mark.parametrize("seed", range(10))
def test_ids_never_run_ahead_of_their_text(tokenizer, seed):
    ids = []
    text = ""
    for output in streamed(tokenizer, cut(TOKENS, random.Random(seed)), ["zzzzzzzzzz"]):
        ids += output.token_ids
        text += output.text
        assert tokenizer.decode(ids).rstrip("\ufffd") == text
    assert ids == TOKENS


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_text_and_ids(tokenizer, seed, include):
    outputs = streamed(
        tokenizer, cut(TOKENS, random.Random(seed)), ["Paris"], include_stop_str_in_output=include
    )
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", "Paris")
    text = "".join(one.text for one in outputs)
    assert text == f"{THOUGHT}</think>It is " + ("Paris" if include else "")
    ids = [one for output in outputs for one in output.token_ids]
    assert ids == spelled(THOUGHT, "</think>", "It is Paris")
