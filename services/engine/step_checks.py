"""Find sampling parameters that would break an engine's step.

vLLM's front end checks most fields (SamplingParams.verify). Others are checked nowhere, or only inside a
step, where a ValueError or IndexError ends the engine with all its requests. The router runs these checks
before it places a request, and each worker runs them again. docs/limits.md lists every check.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

# Sizes of model runner V2's buffers, per request.
V2_ALLOWED_TOKENS = 1024
V2_BIASED_TOKENS = 1024
V2_STOP_TOKENS = 128  # with min_tokens, including the end-of-sequence token
NAMED_TOKENS = 128
V2_MOST_TOKENS = 1 << 30  # limit of max_tokens, which V2 adds to the prompt's length in 32 bits

# Each new token is compared with all stop tokens in turn, which takes 40 us for this many.
STOP_TOKENS = 4096
# After each new token vLLM compares the end of the answer with the text before it, in Python. That takes at
# most 6 ms with these limits, and 2.5 s with patterns of 5,000 tokens, while all streams wait.
PATTERN_TOKENS = 128
PATTERNS_TOKENS = 1024  # in all repetitions together


@dataclass(frozen=True)
class StepLimits:
    """The limits of an engine's steps. The defaults are the loosest, for unknown engines."""

    vocabulary: int = 0  # width of the logits; 0: unknown
    runner_v2: bool = False
    drafts_always: bool = False  # whether the engine drafts and cannot exempt individual requests
    prompt_logprobs: bool = True  # whether the model computes logits of prompts


LOOSEST = StepLimits()


def problem(params: Any, prompt_tokens: int, limits: StepLimits) -> str:
    """Return a request's first problem, with field, value and limit, or ""."""
    return next(_problems(params, prompt_tokens, limits), "")


def _problems(params: Any, prompt_tokens: int, limits: StepLimits) -> Iterator[str]:
    yield from _numbers(params, limits)
    yield from _token_ids(params, limits.vocabulary)
    yield from _prompt_scores(params, prompt_tokens, limits)
    yield from _repetition(params.repetition_detection)
    if params.trace_decode_token_ids is not None:
        yield "trace_decode_token_ids is not served"
    if limits.runner_v2:
        yield from _sizes_of_v2(params)
    if limits.drafts_always:
        yield from _beside_drafts(params, limits)


def _numbers(params: Any, limits: StepLimits) -> Iterator[str]:
    for name, value in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if value is not None and limits.vocabulary and value > limits.vocabulary:
            yield f"{name} is {value}; the model's vocabulary has {limits.vocabulary} tokens"
    # For n answers vLLM adds each answer's number to the seed.
    top = (1 << 63 if limits.runner_v2 else 1 << 64) - 1
    if params.seed is not None and not -(1 << 63) <= params.seed <= top:
        yield f"seed is {params.seed} (for one of n answers); {-(1 << 63)} to {top} are allowed"


def _token_ids(params: Any, vocabulary: int) -> Iterator[str]:
    if params.stop_token_ids and len(params.stop_token_ids) > STOP_TOKENS:
        yield f"stop_token_ids has {len(params.stop_token_ids)} entries; {STOP_TOKENS} are allowed"
    if params.bad_words_token_ids and not all(params.bad_words_token_ids):
        yield "bad_words has an entry without tokens"
    if not vocabulary:
        return
    for name, ids in (
        ("allowed_token_ids", params.allowed_token_ids),
        ("logit_bias", params.logit_bias),
        ("logprob_token_ids", params.logprob_token_ids),
        ("stop_token_ids", params.stop_token_ids),
        ("bad_words", [token for word in params.bad_words_token_ids or () for token in word]),
        # min_tokens masks the request's, the tokenizer's and the model's stop tokens by index in the logits.
        (
            "min_tokens forbids a token that ends the answer and",
            params.min_tokens and params.all_stop_token_ids,
        ),
    ):
        if ids and (outside := _outside(ids, vocabulary)) is not None:
            yield f"{name} names token {outside}; the model's vocabulary has {vocabulary} tokens"


