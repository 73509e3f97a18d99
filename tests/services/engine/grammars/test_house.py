"""Trials of grammars by the real compilers, for a vocabulary of 150,000 tokens."""

import asyncio
import os
import signal
import socket
import string
import time
from dataclasses import replace

import pytest
import pytest_asyncio
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from baton.protos.worker_pb2 import Failed
from baton.services.engine.errors import RequestRefused
from baton.services.engine.grammars import helper
from baton.services.engine.grammars import house as houses
from baton.services.engine.grammars.helper import Helper
from baton.services.engine.grammars.house import SLOW, GrammarHouse
from harness import zygote
from harness.fake_worker import until
from harness.support import PATIENCE
from tests.services.engine.grammars.bombs import BOMBS, EMPTY, HONEST
from tests.services.engine.grammars.vocabulary import SIZE

pytestmark = pytest.mark.asyncio(loop_scope="module")  # the tests share a helper

EOS = SIZE - 1
# Bombs that cost next to nothing with this vocabulary.
HARMLESS = {"maxItems of 10^9", "minItems of 10^9", "300 tags and triggers"}
# Bombs that the same limit of the same compiler ends as others; WHOLE_TABLE=1 tries them, too.
ALIKE = {
    *("1,000 strings with maxLength", "oneOf six deep", "maxLength of 10^9", "unicode classes"),
    *("2,000 optional rules", "100,000 choices"),
}
# Grammars whose cost depends on the answer's tokens; their steps are limited at run time (test_metered.py).
LATER = {"two quantifiers", "three quantifiers", "optional letters", "deep recursion", "minLength of 10^9"}


def asked(grammar, **fields):
    field, value = grammar
    limits = {"max_tokens": 100, **fields}
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**{field: value}), **limits)
    params.update_from_generation_config({}, EOS)
    return params


def bomb(number):
    return "regex", f"([a-z]{{1,{3000 + number}}}x){{1,300}}"


def serve(connection):
    """Be a helper, in a process with vLLM's imports, as a worker's first helper is."""
    helper._help(os.dup(connection.fileno()), os.getppid())


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def house(context, tmp_path_factory):
    """Give each trial in the slow lane 0.05 s of CPU, not 5: a bomb has had 0.5 s in the quick lane."""
    process, connection = zygote.connected("grammars", f"{__name__}:serve", tmp_path_factory.mktemp("helper"))
    with connection:
        first = Helper(process.pid, socket.socket(fileno=os.dup(connection.fileno())))
    made = GrammarHouse(first, slow=replace(SLOW, cpu_s=0.05))
    await made.open(context)
    async with asyncio.timeout(120 * PATIENCE):
        await made.check(asked(HONEST["three choices"]), 0)  # wait for the helper
    yield made
    made.close()


async def refusal(house, params, party=1):
    try:
        await house.check(params, party)
    except RequestRefused as refused:
        return refused
    return None


async def test_bombs_are_refused_in_time_and_honest_grammars_are_not(house):
    wrong = []
    for name, grammar in HONEST.items():
        if refused := await refusal(house, asked(grammar)):
            wrong.append(f"{name}: {refused}")
    for name, grammar in {**EMPTY, **BOMBS}.items():
        if name in ALIKE and "WHOLE_TABLE" not in os.environ:
            continue
        start = time.monotonic()
        refused = await refusal(house, asked(grammar))
        took = time.monotonic() - start
        if took > 8.0 * PATIENCE:  # it has 0.55 s of CPU; the engine's compiler would take up to minutes
            wrong.append(f"{name}: {took:.1f} s")
        if name in HARMLESS | LATER:
            continue
        if refused is None or refused.code != Failed.CODE_INVALID:
            wrong.append(f"{name}: {refused or 'not refused'}")
        elif name in EMPTY and "no answer satisfies" not in str(refused):
            wrong.append(f"{name}: {refused}")
    assert not wrong
    assert "too costly" in str(await refusal(house, asked(BOMBS["a regex of 3.3 KB"])))  # remembered
    delayed = await _delay_beside_bombs(house)
    assert delayed < 5.0 * PATIENCE  # one compiler that served all in order took 22 s or more


