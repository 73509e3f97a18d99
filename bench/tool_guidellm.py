"""guidellm: a fixed number of requests at a time, and all at once.

Its sweep is left out: two servers' sweeps have different rates, and windows long enough for a rate
(answers take seconds at full load on two cores) would take ten minutes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.tools import TOKENIZER, Figures, command, installed
from harness.deployment import MODEL_NAME

PROMPT_TOKENS, ANSWER_TOKENS = 256, 64
# By row: requests at a time, and in all.
STREAMS = {"1": 8, "8": 32, "64": 128}
AT_ONCE = 128  # more than the workers of deploy/laptop.yaml admit: the others wait in the router
LIMIT_S = 300.0  # of one run
FIGURES = {
    "ttft_p50_ms": ("time_to_first_token_ms", "p50"),
    "ttft_p99_ms": ("time_to_first_token_ms", "p99"),
    "itl_p50_ms": ("inter_token_latency_ms", "p50"),
    "itl_p99_ms": ("inter_token_latency_ms", "p99"),
}
# The arguments of each load: a profile, and its end.
LOADS: dict[str, dict[str, Any]] = {
    "concurrent": {
        "--profile": {"kind": "concurrent", "streams": [int(streams) for streams in STREAMS]},
        "--constraint": {"kind": "max_requests", "count": list(STREAMS.values())},
    },
    "throughput": {
        "--profile": {"kind": "throughput", "max_concurrency": AT_ONCE},
        "--constraint": {"kind": "max_requests", "count": AT_ONCE},
    },
}
ROWS = {"concurrent": list(STREAMS), "throughput": ["throughput"]}
# It would start up to ten processes, each of which takes seconds of the cores that the servers need.
ENVIRONMENT = {"GUIDELLM__MAX_WORKER_PROCESSES": "1"}


class Guidellm:
    about = (
        f"`guidellm`, synthetic prompts of {PROMPT_TOKENS} tokens, answers of {ANSWER_TOKENS}, by "
        f"concurrency; throughput: {AT_ONCE} requests at once."
    )
    columns: Sequence[str] = ("failed", "requests_per_s", "tokens_per_s", *FIGURES)
    loads: Sequence[str] = tuple(LOADS)

    def prepare(self) -> None:
        installed("guidellm")

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
            "--seed": {"kind": "static", "value": seed},
            "--output": {"kind": "json", "path": str(report)},
            **LOADS[load],
        }
        words = [word for name, value in options.items() for word in (name, json.dumps(value))]
        line = [installed("guidellm"), "run", *words, "--disable-console"]
        failure = command(line, folder, LIMIT_S, ENVIRONMENT)
        if failure:
            raise RuntimeError(failure)
        return dict(zip(ROWS[load], figures(json.loads(report.read_text())), strict=True))


def figures(report: dict[str, Any]) -> Iterator[Figures]:
    """Return a row for each benchmark of a report."""
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
