"""Measure text streams beside images, repeated images, and bytes on the wire, by arrangement of workers.

Closed-loop text streams run while prompts with an image of 1,024 tokens arrive at a steady rate. Then images
are sent one at a time: new ones, and the same ones after other text, so that no cached KV fits. The encode
worker of `room for one` keeps the embeddings of a single image, so it computes each image anew.

All deployments stay up, and the load alternates between them. On two cores, E and P share one.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import Any

import aiohttp

from baton.handoff.save import sizing
from bench.images import Conversation, asked, says
from bench.options import options
from bench.served import AGGREGATED, in_turns, no_pauses, up
from bench.traffic import Mix, Prompt, run, stream
from harness.architectures import visions
from harness.architectures.registry import Architecture
from harness.deployment import Deployment
from harness.pictures import data_url, noise, saved
from harness.scrape import samples
from harness.stats import median, medians, save

MODEL = Architecture("qwen2.5-vl-large", visions.qwen2_5_vl_large, {})
NAME = "qwen2.5-vl"
SIDE = 896  # pixels: 1,024 tokens
ROOM_FOR_ONE = {f"{sizing.__name__}:EMBEDDINGS_BYTES": 2 << 20}  # one image's embeddings take 1.5 MiB
ARMS: dict[str, tuple[tuple[int, int, int, int], dict[str, Any]]] = {
    "2 aggregated": ((0, 0, 2, 0), {"engine": AGGREGATED}),
    "1P1D": ((1, 1, 0, 0), {}),
    "1E1P1D": ((1, 1, 0, 1), {}),
    "1E1P1D, room for one": (
        (1, 1, 0, 1),
        {"constants": ROOM_FOR_ONE},
    ),
}
REPEATED = 6  # images, more than any engine's own cache of embeddings holds
ANSWER = 4  # tokens
WARM_S = 8.0
# Figure -> a counter and the value of one of its labels ("" for all).
WIRES = {
    "pixels_to_e_mib": ("baton_router_image_bytes_total", "encode"),
    "pixels_to_p_mib": ("baton_router_image_bytes_total", "prefill"),
    "pixels_to_d_mib": ("baton_router_image_bytes_total", "decode"),
    "pixels_to_mixed_mib": ("baton_router_image_bytes_total", "mixed"),
    "embeddings_mib": ("baton_worker_embeddings_loaded_bytes_total", ""),
    "kv_mib": ("baton_router_handoff_bytes_total", ""),
}


def main(arguments: list[str]) -> None:
    given = options(__doc__, arguments, rounds=(3, "turns of each arm"), seconds=(24.0, "of load, each time"))
    with ExitStack() as stack:
        arms = {name: stack.enter_context(_up(name)) for name in ARMS}
        beside = {name: one for name, one in arms.items() if "room" not in name}
        for one in beside.values():  # the first requests compile and allocate
            _beside(one, WARM_S, 0)
        streams = in_turns(beside, given.rounds, lambda one, number: _beside(one, given.seconds, number + 1))
        alone = in_turns(arms, given.rounds, _alone)
    save(
        "images-beside",
        {
            "load": vars(_mix(given.seconds)),
            "streams": {name: medians(some) for name, some in streams.items()},
            "alone": {name: _by_kind(medians(some)) for name, some in alone.items()},
            "runs": {"streams": streams, "alone": alone},
        },
    )


def _up(name: str) -> Any:
    (prefill, decode, mixed, encode), own = ARMS[name]
    engine = {
        "model": str(MODEL.target(MODEL.checkpoint())),
        "served_model_name": NAME,
        "dtype": "bfloat16",
        "max_model_len": 2048,
        "max_num_seqs": 16,
        "kv_cache_gib": 0.25,
        "tool_call_parser": None,
        "speculative_config": None,
    }
    return up(
        *(prefill, decode, mixed, "--encode", str(encode)),
        **own | {"engine": engine | own.get("engine", {})},
    )


def _mix(seconds: float) -> Mix:
    return Mix(seconds=seconds, long_per_s=0.5, vocabulary=256)  # tokens from 256 on are special


def _beside(one: Deployment, seconds: float, seed: int) -> dict[str, float]:
    mix = _mix(seconds)
    images: list[Prompt] = [[asked(_image(seed, number))] for number in range(mix.arrivals)]
    return asyncio.run(run(mix, one.url, NAME, seed, iter(images)))


def _alone(one: Deployment, turn: int) -> dict[str, float]:
    """Send new images, then repeat them after other text. Return ms to the first token and MiB per image."""
    images = [_image(100 + turn, number) for number in range(REPEATED)]
    kinds: dict[str, list[Prompt]] = {
        "new": [[asked(image)] for image in images],
        "again": [_behind(f"Picture {number}, please.", image) for number, image in enumerate(images)],
    }
    found: dict[str, float] = {}
    for kind, prompts in kinds.items():
        before = _bytes(one)
        with no_pauses():
            found[f"{kind} ttft_ms"] = 1e3 * median(asyncio.run(_ttfts(one, prompts)))
        after = _bytes(one)
        found |= {f"{kind} {wire}": (after[wire] - before[wire]) / 2**20 / REPEATED for wire in WIRES}
    return found


async def _ttfts(one: Deployment, prompts: list[Prompt]) -> list[float]:
    async with aiohttp.ClientSession() as http:
        return [(await stream(http, one.url, NAME, prompt, ANSWER)).ttft for prompt in prompts]


def _behind(text: str, image: str) -> Conversation:
    """Ask about an image after other text, in an earlier turn: within a turn, vLLM puts images first."""
    return [asked(text=text), says("Here it is."), asked(image)]


def _image(seed: int, number: int) -> str:
    return data_url(saved(noise(1000 * seed + number, (SIDE, SIDE))))


def _bytes(one: Deployment) -> dict[str, float]:
    known = list(samples(one.url, "?all"))
    return {
        wire: sum(each.value for each in known if each.name == name and label in ("", *each.labels.values()))
        for wire, (name, label) in WIRES.items()
    }


def _by_kind(flat: dict[str, float]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for key, value in flat.items():
        kind, figure = key.split()
        found.setdefault(kind, {})[figure] = value
    return found
