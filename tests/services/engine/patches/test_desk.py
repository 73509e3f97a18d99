"""The exchange between model runner and proposer."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from baton.services.decode.proposers.drafting import Proposal
from baton.services.decode.proposers.hybrid import Hybrid
from baton.services.decode.proposers.matching import NgramMatcher
from baton.services.engine.patches.drafts_v1 import Desk

WIDTH, LIMIT, VOCABULARY = 32, 5, 1000
R = -1  # a rejected draft


class Listener:
    """Drafts 900, 901, ..., one more than allowed, and keeps the batch."""

    def propose(self, batch):
        self.batch = batch
        tokens = np.tile(np.arange(900, 900 + LIMIT + 1, dtype=np.int32), (len(batch.limits), 1))
        return Proposal(tokens, batch.limits + np.int32(1))

    def forget(self, request_ids):
        """Nothing is kept."""


def runner(texts, reading=(), prompts=()):
    """Return a stand-in for a model runner; rows in `reading` are incomplete prompts."""
    rows = len(texts)
    tokens = np.zeros((rows + 1, WIDTH), dtype=np.int32)
    for row, text in zip(tokens, texts, strict=False):
        row[: len(text)] = text
    mask = np.zeros(rows + 1, dtype=bool)
    mask[list(reading)] = True
    return SimpleNamespace(
        input_batch=SimpleNamespace(
            num_reqs=rows,
            req_ids=[f"r{row}" for row in range(rows)],
            token_ids_cpu=tokens,
            num_tokens_no_spec=np.array([len(text) for text in texts] + [0], dtype=np.int32),
            num_prompt_tokens=np.array([*(prompts or map(len, texts)), 0], dtype=np.int32),
            vocab_size=VOCABULARY,
        ),
        discard_request_mask=SimpleNamespace(np=mask),
        max_model_len=WIDTH,
    )


class Model:
    """A draft model that drafts the first of these tokens."""

    def __init__(self, *rows):
        self.rows = rows
        self.asked = []

    def __call__(self, tokens):
        self.asked.append(tokens)
        return torch.tensor([row[:tokens] for row in self.rows])


class NoMatch(Listener):
    def propose(self, batch):
        return Proposal(np.zeros((len(batch.limits), LIMIT), np.int32), np.zeros_like(batch.limits))


def hybrid(then, steps, first=None):
    return Hybrid(first or NoMatch(), then, steps, least=1)


def sampled(*tokens):
    return torch.tensor(tokens, dtype=torch.int32)[:, None]


def read(batch, row):
    return batch.tokens[row, : batch.lengths[row]].tolist()


def test_the_hybrid_sees_sampled_and_drafted_tokens():
    listener = Listener()
    written = torch.tensor([[7, 8, R], [9, R, R], [5, R, R]], dtype=torch.int32)
    found = Desk(hybrid(listener, 2), 4).draft(
        runner([[1, 2], [3], [4, 4, 4]], reading=[2]), written, Model([70, 71], [90, 91], [50, 51]), LIMIT
    )
    assert [read(listener.batch, row) for row in range(3)] == [
        [1, 2, 7, 8, 70, 71],
        [3, 9, 90, 91],
        [4, 4, 4],
    ]
    assert listener.batch.settled.tolist() == [4, 2, 3]
    assert listener.batch.limits.tolist() == [3, 3, 0]
    assert found == [[70, 71, 900, 901, 902], [90, 91, 900, 901, 902], []]


def test_rows_without_a_match_are_shorter():
    matcher = NgramMatcher(2, 4, LIMIT, 4)
    found = Desk(hybrid(matcher, 1), 4).draft(
        runner([[1, 2, 3, 4, 5, 1], [1, 2, 3]]), sampled(2, 6), Model([3], [9]), LIMIT
    )
    assert found == [[3, 4, 5, 1, 2], [9]]


@pytest.mark.parametrize(
    ("others", "asked"), [(0, 1), (1, 1), (2, 3)], ids=["all match", "three of four", "three of five"]
)
def test_the_models_passes_are_skipped_if_nearly_all_rows_match(others, asked):
    """Long matches replace the model's tokens in any case."""
    listener, model = Listener(), Model(*[[70, 71, 72]] * (3 + others))
    texts = [[1, 2, 3, 4, 5, 1, 2]] * 3 + [[6, 7, 8]] * others
    first = NgramMatcher(3, 4, LIMIT, 8)
    found = Desk(hybrid(listener, 3, first), 8).draft(runner(texts), sampled(*[3] * len(texts)), model, LIMIT)
    assert model.asked == [asked]
    assert found[:3] == [[4, 5, 1, 2, 3]] * 3
    assert found[3:] == [[*[70, 71, 72][:asked], 900, 901, 902, 903][:LIMIT]] * others
    assert listener.batch.lengths.tolist() == [8] * 3 + [4 + asked] * others
    assert listener.batch.limits.tolist() == [0] * 3 + [LIMIT - asked] * others