def began(house, numbers):
    """Begin trials of these bombs for one client."""
    return [asyncio.create_task(refusal(house, asked(bomb(number)))) for number in numbers]


async def cancelled(tasks):
    for one in tasks:
        one.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def until_one_runs(house):
    await until(lambda: any(trial.runs for trial in house._trials.values()), "a trial runs", 10)


async def _delay_beside_bombs(house):
    """Return the longest time that another client's small schemas take while 40 bombs wait."""
    bombs = began(house, range(40))
    await asyncio.sleep(0.5)
    longest = 0.0
    for number in range(3):
        start = time.monotonic()
        small = "json", f'{{"type": "object", "properties": {{"a{number}": {{"type": "integer"}}}}}}'
        assert await refusal(house, asked(small), 2) is None
        longest = max(longest, time.monotonic() - start)
    assert sum(one.done() for one in bombs) < len(bombs), "the bombs ended too early to delay anything"
    await cancelled(bombs)
    return longest


async def test_grammars_that_other_fields_exclude_are_refused(house):
    letters = _letters()
    yes_no = ("choice", ["yes", "no"])
    cases = {
        "allowed elsewhere": (asked(yes_no, allowed_token_ids=[letters["a"], EOS]), False),
        "its second letter is not allowed": (
            asked(("choice", ["ab"]), allowed_token_ids=[letters["a"], EOS]),
            False,
        ),
        "it may not end": (asked(("choice", ["ab"]), allowed_token_ids=[letters["a"], letters["b"]]), False),
        "it ends before min_tokens": (asked(yes_no, min_tokens=10), False),
        "it can be longer than min_tokens": (asked(("regex", "[a-z]+"), min_tokens=10), True),
        "letters are allowed": (asked(yes_no, allowed_token_ids=[*letters.values(), EOS]), True),
    }
    for name, (params, well) in cases.items():
        refused = await refusal(house, params)
        assert (refused is None) == well, f"{name}: {refused}"
        assert refused is None or refused.code == Failed.CODE_INVALID


def _letters():
    """Return the tokens of a to z. The tokenizer's first tokens are the sorted alphabet of bytes."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return {letter: alphabet.index(letter) for letter in string.ascii_lowercase}


async def test_trials_without_callers_end_and_refusals_are_remembered(house):
    gone = began(house, range(3))
    await until_one_runs(house)
    await cancelled(gone)
    await until(lambda: not house._trials, "the trials have ended", 10)
    bad = asked(EMPTY["a rule that is itself"])
    assert await refusal(house, bad)
    tried = house._number
    assert await refusal(house, bad)
    assert house._number == tried  # not tried again


async def test_one_client_with_too_many_trials_is_refused_alone(house, monkeypatch):
    monkeypatch.setattr(houses, "_MOST_OF_PARTY", 2)
    waiting = began(house, range(50, 52))
    await asyncio.sleep(0)
    refused = await refusal(house, asked(bomb(53)))
    assert refused.code == Failed.CODE_FULL
    assert await refusal(house, asked(HONEST["a date"]), party=2) is None
    await cancelled(waiting)


async def test_a_dead_helper_is_replaced(house, monkeypatch):
    monkeypatch.setattr(houses, "_RESTART_S", 0.0)
    (waiting,) = began(house, [60])
    await until_one_runs(house)
    os.kill(house._helper.pid, signal.SIGKILL)
    refused = await asyncio.wait_for(waiting, 10 * PATIENCE)
    assert refused.code == Failed.CODE_FULL
    async with asyncio.timeout(60 * PATIENCE):
        assert await refusal(house, asked(("regex", "after the death"))) is None
