"""The training loop: batches from several domains, Muon and AdamW, checkpoints that can be resumed."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from corpus import Tokens, WindowOrder
from schedule import Schedule
from threads import SpareThreads
from torch import nn

logger = logging.getLogger("demo-model")

# Window length and how often a micro-batch has it; each micro-batch holds about the same number of tokens.
WINDOW_LENGTHS = {512: 0.86, 1024: 0.1, 2048: 0.04}
MICRO_BATCH_TOKENS = 2048
MUON_RATE, ADAM_RATE = 0.005, 0.003


@dataclass(frozen=True, slots=True)
class TrainSettings:
    checkpoint: Path
    seed: int = 0
    threads: int = 2
    micro_batches: int = 2
    checkpoint_every_s: float = 240.0
    log_every: int = 50


@dataclass(slots=True)
class Progress:
    """The progress of a run; `positions` is that of each walk over windows, by `domain/length`."""

    step: int = 0
    tokens: int = 0
    began_at: float = 0.0
    positions: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of packed documents, each [B, T + 1]: token ids, each token's loss weight, its place in its document."""

    ids: torch.Tensor
    weights: torch.Tensor
    positions: torch.Tensor


class Batches:
    """A source of micro-batches by domain and window length, determined by the seed and `positions` alone.

    `shares` says which part of the rows each domain of `tokens` has, `lengths` how often a window has which length.
    """

    def __init__(
        self,
        tokens: Mapping[str, Tokens],
        shares: Mapping[str, float],
        seed: int,
        lengths: Mapping[int, float] = WINDOW_LENGTHS,
    ) -> None:
        self._tokens, self._shares, self._lengths = tokens, shares, lengths
        self._seed = seed
        self._orders = {
            f"{domain}/{length}": WindowOrder(tokens[domain], length, seed + length)
            for domain in shares
            for length in lengths
        }

    @property
    def positions(self) -> dict[str, int]:
        return {name: order.position for name, order in self._orders.items()}

    def go_to(self, positions: Mapping[str, int]) -> None:
        """Resume the walks at `positions`."""
        for name, position in positions.items():
            self._orders[name].position = position

    def draw(self, step: int, part: int) -> Batch:
        """Draw one micro-batch of about `MICRO_BATCH_TOKENS` tokens."""
        rng = np.random.default_rng([self._seed, step, part])
        length = int(rng.choice(list(self._lengths), p=list(self._lengths.values())))
        domains = rng.choice(
            list(self._shares), size=MICRO_BATCH_TOKENS // length, p=list(self._shares.values())
        )
        ids, weights, positions = [], [], []
        for domain in domains:
            source, start = self._tokens[domain], self._orders[f"{domain}/{length}"].next()
            ids.append(source.ids[start : start + length + 1].astype(np.int64))
            weights.append(source.weights[start : start + length + 1].astype(np.float32) / 10)
            positions.append(source.places(start, length + 1))
        return Batch(*(torch.from_numpy(np.stack(rows)) for rows in (ids, weights, positions)))


def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Make the optimizers: Muon (Jordan et al., 2024) for the layers' matrices, AdamW for all else."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim < 2 or "embed" in n]
    muon = torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=0.02, adjust_lr_fn="match_rms_adamw")
    adam = torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    return [muon, adam]


class Trainer:
    """Training of `model` by `loss` until the schedule ends, resumed from a checkpoint if there is one."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Batch], torch.Tensor],
        batches: Batches,
        schedule: Schedule,
        settings: TrainSettings,
    ) -> None:
        self._model, self._loss, self._batches = model, loss, batches
        self._optimizers = optimizers(model)
        self._settings = settings
        self._progress = Progress(began_at=schedule.began_at)
        self._resume()
        self._schedule = replace(schedule, began_at=self._progress.began_at)
        self._threads = SpareThreads(settings.threads)
        self._stopped = False

    def stop(self) -> None:
        """Let `run` end after the present step, with a checkpoint. Safe to call from a signal handler."""
        self._stopped = True

    def run_to_the_end(self) -> None:
        """Call `run`, and let SIGTERM end it early. For the main thread only."""
        signal.signal(signal.SIGTERM, lambda _signal, _frame: self.stop())
        self.run()
        logger.info("done: %d steps, %.1f M tokens", self._progress.step, self._progress.tokens / 1e6)

    def run(self) -> None:
        """Train until the schedule ends or `stop` is called; the last thing done is a checkpoint."""
        progress, last_saved = self._progress, time.time()
        losses: list[float] = []
        mark_time, mark_tokens = time.time(), progress.tokens
        while not self._stopped and self._schedule.remaining(progress.step, time.time()) > 0:
            losses.append(self._step(self._schedule.scale(progress.step, time.time())))
            progress.step += 1
            if progress.step % self._settings.log_every == 0:
                rate = (progress.tokens - mark_tokens) / (time.time() - mark_time)
                self._log(sum(losses) / len(losses), rate)
                losses, mark_time, mark_tokens = [], time.time(), progress.tokens
            if time.time() - last_saved > self._settings.checkpoint_every_s:
                self.save()
                last_saved = time.time()
        self.save()

    def _step(self, scale: float) -> float:
        """One optimizer step over `micro_batches` micro-batches; returns the mean loss."""
        torch.set_num_threads(self._threads.count())
        parts, total = self._settings.micro_batches, 0.0
        for part in range(parts):
            batch = self._batches.draw(self._progress.step, part)
            loss = self._loss(batch) / parts
            loss.backward()
            total += loss.item()
            self._progress.tokens += batch.ids.shape[0] * (batch.ids.shape[1] - 1)
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        for optimizer, rate in zip(self._optimizers, (MUON_RATE, ADAM_RATE), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return total

    def _log(self, loss: float, tokens_per_s: float) -> None:
        now, progress = time.time(), self._progress
        left = self._schedule.remaining(progress.step, now)
        eta = max(0.0, self._schedule.finish_at - now)
        logger.info(
            "step %d  tokens %.2fM  loss %.3f  %.0f tokens/s  threads %d  rate x%.2f  left %.0f%%  ends in %.0f min at the latest",
            progress.step,
            progress.tokens / 1e6,
            loss,
            tokens_per_s,
            torch.get_num_threads(),
            self._schedule.scale(progress.step, now),
            100 * left,
            eta / 60,
        )

    def save(self) -> None:
        """Write the checkpoint to a new file and rename it over the old one."""
        self._progress.positions = self._batches.positions
        state: dict[str, Any] = {
            "model": self._model.state_dict(),
            "optimizers": [o.state_dict() for o in self._optimizers],
            "step": self._progress.step,
            "tokens": self._progress.tokens,
            "began_at": self._progress.began_at,
            "positions": self._progress.positions,
            "rng": torch.get_rng_state(),
        }
        partial = self._settings.checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self._settings.checkpoint)

    def _resume(self) -> None:
        if not self._settings.checkpoint.exists():
            return
        state = torch.load(self._settings.checkpoint, weights_only=True)
        self._model.load_state_dict(state["model"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        torch.set_rng_state(state["rng"])
        self._progress = Progress(state["step"], state["tokens"], state["began_at"], state["positions"])
        self._batches.go_to(self._progress.positions)
        logger.info("resumed at step %d", state["step"])
