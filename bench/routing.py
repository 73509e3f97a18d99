"""Compare placement policies under multi-turn chats: Baton's 2P2D, and vLLM's servers behind vllm-router.

All arms have four engines on the same cores, with caches of the same size: one cannot hold all chats, four
together can. Every user has one chat after another, each with one of a few system prompts. The chats are the
same in all arms, so their computed tokens are comparable. All deployments stay up and take turns. vLLM's arms
share the same servers, whose caches are emptied in between. `cache_aware`, vllm-router's default, remembers
which prompts it sent where.

The model runs in float32, and answers are greedy and contain only letters, so they can be appended to the
next prompt as text. The run fails if Baton's policies give different answers. `--rounds 1 --add` adds a round
to the saved result.
"""

from __future__ import annotations

import asyncio
import random
import string
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import aiohttp
import httpx

from baton.protos import scheduler_pb2 as pb
from bench.options import options
from bench.peers import vllm_router
from bench.served import MODEL_NAME, engine_settings, in_turns, up
from bench.traffic import Answer, stream
from harness.deployment import Deployment, stock_vllm
from harness.scrape import total
from harness.simulate.baselines import PLUGINS, POLICIES
from harness.stats import medians, percentile, save, saved
from harness.support import ROOT, eventually

RESULT = "routing"
PAIRS = 2
BLOCK = 32  # tokens
CACHE = 4_096  # tokens of each engine's KV cache
LETTERS = [ord(letter) for letter in string.ascii_lowercase]  # their token ids
VLLM = {"vllm-router round_robin": "round_robin", "vllm-router cache_aware": "cache_aware"}  # arm -> policy
BATON = {"round robin": "round robin", "least loaded": "least loaded", "default": "Baton"}  # arm -> policy
HEARD_S = 10.0


@dataclass(frozen=True)
class Load:
    """Users who chat at the same time. A token is a letter."""

    users: int = 12
    chats: int = 2  # per user, in sequence
    turns: int = 6  # per chat
    systems: int = 4  # system prompts
    system: int = 384  # tokens of each
    message: int = 48
    answer: int = 16
    think_s: float = 2.0  # mean before a message

    @property
    def longest(self) -> int:
        """Tokens of a whole chat."""
        return self.system + self.turns * (self.message + self.answer)

    @property
    def requests(self) -> int:
        return self.users * self.chats * self.turns


WARM = Load(users=4, chats=1, turns=2, think_s=0.1)


class Arm(Protocol):
    """A running deployment."""

    url: str

    def begin(self) -> None:
        """Prepare for a turn and start counting computed tokens."""

    def computed(self, output: int) -> int:
        """Return the prompt tokens computed in this turn, which generated `output` tokens."""


class Baton:
    """Baton's 2P2D."""

    def __init__(self, one: Deployment) -> None:
        self._one = one
        self.url = one.url

    def begin(self) -> None:
        self._before = self._counts()

    def computed(self, output: int) -> int:
        def heard() -> pb.EngineCounts | None:  # heartbeats report the last tokens a moment later
            now = self._counts()
            return now if now.output_tokens >= self._before.output_tokens + output else None

        after = eventually(heard, HEARD_S, "the scheduler has heard of the turn")
        return int(after.computed_tokens - self._before.computed_tokens)

    def _counts(self) -> pb.EngineCounts:
        counts = [worker.load.counts for worker in self._one.describe().workers]
        return pb.EngineCounts(
            computed_tokens=sum(one.computed_tokens for one in counts),
            output_tokens=sum(one.output_tokens for one in counts),
        )


class Servers:
    """vLLM's servers behind a router."""

    def __init__(self, url: str, servers: list[str]) -> None:
        self.url, self._servers = url, servers

    def begin(self) -> None:
        for server in self._servers:
            httpx.post(f"{server}/reset_prefix_cache", timeout=10).raise_for_status()
        self._before = self._count()

    def computed(self, output: int) -> int:
        del output
        return self._count() - self._before

    def _count(self) -> int:
        name = "vllm:prompt_tokens_by_source_total"
        return sum(int(total(server, name, source="local_compute")) for server in self._servers)


def main(arguments: list[str]) -> None:
    given = options(
        __doc__,
        arguments,
        rounds=(2, "turns of each arm"),
        arm=([str], "all by default", [*BATON, *VLLM]),
        add=(False, "add to the saved rounds of the same load"),
        dry=(False, "save nothing"),
        **{one.name: (one.default, f"of the load, {one.default} by default") for one in fields(Load)},
    )
    load = Load(**{one.name: getattr(given, one.name) for one in fields(Load)})
    sizes = {"load": asdict(load), "cache_tokens": CACHE, "pairs": PAIRS}
    names = given.arm or [*BATON, *VLLM]
    result: dict[str, Any] = {**sizes, "runs": {name: [] for name in names}}
    if given.add:
        result = _earlier(sizes, names)
    measure(result["runs"], load, given.rounds)
    result["median"] = {name: medians(found) for name, found in result["runs"].items()}
    if not given.dry:
        save(RESULT, result)


