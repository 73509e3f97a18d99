"""`python -m bench images [FAMILY ...]`: answers about images by every arrangement of workers.

Each family's tiny model gets 20 conversations, one after another, and its greedy answers are compared with
those of stock vLLM. An image is new, repeated, repeated with other text, or in an earlier turn.
Families that are not named keep their results.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import openai

from bench.options import options
from bench.tables import IMAGE_FAMILIES
from harness import stats
from harness.architectures.registry import VISIONS, Architecture
from harness.deployment import MODEL_NAME, Deployment, deployment, stock_vllm
from harness.greedy import GREEDY, token_ids
from harness.pictures import data_url, noise, saved
from harness.scrape import samples
from harness.support import CALL_S

ARRANGEMENTS: dict[str, dict[str, int]] = {
    "mixed": {"mixed": 1, "prefill": 0, "decode": 0},
    "1P1D": {},
    "2P2D": {"prefill": 2, "decode": 2},
    "1E1P1D": {"encode": 1},
    "1E1P1D, drafts": {"encode": 1},
}
STEP = 512  # tokens
SETS, TOKENS = 4, 20
TEXT = "Tell me at some length what this is."
WHERE = "baton_router_images_computed_total"

Conversation = list[dict[str, Any]]


def conversations() -> list[Conversation]:
    found: list[Conversation] = []
    for number in range(SETS):
        one, other = (data_url(saved(noise(seed))) for seed in (2 * number + 1, 2 * number + 2))
        began = [asked(one), says("It is a square."), asked(other), says("And this?")]
        found += [
            [asked(one)],
            [asked(one, other)],
            [asked(one)],
            [*began, asked(text="Are they equal?")],
            [asked(other, text=f"Picture {number}, please:\n{TEXT}")],
        ]
    return found


def asked(*images: str, text: str = TEXT) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": one}} for one in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def says(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def answers(url: str) -> list[list[int]]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=CALL_S) as client:
        return [
            token_ids(
                client.chat.completions.create(
                    model=MODEL_NAME,
                    messages=messages,  # type: ignore[arg-type]
                    max_tokens=TOKENS,
                    **GREEDY,
                )
            )
            for messages in conversations()
        ]


def reference(model: Architecture, folder: Path) -> list[list[int]]:
    flags = ["--max-num-batched-tokens", str(STEP)]
    if not model.engine.get("enable_prefix_caching", True):
        flags.append("--no-enable-prefix-caching")
    target = str(model.target(model.checkpoint()))
    with stock_vllm(
        folder, {"VLLM_CPU_OMP_THREADS_BIND": "0"}, flags=flags, model=target, dtype=model.dtype
    ) as (
        url,
        _,
    ):
        return answers(url)


def measured(
    model: Architecture, arrangement: str, expected: list[list[int]], folder: Path
) -> dict[str, Any]:
    checkpoint, workers = model.checkpoint(), dict(ARRANGEMENTS[arrangement])
    engine = {
        "model": str(model.target(checkpoint)),
        "dtype": model.dtype,
        "max_num_batched_tokens": STEP,
        "tool_call_parser": None,
        "speculative_config": model.speculative(checkpoint) if "drafts" in arrangement else None,
        **model.engine,
    }
    encode = ("--encode", str(workers.pop("encode", 0)))
    # Every prompt is handed over, and encode workers compute all images.
    config: dict[str, Any] = {
        "engine": engine,
        "scheduler": {"idle_decode_tokens": 0},
        "router": {"media": {"encode_min_tokens": 1}},
    }
    with deployment(folder, **config) as one:
        one.up(workers.get("prefill", 1), workers.get("decode", 1), workers.get("mixed", 0), *encode)
        found = answers(one.url)
        cell = {"equal": sum(map(list.__eq__, found, expected)), "of": len(expected)}
        return cell | {"computed": _computed(one)}


def _computed(one: Deployment) -> dict[str, int]:
    """Return the number of images by where they were computed or kept."""
    return {each.labels["where"]: int(each.value) for each in samples(one.url) if each.name == WHERE}


def main(arguments: list[str]) -> None:
    names = options(__doc__, arguments, "families to measure").names
    if unknown := sorted(set(names) - set(IMAGE_FAMILIES)):
        raise SystemExit(f"no family {'; '.join(unknown)}; families: {'; '.join(IMAGE_FAMILIES)}")
    families = stats.saved("images").get("families", {})
    for name in names or IMAGE_FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            expected = reference(VISIONS[name], Path(folder, "stock"))
            for number, arrangement in enumerate(ARRANGEMENTS):
                cell = measured(VISIONS[name], arrangement, expected, Path(folder, str(number)))
                print(f"{name:<16} {arrangement:<16} {cell}", flush=True)
                families.setdefault(name, {})[arrangement] = cell
                stats.save("images", {"families": families})
