"""`python -m bench speculation-table [NAME ...]`: every speculative method, aggregated and disaggregated.

Starts each deployment, sends the same prompts greedily, and compares the answers with those of one engine
without speculation. Rows that are not named keep their results.
"""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from dataclasses import dataclass, field
from operator import eq
from pathlib import Path
from typing import Any

from baton.services.engine.args import VLLM_VERSION
from bench.options import options
from bench.prompts import dialogues
from harness.architectures.registry import ARCHITECTURES, Architecture
from harness.speculation.fleets import FLEETS, Outcome, StartFailed, deployment, measure
from harness.stats import save, saved
from harness.support import ROOT

PROMPTS, MAX_TOKENS = 20, 64
NEAR_TIE = 0.06  # a gap in log-probability: bfloat16 has 8 bits, and logits here reach 30
ENGINE = {"max_model_len": 512, "max_num_seqs": 8, "kv_cache_gib": 0.125, "enable_prefix_caching": False}


@dataclass(frozen=True)
class Trained(Architecture):
    """The demo model with a head that was trained for it, whose drafts depend on its KV cache."""

    trunk: str = "weights"
    head: str = ""

    def checkpoint(self) -> Path:
        return ROOT / "deploy" / "demo-model"

    def target(self, folder: Path) -> Path:
        return folder / self.trunk

    def speculative(self, folder: Path) -> dict[str, Any]:
        return self.spec | ({"model": str(folder / self.head)} if self.head else {})


def _ready_made(folder: Path) -> None:
    raise NotImplementedError(f"{folder} is part of the repository")


def _dialogues(model: Path, count: int) -> list[list[int]]:
    """Return chats that ask to repeat a text, which a drafter can predict from the prompt."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    drawn = itertools.islice(dialogues(7, "copying"), count)
    chats = [[{"role": one.role, "content": one.content} for one in chat.messages[:-1]] for chat in drawn]
    texts = [
        tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats
    ]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


_TOKENS = {"num_speculative_tokens": 3}
MODELS: dict[str, Architecture] = {
    **ARCHITECTURES,
    "demo-mtp": Trained("demo-mtp", _ready_made, {"method": "mtp", **_TOKENS}, trunk="weights-mtp"),
    "demo-eagle3": Trained("demo-eagle3", _ready_made, {"method": "eagle3", **_TOKENS}, head="eagle3"),
}


@dataclass(frozen=True)
class Row:
    """A method on an architecture."""

    name: str
    architecture: str  # a key of MODELS
    changes: dict[str, Any] = field(default_factory=dict)  # additions to its --speculative-config

    @property
    def model(self) -> Architecture:
        return MODELS[self.architecture]

    def prompts(self) -> list[list[int]]:
        if not isinstance(self.model, Trained):
            return self.model.prompts(PROMPTS)
        return _dialogues(self.model.target(self.model.checkpoint()), PROMPTS)

    def spec(self) -> dict[str, Any]:
        folder = self.model.checkpoint()
        if self.changes.get("method", self.model.spec["method"]) != self.model.spec["method"]:
            return self.changes
        return self.model.speculative(folder) | self.changes

    def engine(self) -> dict[str, Any]:
        model = self.model
        return {
            **ENGINE,
            "model": str(model.target(model.checkpoint())),
            "dtype": model.dtype,
            **model.engine,
        }


def _hybrid(strategy: str, steps: int) -> dict[str, Any]:
    return {"num_speculative_tokens": 4, "num_model_steps": steps, "mtp_strategy": strategy}


_LOOKUP = {"prompt_lookup_min": 1, "prompt_lookup_max": 4}
ROWS = [
    Row("EAGLE", "eagle"),
    Row("EAGLE-3", "eagle3"),
    Row("draft model", "draft-model"),
    Row("Medusa", "medusa"),
    Row("n-gram", "ngram"),
    Row("suffix", "ngram", {"method": "suffix", "num_speculative_tokens": 4}),
    Row("MTP + n-gram", "mtp-mimo", _hybrid("with_ngram", 2)),
    Row("EAGLE + n-gram", "eagle", _hybrid("with_ngram", 2)),
    Row("MTP + suffix", "mtp-mimo", _hybrid("with_suffix", 2)),
    Row("MTP, MiMo", "mtp-mimo"),
    Row("MTP, GLM-4-MoE", "mtp-glm4-moe"),
    Row("MTP, ERNIE-4.5-MoE", "mtp-ernie4.5-moe"),
    Row("MTP, DeepSeek-V3", "mtp-deepseek-v3"),
    Row("MTP, Qwen3.5", "mtp-qwen3.5"),
    Row("MTP, Qwen3-Next", "mtp-qwen3-next"),
    Row("n-gram, Gemma 3 (windows)", "ngram-gemma3"),
    Row("EAGLE-3, gpt-oss (windows)", "eagle3-gpt-oss"),
    Row("n-gram, Qwen3-Next", "mtp-qwen3-next", {"method": "ngram", "num_speculative_tokens": 3, **_LOOKUP}),
    Row("MTP + n-gram, Qwen3.5", "mtp-qwen3.5", _hybrid("with_ngram", 2)),
    Row("n-gram, Granite 4 (Mamba-2)", "ngram-granite4"),
    Row("MTP, demo model", "demo-mtp"),
    Row("EAGLE-3, demo model", "demo-eagle3"),
]


class Measuring:
    """Runs deployments; measures each target's answers without speculation only once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._plain: dict[str, Outcome] = {}
        self._runs = 0

    def run(self, row: Row, fleet: str, engine: dict[str, Any], *, forgetful: bool = False) -> Outcome:
        """Run a deployment and measure it. Raises StartFailed."""
        self._runs += 1
        folder = self._folder / f"{self._runs}-{fleet}"
        with deployment(folder, FLEETS[fleet], engine, forgetful=forgetful) as one:
            return measure(one, row.prompts(), MAX_TOKENS)

    def plain(self, row: Row) -> Outcome:
        """Return one engine's answers without speculation. Raises StartFailed."""
        engine = row.engine()
        key = json.dumps(engine, sort_keys=True)
        if key not in self._plain:
            self._plain[key] = self.run(row, "aggregated", engine)
        return self._plain[key]

    def cell(self, row: Row, fleet: str) -> dict[str, Any]:
        """Return a table cell for a method and a fleet, with `why` and `tried` if it cannot run."""
        engine = {**row.engine(), "speculative_config": row.spec()}
        try:
            expected = self.plain(row)
            found = self.run(row, fleet, engine)
        except StartFailed as failed:
            return {"why": _without_paths(str(failed)), "tried": "started as the other rows are"}
        cell = compared(found, expected)
        if isinstance(row.model, Trained) and fleet == "1P1D":
            # A control: without the drafter's part of the handoff, fewer drafts must be accepted.
            without = self.run(row, fleet, engine, forgetful=True)
            cell["withheld"] = {
                "equal": sum(map(eq, without.answers, expected.answers)),
                "drafts": without.drafts,
                "accepted": without.accepted,
            }
        return cell

    def row(self, row: Row) -> dict[str, Any]:
        began = time.monotonic()
        cells = {}
        for fleet in FLEETS:
            cells[fleet] = self.cell(row, fleet)
            print(f"{row.name:<20} {fleet:<11} {cells[fleet]}", flush=True)
        return {
            "architecture": row.architecture,
            "spec": {key: value for key, value in row.spec().items() if key != "model"},
            "cells": cells,
            "seconds": round(time.monotonic() - began, 1),
        }


