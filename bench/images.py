"""`python -m bench images [FAMILY ...]`: answers about images by every arrangement of workers.

Each family's tiny model gets 20 conversations, one after another, and its greedy answers are compared with
those of stock vLLM. An image is new, comes again, comes again with other text, or is in an earlier turn.
Writes bench/results/images.json and, from it, the table in docs/images.md.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import openai

from bench.options import options
from harness.architectures.registry import VISIONS, Architecture
from harness.deployment import MODEL_NAME, Deployment, deployment, stock_vllm
from harness.greedy import GREEDY, token_ids
from harness.pictures import data_url, noise, saved
from harness.scrape import samples
from harness.support import CALL_S, ROOT

RESULTS = ROOT / "bench" / "results" / "images.json"
PAGE = ROOT / "docs" / "images.md"
BEGIN, END = "<!-- table: written by `python -m bench images` -->", "<!-- end of table -->"
FAMILIES = {
    "qwen2.5-vl": "Qwen2.5-VL: positions depend on images (M-RoPE)",
    "qwen3-vl": "Qwen3-VL: DeepStack",
    "qwen3.5-vision": "Qwen3.5: states (`--no-enable-prefix-caching`, as [without images](handoff-wire.md))",
    "gemma3-vision": "Gemma 3: sliding windows",
    "llava": "LLaVA",
    "smolvlm": "SmolVLM: images are cut into tiles",
}
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
        return cell | {"computed": _computed(one), "date": time.strftime("%Y-%m-%d")}


def _computed(one: Deployment) -> dict[str, int]:
    """Return the number of images by where they were computed or kept."""
    return {each.labels["where"]: int(each.value) for each in samples(one.url) if each.name == WHERE}


def load() -> dict[str, Any]:
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"families": {}}
    return results


def render(results: dict[str, Any]) -> str:
    lines = [BEGIN, f"| family | {' | '.join(ARRANGEMENTS)} |", "| --- " * (1 + len(ARRANGEMENTS)) + "|"]
    for name, shown in FAMILIES.items():
        cells = [results["families"][name][one] for one in ARRANGEMENTS]
        lines.append(" | ".join([f"| {shown}", *(f"{one['equal']}/{one['of']}" for one in cells)]) + " |")
    return "\n".join([*lines, END])


def main(arguments: list[str]) -> None:
    given = options(__doc__, arguments, "families to measure", page=(False, "write the page alone"))
    if unknown := sorted(set(given.names) - set(FAMILIES)):
        raise SystemExit(f"no family {'; '.join(unknown)}; families: {'; '.join(FAMILIES)}")
    results = load()
    for name in () if given.page else given.names or FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            expected = reference(VISIONS[name], Path(folder, "stock"))
            for number, arrangement in enumerate(ARRANGEMENTS):
                cell = measured(VISIONS[name], arrangement, expected, Path(folder, str(number)))
                print(f"{name:<16} {arrangement:<16} {cell}", flush=True)
                results["families"].setdefault(name, {})[arrangement] = cell
                RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    if missing := [name for name in FAMILIES if len(results["families"].get(name, {})) < len(ARRANGEMENTS)]:
        raise SystemExit(f"the page is left as it is: {'; '.join(missing)} not measured yet")
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(before + render(results) + rest.split(END)[1])
