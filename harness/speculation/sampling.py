"""Sample answers with an engine in a child process, and compute the distribution that they should have.

The expected distribution is exact: plain forward passes give the probability of every short continuation,
filtered by temperature, top-k, top-p and min-p.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from baton.services.decode.proposers import registry
from baton.services.speculation import SpeculativeSettings
from harness import zygote
from harness.architectures import language

LENGTH = 3  # tokens of an answer; the first is decoded without drafts
DEADLINE_S = 240.0
REQUESTS = 256  # per batch
LEAST = 0.0025  # usual probability below which answers share a cell


@dataclass(frozen=True)
class Way:
    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True)
class Sample:
    """An engine's answers, counted per sampling setting, and its draft counts."""

    answers: dict[Way, Counter[tuple[int, ...]]]
    drafted: int
    accepted: int


@dataclass(frozen=True)
class Order:
    model: Path
    prompt: tuple[int, ...]
    ways: tuple[Way, ...]
    samples: int  # per way
    speculative: dict[str, Any] | None = None  # --speculative-config
    more: dict[str, Any] = field(default_factory=dict)  # additions to vLLM's speculative_config
    seed: int = 0
    core: int = 0
    mended: bool = True  # apply Baton's patch of the sampler
    first_drafts: tuple[int, ...] = ()  # each request arrives with these drafts; needs a prompt of one token


class Engine:
    """A forked process that runs an order with one vLLM engine."""

    def __init__(self, order: Order) -> None:
        self._remote = zygote.Remote("sampling", f"{__name__}:serve", order)

    def result(self) -> Sample:
        """Wait for the sample. Raises TimeoutError, or RuntimeError with the child's traceback."""
        try:
            found: Sample = self._remote.receive(DEADLINE_S)
            return found
        finally:
            self._remote.close(10)


