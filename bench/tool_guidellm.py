"""guidellm: a fixed number of requests at a time, all at once, and its sweep over rates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.tools import TOKENIZER, Figures, command, commands
from tests.e2e.deployment import MODEL_NAME

PROMPT_TOKENS, ANSWER_TOKENS = 256, 64
# By row: how many at a time, and how many in all.
STREAMS = {"1": 16, "8": 64, "64": 256}
AT_ONCE = 512
RATES, RATE_S = 5, 6  # of the sweep: one at a time, all that goes, and rates between them; seconds of each
LIMIT_S = 300.0  # of one run
FIGURES = {
    "ttft_p50_ms": ("time_to_first_token_ms", "p50"),
    "ttft_p99_ms": ("time_to_first_token_ms", "p99"),
    "itl_p50_ms": ("inter_token_latency_ms", "p50"),
    "itl_p99_ms": ("inter_token_latency_ms", "p99"),
}
# What each load adds to the command: a profile, and where it ends.
LOADS: dict[str, dict[str, Any]] = {
    "concurrent": {
        "--profile": {"kind": "concurrent", "streams": [int(streams) for streams in STREAMS]},
        "--constraint": {"kind": "max_requests", "count": list(STREAMS.values())},
    },
    "throughput": {
        "--profile": {"kind": "throughput"},
        "--constraint": {"kind": "max_requests", "count": AT_ONCE},
    },
    "sweep": {
        "--profile": {"kind": "sweep", "sweep_size": RATES},
        "--constraint": {"kind": "max_duration", "seconds": RATE_S},
    },
}
ROWS = {
    "concurrent": list(STREAMS),
    "throughput": ["throughput"],
    "sweep": ["sweep: one at a time", "sweep: all that goes", *(f"sweep: rate {n}" for n in range(2, RATES))],
}


class Guidellm:
    about = (
        f"`guidellm`, synthetic prompts of {PROMPT_TOKENS} tokens, answers of {ANSWER_TOKENS}; so many at a "
        f"time, {AT_ONCE} requests at once (throughput), and its sweep, {RATE_S} s of each rate: the rates "
        "lie between what the same server gives one at a time and at most. Requests that it cuts off at the "
        "end of a rate do not count."
    )
    columns = ("failed", "requests_per_s", "tokens_per_s", *FIGURES)
    loads = tuple(LOADS)

    def prepare(self) -> None:
        commands()

    def run(self, url: str, load: str, folder: Path, seed: int) -> dict[str, Figures]:
        report = folder / "guidellm.json"
        report.unlink(missing_ok=True)
        options: dict[str, dict[str, Any]] = {
            "--backend": {
                "kind": "openai_http",
                "target": url,
                "model": MODEL_NAME,
                "request_format": "/v1/completions",
            },
            "--tokenizer": {"kind": "huggingface_auto", "model": str(TOKENIZER)},
            "--data": {
                "kind": "synthetic_text",
                "prompt_tokens": PROMPT_TOKENS,
                "output_tokens": ANSWER_TOKENS,
            },
            "--seed": {"kind": "static", "seed": seed},
            "--output": {"kind": "json", "path": str(report)},
            **LOADS[load],
        }
        words = [word for name, value in options.items() for word in (name, json.dumps(value))]
        failure = command([commands() / "guidellm", "run", *words, "--disable-console"], folder, LIMIT_S)
        if failure:
            raise RuntimeError(failure)
        return dict(zip(ROWS[load], figures(json.loads(report.read_text())), strict=True))


def figures(report: dict[str, Any]) -> Iterator[Figures]:
    """One row for each benchmark of a report."""
    for benchmark in report["benchmarks"]:
        metrics = benchmark["metrics"]
        yield {
            "failed": metrics["request_totals"]["errored"],
            "requests_per_s": round(metrics["requests_per_second"]["successful"]["mean"], 2),
            "tokens_per_s": round(metrics["output_tokens_per_second"]["successful"]["mean"], 2),
            **{
                ours: round(metrics[name]["successful"]["percentiles"][share], 2)
                for ours, (name, share) in FIGURES.items()
            },
        }
