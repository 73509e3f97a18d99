"""Fail an answer's worker at chosen tokens and compare the answers that clients get.

Runs a router, a prefill and two decode workers with the demo model and its MTP drafts, or with a tiny model.
A model that takes images also gets an encode worker.
Each worker is behind a cutter (harness/cutting.py). Each answer is requested once undisturbed, then once for
each position, and compared as a client sees it: text, token ids, log-probabilities, tool calls, reasoning,
finish reasons and usage.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from harness.architectures.registry import Architecture
from harness.cutting import Cutter, cutter
from harness.deployment import ENGINE, MODEL_NAME
from harness.features import FEATURES, Feature, difference, whole
from harness.workers import fleet, router, wait_for

THINK_END = "."  # the demo model's token that becomes `</think>`
ROLES = ("prefill", "decode", "decode")
AT_ONCE = 10  # concurrent requests; each engine takes 16
NO_PAUSE = {"baton.services.router.placement:CUT_S": 0.0}  # ask an encode worker that failed again at once
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
    """Write the demo model with thinking tokens: a full stop ends thinking; the template can skip it."""
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
def site(folder: Path, architecture: Architecture | None = None) -> Iterator[Site]:
    """Start 1P2D behind cutters, and a router."""
    if architecture is None:
        model = thinking_model(folder / "model")
        own: dict[str, Any] = {"reasoning_parser": "qwen3", "speculative_config": MTP}
    else:
        folder.mkdir(parents=True)
        model = architecture.target(architecture.checkpoint())
        drafts = architecture.speculative(architecture.checkpoint())
        own = {"dtype": architecture.dtype, "max_model_len": 512, "speculative_config": drafts}
        own |= {"tool_call_parser": None, **architecture.engine}
    sees = architecture is not None and bool(architecture.mark)
    roles = (*ROLES, "encode") if sees else ROLES
    # No process dies, so leases are long; every prompt goes to the prefill worker.
    scheduler = {"worker_lease_s": 25.0, "idle_decode_tokens": 0}
    engine = {**ENGINE, "model": str(model), "max_num_batched_tokens": 128, **own}
    with ExitStack() as stack:
        workers = stack.enter_context(fleet(model, folder, scheduler))
        own_scheduler = {**scheduler, "address": workers.scheduler}
        media = {"encode_min_tokens": 1}
        url = stack.enter_context(router(folder, engine, own_scheduler, constants=NO_PAUSE, media=media))
        cutters = [stack.enter_context(cutter()) for _ in roles]
        started = [
            workers.start(
                role,
                engine=engine,
                scheduler=scheduler,
                worker={"advertise": front.address},
                handoff={"staging_mib": 128},
            )
            for role, front in zip(roles, cutters, strict=True)
        ]
        for worker, front in zip(started, cutters, strict=True):
            front.stand_before(worker.address)
        wait_for(started, url)
        yield Site(url, cutters)


class Comparison:
    """Requests each answer twice, once with its worker failing at a given token, and compares both."""

    def __init__(
        self, site: Site, client: httpx.AsyncClient, every: int = 1, plain: Feature = FEATURES[0]
    ) -> None:
        """Try every `every`-th position of an answer, with an offset per feature.

        Stop strings come from the answer to the same prompt with the feature `plain`.
        """
        self._every = every
        self._plain_feature = plain
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
        if "logprobs" in body and not expected["choices"][0].get("logprobs"):
            score.wrong.append(f"answer {number} has no log-probabilities")
        tokens = max(len(choice.get("token_ids") or []) for choice in expected["choices"])
        wishes = ["0", "1p"] if tokens > 1 else ["0"]
        if self._every > 1:  # features take turns, and each fails in the middle, too
            wishes = wishes[len(feature.name) % len(wishes) :][:1]
        first = 1 + len(feature.name) % max(1, min(self._every, tokens - 1))
        wishes += [f"{at}{'' if at % 3 else 'r'}" for at in range(first, tokens, self._every)]
        await asyncio.gather(*(self._cut(feature, number, wish, body, expected, score) for wish in wishes))

    async def score_new(self, feature: Feature, wishes: Sequence[str]) -> Score:
        """Cut one answer per wish, and request it undisturbed afterwards, so that no KV is cached before."""
        score = Score(feature.name)
        for number, wish in enumerate(wishes):
            await self._cut(feature, number, wish, feature.body(number, ""), None, score)
        return score

    async def _cut(
        self, feature: Feature, number: int, wish: str, body: Any, expected: Any, score: Score
    ) -> None:
        """Compare a cut answer with the `expected` one (None: request that afterwards)."""
        name = f"cut-{wish}-{re.sub('[^a-z0-9]+', '-', feature.name.lower())}-{number}"
        score.tried += 1
        try:
            answer = await self._ask(feature.path, body, f"{name}.")
            expected = expected or await self._ask(feature.path, body, f"whole-{number}")
            found = difference(answer, expected)
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
                body = self._plain_feature.body(number, "")
                answer = await self._ask("/v1/completions", body, f"plain-{number}")
                self._plain[number] = answer["choices"][0]["text"]
        return self._plain[number]

    async def _ask(self, path: str, body: dict[str, Any], name: str) -> Any:
        body = {"model": MODEL_NAME, "return_token_ids": True, **body}
        async with self._room:
            answer = await self._client.post(path, json=body, headers={"X-Request-Id": name})
        return whole(answer.status_code, answer.text, bool(body.get("stream")))
