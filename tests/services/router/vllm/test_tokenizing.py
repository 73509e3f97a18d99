"""A text is tokenized only as far as the model can take it, with the same tokens."""

from types import SimpleNamespace

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.renderers.base import BaseRenderer
from vllm.renderers.params import TokenizeParams
from vllm.tokenizers import get_tokenizer

from baton.services.router.vllm import tokenizing
from harness.deployment import MODEL

TEXT = "The quick brown fox jumps over the lazy dog. " * 10_000  # 450 KB
LENGTH = 2_000


class Counting:
    def __init__(self):
        self.real = get_tokenizer(str(MODEL))
        self.truncation_side = "right"
        self.seen = []

    def __call__(self, text, **kwargs):
        self.seen.append(len(text))
        return self.real(text, **kwargs)


@pytest.fixture(scope="module")
def tokenizer():
    return Counting()


@pytest.fixture(scope="module")
def whole(tokenizer):
    return tokenizer.real(TEXT)["input_ids"]


def tokenized(tokenizer, text, **params):
    """Return a renderer's tokens for a text. Raises VLLMValidationError."""
    tokenizing.bound_tokenizing()
    tokenizing.bound_tokenizing()
    tokenizer.seen.clear()
    renderer = SimpleNamespace(
        get_tokenizer=lambda: tokenizer,
        model_config=SimpleNamespace(max_model_len=LENGTH),
        _wants_offsets=lambda _, params: params.return_token_offsets,
        _build_tokens_prompt=lambda ids, *_, **__: ids,
    )
    wanted = TokenizeParams(**{"max_total_tokens": LENGTH, **params})
    found = BaseRenderer._tokenize_prompt(renderer, {"prompt": text}, wanted)
    return wanted._token_truncation(tokenizer, found)


@pytest.mark.parametrize("limit", [LENGTH, None])
def test_a_text_that_cannot_fit_is_refused_early(tokenizer, limit):
    with pytest.raises(VLLMValidationError, match="maximum context length is 2000 tokens"):
        tokenized(tokenizer, TEXT, max_total_tokens=limit)
    assert sum(tokenizer.seen) <= 2 * tokenizing.PIECE


def test_a_text_that_fits_is_tokenized_at_once(tokenizer):
    text = TEXT[:3_000]
    assert tokenized(tokenizer, text) == tokenizer.real(text)["input_ids"]
    assert tokenizer.seen == [3_000]


def test_a_long_text_of_few_tokens_fits(tokenizer):
    text = " " * (2 * tokenizing.PIECE)
    expected = tokenizer.real(text)["input_ids"]
    assert tokenized(tokenizer, text, max_total_tokens=len(expected)) == expected


def test_texts_with_offsets_have_a_limit(tokenizer):
    text = " " * (tokenizing.WITH_OFFSETS + 1)
    with pytest.raises(VLLMValidationError, match="at most 262144 characters"):
        tokenized(tokenizer, text, return_token_offsets=True, max_total_tokens=1_000_000)
    assert not tokenizer.seen or max(tokenizer.seen) <= tokenizing.PIECE


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kept", [5, 1_500])
def test_a_truncated_text_has_the_same_tokens(tokenizer, whole, side, kept):
    got = tokenized(tokenizer, TEXT, truncate_prompt_tokens=kept, truncation_side=side)
    assert got == (whole[-kept:] if side == "left" else whole[:kept])
    assert max(tokenizer.seen) <= 2 * tokenizing.PIECE


def test_both_ways_to_count_agree(tokenizer):
    piece = TEXT[: tokenizing.PIECE]
    plain = len(tokenizer.real(piece, add_special_tokens=False)["input_ids"])
    assert tokenizing._count(tokenizer.real, piece) == tokenizing._count(tokenizer, piece) == plain
