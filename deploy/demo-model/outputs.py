"""Outputs of the trunk itself: the training data of its drafters.

A drafter has to foresee the trunk, mistakes included, so that it learns from the trunk's replies rather than
from the ones of the generators (as in Medusa's self-distillation and EAGLE's regenerated answers).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import numpy as np
from chat import END_OF_TEXT, prompt_of
from corpus import Tokens, packed
from dialogues import stream
from tokenizer import CONTEXT, token_id
from tokenizers import Tokenizer

if TYPE_CHECKING:
    from vllm import LLM

# Prompts per file: few enough that training can begin while later files are generated.
SHARD_PROMPTS = 4096
MAX_REPLY = 512
GREEDY_SHARE, TEMPERATURE = 0.6, 0.8
REPLY_WEIGHT = 10


def offline_engine(folder: Path, **options: object) -> LLM:
    """Load vLLM in this process with a model folder; `options` are those of `vllm.LLM`."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # stdout is for the figures alone
    from vllm import LLM

    settings: dict[str, object] = {
        "dtype": "bfloat16",
        "max_model_len": CONTEXT,
        "block_size": 32,
        "gpu_memory_utilization": 0.2,
        "max_num_seqs": 128,
        "enforce_eager": True,  # a minute of compiling would cost more than it saves
        "disable_log_stats": False,  # llm.get_metrics() needs them
    }
    return LLM(str(folder), **{**settings, **options})


def replies(engine: LLM, prompts: Sequence[list[int]], seed: int) -> list[list[int]]:
    """Return the trunk's replies to encoded prompts with their end token: most greedy, the others sampled."""
    from vllm import SamplingParams, TokensPrompt

    rng = Random(seed)
    sampling = [
        SamplingParams(
            temperature=0.0 if rng.random() < GREEDY_SHARE else TEMPERATURE,
            max_tokens=min(MAX_REPLY, CONTEXT - len(prompt)),
            skip_special_tokens=False,
            detokenize=False,
        )
        for prompt in prompts
    ]
    answered = engine.generate(
        [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts], sampling, use_tqdm=False
    )
    return [list(output.outputs[0].token_ids) for output in answered]


def make_shards(folder: Path, target: Path, count: int, seed: int) -> Iterator[int]:
    """Generate replies for `count` shards of training prompts; yield the tokens of each shard written.

    Shards that are there already are kept: a run that was ended goes on where it was.
    """
    target.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    separator = token_id(tokenizer, END_OF_TEXT)
    missing = [index for index in range(count) if not shard_path(target, index).exists()]
    if not missing:
        return
    engine = offline_engine(folder)
    for index in missing:
        dialogues = itertools.islice(stream(seed + index), SHARD_PROMPTS)
        prompts = [e.ids for e in tokenizer.encode_batch_fast([prompt_of(d) for _, d in dialogues])]
        prompts = [prompt for prompt in prompts if len(prompt) < CONTEXT - 64]
        pairs = zip(prompts, replies(engine, prompts, seed + index), strict=True)
        tokens = packed(([(p, 0), (a, REPLY_WEIGHT)] for p, a in pairs), separator, 0)
        tokens.save(shard_path(target, index))
        yield len(tokens.ids)


def shard_path(target: Path, index: int) -> Path:
    return target / f"{index:03d}.npz"


def load_shards(target: Path) -> Tokens:
    """Return all shards in `target`, end to end.

    Raises FileNotFoundError when there is none.
    """
    parts = [Tokens.load(path) for path in sorted(target.glob("[0-9][0-9][0-9].npz"))]
    if not parts:
        raise FileNotFoundError(f"no outputs of the trunk in {target}; run `draft.py outputs` first")
    offsets = itertools.accumulate((len(part.ids) for part in parts), initial=0)
    starts = [part.starts + offset for part, offset in zip(parts, offsets, strict=False)]
    return Tokens(
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.weights for part in parts]),
        np.concatenate(starts),
    )
