"""Time per output token with each speculative method against none, on the demo model.

Engines alone first: a method's engine and one without speculation, a core each, take turns over the same
prompts; only one works at a time. Fixed lengths and "auto" take turns within the method's engine. Then whole
deployments over HTTP, with and without, each on both cores: 1P1D (an engine a core) and one mixed worker. The
router and the scheduler share these cores.

Answers are greedy: a method whose answers differ from those of the engine without is not reported on.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp

from bench.drafting_engine import AUTO, CLOCKS, EngineProcess, Run
from bench.prompts import FOLDER, KINDS, held_out
from bench.stats import median, save
from bench.traffic import stream
from tests.e2e.deployment import MODEL_NAME, deployment

STREAMS = (1, 4, 16)
PROMPTS = {1: 8, 4: 24, 16: 96}  # of a measurement
LIMIT = 4
MODEL_LIMIT = 6  # of the trained heads
HYBRID_LIMIT = 10
LONG = 32  # tokens of an answer at least, over HTTP
EQUAL = 0.95  # of the answers; float32 breaks ties of two tokens by the shape of the batch
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 2048,
    "max_num_seqs": 16,
    "kv_cache_gib": 0.25,
    "enable_prefix_caching": False,
}
PLAIN, MTP, EAGLE3 = (str(FOLDER / name) for name in ("weights", "weights-mtp", "eagle3"))


# The same prompts are asked again and again: without this, suffixes would be looked up in the very answers.
NO_PAST = {"suffix_decoding_max_cached_requests": 0}


def _auto(method: str, limit: int = LIMIT, **more: Any) -> dict[str, Any]:
    return {"method": method, "num_speculative_tokens": AUTO, "max_speculative_tokens": limit, **more}


def _hybrid(strategy: str, **more: Any) -> dict[str, Any]:
    """The demo model's MTP layer was trained on its own drafts: it is right further ahead than one token."""
    return _auto("mtp", HYBRID_LIMIT, num_model_steps=4, mtp_strategy=strategy, **more)


# Method: the model, its settings, and the lengths that take turns.
METHODS: dict[str, tuple[str, dict[str, Any], tuple[int | str, ...]]] = {
    "ngram": (PLAIN, _auto("ngram"), (LIMIT, AUTO)),
    "suffix": (PLAIN, _auto("suffix", HYBRID_LIMIT, **NO_PAST), (HYBRID_LIMIT, AUTO)),
    "mtp": (MTP, _auto("mtp", MODEL_LIMIT), (0, 2, 4, 6, AUTO)),
    "eagle3": (PLAIN, _auto("eagle3", MODEL_LIMIT, model=EAGLE3), (2, 4, 6, AUTO)),
    "mtp + ngram": (MTP, _hybrid("with_ngram"), (2, 4, 10, AUTO)),
    "mtp + suffix": (MTP, _hybrid("with_suffix", **NO_PAST), (2, 4, 10, AUTO)),
}
SERVED = "mtp + suffix"  # the method of the deployments


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="turns of each engine")
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS), metavar="NAME")
    parser.add_argument("--served", choices=[*METHODS, "none"], default=SERVED, help="by the deployments")
    parser.add_argument(
        "--clock", choices=list(CLOCKS), default="wall", help="cpu: on a busy machine, to try"
    )
    options = parser.parse_args(arguments)
    prompts = {kind: held_out(kind, 2 * max(PROMPTS.values())) for kind in KINDS}
    with EngineSet(options.clock) as engines:
        results = {
            name: compare(engines, name, prompts, options.rounds, options.clock) for name in options.methods
        }
        lengths = {kind: [len(a) for a in answers] for kind, answers in engines.answers(prompts).items()}
    print_goals(goals(results))
    served = {}
    if options.served != "none":
        served = serve(options.served, prompts, lengths, max(1, options.rounds - 1))
    save(
        "speculation",
        {
            "rounds": options.rounds,
            "clock": options.clock,
            "ms_per_token": results,
            "goals": goals(results),
            "served_method": options.served,
            "served": served,
        },
    )


