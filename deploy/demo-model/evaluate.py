"""Measure how many held-out questions a model answers correctly, with transformers on the CPU."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from chat import prompt_of
from dialogues import GENERATORS, stream
from transformers import AutoModelForCausalLM, AutoTokenizer

VALIDATION_SEED = 10_001


def holds(reply: str, answer: str) -> bool:
    """Return whether the reply contains `answer`, but not as part of a longer word or number."""
    before = r"(?<![\w.-])" if answer[:1].isalnum() else ""
    after = r"(?!\w)" if answer[-1:].isalnum() else ""
    return re.search(before + re.escape(answer) + after, reply) is not None


def questions(domain: str, count: int) -> list[tuple[str, str]]:
    """Return held-out prompts of a domain, with the text that each reply must contain."""
    found: dict[str, str] = {}
    for _, dialogue in itertools.islice(stream(VALIDATION_SEED, held_out=True, domain=domain), 20 * count):
        if dialogue.answer is not None and len(found) < count:
            found[prompt_of(dialogue)] = dialogue.answer
    return list(found.items())


def report(folder: Path, count: int) -> Iterator[str]:
    """Yield a Markdown table of greedy float32 answers to `count` questions per domain."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    yield "| held-out questions | asked | right |\n| --- | ---: | ---: |"
    for domain in sorted({g.domain for g in GENERATORS.values()}):
        asked, right = questions(domain, count), 0
        for chunk in (asked[i : i + 32] for i in range(0, len(asked), 32)):
            prompts = [prompt for prompt, _ in chunk]
            batch = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
            with torch.inference_mode():
                output = model.generate(**batch, max_new_tokens=160, do_sample=False)
            new = output[:, batch["input_ids"].shape[1] :]
            replies = tokenizer.batch_decode(new, skip_special_tokens=True)
            right += sum(holds(reply, answer) for reply, (_, answer) in zip(replies, chunk, strict=True))
        if asked:
            yield f"| {domain} | {len(asked)} | {100 * right / len(asked):.0f}% |"
