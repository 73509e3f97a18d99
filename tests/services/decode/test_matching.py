"""N-gram matches, compared with a brute-force reference."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.services.decode.proposers.matching import NgramMatcher
from tests.services.decode.batches import batch_of, drafts_of

TEXTS = st.lists(st.integers(0, 3), max_size=80)


def reference(text: list[int], limit: int, min_n: int, max_n: int) -> list[int]:
    """Return the continuation of the most recent longest match, by brute force."""
    for n in range(max_n, min_n - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if n < len(text) and text[end - n : end] == text[-n:]:
                long = text[:]
                for i in range(limit):
                    long.append(long[end + i])
                return long[len(text) :]
    return []


@given(
    texts=st.lists(TEXTS, min_size=1, max_size=4),
    limits=st.lists(st.integers(0, 6), min_size=4, max_size=4),
    low=st.integers(1, 4),
    more=st.integers(0, 4),
)
def test_the_most_recent_longest_match_is_continued(
    texts: list[list[int]], limits: list[int], low: int, more: int
) -> None:
    limits = limits[: len(texts)]
    matcher = NgramMatcher(low, low + more, most=6, rows=8)
    found = drafts_of(matcher.propose(batch_of(texts, limits)))
    expected = [reference(text, limit, low, low + more) for text, limit in zip(texts, limits, strict=True)]
    assert found == expected


def test_a_match_far_back_is_found() -> None:
    text = [1, 2, 3, 4, 5, *range(100, 5100), 1, 2, 3]
    matcher = NgramMatcher(2, 4, most=4, rows=1)
    assert drafts_of(matcher.propose(batch_of([text], 4, width=6000))) == [[4, 5, 100, 101]]


def test_repetitive_text_is_drafted_in_full() -> None:
    matcher = NgramMatcher(2, 3, most=5, rows=1)
    assert drafts_of(matcher.propose(batch_of([[9, 1, 2, 1, 2, 1, 2]], 5))) == [[1, 2, 1, 2, 1]]


def test_nothing_is_drafted_without_a_match_or_with_a_limit_of_0() -> None:
    matcher = NgramMatcher(2, 3, most=5, rows=4)
    texts = [[1, 2, 3, 4], [1, 2, 1, 2], [], [5]]
    assert drafts_of(matcher.propose(batch_of(texts, [5, 0, 5, 5]))) == [[], [], [], []]


def test_a_match_may_include_the_draft_models_tokens() -> None:
    matcher = NgramMatcher(2, 3, most=4, rows=1)
    assert drafts_of(matcher.propose(batch_of([[4, 5, 6, 8, 4, 5]], 2, drafted=[1]))) == [[6, 8]]