class EngineSet(ExitStack):
    """The engine without speculation, which stays, and one with, which changes."""

    def __init__(self, clock: str) -> None:
        super().__init__()
        self.plain = EngineProcess({**ENGINE, "model": PLAIN}, 0, clock)
        self.callback(self.plain.close)

    def __enter__(self) -> EngineSet:
        super().__enter__()
        self.plain.ready()
        return self

    def answers(self, prompts: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        """What is answered without speculation."""
        return {kind: self.plain.measure(asked, 16, None).answers for kind, asked in prompts.items()}


def compare(
    engines: EngineSet, name: str, prompts: dict[str, list[list[int]]], rounds: int, clock: str
) -> dict[str, Any]:
    """One method against none: kind -> streams -> milliseconds by length, and how much was accepted."""
    model, spec, lengths = METHODS[name]
    method = EngineProcess({**ENGINE, "model": model, "speculative_config": spec}, 1, clock)
    result: dict[str, Any] = {}
    try:
        method.ready()
        reference = engines.answers(prompts)
        for kind, asked in prompts.items():  # the first requests compile and allocate
            equal = _equal(method.measure(asked, 16, AUTO), reference[kind])
            if equal < EQUAL:
                raise RuntimeError(f"{name}: {equal:.0%} of the answers are those without speculation")
        for kind, asked in prompts.items():
            for streams in STREAMS:
                runs: dict[str, list[Run]] = {}
                few = asked[: PROMPTS[streams]]
                method.measure(few, streams, AUTO)  # a server has met its load before
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
    return {
        "ms": {name: round(median([run.ms_per_token for run in them]), 3) for name, them in runs.items()},
        "accepted": accepted,
        "auto_limits": {str(limit): limits[limit] for limit in sorted(limits)},
    }


def goals(results: dict[str, Any]) -> dict[str, Any]:
    """What is wanted, as ratios of times per output token."""
    found: dict[str, Any] = {}
    cells = [
        (name, kind, streams, row["ms"])
        for name, kinds in results.items()
        for kind, loads in kinds.items()
        for streams, row in loads.items()
    ]
    over = {
        f"{name}, {kind}, {streams}": round(ms[AUTO] / _best_fixed(ms) - 1, 3)
        for name, kind, streams, ms in cells
    }
    if over:
        worst = max(over, key=lambda cell: over[cell])
        found["auto over the best fixed length (goal <= 0.05)"] = {"worst": over[worst], "where": worst}
    for kind in KINDS:
        faster = {
            name: round(ms["none"] / min(value for key, value in ms.items() if key != "none"), 2)
            for name, its_kind, streams, ms in cells
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


def _best_fixed(ms: dict[str, float]) -> float:
    """None is a fixed length too: 0."""
    return min(value for key, value in ms.items() if key != AUTO)


def _speed(results: dict[str, Any], name: str, kind: str, streams: str) -> float:
    """Against the engine without that took turns with it: the machine's moods hit both."""
    ms = results[name][kind][streams]["ms"]
    return float(ms["none"] / ms[AUTO])


def print_goals(found: dict[str, Any]) -> None:
    for goal, value in found.items():
        print(f"{goal}: {value}")


def serve(
    name: str, prompts: dict[str, list[list[int]]], lengths: dict[str, list[int]], rounds: int
) -> dict[str, Any]:
    """Deployments with and without, in turns: placement -> kind -> streams -> milliseconds a token."""
    model, spec, _ = METHODS[name]
    arms = {
        "none": {"model": PLAIN, "speculative_config": None},
        name: {"model": model, "speculative_config": spec},
    }
    pairs = {
        kind: [
            (prompt, length) for prompt, length in zip(asked, lengths[kind], strict=True) if length >= LONG
        ]
        for kind, asked in prompts.items()
    }
    results: dict[str, Any] = {}
    for placement, fleet in {"1P1D": (1, 1, 0), "aggregated": (0, 0, 1)}.items():
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            up = {
                arm: stack.enter_context(
                    deployment(Path(folder) / str(number), engine={**ENGINE, **engine})
                ).up(*fleet)
                for number, (arm, engine) in enumerate(arms.items())
            }
            for one in up.values():
                for asked in pairs.values():
                    asyncio.run(_drive(one.url, asked, 16))
            for kind, asked in pairs.items():
                for streams in STREAMS:
                    few = asked[: PROMPTS[streams]]
                    runs: dict[str, list[float]] = {arm: [] for arm in arms}
                    for _ in range(rounds):
                        for arm, one in up.items():
                            runs[arm].append(asyncio.run(_drive(one.url, few, streams)))
                    row = {arm: round(median(values), 3) for arm, values in runs.items()}
                    results.setdefault(placement, {}).setdefault(kind, {})[str(streams)] = row
                    print(f"{placement:>12} {kind:>10} {streams:>2}", row, flush=True)
    return results


async def _drive(url: str, asked: list[tuple[list[int], int]], streams: int) -> float:
    """Answer the prompts, so many at a time; median milliseconds a token of a whole answer.

    From the question to the last token: drafted tokens arrive in bunches, and the first of them is no start.
    """
    gc.collect()
    waiting = list(asked)
    found: list[float] = []

    async def one(http: aiohttp.ClientSession) -> None:
        while waiting:
            prompt, length = waiting.pop(0)
            answer = await stream(http, url, MODEL_NAME, prompt, length)
            found.append(1e3 * (answer.arrivals[-1] - answer.asked) / length)

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as http:
        await asyncio.gather(*(one(http) for _ in range(streams)))
    return median(found)
