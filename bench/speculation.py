"""Time per output token with each speculative method against none, on the demo model.

Engines alone first: a method's engine and one without speculation, a core each, take turns over the same
prompts; only one works at a time. Fixed numbers of drafted tokens and "auto" take turns within the method's
engine. Then whole deployments over HTTP (bench/speculation_served.py).

Answers are greedy: a method whose answers differ from those of the engine without gets no figures.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from typing import Any

from bench.drafting_engine import AUTO, CLOCKS, EngineProcess, Prefilled, Run
from bench.prompts import FOLDER, KINDS, held_out, whole_blocks
from bench.speculation_served import SHORTEST, Pairs, serve
from harness.stats import median, save

STREAMS = (1, 4, 16)
PROMPTS = {1: 24, 4: 72, 16: 192}  # of a measurement
WARM_STEPS = 400  # of "auto", before a cell is measured: a few seconds of a server's life
LIMIT = 4
MODEL_LIMIT = 6  # of the trained heads
HYBRID_LIMIT = 10
BLOCK = 32  # tokens
PADDING = 0  # the token between the demo model's texts
EQUAL = 0.95  # of the answers; float32 breaks ties of two tokens by the shape of the batch
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 2048,
    "max_num_seqs": 16,
    "kv_cache_gib": 1.0,
    "block_size": BLOCK,
}
SERVED = {**ENGINE, "kv_cache_gib": 0.25, "enable_prefix_caching": False}
PLAIN, MTP, EAGLE3 = (str(FOLDER / name) for name in ("weights", "weights-mtp", "eagle3"))


# The same prompts come again and again: without this, suffixes would be found in their own answers.
NO_PAST = {"suffix_decoding_max_cached_requests": 0}


def _auto(method: str, limit: int = LIMIT, **more: Any) -> dict[str, Any]:
    return {"method": method, "num_speculative_tokens": AUTO, "max_speculative_tokens": limit, **more}


def _hybrid(strategy: str, **more: Any) -> dict[str, Any]:
    """Return a hybrid's config. The demo model's MTP layer was trained to draft several tokens ahead."""
    return _auto("mtp", HYBRID_LIMIT, num_model_steps=4, mtp_strategy=strategy, **more)


# Method: the model, its settings, and the numbers of drafted tokens that take turns.
METHODS: dict[str, tuple[str, dict[str, Any], tuple[int | str, ...]]] = {
    "ngram": (PLAIN, _auto("ngram"), (LIMIT, AUTO)),
    "suffix": (PLAIN, _auto("suffix", HYBRID_LIMIT, **NO_PAST), (HYBRID_LIMIT, AUTO)),
    "mtp": (MTP, _auto("mtp", MODEL_LIMIT), (0, 2, 4, 6, AUTO)),
    "eagle3": (PLAIN, _auto("eagle3", MODEL_LIMIT, model=EAGLE3), (2, 4, 6, AUTO)),
    "mtp + ngram": (MTP, _hybrid("with_ngram"), (2, 4, 10, AUTO)),
    "mtp + suffix": (MTP, _hybrid("with_suffix", **NO_PAST), (2, 4, 10, AUTO)),
}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns of each engine")
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS), metavar="NAME")
    parser.add_argument("--served-rounds", type=int, default=3, help="turns of each deployment; 0: none")
    parser.add_argument(
        "--clock", choices=list(CLOCKS), default="wall", help="cpu: on a busy machine, to try"
    )
    options = parser.parse_args(arguments)
    prompts = {kind: held_out(kind, max(PROMPTS.values())) for kind in KINDS}
    with EngineSet(options.clock, prompts) as engines:
        results = {name: compare(engines, name, options.rounds, options.clock) for name in options.methods}
        lengths = engines.lengths(prompts)
    print_goals(goals(results))
    served = {}
    if options.served_rounds:
        methods = {
            name: {**SERVED, "model": model, "speculative_config": spec}
            for name, (model, spec, _) in METHODS.items()
            if name in options.methods
        }
        plain = {**SERVED, "model": PLAIN, "speculative_config": None}
        served = serve(plain, methods, lengthy(prompts, lengths), STREAMS, options.served_rounds)
    save(
        "speculation",
        {
            "rounds": options.rounds,
            "clock": options.clock,
            "ms_per_token": results,
            "goals": goals(results),
            "served_rounds": options.served_rounds,
            "served": served,
        },
    )


def lengthy(prompts: dict[str, list[list[int]]], lengths: dict[str, list[int]]) -> dict[str, Pairs]:
    """Return the prompts whose answers have SHORTEST tokens or more, with the answers' lengths."""
    return {
        kind: [pair for pair in zip(asked, lengths[kind], strict=True) if pair[1] >= SHORTEST]
        for kind, asked in prompts.items()
    }


