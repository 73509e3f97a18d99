"""Grammars on real workers: costly ones delay none, dead ends fail alone, impossible ones are refused."""

import time

from vllm.sampling_params import StructuredOutputsParams

from harness.support import PATIENCE, eventually
from tests.services.worker.router import DECODE, PREFILL, connected, prompt, request

LETTERS = [*range(ord("a"), ord("z") + 1)]  # the tokenizer's tokens are bytes


def bomb(number):
    branches = "|".join(f"([a-z]{{1,{200 + n}}}[0-9]{{1,{300 + n}}}x{n})" for n in range(110))
    grammar = StructuredOutputsParams(regex=f"({branches}|{number})*")
    return request(f"bomb {number}", prompt(20, seed=number), structured_outputs=grammar)


def small(number):
    grammar = StructuredOutputsParams(choice=[f"yes{number}", "no"])
    core = request(f"small {number}", prompt(20, seed=number), structured_outputs=grammar)
    core.sampling_params.ignore_eos = False
    return core


async def test_costly_grammars_do_not_delay_another_client(mixed):
    async with connected(mixed.address) as theirs, connected(mixed.address) as ours:
        assert (await ours.run(small(0), DECODE)).finish is not None
        for number in range(4):
            await theirs.start(bomb(number), DECODE)
        longest = 0.0
        for number in range(1, 5):
            began = time.monotonic()
            assert (await ours.run(small(number), DECODE)).finish is not None
            longest = max(longest, time.monotonic() - began)
        assert not theirs.got("bomb 3").over
        await theirs.abort(*(f"bomb {number}" for number in range(4)))
    assert longest < 5.0 * PATIENCE  # 11 s or more in one queue
    eventually(lambda: not mixed.figure("baton_worker_requests_running"), 10, "nothing is left")


async def test_an_answer_that_cannot_continue_fails_alone(prefill, source, target):
    neighbour = request("neighbour", prompt(30, seed=9), max_tokens=200)
    await target.start(neighbour, DECODE)
    # Seventy letters, then a digit, which the request does not allow: found only at the end of the answer.
    grammar = StructuredOutputsParams(regex="[a-z]{70}[0-9]")
    sampling = {"structured_outputs": grammar, "allowed_token_ids": LETTERS, "max_tokens": 100}
    core = request("endless", prompt(40, seed=8), **sampling)
    assert "after 70 tokens" in (await target.run(core, DECODE)).failure()
    core.request_id = "endless, handed over"
    await source.prefill(core)
    rest = await target.run(core, DECODE, source=source.source(core))
    assert "after 70 tokens" in rest.failure()
    assert len((await target.end("neighbour")).tokens) == 200


async def test_each_request_uses_the_backend_that_its_grammar_needs(target):
    """The first request used to decide for all others."""
    multiple = '{"type": "integer", "multipleOf": 4001, "minimum": 1, "maximum": 9000}'
    for number in (60, 61):
        assert (await target.run(small(number), DECODE)).finish is not None
        grammar = StructuredOutputsParams(json=multiple)
        core = request(f"multiple {number}", prompt(20), structured_outputs=grammar)
        assert bytes((await target.run(core, DECODE)).tokens[:4]) in (b"4001", b"8002")


async def test_a_grammar_that_nothing_satisfies_is_refused_before_the_prefill(source):
    for kind, grammar in {"grammar": "root ::= root", "regex": "[^\\s\\S]", "json": '{"$ref": "#"}'}.items():
        empty = StructuredOutputsParams(**{kind: grammar})
        got = await source.run(request(f"empty {kind}", prompt(20), structured_outputs=empty), PREFILL)
        assert "no answer satisfies" in got.failure()
