"""`python -m bench unequal [NAME ...]`: hand over between workers with different tensor-parallel sizes.

Each model gets a scheduler, a router, a prefill and a decode worker, one of which has two ranks. The same
prompts are sent greedily, one at a time and four at a time, and the answers compared with those of one mixed
worker without speculation.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench.options import options
from bench.speculation_table import MAX_TOKENS, PROMPTS, Row, chosen, compared
from harness.speculation.fleets import MODEL_NAME, Deployment, measure
from harness.support import ROOT
from harness.workers import fleet, router, wait_for

RESULTS = ROOT / "bench" / "results" / "unequal.json"
MODELS = [
    *("EAGLE", "MTP, demo model", "MTP, GLM-4-MoE", "MTP, DeepSeek-V3", "n-gram"),
    *("n-gram, Gemma 3 (windows)", "EAGLE-3, gpt-oss (windows)"),
]
STEP = 32  # tokens, so that most prompts take two steps
WHOLE = {"mtp-deepseek-v3"}  # MLA cannot prefill a prompt in chunks on CPUs
SIZES = {"2 -> 1": (2, 1), "1 -> 2": (1, 2)}  # ranks of the prefill and of the decode worker


@contextmanager
def deployed(row: Row, sizes: tuple[int, ...], folder: Path) -> Iterator[Deployment]:
    """Start a prefill and a decode worker of two sizes, or one mixed worker without speculation."""
    engine = {**row.engine(), "served_model_name": MODEL_NAME}
    if row.architecture not in WHOLE:
        engine["max_num_batched_tokens"] = STEP
    scheduler = {"worker_lease_s": 60.0, "heartbeat_s": 1.0, "idle_decode_tokens": 0}
    roles = ("prefill", "decode") if len(sizes) > 1 else ("mixed",)
    if len(sizes) > 1:
        engine["speculative_config"] = row.spec()
    folder.mkdir()
    with ExitStack() as stack:
        workers = stack.enter_context(fleet(Path(engine["model"]), folder, scheduler))
        where = {**scheduler, "address": workers.scheduler}
        url = stack.enter_context(router(folder, engine, where))
        started = [
            workers.start(
                role,
                engine={**engine, "tensor_parallel_size": size},
                scheduler=scheduler,
                handoff={"staging_mib": 64},
            )
            for role, size in zip(roles, sizes, strict=True)
        ]
        wait_for(started, url)
        yield Deployment(url, [worker.metrics.removesuffix("/metrics") for worker in started])


def measured(row: Row, folder: Path) -> dict[str, Any]:
    """Measure a model with each pair of sizes."""
    with deployed(row, (1,), folder / "mixed") as one:
        expected = measure(one, row.prompts(), MAX_TOKENS)
    cells = {}
    for name, sizes in SIZES.items():
        with deployed(row, sizes, folder / name.replace(" -> ", "-")) as one:
            cells[name] = compared(measure(one, row.prompts(), MAX_TOKENS), expected)
        print(f"{row.name:<28} {name}  {cells[name]}", flush=True)
    return cells


def main(arguments: list[str]) -> None:
    names = options(__doc__, arguments, "rows to measure").names
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": {}}
    for row in chosen(names, MODELS):
        with tempfile.TemporaryDirectory() as folder:
            cells = measured(row, Path(folder))
        results["rows"][row.name] = {"cells": cells, "date": time.strftime("%Y-%m-%d")}
        results["prompts"], results["tokens"] = PROMPTS, MAX_TOKENS
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
