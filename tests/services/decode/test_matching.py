"""N-gram matches of a batch, compared with the naive form."""

from hypothesis import given
from hypothesis import strategies as st

from baton.services.decode.proposers.matching import NgramMatcher
from tests.kernels.ngram_match import naive
from tests.services.decode.batches import batch_of, drafts_of


@given(
    texts=st.lists(st.lists(st.integers(0, 3), max_size=80), min_size=1, max_size=4),
    limits=st.lists(st.integers(0, 6), min_size=4, max_size=4),
    low=st.integers(1, 4),
    more=st.integers(0, 4),
)
def test_each_row_is_continued_up_to_its_limit(texts, limits, low, more):
    limits = limits[: len(texts)]
    matcher = NgramMatcher(low, low + more, most=6, rows=8)
    found = drafts_of(matcher.propose(batch_of(texts, limits)))
    assert found == [
        naive.continuation(text, limit, low, low + more) for text, limit in zip(texts, limits, strict=True)
    ]


def test_a_match_may_include_the_draft_models_tokens():
    matcher = NgramMatcher(2, 3, most=4, rows=1)
    assert drafts_of(matcher.propose(batch_of([[4, 5, 6, 8, 4, 5]], 2, drafted=[1]))) == [[6, 8]]
