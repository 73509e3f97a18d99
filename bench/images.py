"""Measure streams of text beside images, with and without an encode worker.

The arms are 1E1P1D, 1P1D and two aggregated engines, in turns. Streams of text run all the time, while chats
with a new image, and chats with one that was shown before, arrive at a fixed rate. Every prompt begins with
words of its own, so that no prefix cache helps: an image that comes again must be computed again, unless its
embeddings are kept. The model and its tower are tiny (harness/architectures), so the figures compare the
arms and are no forecast.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from bench.light import Client, Reply, body, closed, opened, ttfts
from bench.options import options
from bench.served import in_turns, no_pauses
from harness.architectures.registry import VISIONS
from harness.deployment import MODEL_NAME, Deployment, deployment
from harness.pictures import data_url, noise, saved
from harness.scrape import total
from harness.stats import median, percentile, save

ARMS = {"1E1P1D": (1, 1, 0, "--encode", "1"), "1P1D": (1, 1), "2 aggregated": (0, 0, 2)}
PROMPT, ANSWER = 64, 200  # tokens of a text stream
SHOWN = 4  # tokens of an answer about an image
BYTES = "baton_worker_embeddings_loaded_bytes_total", "baton_worker_handoff_bytes_total"


def main(arguments: list[str]) -> None:
    given = options(
        __doc__,
        arguments,
        rounds=(3, "of all arms"),
        seconds=(10.0, "of an arm in a round"),
        per_s=(1.0, "images a second, half of which were shown before"),
        streams=(4, "of text"),
        side=(600, "width and height of an image, in pixels"),
    )
    load = _Load(given.seconds, given.per_s, given.streams, given.side)
    with no_pauses():
        runs = in_turns(ARMS, given.rounds, lambda arm, number: _measure(arm, number, load))
    medians = {arm: {key: median([one[key] for one in of]) for key in of[0]} for arm, of in runs.items()}
    print(json.dumps(medians, indent=2))
    save("images", {"load": vars(given), "median": medians, "runs": runs})


class _Load:
    def __init__(self, seconds: float, per_s: float, streams: int, side: int) -> None:
        self.seconds, self.per_s, self.streams = seconds, per_s, streams
        self._side = side
        self._numbers = itertools.count()

    async def run(self, port: int, draw: random.Random) -> tuple[list[Reply], list[Reply], list[Reply]]:
        """Return the replies to text, to new images, and to images shown before."""
        client = Client(port)
        again = self._image()
        await client.post("/v1/chat/completions", self._chat(lambda: again, draw))
        asks = [partial(self._chat, self._image, draw), partial(self._chat, lambda: again, draw)]
        text, new, old = await asyncio.gather(
            closed(
                client,
                lambda: body(draw, PROMPT, ANSWER, model=MODEL_NAME, vocabulary=(32, 127)),
                self.streams,
                self.seconds,
            ),
            *(opened(client, ask, self.per_s / 2, self.seconds, draw) for ask in asks),
        )
        await client.close()
        return text, new, old

    def _image(self) -> str:
        return data_url(saved(noise(next(self._numbers), (self._side, self._side))))

    def _chat(self, image: Callable[[], str], draw: random.Random) -> dict[str, Any]:
        words = {"type": "text", "text": f"{draw.getrandbits(64):016x} What is this?"}
        parts = [words, {"type": "image_url", "image_url": {"url": image()}}]
        asked = body(draw, 0, SHOWN, model=MODEL_NAME)
        return {key: value for key, value in asked.items() if key != "prompt"} | {
            "messages": [{"role": "user", "content": parts}]
        }


def _measure(arm: tuple[Any, ...], number: int, load: _Load) -> dict[str, float]:
    model = VISIONS["qwen2.5-vl"]
    engine = {
        "model": str(model.target(model.checkpoint())),
        "speculative_config": None,
        "tool_call_parser": None,
        "max_model_len": 4096,
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        deployment(Path(folder), engine=engine, router={"media": {"encode_min_tokens": 1}}) as one,
    ):
        one.up(*arm)
        text, new, again = asyncio.run(load.run(one.port, random.Random(number)))
        embeddings, kv = (sum(total(url, name) for url in _workers(one)) for name in BYTES)
    gaps = [1e3 * gap for reply in text for gap in reply.gaps]
    failed = sum(not reply.whole for reply in (*text, *new, *again))
    if failed or not gaps:
        raise RuntimeError(f"{failed} of {len(text) + len(new) + len(again)} requests failed")
    return {
        "itl_max_ms": max(gaps),
        "itl_p99_ms": percentile(gaps, 0.99),
        "tokens_per_s": len(gaps) / load.seconds,
        "ttft_new_p50_ms": percentile(ttfts(new), 0.5),
        "ttft_again_p50_ms": percentile(ttfts(again), 0.5),
        "embeddings_mib": embeddings / 2**20,
        "kv_mib": kv / 2**20,
        "images": len(new) + len(again),
    }


def _workers(one: Deployment) -> Iterator[str]:
    """Yield the URLs of the workers' metrics."""
    done = one.baton("metrics", "targets")
    for group in json.loads(done.stdout):
        if group["labels"]["role"] in ("prefill", "decode", "mixed"):
            yield from (f"http://{target}" for target in group["targets"])
