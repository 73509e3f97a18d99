"""A request continues unchanged on another worker, with all kinds of sampling, resumed or handed over."""

import copy
import json

import pytest
from vllm.sampling_params import StructuredOutputsParams

from baton.protos import worker_pb2 as pb
from tests.services.worker.router import DECODE, PREFILL, prompt, request

SCHEMA = json.dumps(
    {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer"}},
     "required": ["name", "age"], "additionalProperties": False}
)  # fmt: skip
KINDS = {
    "greedy": {},
    "logprobs": {"logprobs": 4},
    "frequency_penalty": {"frequency_penalty": 1.7},
    "presence_penalty": {"presence_penalty": 1.9},
    "repetition_penalty": {"repetition_penalty": 1.6},
    "min_tokens": {"min_tokens": 12, "stop_token_ids": list(range(0, 512, 3)), "ignore_eos": False},
    "max_tokens": {"max_tokens": 9},
    "seed": {"temperature": 1.0, "seed": 17, "logprobs": 2},
    "seed, top-p, top-k": {"temperature": 0.9, "seed": 5, "top_p": 0.9, "top_k": 60},
    "seed and penalties": {"temperature": 1.2, "seed": 3, "frequency_penalty": 0.8},
    "regex": {
        "structured_outputs": StructuredOutputsParams(regex=r"[a-f]{3}[0-9]{4}[u-z]{5}[A-D]{2}[0-9]{10,}")
    },
    "json": {
        "structured_outputs": StructuredOutputsParams(json=SCHEMA),
        "max_tokens": 40,
        "ignore_eos": False,
    },
    "logit_bias": {"logit_bias": {65: 4.0, 66: 4.5, 67: -100.0}},
    "prompt_logprobs": {"prompt_logprobs": 2},
}


def params(kind):
    """Return new parameters, because a request modifies its own."""
    return copy.deepcopy(KINDS[kind])


async def uninterrupted(target, name, tokens, kind):
    return await target.run(request(name, tokens, **params(kind)), DECODE)


def same(whole, first, rest):
    assert rest.failed is None
    assert whole.tokens[first:] == rest.tokens
    assert (whole.finish, whole.stop_reason) == (rest.finish, rest.stop_reason)
    for ours, theirs in zip(whole.logprobs[first:], rest.logprobs, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_request_resumes_after_n_tokens(target, kind):
    tokens = prompt(70, seed=list(KINDS).index(kind))
    whole = await uninterrupted(target, f"whole {kind}", tokens, kind)
    assert len(whole.tokens) > 7, "too short to interrupt"
    for batch in ((1,), (2, 7)):  # alone, and together
        for n in batch:
            core = request(f"after {n} {kind}", tokens, **params(kind))
            await target.start(core, DECODE, written=whole.tokens[:n])
        for n in batch:
            rest = await target.end(f"after {n} {kind}")
            same(whole, n, rest)
            assert rest.prompt_logprobs == 0


@pytest.mark.parametrize("kind", KINDS)
async def test_a_request_continues_after_a_handoff(source, target, kind):
    tokens = prompt(300, seed=100 + list(KINDS).index(kind))  # computed in two steps of 256 tokens
    name = f"handed over {kind}"
    core = request(name, tokens, **params(kind))
    begun = await source.prefill(core)
    assert (len(begun.tokens), begun.finish) == (1, None)
    assert begun.prompt_logprobs == (299 if kind == "prompt_logprobs" else 0)
    rest = await target.run(core, DECODE, source=source.source(core))
    whole = await uninterrupted(target, f"aggregated {kind}", tokens, kind)
    assert begun.tokens == whole.tokens[:1]
    same(whole, 1, rest)
    assert rest.admitted.blocks_pulled == 10
    assert rest.prompt_logprobs == 0


async def test_bad_words_across_the_boundary(target):
    tokens = prompt(60, seed=60)
    free = await uninterrupted(target, "free", tokens, "greedy")
    banned = [free.tokens[n : n + 2] for n in (0, 1, 6)]

    def core(name):
        made = request(name, tokens, bad_words=["set below"])
        made.sampling_params._bad_words_token_ids = banned  # the front end's tokenizer does this
        return made

    whole = await target.run(core("banned"), DECODE)
    assert whole.tokens[0] == free.tokens[0]
    assert whole.tokens[1] != free.tokens[1]
    for n in (1, 2, 7):
        same(whole, n, await target.run(core(f"banned after {n}"), DECODE, written=whole.tokens[:n]))


async def test_a_second_prefill_includes_earlier_output(source, target):
    tokens = prompt(90, seed=50)
    whole = await uninterrupted(target, "never lost", tokens, "seed and penalties")
    core = request("lost its decode worker", tokens, **params("seed and penalties"))
    begun = await source.run(core, PREFILL, epoch=3, written=whole.tokens[:5])
    assert begun.tokens == whole.tokens[5:6]
    assert begun.saved is not None
    rest = await target.run(core, DECODE, epoch=3, written=whole.tokens[:5], source=source.source(core, 5))
    same(whole, 6, rest)


async def test_output_that_a_grammar_rejects_fails_only_its_request(target):
    core = request("rejected", prompt(40), structured_outputs=StructuredOutputsParams(regex="[a-z]{20}"))
    got = await target.run(core, DECODE, written=[ord("7")])
    assert got.failed.code == pb.Failed.CODE_INVALID  # so it is not tried elsewhere
    fine = await target.run(request("beside it", prompt(40), max_tokens=3), DECODE)
    assert len(fine.tokens) == 3
