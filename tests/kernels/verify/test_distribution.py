"""Verified texts have the target's distribution with any drafts: chi-square against exact probabilities.

The target is a table of what follows each token. Texts of LENGTH tokens are written in as many steps as
needed, with one seed per request and its positions, so that random numbers used twice would show.
"""

from collections import Counter
from dataclasses import dataclass

import pytest
import torch

from baton.kernels.verify import DraftedTokens, Job, Sampling, cpu, verify
from harness.speculation.sampling import Way, expected, filtered, fit

SAMPLES = 20_000
LENGTH = 4
VOCABULARY = 5
DRAFTED = 2
CHANCE = 1e-5  # probability that a right sample fails, in each of some 30 comparisons
ALL = Way(1.0)
WAYS = {"all": ALL, "filtered": Way(0.7, top_k=4, top_p=0.85, min_p=0.05)}


@dataclass(frozen=True)
class Tables:
    """The target's and the drafter's logits of the token that follows each token, [V, V]."""

    target: torch.Tensor
    drafter: torch.Tensor

    @classmethod
    def random(cls, seed):
        make = torch.Generator().manual_seed(seed)
        target = 1.5 * torch.randn(VOCABULARY, VOCABULARY, generator=make)
        return cls(target, target + torch.randn(VOCABULARY, VOCABULARY, generator=make))


def sampling(way, requests, seed=0):
    def each(name, dtype):
        value = getattr(way, name)
        return torch.full((requests,), value, dtype=dtype) if value != getattr(ALL, name) else None

    return Sampling(
        torch.full((requests,), way.temperature),
        torch.arange(requests) + (seed << 32),
        top_k=each("top_k", torch.int32),
        top_p=each("top_p", torch.float32),
        min_p=each("min_p", torch.float32),
    )


def draft(tables, text, temperature, proposal, make):
    """Return drafts [R, DRAFTED] after tokens [R], drawn or most likely, and logits [R, DRAFTED, V]."""
    tokens, logits = [text], []
    for _ in range(DRAFTED):
        logits.append(tables.drafter[tokens[-1]])
        chances = (logits[-1] / temperature).softmax(1)
        drawn = chances.multinomial(1, generator=make).squeeze(1)
        tokens.append(logits[-1].argmax(1) if proposal == "one-hot" else drawn)
    return torch.stack(tokens[1:], 1), torch.stack(logits, 1)


def step(tables, way, method, proposal, last, at, make, seed=0):
    """Return a job with drafts after the last tokens [R] at these positions; some requests have fewer."""
    requests = last.shape[0]
    tokens, logits = draft(tables, last, way.temperature, proposal, make)
    count = torch.randint(0, DRAFTED + 1, (requests,), generator=make)
    count = torch.where(torch.rand(requests, generator=make) < 0.6, DRAFTED, count)
    places = torch.arange(DRAFTED + 1)
    rows = places <= count.unsqueeze(1)  # [R, DRAFTED + 1]
    drafted = places[1:] <= count.unsqueeze(1)
    before = torch.cat([last.unsqueeze(1), tokens], 1)
    return Job(
        tables.target[before[rows]],
        DraftedTokens(
            tokens[drafted].int(),
            (count + 1).cumsum(0).int(),
            DRAFTED,
            probs=(logits / way.temperature).softmax(2)[drafted] if proposal == "probs" else None,
            logits=logits if proposal == "logits" else None,
        ),
        sampling(way, requests, seed),
        method,
        (at.unsqueeze(1) + places)[rows],
        tile=2,
    )


def written(tables, way, method, proposal, samples=SAMPLES):
    """Return [samples, LENGTH] tokens that follow token 0."""
    make = torch.Generator().manual_seed(5)
    text = torch.zeros(samples, LENGTH + DRAFTED + 1, dtype=torch.int64)
    size = torch.ones(samples, dtype=torch.int64)
    every = torch.arange(samples)
    while int(size.min()) <= LENGTH:
        job = step(tables, way, method, proposal, text[every, size - 1], size - 1, make)
        found = cpu.verify(job)
        for place in range(DRAFTED + 1):
            here = (size + place).clamp(max=text.shape[1] - 1)
            more = (found.counts > place) & (size + place < text.shape[1])
            text[every[more], here[more]] = found.tokens[more, place].long()
        size = (size + found.counts).clamp(max=text.shape[1])
        size = torch.where(size > LENGTH, LENGTH + 1, size)  # later tokens are overwritten and ignored
    return text[:, 1 : LENGTH + 1]


def chance_of_fit(texts, tables, way):
    """Return how likely texts of the right distribution fit at least as badly as these [samples, n]."""
    samples, length = texts.shape
    before = torch.cat([torch.zeros_like(texts[:, :1]), texts[:, :-1]], 1)
    assert bool((filtered(tables.target, way)[before, texts] > 0).all()), "a filtered token was written"
    least = 5 / samples
    wanted = expected(lambda rows: tables.target[rows[:, -1]], (0,), way, length, least)
    return fit(Counter(map(tuple, texts.tolist())), wanted, length, least).chance


@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize("proposal", ["one-hot", "probs", "logits"])
@pytest.mark.parametrize("way", WAYS)
def test_texts_have_the_targets_distribution(method, proposal, way):
    tables = Tables.random(1)
    texts = written(tables, WAYS[way], method, proposal)
    for length in (1, 2, LENGTH):
        chance = chance_of_fit(texts[:, :length], tables, WAYS[way])
        print(f"{method}, {proposal}, {way}, {length} tokens: p = {chance:.2g}")
        assert chance > CHANCE
    assert chance_of_fit(texts[:, :2], Tables.random(2), ALL) < CHANCE, "the test cannot fail"


def test_numbers_that_are_drawn_twice_show(monkeypatch):
    """Block verification needs new random numbers for positions that are verified again."""
    drawn = cpu.uniforms
    monkeypatch.setattr(cpu, "uniforms", lambda seeds, at, numbers: drawn(seeds, at, numbers * 0))
    tables = Tables.random(1)
    texts = written(tables, ALL, "block", "probs", 3 * SAMPLES)
    assert chance_of_fit(texts[:, :2], tables, ALL) < CHANCE


@pytest.mark.parametrize("way", WAYS)
def test_sampling_without_drafts(way):
    tables = Tables.random(3)
    none = torch.zeros(0, dtype=torch.int32)
    drafts = DraftedTokens(none, torch.arange(1, SAMPLES + 1).int(), 0)
    found = verify(tables.target[:1].expand(SAMPLES, -1), drafts, sampling(WAYS[way], SAMPLES))
    assert chance_of_fit(found.tokens.long(), tables, WAYS[way]) > CHANCE


@pytest.mark.parametrize("proposal", ["one-hot", "probs"])
def test_block_verification_accepts_no_fewer_drafts(proposal):
    """With drawn drafts it accepts more of some; with one-hot drafts it accepts the same number."""
    gains = []
    for seed in range(8):
        tables, accepted = Tables.random(10 + seed), {}
        for method in ("standard", "block"):
            make = torch.Generator().manual_seed(seed)
            last, at = torch.arange(SAMPLES) % VOCABULARY, torch.zeros(SAMPLES, dtype=torch.int64)
            job = step(tables, ALL, method, proposal, last, at, make, seed)
            accepted[method] = cpu.verify(job).counts.double()
        difference = accepted["block"] - accepted["standard"]
        error = float(difference.std()) / SAMPLES**0.5
        assert float(difference.mean()) > -4 * error
        gains.append(float(difference.mean()) / max(error, 1e-9))
    assert (max(gains) > 4) == (proposal != "one-hot")
