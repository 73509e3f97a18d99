"""Grammars on real workers: costly ones delay none, dead ends fail alone, impossible ones are refused."""

import time

from baton.protos import worker_pb2 as pb
from harness.support import PATIENCE, eventually
from tests.services.worker.router import DECODE, PREFILL, StructuredOutputsParams, connected, prompt, request

LETTERS = [*range(ord("a"), ord("z") + 1)]  # the tokenizer's tokens are bytes
# Seventy letters, then a digit, which the request does not allow: found only at the end of the answer.
ENDLESS = {
    "structured_outputs": StructuredOutputsParams(regex="[a-z]{70}[0-9]"),
    "allowed_token_ids": LETTERS,
    "max_tokens": 100,
}


def bomb(number):
    branches = "|".join(f"([a-z]{{1,{200 + n}}}[0-9]{{1,{300 + n}}}x{n})" for n in range(110))
    grammar = StructuredOutputsParams(regex=f"({branches}|{number})*")
    return request(f"bomb {number}", prompt(20, seed=number), structured_outputs=grammar)


def small(number, **params):
    grammar = StructuredOutputsParams(choice=[f"yes{number}", "no"])
    core = request(f"small {number}", prompt(20, seed=number), structured_outputs=grammar, **params)
    core.sampling_params.ignore_eos = False
    return core


def refused(got):
    assert got.failed is not None, got
    assert got.failed.code == pb.Failed.CODE_INVALID
    return got.failed.message


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


async def test_an_answer_that_cannot_continue_fails_alone(prefill, mixed):
    async with connected(prefill.address) as source, connected(mixed.address) as target:
        neighbour = request("neighbour", prompt(30, seed=9), max_tokens=200)
        await target.start(neighbour, DECODE)
        core = request("endless", prompt(40, seed=8), **ENDLESS)
        assert "after 70 tokens" in refused(await target.run(core, DECODE))
        core.request_id = "endless, handed over"
        await source.prefill(core)
        rest = await target.run(core, DECODE, source=source.source(core))
        assert "after 70 tokens" in refused(rest)
        assert len((await target.end("neighbour")).tokens) == 200


async def test_each_request_uses_the_backend_that_its_grammar_needs(mixed):
    """The first request used to decide for all others."""
    multiple = '{"type": "integer", "multipleOf": 4001, "minimum": 1, "maximum": 9000}'
    async with connected(mixed.address) as stream:
        for number in (60, 61):
            assert (await stream.run(small(number), DECODE)).finish is not None
            core = request(
                f"multiple {number}", prompt(20), structured_outputs=StructuredOutputsParams(json=multiple)
            )
            assert bytes((await stream.run(core, DECODE)).tokens[:4]) in (b"4001", b"8002")


async def test_a_grammar_that_nothing_satisfies_is_refused_before_the_prefill(prefill):
    async with connected(prefill.address) as stream:
        for number, grammar in enumerate(
            (
                StructuredOutputsParams(grammar="root ::= root"),
                StructuredOutputsParams(regex="[^\\s\\S]"),
                StructuredOutputsParams(json='{"$ref": "#"}'),
            )
        ):
            core = request(f"empty {number}", prompt(20), structured_outputs=grammar)
            assert "no answer satisfies" in refused(await stream.run(core, PREFILL))
