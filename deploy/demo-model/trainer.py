"""The training loop: batches from several domains, Muon and AdamW, checkpoints that can be taken up again."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from corpus import DOMAINS, Tokens, WindowOrder
from schedule import Schedule
from threads import SpareThreads
from torch.nn import functional
from transformers import Qwen2ForCausalLM

logger = logging.getLogger("demo-model")

# Share of the rows of a batch. Dialogues are never seen twice; the text is, so it weighs less.
DOMAIN_SHARES = {"dialogues": 0.86, "code": 0.08, "prose": 0.06}
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
    """Where the run is; `positions` is each window walk's place, by `domain/length`."""

    step: int = 0
    tokens: int = 0
    began_at: float = 0.0
    positions: dict[str, int] = field(default_factory=dict)


class Batches:
    """Draws micro-batches by domain and window length; what it draws depends on the seed and `positions` alone."""

    def __init__(self, tokens: dict[str, Tokens], seed: int, positions: dict[str, int]) -> None:
        self._tokens = tokens
        self._seed = seed
        self._orders = {
            f"{domain}/{length}": WindowOrder(tokens[domain], length, seed + length)
            for domain in DOMAINS
            for length in WINDOW_LENGTHS
        }
        for name, position in positions.items():
            self._orders[name].position = position

    @property
    def positions(self) -> dict[str, int]:
        return {name: order.position for name, order in self._orders.items()}

    def draw(self, step: int, part: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Inputs [B, T], targets [B, T] and loss weights [B, T] of one micro-batch."""
        rng = np.random.default_rng([self._seed, step, part])
        length = int(rng.choice(list(WINDOW_LENGTHS), p=list(WINDOW_LENGTHS.values())))
        domains = rng.choice(
            list(DOMAIN_SHARES), size=MICRO_BATCH_TOKENS // length, p=list(DOMAIN_SHARES.values())
        )
        ids, weights = [], []
        for domain in domains:
            source, start = self._tokens[domain], self._orders[f"{domain}/{length}"].next()
            ids.append(source.ids[start : start + length + 1].astype(np.int64))
            weights.append(source.weights[start + 1 : start + length + 1].astype(np.float32) / 10)
        rows = torch.from_numpy(np.stack(ids))
        return rows[:, :-1], rows[:, 1:], torch.from_numpy(np.stack(weights))


def optimizers(model: Qwen2ForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al., 2024) for the layers' matrices, AdamW for the embedding, biases and norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim < 2 or "embed" in n]
    muon = torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=0.02, adjust_lr_fn="match_rms_adamw")
    adam = torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    return [muon, adam]


def weighted_loss(logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over logits [B, T, V], each position counted by its weight [B, T]."""
    losses = functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    flat = weights.flatten()
    return (losses * flat).sum() / flat.sum().clamp(min=1.0)


class Trainer:
    """Runs until the schedule ends; `resume` takes up the checkpoint where there is one."""

    def __init__(
        self, model: Qwen2ForCausalLM, tokens: dict[str, Tokens], schedule: Schedule, settings: TrainSettings
    ) -> None:
        self._model = model
        # Plain attention, compiled: 9.6k tokens/s; the fused kernel of torch 2.13, not compiled: 6.6k (two cores of an
        # EPYC with AVX-512 BF16, windows of 512). One compilation for each window length.
        model.set_attn_implementation("eager")
        self._forward = torch.compile(model.forward, dynamic=False)
        self._optimizers = optimizers(model)
        self._settings = settings
        self._progress = Progress(began_at=schedule.began_at)
        self._resume()
        self._schedule = replace(schedule, began_at=self._progress.began_at)
        self._threads = SpareThreads(settings.threads)
        self._stopped = False
        self._batches = Batches(tokens, settings.seed, self._progress.positions)

    @property
    def progress(self) -> Progress:
        return self._progress

    def stop(self) -> None:
        """Let `run` end after the step in hand, with a checkpoint; safe to call from a signal handler."""
        self._stopped = True

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
            inputs, targets, weights = self._batches.draw(self._progress.step, part)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = self._forward(input_ids=inputs, use_cache=False).logits
            loss = weighted_loss(logits, targets, weights) / parts
            loss.backward()
            total += loss.item()
            self._progress.tokens += inputs.numel()
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
        logger.info("resumed at step %d", state["step"])
