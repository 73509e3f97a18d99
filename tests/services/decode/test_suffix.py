"""Suffix drafts, compared with a brute-force reference."""

from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.services.decode.proposers.suffix import PastOutputs, SuffixProposer, Tree, suffix_proposer
from baton.services.decode.proposers.suffix_index import FOUND, GRAM
from baton.services.speculation import SpeculativeSettings
from tests.services.decode.batches import WIDTH, batch_of, drafts_of

TREE = Tree(depth=12, factor=1.0, floor=0.1)
MOST = 5


def best_path(texts, ends, context, tree, limit):
    """Return score and tokens of the best draft, from all occurrences in `texts` before `ends`."""
    longest = max(tree.depth - limit, tree.depth // 2)
    found = []
    for number, text in enumerate(texts):
        for place in range(min(ends, len(text) - 1)):
            n = 0
            while n < min(longest, place + 1, len(context)) and text[place - n] == context[-1 - n]:
                n += 1
            if n:
                found.append((number, place, n))
    # ties: the long chain first, then the newest
    found.sort(key=lambda one: (one[2] >= GRAM, one[0], one[1]), reverse=True)
    best = (0.0, [])
    for n in range(longest, 0, -1):
        below = [texts[number][place + 1 :] for number, place, length in found if length >= n]
        path = []
        score, probability = 0.0, 1.0
        while len(path) < min(limit, int(n * tree.factor), tree.depth - n):
            counts = Counter(rest[len(path)] for rest in below if len(rest) > len(path))
            if not counts:
                break
            ((token, count),) = counts.most_common(1)
            probability *= count / counts.total()
            if probability < tree.floor:
                break
            score += probability
            path.append(token)
            below = [rest for rest in below if rest[: len(path)][-1:] == [token] and len(rest) >= len(path)]
        if score > best[0]:
            best = (score, path)
    return best


def proposer(tree=TREE, *, rows=4, past=8):
    return SuffixProposer(tree, rows=rows, width=WIDTH, most=MOST, past=past)


TEXT = st.lists(st.integers(0, 3), min_size=1, max_size=FOUND - 4)


@given(
    text=TEXT,
    past=st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=20), max_size=3),
    drafted=st.integers(0, 2),
    limit=st.integers(0, MOST),
    tree=st.builds(
        Tree,
        depth=st.integers(2, 14),
        factor=st.sampled_from([0.5, 1.0, 2.5]),
        floor=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    ),
    cut=st.integers(0, 60),
)
def test_the_draft_has_the_highest_score(text, past, drafted, limit, tree, cut):
    one = proposer(tree)
    for number, answer in enumerate(past):
        one.propose(batch_of([[2, *answer]], MOST, names=[f"past {number}"], prompts=[1]))
        one.forget([f"past {number}"])
    drafted = min(drafted, len(text) - 1)
    settled = len(text) - drafted
    if 0 < cut < settled:  # an earlier step of the request
        one.propose(batch_of([text[:cut]], MOST, names=["now"]))
    (found,) = drafts_of(one.propose(batch_of([text], limit, names=["now"], drafted=[drafted])))
    context = text[-tree.depth :]
    own = best_path([text], settled, context, tree, limit) if limit else (0.0, [])
    others = best_path(past, WIDTH, context, tree, limit) if limit else (0.0, [])
    assert found == (others if others[0] > own[0] else own)[1]


def test_requests_change_rows_and_come_and_go():
    one = proposer(rows=2)
    a, b, c = [1, 2, 3, 4, 1, 2, 3], [5, 6, 7, 8, 5, 6, 7], [8, 9, 8, 9, 8, 9, 8]
    assert drafts_of(one.propose(batch_of([a, b], 2, names="ab"))) == [[4, 1], [8, 5]]
    assert drafts_of(one.propose(batch_of([b, a], 2, names="ba"))) == [[8, 5], [4, 1]]
    # c takes the slot of a, which is indexed again later
    assert drafts_of(one.propose(batch_of([c, b], 2, names="cb"))) == [[9, 8], [8, 5]]
    assert drafts_of(one.propose(batch_of([[*a, 4], b], 2, names="ab"))) == [[1, 2], [8, 5]]


