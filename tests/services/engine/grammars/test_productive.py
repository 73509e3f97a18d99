"""Grammars without a finite answer are recognised."""

import json

import pytest
import xgrammar

from baton.services.engine.grammars.productive import has_an_end

ENDLESS = (
    "root ::= root",
    'root ::= "a" root',
    'root ::= "a" b\nb ::= "b" root | root',
    'root ::= b{2,3}\nb ::= "(" b ")"',
)
ENDING = (
    'root ::= "a"',
    'root ::= "a" root | "b"',
    'root ::= b{0,3} "x"\nb ::= "(" b ")"',
    'root ::= b*\nb ::= "(" b ")"',
    'root ::= [a-z]+ unused?\nunused ::= "u" unused',
    'root ::= ""',
)


@pytest.mark.parametrize("source", ENDLESS)
def test_a_rule_that_always_continues_has_no_end(source):
    assert not has_an_end(xgrammar.Grammar.from_ebnf(source).serialize_json())


@pytest.mark.parametrize("source", ENDING)
def test_a_rule_with_a_way_out_has_one(source):
    assert has_an_end(xgrammar.Grammar.from_ebnf(source).serialize_json())


def test_a_long_chain_is_followed_to_its_end():
    rules = "\n".join(f'r{n} ::= "(" r{n + 1} ")"' for n in range(5000))
    for last, ends in (('r5000 ::= "x"', True), ('r5000 ::= "x" r0', False)):
        source = f"root ::= r0\n{rules}\n{last}"
        assert has_an_end(xgrammar.Grammar.from_ebnf(source).serialize_json()) == ends


def test_an_unknown_format_passes():
    grammar = json.loads(xgrammar.Grammar.from_ebnf("root ::= root").serialize_json())
    assert has_an_end(json.dumps({**grammar, "__VERSION__": "v99"}))