def measure(runs: dict[str, list[dict[str, float]]], load: Load, rounds: int) -> None:
    """Alternate between the arms and add to their figures. Raises SystemExit if Baton's answers differ."""
    first, answers = len(next(iter(runs.values()))), dict[int, list[str]]()

    def one_turn(arm: Arm, number: int) -> dict[str, float]:
        figures, written = turn(arm, load, first + number)
        if isinstance(arm, Baton) and answers.setdefault(number, written) != written:
            raise SystemExit("Baton's policies gave different answers: the figures would mean nothing")
        return figures

    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        arms = _started(stack, folder, list(runs), load)
        for arm in arms.values():
            asyncio.run(chatted(arm.url, WARM, seed=-1))  # compiles, connects, allocates
        for name, found in in_turns(arms, rounds, one_turn).items():
            runs[name] += found


def turn(arm: Arm, load: Load, seed: int) -> tuple[dict[str, float], list[str]]:
    """Run all chats of a seed on an arm. Return the figures and the answers."""
    arm.begin()
    began = time.perf_counter()
    sent = asyncio.run(chatted(arm.url, load, seed))
    took = time.perf_counter() - began
    output = sum(one.tokens for _, one in sent)
    prompts, computed = sum(prompt for prompt, _ in sent), arm.computed(output)
    ttft = [1e3 * one.ttft for _, one in sent]
    gaps = [1e3 * gap for _, one in sent for gap in one.gaps]
    figures = {
        "ttft_mean_ms": sum(ttft) / len(ttft),
        "ttft_p50_ms": percentile(ttft, 0.5),
        "ttft_p99_ms": percentile(ttft, 0.99),
        "itl_p50_ms": percentile(gaps, 0.5),
        "itl_p99_ms": percentile(gaps, 0.99),
        "computed_tokens": float(computed),
        "computed_share": computed / prompts,
        "tokens_per_s": output / took,
    }
    return figures, [_text(one) for _, one in sent]


async def chatted(url: str, load: Load, seed: int) -> list[tuple[int, Answer]]:
    """Run all users' chats. Return each prompt's length and answer, user by user."""
    systems = [_letters(random.Random(f"{seed} system {one}"), load.system) for one in range(load.systems)]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as http:

        async def user(number: int) -> list[tuple[int, Answer]]:
            draw = random.Random(f"{seed} {number}")
            sent = []
            for _ in range(load.chats):
                prompt = draw.choice(systems)
                for _ in range(load.turns):
                    await asyncio.sleep(draw.expovariate(1 / load.think_s))
                    prompt += _letters(draw, load.message)
                    answer = await stream(
                        http, url, MODEL_NAME, prompt, load.answer, allowed_token_ids=LETTERS
                    )
                    sent.append((len(prompt), answer))
                    prompt += _text(answer)
            return sent

        return [one for sent in await asyncio.gather(*map(user, range(load.users))) for one in sent]


def _earlier(sizes: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Return the saved result. Raises SystemExit if its load or arms differ."""
    found = saved(RESULT)
    if any(found.get(key) != value for key, value in sizes.items()) or list(found["runs"]) != names:
        raise SystemExit(f"the saved {RESULT}.json has another load or other arms: leave --add out")
    return found


def _started(stack: ExitStack, folder: Path, names: list[str], load: Load) -> dict[str, Arm]:
    engine = engine_settings() | {"dtype": "float32", "max_model_len": load.longest + BLOCK}
    arms: dict[str, Arm] = {}
    for name in names:
        if name in BATON:
            arms[name] = Baton(stack.enter_context(_baton(BATON[name], engine)))
    if wanted := [name for name in names if name in VLLM]:
        servers = [stack.enter_context(_server(folder, engine, number)) for number in range(2 * PAIRS)]
        for name in wanted:
            url = stack.enter_context(_routed(folder, servers, VLLM[name]))
            arms[name] = Servers(url, servers)
    return {name: arms[name] for name in names}


def _baton(policy: str, engine: dict[str, Any]) -> AbstractContextManager[Deployment]:
    settings, events = POLICIES[policy]
    scheduler: dict[str, Any] = {"policy": settings.model_dump()}
    if not events:
        scheduler["prefix_pull_s"] = 0.0  # pulls are placement by caches, too
    sizes = {"block_size": BLOCK, "num_gpu_blocks_override": CACHE // BLOCK}
    return up(
        PAIRS,
        PAIRS,
        path=PLUGINS,
        environment={"PYTHONPATH": f"{PLUGINS}:{ROOT}"},
        engine=engine | {"extra": sizes},
        scheduler=scheduler,
    )


@contextmanager
def _server(folder: Path, engine: dict[str, Any], number: int) -> Iterator[str]:
    """Run one of vLLM's servers and yield its URL."""
    environment = {"VLLM_CPU_OMP_THREADS_BIND": str(number % 2), "VLLM_SERVER_DEV_MODE": "1"}
    flags = ("--block-size", str(BLOCK), "--num-gpu-blocks-override", str(CACHE // BLOCK))
    given = engine | {"tool_call_parser": "hermes"}
    with stock_vllm(folder / f"vllm-{number}", environment, flags=flags, **given) as (url, _):
        yield url


@contextmanager
def _routed(folder: Path, servers: list[str], policy: str) -> Iterator[str]:
    """Run vllm-router in front of these servers and yield its URL."""
    logs = folder / f"router-{policy}"
    logs.mkdir()
    with vllm_router(logs, "--policy", policy, "--worker-urls", *servers) as (url, _):
        yield url


def _letters(draw: random.Random, count: int) -> str:
    return "".join(draw.choices(string.ascii_lowercase, k=count))


def _text(answer: Answer) -> str:
    return bytes(answer.token_ids).decode()
