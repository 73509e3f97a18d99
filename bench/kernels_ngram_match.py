"""`ngram_match` for `python -m bench kernels`: its check, its shapes, plain torch, and vLLM's kernels.

vLLM's kernels are those of its model runner V2: two launches, which do not continue their own drafts. They
are loaded from vLLM's source files, so vLLM need not be importable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch

from baton.kernels.ngram_match import cpu, new_workspace, ngram_match
from bench import vllm_source
from bench.kernels import Case

MIN_N, MAX_N, K = 2, 4, 4
VOCABULARY = 128_000
SHAPES = ((256, 4096), (256, 32_768), (64, 4096), (1, 4096))  # requests, tokens of each
_VLLM = "v1/worker/gpu/spec_decode/ngram/speculator.py"
_SHIPPED_BLOCK = 256  # tokens per program in vLLM, for 1,024 tokens of context or more


class Batch:
    """Texts and buffers for drafts. The end of every second text occurs earlier in it."""

    def __init__(self, requests: int, context: int, device: str, *, letters: int = VOCABULARY, seed: int = 0):
        draw = torch.Generator().manual_seed(seed)
        # Token frequencies roughly follow Zipf's law, as in natural language.
        texts = (letters ** torch.rand(requests, context, generator=draw, dtype=torch.float64)).int()
        for row in range(0, requests, 2):
            end = int(torch.randint(MAX_N, max(context - K, MAX_N + 1), (1,), generator=draw))
            end = min(end, context)
            texts[row, end - MAX_N : end] = texts[row, context - MAX_N :]
        self.tokens = texts.to(device)
        self.lengths = torch.full((requests,), context, dtype=torch.int32, device=device)
        self.limits = torch.full((requests,), K, dtype=torch.int32, device=device)
        self.drafts = torch.zeros(requests, K, dtype=torch.int32, device=device)
        self.counts = torch.zeros(requests, dtype=torch.int32, device=device)

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        return self.tokens, self.lengths, self.limits, self.drafts, self.counts

    def found_by(self, match: Callable[..., object]) -> tuple[list[list[int]], list[int]]:
        """Return each request's drafts and their number, written over garbage."""
        self.drafts.fill_(-1)
        self.counts.fill_(-1)
        match(*self.arguments, min_n=MIN_N, max_n=MAX_N)
        return self.drafts.tolist(), self.counts.tolist()


def plain_torch(
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    limits: torch.Tensor,
    drafts: torch.Tensor,
    counts: torch.Tensor,
    *,
    min_n: int,
    max_n: int,
) -> None:
    """Match with tensor operations: compare every window of every length with the text's end."""
    width = tokens.shape[1]
    places = torch.arange(width, device=tokens.device)
    best = torch.full_like(lengths, -1, dtype=torch.int64)
    for n in range(min_n, min(max_n, width) + 1):
        from_end = (lengths[:, None] - n + places[:n]).clamp_(min=0)
        end = tokens.gather(1, from_end)  # [requests, n]
        same = (tokens.unfold(1, n, 1) == end[:, None]).all(2)  # [requests, width - n + 1]
        ends = places[n - 1 :]
        same &= (ends < lengths[:, None] - 1) & (lengths[:, None] > n)
        best = torch.maximum(best, torch.where(same, n * width + ends, -1).amax(1))
    start = best % width + 1
    step = places[: drafts.shape[1]]
    period = (lengths - start).clamp_(min=1)
    found = tokens.gather(1, (start[:, None] + step % period[:, None]).clamp_(max=width - 1))
    counts.copy_(torch.where(best < 0, 0, limits.clamp(0, drafts.shape[1])))
    torch.where(step < counts[:, None], found, drafts, out=drafts)


def check(device: str) -> None:
    """Compare the kernel and its alternative with the CPU's form. Raises AssertionError if they differ."""
    for letters in (1, 3, 50, VOCABULARY):
        for requests, context in ((1, 63), (5, 1), (7, 1025), (3, 4500)):
            batch = Batch(requests, context, device, letters=letters, seed=context)
            batch.limits[0] -= 2
            right = Batch(requests, context, "cpu", letters=letters, seed=context)
            right.limits[0] -= 2
            expected = right.found_by(cpu.ngram_match)
            for match in (ngram_match, plain_torch):
                if batch.found_by(match) != expected:
                    raise AssertionError(
                        f"{match.__name__} is wrong: {requests} texts of {context} tokens, {letters} letters"
                    )


def cases(device: str) -> Iterator[Case]:
    for requests, context in SHAPES:
        batch = Batch(requests, context, device)
        plain = partial(plain_torch, *batch.arguments, min_n=MIN_N, max_n=MAX_N)
        against: dict[str, Callable[[], object]] = {"plain torch": plain}
        more: dict[str, Any] = {}
        if device != "cpu":
            more["workspace"] = new_workspace(requests, device)
            if (shipped := _shipped(batch)) is not None:
                against["vLLM, model runner V2"] = shipped
        yield Case(
            name=f"ngram_match {requests} x {context}",
            shape={"requests": requests, "tokens": context, "n": f"{MIN_N} to {MAX_N}", "k": K},
            bytes_moved=4 * requests * (context + K + 3),
            run=partial(ngram_match, *batch.arguments, min_n=MIN_N, max_n=MAX_N, **more),
            against=against,
        )


def _shipped(batch: Batch) -> Callable[[], object] | None:
    """Return a function that launches vLLM's two kernels as its speculator does; None without vLLM."""
    kernels = _shipped_kernels()
    if kernels is None:
        return None
    import triton

    requests, width = batch.tokens.shape
    device = batch.tokens.device
    blocks = triton.cdiv(width, _SHIPPED_BLOCK)
    rows = torch.arange(requests, device=device)
    sampled = torch.ones(requests, dtype=torch.int32, device=device)
    last = batch.tokens[:, -1].long()
    scratch = torch.zeros(requests, blocks, dtype=torch.int64, device=device)
    drafts = torch.zeros(requests, K, dtype=torch.int64, device=device)
    known = (batch.tokens, batch.tokens.stride(0), rows, batch.lengths, sampled)
    power = triton.next_power_of_2

    def run() -> None:
        kernels._ngram_scan_kernel[requests, blocks](
            *(*known, scratch, scratch.stride(0), width, MIN_N, MAX_N, power(MAX_N), _SHIPPED_BLOCK),
            num_warps=4,
            num_stages=2,
        )
        kernels._ngram_finalize_kernel[(requests,)](
            *(*known, last, scratch, scratch.stride(0), drafts, width, blocks, K, power(K), power(blocks)),
            num_warps=2,
            num_stages=1,
        )

    return run


@cache
def _shipped_kernels() -> ModuleType | None:
    kernels = "_ngram_scan_kernel", "_ngram_finalize_kernel"
    return vllm_source.load("vllm_ngram_kernels", [_VLLM], only=kernels)
