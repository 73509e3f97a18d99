"""lm-eval: many questions in few requests, aborted at the first one that fails.

Its tasks are made here, so that no hub need be reachable: questions that the demo model was not trained on,
once with four answers to choose from (the prompts' log-probabilities decide), once to be answered freely.
"""

from __future__ import annotations

import json
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from bench.prompts import questions
from bench.tools import TOKENIZER, Figures, command, installed
from harness.deployment import MODEL_NAME

QUESTIONS, CHOICES = 128, 4
ANSWER_TOKENS = 64
BATCH, CONCURRENCY = 16, 8
LIMIT_S = 300.0  # of one run
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


class LmEval:
    about = (
        f"`lm-eval`, local-completions, {BATCH} prompts a request, {CONCURRENCY} requests at a time, no "
        f"retries: {QUESTIONS} questions, once with {CHOICES} answers to choose from by their "
        "log-probabilities (echo), once answered greedily. `seconds` include the tool's own start. "
        "`answers` is a checksum: where it is the same, all answers are."
    )
    columns: Sequence[str] = ("failed", "seconds", "score", "answers")
    loads: Sequence[str] = tuple(TASKS)

    def prepare(self) -> None:
        installed("lm-eval")

    def run(self, url: str, load: str, folder: Path, seed: int) -> dict[str, Figures]:
        del seed  # the answers are compared
        name = f"baton_{load}"
        task(name, load, folder)
        out = Path(tempfile.mkdtemp(dir=folder))  # for the report of this run alone
        model = {
            "model": MODEL_NAME,
            "base_url": f"{url}/v1/completions",
            "tokenizer_backend": "huggingface",
            "tokenizer": TOKENIZER,
            "num_concurrent": CONCURRENCY,
            "max_retries": 1,  # of attempts: a failed request is not sent again
            "max_length": 1024,
        }
        options = {
            "--model": "local-completions",
            "--model_args": ",".join(f"{name}={value}" for name, value in model.items()),
            "--batch_size": str(BATCH),
            "--tasks": name,
            "--include_path": str(folder),
            "--output_path": str(out),
        }
        words = [word for option in options.items() for word in option]
        failure = command([installed("lm-eval"), "run", *words, "--log_samples"], folder, LIMIT_S)
        if failure:
            print(failure, flush=True)
            return {load: {"failed": QUESTIONS, "seconds": 0, "score": 0, "answers": 0}}
        return {load: figures(out)}


def task(name: str, kind: str, folder: Path) -> None:
    """Write a task: its questions and how they are sent."""
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


def figures(out: Path) -> Figures:
    """Return the figures of a report and its samples."""
    (report,) = out.rglob("results_*.json")
    (samples,) = out.rglob("samples_*.jsonl")
    result = json.loads(report.read_text())
    (scores,) = result["results"].values()
    score = next(value for name, value in scores.items() if name in ("acc,none", "exact_match,none"))
    answers = [answer(json.loads(line)) for line in samples.read_text().splitlines()]
    return {
        "failed": QUESTIONS - len(answers),
        "seconds": round(float(result["total_evaluation_time_seconds"]), 2),
        "score": round(score, 4),
        "answers": zlib.crc32("\0".join(answers).encode()),
    }


def answer(sample: dict[str, Any]) -> str:
    """Return the generated text, or the likeliest choice."""
    given = sample["filtered_resps"]
    if isinstance(given[0], str):
        return str(given[0])
    return str(max(range(len(given)), key=lambda choice: float(given[choice][0])))
