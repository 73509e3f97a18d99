"""Limit the cost of tokenizing: tokenize no more of a text than fits into the model's context.

vLLM tokenizes the whole text before cutting it, which takes a second and 80 MiB of memory for each MiB. Here
a text that is unlikely to fit is first counted a piece at a time, until it is certain that the text does
not fit or that the rest would be cut off. A long text that fits is tokenized in pieces (pieces.py).

Leans on: vllm.renderers.base.BaseRenderer._tokenize_prompt(self, prompt, params), which the renderer's thread
runs; TokenizeParams.{max_input_tokens, truncate_prompt_tokens, max_truncation_tokens, truncation_side};
VLLMValidationError; the tokenizer's call, its _tokenizer and its truncation_side.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer
from vllm.exceptions import VLLMValidationError
from vllm.renderers.base import BaseRenderer

from baton.services.engine.patches.replace import replace
from baton.services.router.vllm.pieces import ids_in_pieces

PIECE = 64 << 10  # characters; a piece takes 20 ms without the GIL
# Characters per token of the model's length; a shorter text is tokenized without being counted.
LIKELY = 2
WITH_OFFSETS = 256 << 10  # characters; with offsets a text is tokenized whole, at 180 bytes per character
# Pieces have more tokens than the whole text: we assume at most this many more per cut.
SLACK = 16


def bound_tokenizing() -> None:
    """Limit tokenizing in all renderers; a second call does nothing."""
    replace(BaseRenderer, "_tokenize_prompt", _bounded)


def _bounded(tokenize: Callable[..., Any], self: Any, prompt: Any, params: Any) -> Any:
    limit = params.max_input_tokens or self.model_config.max_model_len  # /tokenize has no limit
    text = prompt["prompt"]
    if len(text) <= PIECE:
        return tokenize(self, prompt, params)
    if len(text) <= LIKELY * limit:
        return _whole(tokenize, self, prompt, params)
    tokenizer = self.get_tokenizer()
    kept = params.truncate_prompt_tokens
    if kept is None:
        if len(enough(tokenizer, text, limit)) < len(text):
            raise VLLMValidationError(
                f"This model's maximum context length is {limit} tokens. However, your text of "
                f"{len(text)} characters has more. Please reduce its length.",
                parameter="input_tokens",
            )
        return _whole(tokenize, self, prompt, params)
    if kept < 0:
        kept = params.max_truncation_tokens
    side = params.truncation_side or tokenizer.truncation_side
    part = enough(tokenizer, text, kept, end=side == "left")
    return _whole(tokenize, self, {**prompt, "prompt": part}, params)


def _whole(tokenize: Callable[..., Any], self: Any, prompt: Any, params: Any) -> Any:
    ids = None
    if self._wants_offsets(prompt, params):
        if len(prompt["prompt"]) > WITH_OFFSETS:
            raise VLLMValidationError(
                f"return_token_offsets: offsets are given for texts of at most {WITH_OFFSETS} characters; "
                f"this one has {len(prompt['prompt'])}. Leave it out, or send less text.",
                parameter="return_token_offsets",
            )
    else:
        ids = ids_in_pieces(self.get_tokenizer(), prompt["prompt"], **params.get_encode_kwargs())
    return tokenize(self, prompt, params) if ids is None else self._build_tokens_prompt(ids, prompt)


def enough(tokenizer: Any, text: str, tokens: int, *, end: bool = False) -> str:
    """Return a text, cut after its first (`end`: before its last) `tokens` tokens and a margin."""
    found = 0
    for at in range(0, len(text), PIECE):
        piece = text[-at - PIECE : len(text) - at] if end else text[at : at + PIECE]
        found += _count(tokenizer, piece) - SLACK
        if found > tokens:
            # One piece more, so the cut is far from the tokens that are kept.
            size = at + 2 * PIECE
            return text[-size:] if end else text[:size]
    return text


def _count(tokenizer: Any, piece: str) -> int:
    """Count a piece's tokens. Calling Hugging Face's Rust tokenizer directly takes a quarter of the time."""
    backend = getattr(tokenizer, "_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        return len(tokenizer(piece, add_special_tokens=False)["input_ids"])
    backend.no_truncation()  # the tokenizer's next call sets its own
    return len(backend.encode_batch_fast([piece], add_special_tokens=False)[0])
