"""A grammar that becomes costly while it runs ends its own request; others continue."""

import pytest
import xgrammar
from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar

from baton.services.engine.grammars import metered
from baton.services.engine.grammars.metered import Metered, problem_of

# Single bytes, runs of one letter as in real vocabularies, and an end token.
VOCABULARY = [bytes([number]) for number in range(256)] + [b"a" * length for length in range(2, 60)] + [b""]
EOS = len(VOCABULARY) - 1


@pytest.fixture(scope="module")
def compiler():
    info = xgrammar.TokenizerInfo(VOCABULARY, stop_token_ids=[EOS])
    return xgrammar.GrammarCompiler(info, max_threads=1)


def grammar(compiler, regex):
    compiled = compiler.compile_regex(regex)
    matcher = xgrammar.GrammarMatcher(compiled)
    return Metered(XgrammarGrammar(vocab_size=len(VOCABULARY), matcher=matcher, ctx=compiled))


def run(one, token, steps):
    """Step like an engine with drafts. Return the number of accepted tokens."""
    bitmask = xgrammar.allocate_token_bitmask(1, len(VOCABULARY))
    for step in range(steps):
        one.validate_tokens([token, token])
        one.fill_bitmask(bitmask, 0)
        if not one.accept_tokens("", [token]):
            return step
    return steps


def test_a_costly_grammar_ends_its_request_with_a_reason(compiler, monkeypatch):
    monkeypatch.setattr(metered, "BURST_S", 0.05)
    monkeypatch.setattr(metered, "TOKEN_S", 0.0005)
    bomb, honest = grammar(compiler, "(a{1,1000}){1,1000}"), grammar(compiler, "a*")
    long = VOCABULARY.index(b"a" * 50)
    assert run(bomb, long, 60) < 60
    assert "too costly" in bomb.problem
    assert not bomb.is_terminated()  # otherwise the engine would accept any token
    assert run(honest, long, 60) == 60
    assert not honest.problem


def test_a_rejected_token_has_a_reason(compiler):
    one = grammar(compiler, "aab")
    assert run(one, ord("a"), 3) == 2
    assert "after 2 tokens" in one.problem

    class Asked:
        grammar = one

    class Request:
        structured_output_request = Asked()

    assert problem_of(Request()) == one.problem
    Request.structured_output_request = None
    assert problem_of(Request()) == ""