def test_a_name_may_be_reused_for_another_text():
    one = proposer(past=0)
    assert drafts_of(one.propose(batch_of([[1, 2, 3, 1, 2]], 2))) == [[3, 1]]
    assert drafts_of(one.propose(batch_of([[1, 2, 4]], 2))) == [[]]
    one.forget(["0", "never seen"])
    assert drafts_of(one.propose(batch_of([[1, 2, 5, 1, 2]], 2))) == [[5, 1]]


def test_drafts_come_from_past_outputs_but_not_from_past_prompts():
    one = proposer()
    one.propose(batch_of([[1, 2, 3, 4, 5, 6]], 3, prompts=[3], names=["old"]))
    one.forget(["old"])
    assert drafts_of(one.propose(batch_of([[4, 5], [1, 2]], 1, names=["new", "other"]))) == [[6], []]


def test_the_draft_models_tokens_are_not_indexed():
    one = proposer()
    one.propose(batch_of([[1, 2, 3, 9]], 2, drafted=[1], prompts=[0]))
    assert drafts_of(one.propose(batch_of([[1, 2, 3, 4, 1, 2, 3]], 1, prompts=[0]))) == [[4]]


def test_the_oldest_outputs_are_evicted():
    past = PastOutputs(2, 8)
    one = proposer(past=2)
    assert len(past.index[0]) >= 16
    for number in range(5):
        one.propose(batch_of([[10 + number, 20, 30 + number]], 1, prompts=[0], names=[str(number)]))
        one.forget([str(number)])
    texts = [[10 + number, 20] for number in range(5)]
    found = drafts_of(one.propose(batch_of(texts[1:], 1, names="abcd")))
    assert found == [[34], [34], [33], [34]]  # only the last two outputs are left


def test_the_ring_of_outputs_wraps_around():
    past = PastOutputs(1000, 600)
    ring = len(past.index[0])
    one = SuffixProposer(TREE, rows=1, width=600, most=MOST, past=1000)
    for number in range(2 * ring // 500):
        text = [number % 50 * 1000 + i for i in range(500)]
        one.propose(batch_of([text], 1, prompts=[0], width=600))
        one.forget(["0"])
    last = [(2 * ring // 500 - 1) % 50 * 1000 + i for i in (7, 8, 9)]
    assert drafts_of(one.propose(batch_of([last], 3, width=600))) == [
        [last[-1] + 1, last[-1] + 2, last[-1] + 3]
    ]


def of_settings(**keys):
    spec = SpeculativeSettings(method="suffix", num_speculative_tokens=MOST, **keys)
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=4), model_config=SimpleNamespace(max_model_len=WIDTH)
    )
    return suffix_proposer(spec, config)


@pytest.mark.parametrize(("factor", "drafted"), [(0.5, 1), (1.0, 2), (2.0, 4)])
def test_suffix_decoding_max_spec_factor(factor, drafted):
    """A suffix of two tokens that occurred before."""
    one = of_settings(suffix_decoding_max_spec_factor=factor, suffix_decoding_min_token_prob=0.0)
    text = [1, 2, 3, 4, 5, 6, 7, 1, 2]
    assert drafts_of(one.propose(batch_of([text], MOST))) == [[3, 4, 5, 6, 7][:drafted]]


@pytest.mark.parametrize(("most", "drafted"), [(0, []), (1, [3, 4]), (10_000, [3, 4])])
def test_suffix_decoding_max_cached_requests(most, drafted):
    """A request's output is kept for others."""
    one = of_settings(suffix_decoding_max_cached_requests=most)
    one.propose(batch_of([[9, 1, 2, 3, 4]], MOST, names=["past"], prompts=[1]))
    one.forget(["past"])
    assert drafts_of(one.propose(batch_of([[8, 1, 2]], MOST, names=["now"]))) == [drafted]
