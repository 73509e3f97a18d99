"""A router limits the size of each grammar, and leaves parsing to the workers."""

import functools
from types import SimpleNamespace

import pytest
from vllm.config import StructuredOutputsConfig
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from baton.services.engine.grammars.backends import native_checks
from baton.services.router.vllm.request_limits import (
    MAX_GRAMMAR_BYTES,
    grammar_bytes,
    leave_to_workers,
    size_problem,
)
from harness.deployment import MODEL

LARGE = "x" * (MAX_GRAMMAR_BYTES + 1)
SCHEMA = {"type": "object", "description": LARGE}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.fixture
def router(monkeypatch):
    """Make vLLM check grammars as in a router during the test."""
    for module, name in native_checks():
        monkeypatch.setattr(module, name, getattr(module, name))  # restores it after the test
    leave_to_workers()


@functools.cache
def _tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL)


def verify(**asked):
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**asked))
    params._validate_structured_outputs(
        SimpleNamespace(is_diffusion=False), StructuredOutputsConfig(), _tokenizer()
    )
    return params.structured_outputs


def chat(**fields):
    return ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "Hi"}], **fields)


@pytest.mark.parametrize(
    ("request_", "counts"),
    [
        (chat(tools=[TOOL], tool_choice="required"), True),
        (chat(tools=[TOOL], tool_choice=NAMED), True),
        (chat(tools=[TOOL]), False),  # only a part of the prompt
        (chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}), True),
        (chat(structured_outputs={"regex": LARGE}), True),
        (
            ResponsesRequest(
                input="Hi", text={"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
            ),
            True,
        ),
    ],
)
def test_grammars_are_counted_in_every_field(request_, counts):
    assert (grammar_bytes(request_) > MAX_GRAMMAR_BYTES) == counts


@pytest.mark.parametrize("field", ["json", "regex", "grammar", "structural_tag"])
def test_grammars_are_counted_in_sampling_params(field):
    for value, refused in ((LARGE, True), ("x", False)):
        params = SamplingParams(structured_outputs=StructuredOutputsParams(**{field: value}))
        assert bool(size_problem(params)) == refused
    assert size_problem(SamplingParams()) == ""


@pytest.mark.usefixtures("router")
def test_nothing_is_parsed():
    links = {
        f"d{n}": {"type": "object", "properties": {"n": {"$ref": f"#/$defs/d{n + 1}"}}, "required": ["n"]}
        for n in range(2000)
    }
    links["d2000"] = {"type": "integer", "multipleOf": 3}
    fatal = {"$ref": "#/$defs/d0", "$defs": links}  # guidance would end with a segmentation fault
    assert verify(json=fatal)._backend == "guidance"
    assert verify(grammar="root ::= nothing")._backend == "xgrammar"


@pytest.mark.usefixtures("router")
@pytest.mark.parametrize(
    "asked",
    [
        {"regex": "a\x00"},
        {"json": "{"},
        {"json": '{"a":' * 100 + "1" + "}" * 100},
        {"choice": []},
        {"grammar": " "},
    ],
)
def test_the_form_is_checked(asked):
    with pytest.raises(VLLMValidationError):
        verify(**asked)
