"""Fail an answer's worker at each of its tokens and compare the answers that clients get.

    python -m harness.continuation [--answers 20] [--feature NAME]... [--plain]
    python -m harness.continuation --architecture eagle3-gpt-oss

Runs a router, a prefill and two decode workers with the demo model and its MTP drafts, each worker behind a
cutter (harness/cutting.py). Each answer is requested once undisturbed, then once for each position, and
compared as a client sees it: text, token ids, log-probabilities, tool calls, reasoning, finish reasons and
usage. Prints the number of equal answers by feature; `make test` runs a part. --architecture replaces the
demo model with a tiny model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from harness import zygote
from harness.architectures.registry import ARCHITECTURES, Architecture
from harness.cutting import Cutter, cutter
from harness.deployment import ENGINE, MODEL_NAME, status_of
from harness.features import ANSWERS, FEATURES, Body, Feature, difference, of_prompts, plain_body, whole
from harness.support import CALL_S, eventually, free_port
from harness.workers import fleet

THINK_END = "."  # the demo model's token that becomes `</think>`
ROLES = ("prefill", "decode", "decode")
START_S = 240.0
AT_ONCE = 10  # concurrent requests; each engine takes 16
MTP = {"method": "mtp", "num_speculative_tokens": 3}


@dataclass
class Score:
    feature: str
    equal: int = 0
    tried: int = 0
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        wrong = "".join(f"\n    {line[:400]}" for line in self.wrong[:3])
        return f"{self.feature:32} {self.equal:5} of {self.tried:5} equal{wrong}"


def thinking_model(folder: Path) -> Path:
    """Write the demo model with thinking tokens: a full stop ends thinking, and the template can skip it."""
    folder.mkdir(parents=True)
    source = Path(ENGINE["model"])
    for file in source.iterdir():
        if file.name not in {"tokenizer.json", "chat_template.jinja"}:
            (folder / file.name).symlink_to(file.resolve())
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    model = tokenizer["model"]
    rarest = max(model["vocab"], key=model["vocab"].__getitem__)
    for name, token in (("<think>", rarest), ("</think>", THINK_END)):
        number = model["vocab"][name] = model["vocab"].pop(token)
        model["merges"] = [pair for pair in model["merges"] if token not in (*pair, "".join(pair))]
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        tokenizer["added_tokens"].append({"id": number, "content": name, **flags})
    tokenizer["added_tokens"].sort(key=lambda one: int(one["id"]))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    template = (source / "chat_template.jinja").read_text()
    thought = "{%- if enable_thinking is false -%}{{- '<think></think>' -}}{%- endif -%}"
    (folder / "chat_template.jinja").write_text(template.rstrip() + thought)
    return folder


@dataclass
class Site:
    url: str
    cutters: list[Cutter]


@contextmanager
def site(
    folder: Path,
    speculation: dict[str, Any] | None = MTP,
    parser: str = "qwen3",
    architecture: Architecture | None = None,
) -> Iterator[Site]:
    """Start 1P2D behind cutters, and a router."""
    if architecture is None:
        model = thinking_model(folder / "model")
        own: dict[str, Any] = {"reasoning_parser": parser, "speculative_config": speculation}
    else:
        folder.mkdir(parents=True)
        model = architecture.target(architecture.checkpoint())
        drafts = architecture.speculative(architecture.checkpoint())
        own = {"dtype": architecture.dtype, "max_model_len": 512, "speculative_config": drafts}
        own |= {"tool_call_parser": None, **architecture.engine}
    # No process dies, so leases are long; every prompt goes to the prefill worker.
    scheduler = {"worker_lease_s": 60.0, "heartbeat_s": 1.0, "idle_decode_tokens": 0}
    engine = {**ENGINE, "model": str(model), "max_num_batched_tokens": 128, **own}
    with ExitStack() as stack:
        workers = stack.enter_context(fleet(model, folder, scheduler))
        url = stack.enter_context(router(folder, engine, {**scheduler, "address": workers.scheduler}))
        cutters = [stack.enter_context(cutter()) for _ in ROLES]
        started = [
            workers.start(
                role,
                engine=engine,
                scheduler=scheduler,
                worker={"advertise": front.address},
                handoff={"staging_mib": 128},
            )
            for role, front in zip(ROLES, cutters, strict=True)
        ]
        for worker, front in zip(started, cutters, strict=True):
            front.stand_before(worker.address)
        for worker in started:
            eventually(worker.serving, START_S, f"{worker.name} serves", every_s=0.2)
        eventually(lambda: status_of(f"{url}/health") == 200, START_S, "the router is ready", every_s=0.2)
        yield Site(url, cutters)


@contextmanager
def router(folder: Path, engine: dict[str, Any], scheduler: dict[str, Any]) -> Iterator[str]:
    """Start a router and yield its URL without waiting for it."""
    port = free_port()
    settings = {"engine": engine, "scheduler": scheduler, "router": {"port": port}}
    process = zygote.shared().start("router", "harness.forked:run", folder, kind="router", settings=settings)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(CALL_S)


class Comparison:
    """Requests undisturbed and cut answers and compares them."""

    def __init__(
        self, site: Site, client: httpx.AsyncClient, every: int = 1, plain: Body | None = None
    ) -> None:
        """Try every `every`-th position of an answer, with an offset per feature.

        Stop strings come from the text of the completion `plain`, by default one of the answer's own prompt.
        """
        self._every = every
        self._plain_body = plain
        self._site = site
        self._client = client
        self._room = asyncio.Semaphore(AT_ONCE)
        self._plain: dict[int, str] = {}
        self._asking_plain = asyncio.Lock()  # features share _plain

    async def score(self, feature: Feature, numbers: Iterable[int]) -> Score:
        score = Score(feature.name)
        await asyncio.gather(*(self._positions(feature, number, score) for number in numbers))
        return score

    async def _positions(self, feature: Feature, number: int, score: Score) -> None:
        body = feature.body(number, await self._plain_text(number))
        expected = await self._ask(feature.path, body, f"whole-{number}")
        if feature.logprobs and not expected["choices"][0].get("logprobs"):
            score.wrong.append(f"answer {number} has no log-probabilities")
        tokens = max(len(choice.get("token_ids") or []) for choice in expected["choices"])
        first = 1 + len(feature.name) % self._every
        wishes = ["0", "1p"] if tokens > 1 else ["0"]
        wishes += [f"{at}{'' if at % 3 else 'r'}" for at in range(first, tokens, self._every)]
        await asyncio.gather(*(self._cut(feature, number, wish, body, expected, score) for wish in wishes))

    async def _cut(
        self, feature: Feature, number: int, wish: str, body: Any, expected: Any, score: Score
    ) -> None:
        name = f"cut-{wish}-{re.sub('[^a-z0-9]+', '-', feature.name.lower())}-{number}"
        score.tried += 1
        try:
            found = difference(await self._ask(feature.path, body, f"{name}."), expected)
            if not any(one.cuts[name] for one in self._site.cutters):
                found = "no worker failed"
        except AssertionError as error:
            found = str(error)
        if found:
            score.wrong.append(f"answer {number}, cut at {wish}: {found}")
        else:
            score.equal += 1

    async def _plain_text(self, number: int) -> str:
        async with self._asking_plain:
            if number not in self._plain:
                body = self._plain_body or plain_body(number)
                answer = await self._ask("/v1/completions", body, f"plain-{number}")
                self._plain[number] = answer["choices"][0]["text"]
        return self._plain[number]

    async def _ask(self, path: str, body: dict[str, Any], name: str) -> Any:
        body = {"model": MODEL_NAME, "return_token_ids": True, **body}
        async with self._room:
            answer = await self._client.post(path, json=body, headers={"X-Request-Id": name})
        return whole(answer.status_code, answer.text, bool(body.get("stream")))


async def scores(
    where: Site, features: Iterable[Feature], numbers: range, plain: Body | None = None
) -> list[Score]:
    """Compare answers feature by feature and print each score."""
    done = []
    async with httpx.AsyncClient(base_url=where.url, timeout=300) as client:
        comparison = Comparison(where, client, plain=plain)
        for feature in features:
            began = time.monotonic()
            done.append(await comparison.score(feature, numbers))
            print(f"{done[-1]}   {time.monotonic() - began:.0f} s", flush=True)
    return done


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m harness.continuation")
    parser.add_argument("--answers", type=int, default=ANSWERS, help="of each feature")
    parser.add_argument("--feature", action="append", help="a feature's name; all by default")
    parser.add_argument("--plain", action="store_true", help="without speculation")
    parser.add_argument("--reasoning-parser", default="qwen3")
    parser.add_argument("--architecture", choices=sorted(ARCHITECTURES))
    args = parser.parse_args()
    architecture = ARCHITECTURES[args.architecture] if args.architecture else None
    features, plain = FEATURES, None
    if architecture is not None:
        features = of_prompts(architecture.prompts(args.answers))
        plain = features[0].body(0, "")
    chosen = [one for one in features if not args.feature or one.name in args.feature]
    speculation = None if args.plain else MTP
    with (
        tempfile.TemporaryDirectory() as folder,
        site(Path(folder) / "site", speculation, args.reasoning_parser, architecture) as where,
    ):
        done = asyncio.run(scores(where, chosen, range(args.answers), plain))
    equal, tried = sum(one.equal for one in done), sum(one.tried for one in done)
    print(f"{equal} of {tried} equal")
    return 0 if equal == tried else 1


if __name__ == "__main__":
    sys.exit(main())
