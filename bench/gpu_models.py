"""Compare models of many kinds, served by 1P1D with their drafts, with one engine without drafts, on one GPU.

The models are the tiny ones of harness.architectures in bfloat16. Those that take images also get an encode
worker, which computes every image.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

import aiohttp
import openai

from bench.gpu_answers import REQUEST_S, answers, compared
from bench.gpu_fleet import Arm, Keep, Served, drafts, handoffs
from bench.images import answers as about_images
from harness.architectures.experts import deepseek_v3
from harness.architectures.registry import ARCHITECTURES, VISIONS, Architecture

PAIR = "-pd"  # ends the name of a model's arm with a prefill and a decode worker
PROMPTS = 8
ENGINE = {"max_num_seqs": 8, "kv_cache_gib": 0.25, "tool_call_parser": None, "dtype": "bfloat16"}
SECTIONS: dict[str, Any] = {
    "scheduler": {"idle_decode_tokens": 0},
    "router": {"media": {"encode_min_tokens": 1}},
}
# Triton's kernel does not need FlashInfer, which vLLM would choose.
LINEAR = {"gdn_prefill_backend": "triton"}
MODELS: dict[str, Architecture] = {
    "glm4-moe": ARCHITECTURES["mtp-glm4-moe"],
    # Attention kernels for GPUs take only DeepSeek's own sizes.
    "deepseek-v3": replace(
        ARCHITECTURES["mtp-deepseek-v3"],
        name="mtp-deepseek-v3-sizes",
        model=partial(deepseek_v3, head_dim=128, rank=512),
    ),
    "qwen35": ARCHITECTURES["mtp-qwen3.5"],
    "gemma3": ARCHITECTURES["ngram-gemma3"],
    "gpt-oss": ARCHITECTURES["eagle3-gpt-oss"],
    "granite4": ARCHITECTURES["ngram-granite4"],
    "qwen25-vl": VISIONS["qwen2.5-vl"],
    "qwen35-vl": VISIONS["qwen3.5-vision"],
    "gemma3-vl": VISIONS["gemma3-vision"],
}


def arms(names: list[str]) -> dict[str, Arm]:
    """Return two arms for each of these MODELS."""
    return {f"{name}{end}": _arm(MODELS[name], bool(end)) for name in names for end in ("", PAIR)}


def _arm(model: Architecture, pair: bool) -> Arm:
    folder = model.checkpoint()
    made: Arm = {"prefill": 1, "decode": 1} if pair else {"mixed": 1}
    if pair and model.mark:
        made["encode"] = 1
    made["engine"] = {
        **ENGINE,
        "model": str(model.target(folder)),
        "max_model_len": 2048 if model.mark else 512,
        "speculative_config": model.speculative(folder) if pair else None,
        "extra": {"enforce_eager": True, **(LINEAR if "qwen3.5" in model.name else {})},
        **model.engine,
    }
    return made | {"handoff": {"staging_mib": 128}}


async def compare(served: Served, tokens: int, keep: Keep) -> None:
    """Compare each pair's answers with those of its model's engine. `keep` gets the figures after each."""
    found: dict[str, Any] = {}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=REQUEST_S)) as http:

        async def judge(name: str) -> None:
            before = served.metrics()[name + PAIR]
            made = await (_images(served, name) if MODELS[name].mark else _texts(http, served, name, tokens))
            after = served.metrics()[name + PAIR]
            found[name] = made | drafts(before, after) | {"handoffs": handoffs(before, after)}
            print(f"{name:>12}", found[name], flush=True)
            keep({"tokens": tokens, "models": found})

        await asyncio.gather(*(judge(name) for name in MODELS if {name, name + PAIR} <= {*served.arms}))


async def _texts(http: aiohttp.ClientSession, served: Served, name: str, tokens: int) -> dict[str, Any]:
    prompts = MODELS[name].prompts(PROMPTS)
    asked = [answers(http, served.url, arm, prompts, tokens) for arm in (name, name + PAIR)]
    expected, given = await asyncio.gather(*asked)
    return await compared(http, served.url, name, prompts, given, expected)


async def _images(served: Served, name: str) -> dict[str, Any]:
    asked = [asyncio.to_thread(about_images, served.url, arm) for arm in (name, name + PAIR)]
    try:
        expected, given = await asyncio.gather(*asked)
    except openai.OpenAIError as error:
        return {"why": repr(error)[:800]}
    return {"equal": sum(map(list.__eq__, given, expected)), "of": len(expected)}