def compared(found: Outcome, expected: Outcome) -> dict[str, Any]:
    """Return the numbers of equal answers and of drafts."""
    pairs = list(zip(found.answers, found.together, expected.answers, strict=True))
    wrong = [(number, pair) for number, pair in enumerate(pairs) if not pair[0] == pair[1] == pair[2]]
    return {
        "equal": len(pairs) - len(wrong),
        "near_ties": sum(near_tie(pair, expected.gaps[number]) for number, pair in wrong),
        "of": len(pairs),
        "drafts": found.drafts,
        "drafted": found.drafted,
        "accepted": found.accepted,
        "handoffs": found.handoffs,
    }


def near_tie(answers: tuple[list[int], ...], gaps: list[float]) -> bool:
    """Return whether the answers diverge at a near-tie, which bfloat16's rounding decides."""
    part = next((at for at, tokens in enumerate(zip(*answers, strict=True)) if len(set(tokens)) > 1), None)
    return part is not None and gaps[part] < NEAR_TIE


def _without_paths(text: str) -> str:
    words = text.partition(" (log: ")[0].split("could not start: ")[-1].split()
    return " ".join("..." if word.strip("'\"(").startswith("/") else word for word in words)


def main(arguments: list[str]) -> None:
    names = options(__doc__, arguments, "rows to measure").names
    rows = {row.name: row for row in ROWS}
    if unknown := sorted(set(names) - set(rows)):
        raise SystemExit(f"no row {', '.join(unknown)}; rows: {', '.join(rows)}")
    found = saved("speculation-table").get("rows", {})
    with tempfile.TemporaryDirectory() as folder:
        measuring = Measuring(Path(folder))
        for name in names or rows:
            found[name] = measuring.row(rows[name])
            save("speculation-table", {"vllm": VLLM_VERSION, "rows": found})
