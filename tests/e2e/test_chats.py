"""A chat's next turn: the prefill worker pulls the KV of the last answer from the decode worker."""

import random

import pytest

from baton.protos import scheduler_pb2 as pb
from harness.deployment import MODEL_NAME
from harness.greedy import token_ids
from harness.scrape import total
from harness.support import eventually

BLOCK = 32
ASKED, ANSWERED = 64, 192  # tokens of the first prompt and its answer
NEW, TURN = 200, 20  # tokens of the next message and its answer

pytestmark = pytest.mark.timeout(120)


def ask(one, prompt, tokens, **extra):
    done = one.client().completions.create(
        model=MODEL_NAME,
        prompt=prompt,
        max_tokens=tokens,
        temperature=0,
        extra_body={"return_token_ids": True, "ignore_eos": True, **extra},
    )
    return token_ids(done)


def told(one, prefill, decode, tokens):
    """Return both workers' counts when the scheduler knows the prefill's token and `tokens` decoded ones."""

    def counts(role):
        return next(each.load.counts for each in one.describe().workers if each.identity.role == role)

    def heard():
        now = counts(pb.ROLE_PREFILL), counts(pb.ROLE_DECODE)
        more = now[0].output_tokens > prefill.output_tokens or not tokens
        return [now] if more and now[1].output_tokens >= decode.output_tokens + tokens else []

    return eventually(heard, 10, "the scheduler has the new counts")[0]


def pulls(one):
    """Return the router's counts of loaded prefix pulls and of their tokens."""
    loaded = total(one.url, "baton_router_prefix_pulls_total", outcome="loaded")
    return {"loaded": loaded, "tokens": total(one.url, "baton_router_prefix_pulled_tokens_total")}


def test_a_turn_behind_a_long_answer_computes_its_message_alone(one_pair):
    """Drafts are on, and their KV is pulled too. A second turn with a new cache salt finds nothing cached."""
    draw = random.Random(4040)
    first = [draw.randrange(300, 800) for _ in range(ASKED)]
    _, decode = told(one_pair, pb.EngineCounts(), pb.EngineCounts(), 0)
    chat = [*first, *ask(one_pair, first, ANSWERED)]
    prefill, decode = told(one_pair, pb.EngineCounts(), decode, ANSWERED - 1)
    chat += [draw.randrange(300, 800) for _ in range(NEW)]
    had = pulls(one_pair)
    answer = ask(one_pair, chat, TURN)
    have = pulls(one_pair)
    assert have["loaded"] == had["loaded"] + 1
    assert ANSWERED - BLOCK < have["tokens"] - had["tokens"] <= ANSWERED + 1
    after, wrote = told(one_pair, prefill, decode, TURN - 1)
    assert NEW < after.computed_tokens - prefill.computed_tokens <= NEW + BLOCK
    assert wrote.computed_tokens - decode.computed_tokens <= BLOCK + 1  # vLLM drafts from hidden states
    assert ask(one_pair, chat, TURN, cache_salt="unseen") == answer
    assert pulls(one_pair)["loaded"] == have["loaded"]
