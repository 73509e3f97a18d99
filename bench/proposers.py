"""Drafting from tokens: the time of a step, and how much is accepted when files are repeated.

    python -m bench proposers [--batches 1 16 256] [--contexts 2048 32768]

Time: a batch in which each row gets one token a step; microseconds of CPU for the whole batch, median of the
steps after the first, which indexes the prompts and is reported apart. Replay: the repository's own files, a
third of each as the prompt, the rest as if a greedy model generated it; the hybrid's draft model is an oracle
that is right three times in four. vLLM's n-gram proposer is measured beside ours, and Arctic Inference's
suffix tree where it is installed. The run fails, and reports nothing, when a proposer does not copy a text
that repeats.
"""

from __future__ import annotations

import argparse
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from baton.services.decode.proposers.drafting import DraftBatch, Ints, Proposer
from baton.services.decode.proposers.matching import NgramMatcher
from baton.services.decode.proposers.suffix import SuffixProposer, Tree
from baton.services.speculation import SpeculativeSettings
from harness.stats import median, save
from harness.support import ROOT

K = 4
VOCABULARY = 32_000
STEPS = 30
ORACLE = 0.75
TREE = Tree.of(SpeculativeSettings(method="suffix"))


@dataclass
class Rows:
    """The arrays of a model runner, and a step's batch of them."""

    tokens: Ints
    lengths: Ints
    prompts: Ints
    limits: Ints

    @classmethod
    def of(cls, rows: int, width: int, limit: int = K) -> Rows:
        lengths = np.zeros(rows, dtype=np.int32)
        limits = np.full(rows, limit, dtype=np.int32)
        return cls(np.zeros((rows, width), dtype=np.int32), lengths, lengths.copy(), limits)

    def batch(self, drafted: int = 0) -> DraftBatch:
        names = [str(row) for row in range(len(self.lengths))]
        settled = self.lengths - np.int32(drafted)
        return DraftBatch(names, self.tokens, self.prompts, settled, self.lengths, self.limits)


Propose = Callable[[Rows], list[list[int]]]


def ours(proposer: Proposer, drafted: int = 0) -> Propose:
    def propose(rows: Rows) -> list[list[int]]:
        found = proposer.propose(rows.batch(drafted))
        return [row[:n] for row, n in zip(found.tokens.tolist(), found.counts.tolist(), strict=True)]

    return propose


def vllm_ngrams(low: int, high: int, width: int) -> Propose:
    """Make vLLM's proposer as its model runner calls it, without a VllmConfig for its four numbers."""
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer

    one = object.__new__(NgramProposer)
    one.min_n, one.max_n, one.k, one.max_model_len = low, high, K, width
    one.valid_ngram_draft = np.zeros((1024, K), dtype=np.int32)
    one.valid_ngram_num_drafts = np.zeros(1024, dtype=np.int32)
    one.num_tokens_threshold, one.num_numba_thread_available = 8192, 1

    def propose(rows: Rows) -> list[list[int]]:
        drafts: list[list[int]] = one.propose(K, [[1]] * len(rows.lengths), rows.lengths, rows.tokens)
        return drafts

    return propose


def arctic(depth: int) -> Propose | None:
    """Make Arctic Inference's tree as vLLM's suffix method calls it; None where it is not installed."""
    try:
        from arctic_inference.suffix_decoding import SuffixDecodingCache
    except ImportError:
        return None
    cache = SuffixDecodingCache(max_tree_depth=depth, max_cached_requests=10_000)
    seen: dict[int, int] = {}

    def propose(rows: Rows) -> list[list[int]]:
        drafts = []
        for row, size in enumerate(rows.lengths.tolist()):
            text = rows.tokens[row]
            if row not in seen:
                cache.start_request(row, text[: size - 1])
            cache.add_active_response(row, text[seen.get(row, size - 1) : size].tolist())
            seen[row] = size
            found = cache.speculate(
                row,
                text[max(0, size - depth) : size],
                max_spec_tokens=K,
                max_spec_factor=1.0,
                min_token_prob=0.1,
            )
            drafts.append(list(found.token_ids))
        return drafts

    return propose


def makers() -> dict[str, Callable[[int, int], Propose | None]]:
    """Return by name what makes an empty proposer from (rows, width)."""

    def suffix(drafted: int) -> Callable[[int, int], Propose]:
        return lambda rows, width: ours(
            SuffixProposer(TREE, rows=rows, width=width, most=K, past=10_000), drafted
        )

    return {
        "n-grams 2 to 4": lambda rows, _: ours(NgramMatcher(2, 4, K, rows)),
        "n-grams 2 to 4, vLLM": lambda _, width: vllm_ngrams(2, 4, width),
        "n-grams behind a drafted token": lambda rows, _: ours(NgramMatcher(2, 4, K, rows), 1),
        "suffixes": suffix(0),
        "suffixes, Arctic Inference": lambda *_: arctic(24),
        "suffixes behind a drafted token": suffix(1),
    }


