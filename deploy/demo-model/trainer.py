"""The training loop: batches from several domains, Muon and AdamW, a learning rate that falls to zero."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from corpus import Tokens, walk
from torch import nn

logger = logging.getLogger("demo-model")

# Probabilities of the window lengths of a micro-batch.
WINDOW_LENGTHS = {512: 0.86, 1024: 0.1, 2048: 0.04}
MICRO_BATCH_TOKENS = 2048
MUON_RATE, ADAM_RATE = 0.005, 0.003
LOG_EVERY = 50  # steps


@dataclass(frozen=True, slots=True)
class Schedule:
    """The learning rate of a run, which ends after `seconds` or `steps`.

    Warm-up, a constant rate, and linear decay in the last `decay_share` of the run, as in MiniCPM (Hu et al.,
    2024).
    """

    seconds: float
    steps: int = 10**9
    warmup_steps: int = 100
    decay_share: float = 0.35

    def remaining(self, step: int, passed_s: float) -> float:
        """Return the remaining part of the run, 0 to 1."""
        return max(0.0, min(1.0 - passed_s / self.seconds, 1.0 - step / self.steps))

    def scale(self, step: int, passed_s: float) -> float:
        """Return the learning rate relative to its peak."""
        left = self.remaining(step, passed_s)
        return min((step + 1) / self.warmup_steps, left / self.decay_share, 1.0)


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of packed documents, [B, T + 1]: token ids, loss weights, positions in the documents."""

    ids: torch.Tensor
    weights: torch.Tensor
    positions: torch.Tensor


class Batches:
    """Micro-batches, determined by the seed.

    `shares`: share of the rows by domain of `tokens`. `lengths`: probabilities of window lengths.
    """

    def __init__(
        self,
        tokens: Mapping[str, Tokens],
        shares: Mapping[str, float],
        seed: int,
        lengths: Mapping[int, float] = WINDOW_LENGTHS,
    ) -> None:
        self._tokens, self._shares, self._lengths, self._seed = tokens, shares, lengths, seed
        self._walks = {
            (domain, length): walk(tokens[domain], length, seed + length)
            for domain in shares
            for length in lengths
        }

    def draw(self, step: int, part: int) -> Batch:
        """Draw one micro-batch of about `MICRO_BATCH_TOKENS` tokens."""
        rng = np.random.default_rng([self._seed, step, part])
        length = int(rng.choice(list(self._lengths), p=list(self._lengths.values())))
        size, shares = MICRO_BATCH_TOKENS // length, list(self._shares.values())
        ids, weights, positions = [], [], []
        for domain in rng.choice(list(self._shares), size=size, p=shares):
            source, start = self._tokens[domain], next(self._walks[domain, length])
            ids.append(source.ids[start : start + length + 1].astype(np.int64))
            weights.append(source.weights[start : start + length + 1].astype(np.float32) / 10)
            positions.append(source.places(start, length + 1))
        return Batch(*(torch.from_numpy(np.stack(rows)) for rows in (ids, weights, positions)))


def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return Muon (Jordan et al., 2024) for the layers' matrices, and AdamW for the other parameters."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim < 2 or "embed" in n]
    muon = torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=0.02, adjust_lr_fn="match_rms_adamw")
    adam = torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    return [muon, adam]


def train(
    model: nn.Module,
    loss: Callable[[Batch], torch.Tensor],
    batches: Batches,
    schedule: Schedule,
    micro_batches: int,
) -> None:
    """Train `model` until the schedule ends, with `micro_batches` per step."""
    both, began = optimizers(model), time.monotonic()
    step = tokens = 0
    while schedule.remaining(step, time.monotonic() - began) > 0:
        total = 0.0
        for part in range(micro_batches):
            batch = batches.draw(step, part)
            found = loss(batch) / micro_batches
            found.backward()
            total += found.item()
            tokens += batch.ids.shape[0] * (batch.ids.shape[1] - 1)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        passed_s = time.monotonic() - began
        for optimizer, rate in zip(both, (MUON_RATE, ADAM_RATE), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * schedule.scale(step, passed_s)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % LOG_EVERY == 0:
            left = 100 * schedule.remaining(step, passed_s)
            said = "step %d, %.2f M tokens, %.0f tokens/s: loss %.3f, %.0f%% left"
            logger.info(said, step, tokens / 1e6, tokens / passed_s, total, left)
    logger.info("done: %d steps, %.1f M tokens", step, tokens / 1e6)
