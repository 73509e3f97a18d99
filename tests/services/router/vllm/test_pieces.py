"""A long text's ids are the tokenizer's own when it is tokenized in pieces, and take little memory."""

from __future__ import annotations

import functools
import json
import random
import subprocess
import sys
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast
from vllm.tokenizers import get_tokenizer
from vllm.tokenizers.hf import get_cached_tokenizer, maybe_make_thread_pool

from baton.services.router.vllm import pieces
from harness.deployment import MODEL
from harness.support import ROOT

WHOLE: dict[str, Any] = {"truncation": False, "add_special_tokens": True}
RUNS = (
    " ",
    "\n",
    "\t",
    "a",
    "ab",
    "the",
    "A",
    "/",
    "-_",
    "'",
    "'s",
    "\u4e2d",
    "\u4e2d\u56fd",
    "\U0001f600",
    "1",
    "\u00e9",
)
WORDS = (
    *("Hello", " world", ". ", "I'll", "it's", "'S", "don\u2019t", "\u017f", " THE", "camelCaseWord", "x1y22z333", "2024-01-01"),
    *("\n", "\n\n", " \n ", "\r\n", "\t", "  ", "\u00a0", "\u3000", "\u2028", "!", "?!", "//", "/home/x ", "#include <a>", "{\"a\": 1}"),
    *("e\u0301", "\u0301", "\u1100\u1161\u11a8", "\uac00\u11a8", "\u212b", "\u037e", "\u4e2d\u6587\u3002", "\u65e5\u672c\uff0c", "\u0410\u0431\u0432"),
    *("\U0001f468\u200d\U0001f469\u200d\U0001f467", "\ufe0f", "\U0001f3fd", "\u0e01\u0e33", "\u0939\u093f", "\u00df", "\u01c5", "\u02b0"),
    *("<|im_start|>", "<|im_end|>", "<|im_", "start|>", "<tool_call>", "</tool_response>", "<", "|>", "_", "im_start", "\x00", "\ufffd"),
)  # fmt: skip


@functools.cache
def made(pattern: str | None = None, *, frame: bool = False, added: str = "", **kinds: bool) -> Any:
    """Return a tokenizer: the demo model's, perhaps with another pattern, frame or added token."""
    backend = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    if pattern == pieces.GPT2:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.normalizer = None  # type: ignore[assignment]
    elif pattern is not None:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, level])  # type: ignore[assignment]
    if frame:
        backend.post_processor = TemplateProcessing(  # type: ignore[assignment]
            single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
        )
    if added:
        backend.add_tokens([AddedToken(added, **kinds)])
    return get_cached_tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE", 100)


def text_of(rng: random.Random) -> str:
    """Return a random text: words, any characters, and runs that are much longer than a piece."""
    parts: list[str] = []
    for _ in range(rng.randrange(1, 30)):
        kind = rng.random()
        if kind < 0.15:
            unit = rng.choice(RUNS)
            parts.append(unit * (rng.choice((5, 300, 600, 2_000)) // len(unit)))
        elif kind < 0.25:
            parts.append("".join(rng.choices("abcdefghij", k=rng.randrange(1, 1_500))))
        elif kind < 0.3:
            every = (
                chr(rng.choice((rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)))) for _ in range(40)
            )
            parts.append("".join(every))
        else:
            parts += rng.choices(WORDS, k=rng.randrange(1, 60))
    return "".join(parts)


@pytest.mark.parametrize("frame", [False, True])
@pytest.mark.parametrize("pattern", [None, *pieces.PATTERNS])
def test_the_ids_are_the_tokenizers_own(pattern: str | None, frame: bool) -> None:
    tokenizer = made(pattern, frame=frame)
    rng = random.Random(f"{pattern}{frame}")
    in_pieces = 0
    for _ in range(150):
        text = text_of(rng)
        for options in (WHOLE, {**WHOLE, "add_special_tokens": False}):
            found = pieces.ids_in_pieces(tokenizer, text, **options)
            in_pieces += found is not None
            assert found is None or found == tokenizer(text, **options)["input_ids"], repr(text)
    assert in_pieces > 280
