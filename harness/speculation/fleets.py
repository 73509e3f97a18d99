"""Deployments of tiny models, and their answers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

from harness import deployment as deployments
from harness.scrape import total
from harness.support import CALL_S, ROOT

MODEL_NAME = "table"
FORGETFUL = ROOT / "harness" / "forgetful"


class StartFailed(Exception):
    """The deployment failed before it was ready; the text is its error line."""


FLEETS = {"aggregated": (0, 0, 1), "1P1D": (1, 1, 0), "2P2D": (2, 2, 0)}  # prefill, decode, mixed workers


@dataclass
class Outcome:
    """A deployment's answers, and its workers' counts for `answers`."""

    answers: list[list[int]]  # token ids of each prompt's greedy answer, one request at a time
    together: list[list[int]]  # the answers with several requests at a time
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    handoffs: int = 0
    gaps: list[list[float]] = field(default_factory=list)  # one list per answer, one gap per token; see _gaps


@dataclass
class Deployment:
    url: str
    metrics: list[str] = field(default_factory=list)  # the workers' URLs

    def count(self, name: str) -> int:
        """Return the sum of a counter over all workers and labels."""
        return sum(int(total(url, f"{name}_total")) for url in self.metrics)


@contextmanager
def deployment(
    folder: Path,
    fleet: tuple[int, int, int],
    engine: dict[str, Any],
    *,
    forgetful: bool = False,
) -> Iterator[Deployment]:
    """Run a deployment with at most one core for each worker. Raises StartFailed.

    forgetful: workers drop the drafter's state of every handoff.
    """
    config: dict[str, Any] = {
        "engine": {"speculative_config": None, "tool_call_parser": None, "served_model_name": MODEL_NAME}
        | engine,
        # No process dies, and a busy machine may delay heartbeats for seconds.
        "scheduler": {"worker_lease_s": 30.0},
        "worker": {"metrics_port": 0},
        "handoff": {"staging_mib": 64},
    }
    path = FORGETFUL if forgetful else None
    with deployments.deployment(folder, path=path, cores=int(sum(fleet) == 1), **config) as one:
        try:
            one.up(*fleet)
        except AssertionError as failed:
            said = str(failed).strip()
            raise StartFailed(said.rpartition("baton: error: ")[2].splitlines()[0]) from failed
        yield Deployment(one.url, _metrics(folder / "logs"))


def _metrics(folder: Path) -> list[str]:
    texts = [log.read_text(errors="replace") for log in sorted(folder.glob("*.log"))]
    return [found for text in texts for found in re.findall(r"metrics on (http://\S+)/metrics", text)]


def measure(deployment: Deployment, prompts: list[list[int]], max_tokens: int) -> Outcome:
    """Send every prompt, one at a time, then four at a time."""
    return asyncio.run(_measure(deployment, prompts, max_tokens))


async def _measure(deployment: Deployment, prompts: list[list[int]], max_tokens: int) -> Outcome:
    url = f"{deployment.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", timeout=CALL_S, max_retries=0) as client:
        await _answer(client, prompts[0], 4)  # warms up
        before = _counts(deployment)
        answers = [await _answer(client, prompt, max_tokens) for prompt in prompts]
        after = _counts(deployment)
        slots = asyncio.Semaphore(4)

        async def one(prompt: list[int]) -> list[int]:
            async with slots:
                return await _answer(client, prompt, max_tokens)

        together = list(await asyncio.gather(*(one(prompt) for prompt in prompts)))
        gaps = [await _gaps(client, prompt, max_tokens) for prompt in prompts] if not after["drafts"] else []
    counted = {name: after[name] - before[name] for name in after}
    return Outcome(answers=answers, together=together, gaps=gaps, **counted)


def _counts(deployment: Deployment) -> dict[str, int]:
    names = {
        "drafts": "baton_worker_drafts",
        "drafted": "baton_worker_drafted_tokens",
        "accepted": "baton_worker_accepted_tokens",
        "handoffs": "baton_worker_handoffs_loaded",
    }
    return {key: deployment.count(name) for key, name in names.items()}


async def _gaps(client: openai.AsyncOpenAI, prompt: list[int], max_tokens: int) -> list[float]:
    """Return each token's log-probability gap to the second-best token."""
    done = await _complete(client, prompt, max_tokens, logprobs=2, return_tokens_as_token_ids=True)
    told = done.choices[0].logprobs
    best = [sorted(one.values()) for one in told.top_logprobs or []] if told is not None else []
    return [one[-1] - one[-2] if len(one) > 1 else 0.0 for one in best]


async def _answer(client: openai.AsyncOpenAI, prompt: list[int], max_tokens: int) -> list[int]:
    done = await _complete(client, prompt, max_tokens, return_token_ids=True)
    return list((done.choices[0].model_extra or {})["token_ids"])


async def _complete(client: openai.AsyncOpenAI, prompt: list[int], max_tokens: int, **more: Any) -> Any:
    more["ignore_eos"] = True
    return await client.completions.create(
        model=MODEL_NAME, prompt=prompt, max_tokens=max_tokens, temperature=0, extra_body=more
    )
