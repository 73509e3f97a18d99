"""Compare models of many kinds on one GPU: 1P1D, with and without drafts, against one engine.

The models are the tiny ones of harness.architectures in bfloat16. Batches that verify drafts
have other shapes than those that compute one token per request, so near-ties can flip. Models that take
images also get an encode worker, which computes every image.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

import aiohttp

from bench.gpu_answers import REQUEST_S, answers, compared
from bench.gpu_fleet import Arm, Keep, Served, drafts, handoffs
from bench.images import TOKENS, conversations
from harness.architectures.experts import deepseek_v3
from harness.architectures.registry import ARCHITECTURES, VISIONS, Architecture

PAIR, DRAFTS = "-pd", "-drafts"  # endings of a model's arms with a prefill and a decode worker
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
    """Return three arms for each of these MODELS."""
    return {f"{name}{end}": _arm(MODELS[name], end) for name in names for end in ("", PAIR, DRAFTS)}


def _arm(model: Architecture, end: str) -> Arm:
    folder = model.checkpoint()
    made: Arm = {"workers": {"prefill": 1, "decode": 1} if end else {"mixed": 1}}
    if end and model.mark:
        made["workers"]["encode"] = 1
    made["engine"] = {
        **ENGINE,
        "model": str(model.target(folder)),
        "max_model_len": 2048 if model.mark else 512,
        "speculative_config": model.speculative(folder) if end == DRAFTS else None,
        "extra": {"enforce_eager": True, **(LINEAR if "qwen3.5" in model.name else {})},
        **model.engine,
    }
    return made | {"handoff": {"staging_mib": 128}}


async def compare(served: Served, tokens: int, keep: Keep) -> None:
    """Compare each pair's answers with those of one engine. `keep` gets the figures after each model."""
    found: dict[str, Any] = {}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=REQUEST_S)) as http:

        async def judge(name: str) -> None:
            before = served.metrics()
            pairs = [name + end for end in (PAIR, DRAFTS) if name + end in served.arms]
            images = conversations() if MODELS[name].mark else []
            prompts = [] if images else MODELS[name].prompts(PROMPTS)
            length = TOKENS if images else tokens
            asked = [answers(http, served.url, arm, images or prompts, length) for arm in (name, *pairs)]
            expected, *given = await asyncio.gather(*asked)
            after = served.metrics()
            for arm, made in zip(pairs, given, strict=True):
                if images:
                    equal = sum(a == b and bool(a) for a, b in zip(made, expected, strict=True))
                    figures: dict[str, Any] = {"equal": equal, "of": len(images)}
                else:
                    figures = await compared(http, served.url, name, prompts, made, expected)
                figures |= drafts(before[arm], after[arm])
                found[arm] = figures | {"handoffs": handoffs(before[arm], after[arm])}
                print(f"{arm:>20}", found[arm], flush=True)
            keep({"tokens": tokens, "models": found})

        await asyncio.gather(*(judge(name) for name in MODELS if name in served.arms))