def _outside(ids: Collection[int], vocabulary: int) -> int | None:
    lowest, highest = min(ids), max(ids)
    if lowest < 0:
        return lowest
    return highest if highest >= vocabulary else None


def _prompt_scores(params: Any, prompt_tokens: int, limits: StepLimits) -> Iterator[str]:
    ids = params.prompt_logprob_token_ids
    if ids is None:
        if params.prompt_logprobs is not None and not limits.prompt_logprobs:
            yield "prompt_logprobs is not served with engine.extra.kv_sharing_fast_prefill"
        return
    rows = prompt_tokens - 1 - (params.prompt_logprob_start or 0)
    if not (limits.runner_v2 and limits.prompt_logprobs):
        yield "prompt_logprob_token_ids is served only by vLLM's model runner V2, without fast prefills"
    elif len(ids) != rows:
        yield f"prompt_logprob_token_ids has {len(ids)} rows; the prompt has {rows} to score"
    elif limits.vocabulary and not (np.min(ids) >= -1 and np.max(ids) < limits.vocabulary):
        yield f"prompt_logprob_token_ids names a token outside the model's vocabulary of {limits.vocabulary}"


def _repetition(asked: Any) -> Iterator[str]:
    if asked is None or asked.max_pattern_size <= 0:
        return
    longest, whole = asked.max_pattern_size, asked.max_pattern_size * asked.min_count
    if longest > PATTERN_TOKENS:
        yield f"repetition_detection.max_pattern_size is {longest}; {PATTERN_TOKENS} tokens are allowed"
    if whole > PATTERNS_TOKENS:
        yield (
            f"repetition_detection looks for {asked.min_count} patterns of {longest} tokens, {whole} in all; "
            f"{PATTERNS_TOKENS} are allowed"
        )


def _sizes_of_v2(params: Any) -> Iterator[str]:
    from vllm import envs

    words = params.bad_words_token_ids or ()
    for name, size, most in (
        ("allowed_token_ids", len(params.allowed_token_ids or ()), V2_ALLOWED_TOKENS),
        ("logit_bias", len(params.logit_bias or ()), V2_BIASED_TOKENS),
        ("logprob_token_ids", len(params.logprob_token_ids or ()), NAMED_TOKENS),
        ("bad_words", len(words), envs.VLLM_MAX_NUM_BAD_WORDS),
    ):
        if size > most:
            yield f"{name} has {size} entries; {most} are allowed (vLLM's model runner V2)"
    if words and (tokens := sum(map(len, words))) > envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS:
        most = envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS
        yield f"bad_words has {tokens} tokens in all; {most} are allowed (vLLM's model runner V2)"
    if params.min_tokens and (count := len(params.all_stop_token_ids)) > V2_STOP_TOKENS:
        yield (
            f"with min_tokens, {count} stop_token_ids are too many; {V2_STOP_TOKENS} are allowed, the "
            "model's own among them (vLLM's model runner V2)"
        )
    if params.max_tokens is not None and params.max_tokens > V2_MOST_TOKENS:
        yield f"max_tokens is {params.max_tokens}; {V2_MOST_TOKENS} are allowed"


def _beside_drafts(params: Any, limits: StepLimits) -> Iterator[str]:
    if not limits.runner_v2:  # V2 applies both to the logits of drafts
        for name, value in (("min_p", params.min_p), ("logit_bias", params.logit_bias)):
            if value:
                yield (
                    f"{name} cannot be combined with speculative decoding on this platform (vLLM's model "
                    "runner V1 would not apply it to drafts)"
                )
    if params.logprob_token_ids and limits.runner_v2:
        yield (
            "logprob_token_ids cannot be combined with speculative decoding on this platform (vLLM's model "
            "runner V2 would return others); ask for logprobs without it"
        )
