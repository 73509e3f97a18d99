"""The GPU's and the CPU's form against the naive one, on texts of few letters, which have many matches."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.kernels.ngram_match import cpu, new_workspace, ngram_match
from bench import kernels_ngram_match
from tests.kernels.ngram_match import naive

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
POISON = -77


@pytest.fixture(scope="module")
def gpu():
    """The Triton form: compiled on a GPU, interpreted without one."""
    from baton.kernels.ngram_match import gpu as triton_form

    return triton_form.ngram_match


@dataclass
class Texts:
    """A batch. Each text is followed by remains of another request's."""

    tokens: torch.Tensor
    lengths: torch.Tensor
    limits: torch.Tensor
    rows: torch.Tensor | None = None
    tails: torch.Tensor | None = None


def texts_of(texts, limits, *, width=0):
    width = max(width, *(len(text) for text in texts), 1)
    tokens = torch.randint(0, 3, (len(texts), width), dtype=torch.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = torch.tensor(text, dtype=torch.int32)
    return Texts(
        tokens,
        torch.tensor([len(text) for text in texts], dtype=torch.int32),
        torch.tensor(limits, dtype=torch.int32),
    )


def run(match, batch, k, low, high, dtype=torch.int32):
    """Return the drafts of each request, and check that no other element was written."""
    device = "cpu" if match is cpu.ngram_match else DEVICE
    more = {}
    if match not in (cpu.ngram_match, ngram_match):
        more["workspace"] = new_workspace(len(batch.limits) + 3, device)
    wide = torch.full((len(batch.limits), k + 3), POISON, dtype=dtype, device=device)
    drafts = wide[:, 1 : k + 1]  # a slice of a wider tensor, as in a speculator
    counts = torch.full((len(batch.limits),), POISON, dtype=torch.int32, device=device)
    match(
        *(one.to(device) for one in (batch.tokens, batch.lengths, batch.limits)),
        drafts,
        counts,
        min_n=low,
        max_n=high,
        rows=None if batch.rows is None else batch.rows.to(device),
        tails=None if batch.tails is None else batch.tails.to(device),
        **more,
    )
    found = [row[:count] for row, count in zip(drafts.tolist(), counts.tolist(), strict=True)]
    left = wide.cpu().clone()
    for row, count in enumerate(counts.tolist()):
        assert 0 <= count <= k
        left[row, 1 : 1 + count] = POISON
    assert (left == POISON).all()
    if more:
        assert not more["workspace"].any()  # the next launch needs it clear
    return found


def check(gpu, batch, k, low, high, dtype=torch.int32):
    """Check that both implementations draft what the naive one does, and return that."""
    wanted = []
    for request, limit in enumerate(batch.limits.tolist()):
        row = request if batch.rows is None else int(batch.rows[request])
        text = batch.tokens[row, : int(batch.lengths[row])].tolist()
        if batch.tails is not None:
            text += batch.tails[request].tolist()
        wanted.append(naive.continuation(text, min(limit, k), low, high))
    assert run(gpu, batch, k, low, high, dtype) == wanted
    assert run(cpu.ngram_match, batch, k, low, high, dtype) == wanted
    return wanted


LETTERS = st.integers(0, 2)
TEXT = st.lists(LETTERS, max_size=63)
BATCHES = st.lists(st.tuples(TEXT, st.integers(0, 6)), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(BATCHES, st.integers(1, 4), st.integers(0, 9), st.integers(0, 3), st.data())
def test_all_forms_find_the_same(gpu, requests, low, more, tail, data):
    texts, limits = map(list, zip(*requests, strict=True))
    batch = texts_of(texts, limits)
    if tail:
        batch.tails = torch.tensor(
            [data.draw(st.lists(LETTERS, min_size=tail, max_size=tail)) for _ in texts]
        )
    if data.draw(st.booleans()):
        batch.rows = torch.tensor(data.draw(st.permutations(range(len(texts)))))
    check(gpu, batch, 5, low, low + more)


@pytest.mark.parametrize("length", [1, 2, 63, 1023, 1024, 1025, 1026, 2050, 5000])
def test_matches_around_the_ends_of_blocks(gpu, length):
    texts = [torch.randint(0, letters, (length,)).tolist() for letters in (1, 2, 9, 5000)]
    check(gpu, texts_of(texts, [4, 1, 9, 4], width=5003), 7, 2, 4)


@pytest.mark.parametrize("place", [0, 1, 500, 1020, 1021, 1022, 1023, 1024, 3000])
def test_a_single_match_is_found_anywhere(gpu, place):
    text = list(range(100, 4196))
    text[place : place + 5] = [1, 2, 3, 7, 8]
    text += [1, 2, 3]
    assert check(gpu, texts_of([text], [2], width=9000), 4, 2, 5) == [[7, 8]]


MATCHES = {
    "at the beginning": ([1, 2, 9, 5, 1, 2], [9, 5, 1]),
    "the later of two of equal length": ([1, 2, 7, 1, 2, 8, 6, 1, 2], [8, 6, 1]),
    "a longer, earlier one": ([4, 1, 2, 7, 9, 3, 1, 2, 8, 4, 1, 2], [7, 9, 3]),
    "one that overlaps the end": ([5, 5, 5], [5, 5, 5]),
    "one continued by its own drafts": ([9, 1, 2, 1, 2], [1, 2, 1]),
    "none": ([1, 2, 3, 4], []),
    "none of at least two tokens": ([1, 2, 3, 2], []),
    "none in a text as long as an n-gram": ([1, 1], []),
    "none in a text of one token": ([1], []),
    "none in an empty text": ([], []),
}


@pytest.mark.parametrize("name", MATCHES)
def test_which_match_is_taken(gpu, name):
    text, expected = MATCHES[name]
    assert check(gpu, texts_of([text], [3]), 8, 2, 4) == [expected]


def test_long_n_grams(gpu):
    """A match of 12 tokens wins over a later one of 10, unless at most 10 tokens are compared."""
    end = list(range(10, 22))
    text = [*end, 70, 1, *end[2:], 80, 2, *end]
    assert check(gpu, texts_of([text], [1]), 4, 2, 12) == [[70]]
    assert check(gpu, texts_of([text], [1]), 4, 2, 10) == [[80]]


def test_limits(gpu):
    batch = texts_of([[1, 2, 3, 1, 2]] * 4, [0, -3, 2, 99])
    assert check(gpu, batch, 4, 1, 3) == [[], [], [3, 1], [3, 1, 2, 3]]


def test_one_request_of_many_rows_with_drafts_of_another_type(gpu):
    batch = texts_of([[1, 2, 1], [4, 5, 6, 8, 4, 5], [3]], [3])
    batch.rows, batch.tails = torch.tensor([1]), torch.tensor([[6, 8]])
    assert check(gpu, batch, 4, 2, 9, torch.int64) == [[4, 5, 6]]


def test_the_dispatcher_runs_on_the_cpu():
    batch = texts_of([[1, 2, 3, 1, 2], [1, 2]], [2, 2])
    assert run(ngram_match, batch, 4, 2, 3) == [[3, 1], []]
    empty = torch.zeros(0, dtype=torch.int32)
    ngram_match(batch.tokens, batch.lengths, empty, torch.zeros(0, 4), empty, min_n=1, max_n=2)


def test_the_dispatcher_refuses_wrong_arguments():
    batch = texts_of([[1, 2]], [2])
    drafts, counts = torch.zeros(1, 4), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="min_n <= max_n"):
        ngram_match(batch.tokens, batch.lengths, batch.limits, drafts, counts, min_n=3, max_n=2)
    with pytest.raises(ValueError, match=r"tokens is torch.int64"):
        ngram_match(batch.tokens.long(), batch.lengths, batch.limits, drafts, counts, min_n=1, max_n=2)
    with pytest.raises(ValueError, match="same number of requests"):
        ngram_match(batch.tokens, batch.lengths, batch.limits, drafts[:0], counts, min_n=1, max_n=2)


def test_the_benchmark_refuses_a_wrong_kernel(monkeypatch):
    kernels_ngram_match.check("cpu")

    def wrong(*arguments, min_n, max_n):
        ngram_match(*arguments, min_n=min_n, max_n=max_n - 1)

    monkeypatch.setattr(kernels_ngram_match, "ngram_match", wrong)
    with pytest.raises(AssertionError, match="wrong is wrong"):
        kernels_ngram_match.check("cpu")