def serve(connection: Connection) -> None:
    """Receive an order and run it. Called in the forked process."""
    order: Order = connection.recv()
    os.environ |= {
        "VLLM_CPU_OMP_THREADS_BIND": str(order.core),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    with zygote.reporting(connection):
        connection.send((True, _carry_out(order)))


def _carry_out(order: Order) -> Sample:
    from vllm import LLM, SamplingParams
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    if not order.mended:
        _unmend()
    engine = LLM(
        model=str(order.model),
        dtype="float32",  # "auto" uses 16 bits
        skip_tokenizer_init=True,
        enforce_eager=True,
        block_size=32,
        max_model_len=64,
        max_num_seqs=REQUESTS,
        max_num_batched_tokens=4096,
        gpu_memory_utilization=0.2,
        kv_cache_memory_bytes=64 << 20,
        disable_log_stats=False,
        seed=order.seed,
        **_speculation(order),
    )
    if order.first_drafts:
        _bring(engine.llm_engine.engine_core.engine_core.scheduler, order.first_drafts)
    params = [
        SamplingParams(**asdict(way), max_tokens=LENGTH, ignore_eos=True, detokenize=False)
        for _ in range(order.samples)
        for way in order.ways
    ]
    prompts = [{"prompt_token_ids": list(order.prompt)}] * len(params)
    outputs = engine.generate(prompts, params, use_tqdm=False)
    answers: dict[Way, Counter[tuple[int, ...]]] = {way: Counter() for way in order.ways}
    for way, output in zip(itertools.cycle(order.ways), outputs, strict=False):
        answers[way][tuple(output.outputs[0].token_ids)] += 1
    counted = {metric.name: getattr(metric, "value", 0) for metric in engine.get_metrics()}
    return Sample(
        answers,
        counted.get("vllm:spec_decode_num_draft_tokens", 0),
        counted.get("vllm:spec_decode_num_accepted_tokens", 0),
    )


def _speculation(order: Order) -> dict[str, Any]:
    """Return the speculative config that a worker passes to vLLM."""
    if order.speculative is None:
        return {}
    spec = SpeculativeSettings(**order.speculative)
    method = registry.method(spec.method)
    numbers = {
        "num_speculative_tokens": spec.limit,
        "num_speculative_tokens_per_batch_size": [(1, REQUESTS, spec.limit)],
    }
    return {
        "speculative_config": {**method.engine_config(spec), **numbers, **order.more},
        "additional_config": {"baton": {"speculative": {**spec.model_dump(), "method": method.name}}},
    }


def _bring(scheduler: Any, drafts: tuple[int, ...]) -> None:
    """Give each request these drafts on arrival, as after a handoff."""
    from baton.services.engine.patches.first_drafts import FirstDrafts, give

    FirstDrafts(scheduler, 0)
    add = scheduler.add_request

    def add_request(request: Any) -> None:
        give(request, drafts)
        add(request)

    scheduler.add_request = add_request


def _unmend() -> None:
    """Restore vLLM's own sampler function, which services/engine/patches/cpu/ replaces."""
    from vllm.utils import cpu_triton_utils

    cpu_triton_utils._expand_kernel_impl = cpu_triton_utils._expand_kernel_impl.__wrapped__


Logits = Callable[[torch.Tensor], torch.Tensor]  # token ids [N, T] -> the last place's logits [N, V]


def expected(
    logits: Logits, prompt: tuple[int, ...], way: Way, length: int = LENGTH, least: float = LEAST
) -> dict[tuple[int, ...], float]:
    """Return the probability of each answer and answer prefix, except those below `least`."""
    found: dict[tuple[int, ...], float] = {}
    rows, chances = torch.tensor([prompt]), torch.ones(1)
    for _ in range(length):
        following = chances.unsqueeze(1) * filtered(logits(rows), way)  # [N, V]
        which, token = (following >= least).nonzero(as_tuple=True)
        rows, chances = torch.cat([rows[which], token.unsqueeze(1)], 1), following[which, token]
        answers = (tuple(row) for row in rows[:, len(prompt) :].tolist())
        found |= dict(zip(answers, chances.tolist(), strict=True))
    return found


def filtered(logits: torch.Tensor, way: Way) -> torch.Tensor:
    """Return probabilities [N, V] after temperature, min-p, top-k and top-p in this order, normalised."""
    probabilities = (logits.double() / way.temperature).softmax(-1)
    ordered, order = probabilities.sort(-1, descending=True)
    ordered[ordered < way.min_p * ordered[:, :1]] = 0
    if way.top_k:
        ordered[:, way.top_k :] = 0
    ordered /= ordered.sum(-1, keepdim=True)
    ordered[ordered.cumsum(-1) - ordered >= way.top_p] = 0
    kept = torch.zeros_like(probabilities).scatter(-1, order, ordered)
    return kept / kept.sum(-1, keepdim=True)


@dataclass(frozen=True)
class Fit:
    """The goodness of a sample's fit: chi-square over the answers, and the total variation distance."""

    chi_square: float
    freedom: int
    distance: float

    @property
    def chance(self) -> float:
        """The probability that a sample of the right distribution fits this badly."""
        halves = torch.tensor([self.freedom / 2, self.chi_square / 2], dtype=torch.float64)
        return float(torch.special.gammaincc(halves[0], halves[1]))

    def __str__(self) -> str:
        return (
            f"chi-square {self.chi_square:.1f} at {self.freedom} degrees of freedom, p = {self.chance:.2g}, "
            f"total variation {self.distance:.3f}"
        )


def fit(
    found: Counter[tuple[int, ...]], wanted: dict[tuple[int, ...], float], length: int, least: float = LEAST
) -> Fit:
    """Compare the answers' first `length` tokens with the probabilities from `expected`."""
    total = found.total()
    observed: Counter[tuple[int, ...]] = Counter()
    for answer, count in found.items():
        observed[answer[:length]] += count
    cells = [(observed[key], chance * total) for key, chance in wanted.items() if len(key) == length]
    rest = total - sum(count for count, _ in cells), total - sum(value for _, value in cells)
    if rest[1] >= least * total:
        cells.append(rest)
    chi_square = sum((count - value) ** 2 / value for count, value in cells)
    distance = sum(abs(count - value) for count, value in cells) / total / 2
    return Fit(chi_square, max(len(cells) - 1, 1), distance)


def reference(model: Path) -> Logits:
    """Load a target into transformers and return a function that computes its logits."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            parts = [loaded(part, logits_to_keep=1).logits[:, -1] for part in tokens.split(1024)]
        return torch.cat(parts)

    return logits


def prompt(start: int, length: int = 12) -> tuple[int, ...]:
    """Return a short text that repeats itself, so that n-grams match."""
    follows = language.successors()
    text = [start]
    while len(text) < length:
        text.append(follows[text[-1]] if len(text) % 5 else start)
    return tuple(text)