def text(rng: random.Random, size: int) -> list[int]:
    """Return a text: half new tokens, frequent ones more often, half copies of earlier passages."""
    made: list[int] = []
    while len(made) < size:
        length = rng.randrange(5, 60)
        if made and rng.random() < 0.5:
            begin = rng.randrange(len(made))
            made += made[begin : begin + length]
        else:
            made += [int(VOCABULARY ** rng.random()) for _ in range(length)]
    return made[:size]


def check(name: str, propose: Propose) -> None:
    """Check that a text that is repeated is drafted."""
    rows = Rows.of(1, 1024)
    rows.tokens[0, :120] = [*range(1000, 1100), *range(1000, 1020)]
    rows.lengths[:] = rows.prompts[:] = 120
    if propose(rows)[0] != [1020, 1021, 1022, 1023]:
        raise SystemExit(f"{name} does not copy a text that repeats: the figures would mean nothing")


def measure(propose: Propose, texts: list[list[int]], context: int) -> tuple[float, float]:
    """Return the microseconds of a step, and of the first one."""
    rows = Rows.of(len(texts), context + STEPS + K)
    for row, one in enumerate(texts):
        rows.tokens[row, : len(one)] = one
    took = []
    for step in range(STEPS):
        rows.lengths[:] = context + step
        if step == 0:
            rows.prompts[:] = context - 1
        began = time.process_time()
        propose(rows)
        took.append(1e6 * (time.process_time() - began))
    return median(took[1:]), took[0]


def sources() -> list[list[int]]:
    """Return the words of Python files, as numbers."""
    numbers: dict[str, int] = {}
    files = sorted([*ROOT.glob("scheduler/**/*.py"), *ROOT.glob("handoff/*.py")])
    words = [re.findall(r"\w+|[^\w\s]|\n| +", file.read_text())[:2500] for file in files]
    return [[numbers.setdefault(word, len(numbers)) for word in one] for one in words if len(one) > 300]


def replay(
    proposer: Proposer, files: list[list[int]], limit: int, *, oracle: bool = False
) -> dict[str, float]:
    """Return drafted and accepted tokens and those a step; with an oracle, its drafts count too."""
    rows = Rows.of(1, 4096, limit - oracle)
    rng = random.Random(1)
    steps = drafted = accepted = written = 0
    for number, file in enumerate(files):
        position = len(file) // 3
        rows.prompts[:] = position
        written += len(file) - position
        while position < len(file):
            rows.tokens[0, :position] = file[:position]
            guess = [file[position] if rng.random() < ORACLE else VOCABULARY] if oracle else []
            rows.tokens[0, position : position + len(guess)] = guess
            rows.lengths[:] = position + len(guess)
            batch = rows.batch(len(guess))
            found = proposer.propose(
                DraftBatch(
                    [str(number)], batch.tokens, batch.prompts, batch.settled, batch.lengths, batch.limits
                )
            )
            draft = guess + found.tokens[0, : found.counts[0]].tolist()
            right = 0
            while right < len(draft) and file[position : position + right + 1] == [*draft[: right + 1]]:
                right += 1
            steps, drafted, accepted = steps + 1, drafted + len(draft), accepted + right
            position += right + 1
        proposer.forget([str(number)])
    return {
        "drafted": drafted,
        "accepted": accepted,
        "acceptance": round(accepted / max(drafted, 1), 3),
        "tokens_a_step": round(written / steps, 3),
    }


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 256])
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 32_768])
    options = parser.parse_args(arguments)
    times: dict[str, Any] = {}
    for name, make in makers().items():
        one = make(1, 1024)
        if one is None:
            continue
        if "behind" not in name:
            check(name, one)
        times[name] = {}
    print("batch  context  us a step  first step us  proposer")
    for context in options.contexts:
        rng = random.Random(0)
        texts = [text(rng, context + STEPS) for _ in range(max(options.batches))]
        for batch in options.batches:
            for name, figures in times.items():
                made = makers()[name](batch, context + STEPS + K)
                if made is None:
                    continue
                step, first = measure(made, texts[:batch], context)
                figures[f"{batch} x {context}"] = {"step_us": round(step), "first_us": round(first)}
                print(f"{batch:>5}  {context:>7}  {step:>9.0f}  {first:>13.0f}  {name}", flush=True)
    files = sources()
    replayed = {}
    print("drafted  accepted  share  tokens/step  replayed by")
    for limit in (K, 2 * K):
        for oracle in (False, True):
            for name, proposer in replayers(limit).items():
                label = f"{'oracle, then ' if oracle else ''}{name}, {limit} a step"
                result = replayed[label] = replay(proposer, files, limit, oracle=oracle)
                print(
                    "{drafted:>7}  {accepted:>8}  {acceptance:>5.2f}  {tokens_a_step:>11.2f}  ".format(
                        **result
                    )
                    + label
                )
    save("proposers", {"k": K, "steps": STEPS, "times": times, "replay": replayed})


def replayers(limit: int) -> dict[str, Proposer]:
    made: dict[str, Proposer] = {
        f"n-grams {low} to {high}": NgramMatcher(low, high, limit, 1)
        for low, high in ((1, 3), (2, 4), (3, 5), (2, 8))
    }
    for past in (0, 10_000):
        name = f"suffixes, {past} past answers"
        made[name] = SuffixProposer(TREE, rows=1, width=4096, most=limit, past=past)
    return made