class EngineSet(ExitStack):
    """The engine without speculation, which stays, and one with, which changes."""

    def __init__(self, clock: str, prompts: dict[str, list[list[int]]]) -> None:
        super().__init__()
        self._prompts = prompts
        self.prompts: dict[str, list[Prefilled]] = {}  # by kind
        self.answers: dict[str, list[list[int]]] = {}  # to these, without speculation
        self.plain = EngineProcess({**ENGINE, "model": PLAIN}, 0, clock)
        self.callback(self.plain.close)

    def __enter__(self) -> EngineSet:
        super().__enter__()
        self.plain.ready()
        for kind, prompts in self._prompts.items():
            padded = [Prefilled(whole_blocks(prompt, BLOCK, PADDING), []) for prompt in prompts]
            answers = self.plain.measure(padded, 16, None).answers
            self.answers[kind] = [answer for answer in answers if len(answer) > 1]
            self.prompts[kind] = [
                Prefilled(asked.prompt, answer[:1])
                for asked, answer in zip(padded, answers, strict=True)
                if len(answer) > 1
            ]
        return self

    def lengths(self, prompts: dict[str, list[list[int]]]) -> dict[str, list[int]]:
        """Return the number of tokens of each prompt's answer."""
        return {
            kind: [
                len(answer)
                for answer in self.plain.measure([Prefilled(p, []) for p in them], 16, None).answers
            ]
            for kind, them in prompts.items()
        }


def compare(engines: EngineSet, name: str, rounds: int, clock: str) -> dict[str, Any]:
    """Compare a method with none: kind -> streams -> milliseconds by draft length, and what was accepted."""
    model, spec, lengths = METHODS[name]
    method = EngineProcess({**ENGINE, "model": model, "speculative_config": spec}, 1, clock)
    result: dict[str, Any] = {}
    try:
        method.ready()
        for kind, asked in engines.prompts.items():  # the first requests compile and allocate
            equal = _equal(method.measure(asked, 16, AUTO), engines.answers[kind])
            if equal < EQUAL:
                raise RuntimeError(f"{name}: {equal:.0%} of the answers are those without speculation")
        for kind, asked in engines.prompts.items():
            for streams in STREAMS:
                runs: dict[str, list[Run]] = {}
                few = asked[: PROMPTS[streams]]
                warm = 0
                while warm < WARM_STEPS:
                    warm += sum(method.measure(few, streams, AUTO).limits.values())
                for _ in range(rounds):  # A B C A B C
                    runs.setdefault("none", []).append(engines.plain.measure(few, streams, None))
                    for length in lengths:
                        runs.setdefault(str(length), []).append(method.measure(few, streams, length))
                result.setdefault(kind, {})[str(streams)] = row = _row(runs)
                print(f"{name:>12} {kind:>10} {streams:>2}", row["ms"], row["auto_limits"], flush=True)
    finally:
        method.close()
    return result


def _equal(run: Run, reference: list[list[int]]) -> float:
    return sum(a == b for a, b in zip(run.answers, reference, strict=True)) / len(reference)


def _row(runs: dict[str, list[Run]]) -> dict[str, Any]:
    accepted = {
        name: round(sum(run.accepted for run in them) / max(1, sum(run.drafted for run in them)), 2)
        for name, them in runs.items()
        if name != "none"
    }
    auto = runs.get(AUTO, [])
    limits = sum((run.limits for run in auto), start=type(auto[0].limits)()) if auto else {}
    ms = {name: [run.ms_per_token for run in them] for name, them in runs.items()}
    over = {
        name: median([mine / other for mine, other in zip(ms[AUTO], them, strict=True)]) - 1
        for name, them in ms.items()
        if name != AUTO
    }
    return {
        "ms": {name: round(median(them), 3) for name, them in ms.items()},
        "auto_over": {name: round(value, 3) for name, value in over.items()},  # medians of the rounds' ratios
        "accepted": accepted,
        "auto_limits": {str(limit): limits[limit] for limit in sorted(limits)},
    }


def goals(results: dict[str, Any]) -> dict[str, Any]:
    """Return the goals, as ratios of times per output token."""
    found: dict[str, Any] = {}
    cells = [
        (name, kind, streams, row)
        for name, kinds in results.items()
        for kind, loads in kinds.items()
        for streams, row in loads.items()
    ]
    # No drafts at all is a fixed number, too: 0.
    over = {
        f"{name}, {kind}, {streams}": max(row["auto_over"].values()) for name, kind, streams, row in cells
    }
    if over:
        worst = max(over, key=lambda cell: over[cell])
        found["auto over the best fixed length (goal <= 0.05)"] = {
            "worst": over[worst],
            "where": worst,
            "beyond": sum(value > 0.05 for value in over.values()),
            "cells": len(over),
        }
    for kind in KINDS:
        faster = {
            name: round(
                row["ms"]["none"] / min(value for key, value in row["ms"].items() if key != "none"), 2
            )
            for name, its_kind, streams, row in cells
            if its_kind == kind and streams == "1"
        }
        if faster:
            found[f"1 stream, {kind}: times as fast as none (goal of the best >= 1.6)"] = faster
    for hybrid in ("mtp + ngram", "mtp + suffix"):
        if hybrid in results and "mtp" in results:
            found[f"{hybrid}: times as fast as mtp (goal: chat >= 1, repetitive >= 1.3)"] = {
                f"{kind}, {streams}": round(
                    _speed(results, hybrid, kind, streams) / _speed(results, "mtp", kind, streams), 2
                )
                for kind in KINDS
                for streams in map(str, STREAMS)
            }
    return found


def _speed(results: dict[str, Any], name: str, kind: str, streams: str) -> float:
    """Return the speed-up over the engine without, measured in turns: the machine's moods hit both."""
    ms = results[name][kind][streams]["ms"]
    return float(ms["none"] / ms[AUTO])


def print_goals(found: dict[str, Any]) -> None:
    for goal, value in found.items():
        print(f"{goal}: {value}")