def test_incomplete_prompts_do_not_count_as_drafting():
    model, text = Model([70, 71], [80, 81]), [1, 2, 3, 4, 1, 2]
    found = Desk(hybrid(Listener(), 2, NgramMatcher(3, 4, LIMIT, 2)), 2).draft(
        runner([text, text], reading=[1]), sampled(3, 3), model, LIMIT
    )
    assert model.asked == [1]
    assert found == [[4, 1, 2, 3, 4], []]


def test_short_matches_do_not_replace_the_model():
    model = Model([70, 71])
    beside = Hybrid(Listener(), Listener(), 2, least=LIMIT)
    assert Desk(beside, 1).draft(runner([[1]]), sampled(2), model, LIMIT - 1) == [[70, 71, 900, 901]]
    assert model.asked == [2]


def test_the_model_runs_even_if_nothing_is_drafted():
    model, listener = Model([]), Listener()
    assert Desk(hybrid(listener, 2), 1).draft(runner([[1]]), sampled(2), model, 0) == [[]]
    assert model.asked == [0]
    assert read(listener.batch, 0) == [1, 2]


def test_tokens_outside_the_vocabulary_are_ignored():
    listener = Listener()
    written = torch.tensor([[7, VOCABULARY, 8]], dtype=torch.int32)
    Desk(hybrid(listener, 1), 1).draft(runner([[1]]), written, Model([3]), LIMIT)
    assert read(listener.batch, 0) == [1, 7, 8, 3]


def test_sampled_lists_are_already_in_the_batch():
    listener, model = Listener(), Model()
    found = Desk(listener, 4).draft(runner([[1, 2], [3]], prompts=[1, 1]), [[2], [3]], model, 3)
    assert [read(listener.batch, row) for row in range(2)] == [[1, 2], [3]]
    assert listener.batch.prompts.tolist() == [1, 1]
    assert found == [[900, 901, 902]] * 2
    assert model.asked == []  # there is no draft model


@pytest.mark.parametrize("wanted", range(LIMIT + 1))
def test_drafts_are_limited_to_the_length_asked_for(wanted):
    found = Desk(hybrid(Listener(), 2), 1).draft(runner([[1]]), sampled(2), Model([0, 1]), wanted)
    assert found == [[0, 1, 900, 901, 902][:wanted]]
    first = Desk(hybrid(Listener(), 2, Listener()), 1).draft(runner([[1]]), sampled(2), Model([0, 1]), wanted)
    assert first == [[900, 901, 902, 903, 904][:wanted]]


def test_drafts_are_limited_to_the_context():
    for free in range(1, LIMIT + 2):  # after the sampled token
        text = list(range(WIDTH - 1 - free))
        found = Desk(hybrid(Listener(), 1), 1).draft(runner([text]), sampled(2), Model([3]), LIMIT)
        assert found == [[3, 900, 901, 902, 903][: free - 1]]
