"""Score a model folder on the held-out parts: perplexity, right answers, and samples to read.

Only files of the folder and transformers are used, so that what is measured is what gets served.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from chat import IM_START, prompt_of
from corpus import TEXT_DOMAINS, Tokens, dialogue_tokens, text_tokens, windows
from dialogues import GENERATORS, stream
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

VALIDATION_SEED = 10_001
WINDOW = 512
_BATCH = 32

SAMPLES = (
    "Hello",
    "What is the capital of France?",
    "What is 12 + 7?",
    "Write a short poem.",
    "Tell me a story about a fox.",
    "Who are you?",
    "Write a Python function that reverses a string.",
    "How many minutes are in 3 hours?",
    "Repeat after me: the blue boat waited by the old bridge",
    "Extract name, age and city as JSON: Anna Reed is 31 years old and lives in Oslo.",
    "Sort these numbers: 42, 7, 19, 3",
    "What is the meaning of quantum physics?",
)


class Answers:
    """Greedy replies of a model folder, many prompts at a time."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def to(self, prompts: Sequence[str], max_new_tokens: int = 160) -> Iterator[str]:
        """Yield replies to rendered prompts in order, without the end token, with markers of tool calls."""
        for chunk in _batched(prompts, _BATCH):
            batch = self.tokenizer(list(chunk), return_tensors="pt", padding=True, add_special_tokens=False)
            with torch.inference_mode():
                output = self.model.generate(**batch, max_new_tokens=max_new_tokens, do_sample=False)
            replies: list[str] = self.tokenizer.batch_decode(
                output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True
            )
            yield from replies


def _batched(values: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    return (values[i : i + size] for i in range(0, len(values), size))


def holds(reply: str, answer: str) -> bool:
    """Return whether the reply contains `answer` as a whole, not as a part of a longer word or number."""
    before = r"(?<![\w.-])" if answer[:1].isalnum() else ""
    after = r"(?!\w)" if answer[-1:].isalnum() else ""
    return re.search(before + re.escape(answer) + after, reply) is not None


def mean_loss(model: PreTrainedModel, tokens: Tokens, most: int = 64) -> float:
    """Return the mean weighted cross-entropy, in nats per token, over up to `most` windows."""
    total = count = 0.0
    for start in windows(tokens, WINDOW)[:most]:
        ids = torch.from_numpy(tokens.ids[start : start + WINDOW + 1].astype(np.int64))
        weights = torch.from_numpy((tokens.weights[start + 1 : start + WINDOW + 1] >= 10).astype(np.float32))
        with torch.inference_mode():
            logits = model(ids[None, :-1]).logits[0]
        total += float((functional.cross_entropy(logits, ids[1:], reduction="none") * weights).sum())
        count += float(weights.sum())
    return total / count


def questions(domain: str, count: int) -> list[tuple[str, str]]:
    """Return held-out prompts of a domain, each with the text that its reply has to contain."""
    found: dict[str, str] = {}
    for _, dialogue in itertools.islice(stream(VALIDATION_SEED, held_out=True, domain=domain), 20 * count):
        if dialogue.answer is not None and len(found) < count:
            found[prompt_of(dialogue)] = dialogue.answer
    return list(found.items())


def _losses(answers: Answers, tokenizer: Tokenizer) -> Iterator[str]:
    yield "| held-out text | loss, nats a token | perplexity |\n| --- | ---: | ---: |"
    parts = {domain: text_tokens(tokenizer, domain, held_out=True) for domain in TEXT_DOMAINS}
    parts["dialogues (replies only)"] = dialogue_tokens(tokenizer, 1500, VALIDATION_SEED, held_out=True)
    for domain, tokens in parts.items():
        loss = mean_loss(answers.model, tokens)
        yield f"| {domain} | {loss:.3f} | {math.exp(loss):.2f} |"


def _scores(answers: Answers, count: int) -> Iterator[str]:
    yield "| held-out questions | asked | right |\n| --- | ---: | ---: |"
    for domain in sorted({g.domain for g in GENERATORS.values()}):
        asked = questions(domain, count)
        if not asked:
            continue
        replies = answers.to([prompt for prompt, _ in asked])
        right = sum(holds(reply, answer) for reply, (_, answer) in zip(replies, asked, strict=True))
        yield f"| {domain} | {len(asked)} | {100 * right / len(asked):.0f}% |"


def report(folder: Path, count: int) -> str:
    """Return the figures of a model folder as Markdown, for `count` questions per domain."""
    answers = Answers(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = [f"{IM_START}user\n{text}<|im_end|>\n{IM_START}assistant\n" for text in SAMPLES]
    samples = [f"> {ask}\n\n{reply}\n" for ask, reply in zip(SAMPLES, answers.to(prompts), strict=True)]
    return "\n".join([*_losses(answers, tokenizer), "", *_scores(answers, count), "", *samples])
