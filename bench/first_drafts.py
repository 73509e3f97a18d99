"""Measure what drafts that come with a handoff cost in the last prefill step, and what decoding gains.

One engine with the demo model and its MTP layer hands prompts over to itself, so the figures include neither
network nor router. Each prompt runs with every number of drafts, in rotating order; 0 is a handoff without
drafts. The time to the first token ends with the last prefill step. The times to the second and third tokens
begin with the decode request and include loading the KV.
"""

from __future__ import annotations

import time
from typing import Any

from baton.handoff.params import load_params, save_params
from baton.services.decode.proposers import registry
from baton.services.speculation import SpeculativeSettings
from bench.options import options
from bench.prompts import FOLDER, held_out
from harness.engines import Engine, EngineProcess, Options
from harness.stats import median, save

DRAFTS = (0, 1, 2, 3, 5)
IN_FORCE = 3  # tokens drafted in each decode step
LIMIT = max(DRAFTS)
ANSWER = 24  # tokens


class _InForce:
    def __getitem__(self, requests: int) -> int:
        return IN_FORCE


def main(arguments: list[str]) -> None:
    prompts = held_out("chat", options(__doc__, arguments, prompts=40).prompts, longest=200)
    runs: dict[int, list[dict[str, float]]] = {drafts: [] for drafts in DRAFTS}
    answers: list[set[tuple[int, ...]]] = []
    with EngineProcess(_options()) as engine:
        engine.call(_install)
        print("the engine is loaded", flush=True)
        for drafts in DRAFTS:  # the first requests compile and allocate
            engine.call(_hand_over, f"warm-{drafts}", prompts[0], drafts)
        for number, prompt in enumerate(prompts):
            seen = set()
            for turn in range(len(DRAFTS)):
                drafts = DRAFTS[(turn + number) % len(DRAFTS)]
                found, answer = engine.call(_hand_over, f"{number}-{drafts}", prompt, drafts)
                runs[drafts].append(found)
                seen.add(answer)
            answers.append(seen)
    differ = sum(len(seen) > 1 for seen in answers)
    if differ:
        raise SystemExit(f"{differ} of {len(prompts)} answers differ with the number of drafts")
    arms = {str(drafts): _summary(found) for drafts, found in runs.items()}
    for name, figures in arms.items():
        print(f"{name} drafts: {figures}", flush=True)
    save("first-drafts", {"prompts": len(prompts), "in_force": IN_FORCE, "arms": arms})


def _options() -> Options:
    settings = SpeculativeSettings(method="mtp", num_speculative_tokens=LIMIT)
    config = registry.method("mtp").engine_config(settings)
    config["num_speculative_tokens"] = LIMIT
    config["num_speculative_tokens_per_batch_size"] = [(1, 256, LIMIT)]
    engine: dict[str, Any] = {
        "dtype": "float32",
        "enable_prefix_caching": False,
        "max_num_batched_tokens": 256,
        "speculative_config": config,
        "additional_config": {"baton": {"speculative": settings.model_dump()}},
    }
    return Options(FOLDER / "weights-mtp", "both", cores="0", engine=engine)


def _summary(runs: list[dict[str, float]]) -> dict[str, float]:
    found = {key: round(median([one[key] for one in runs]), 2) for key in runs[0] if key.endswith("_ms")}
    tokens = sum(one["first_step_tokens"] for one in runs) / len(runs)
    return {"first_step_tokens": round(tokens, 3), **found}


# These run in the engine's process.

_SEAM: list[Any] = []


def _install(engine: Engine) -> None:
    from baton.services.engine.patches.draft_length import WhileDecoding
    from baton.services.engine.patches.first_drafts import FirstDrafts

    WhileDecoding(engine.core.scheduler, _InForce(), 0)
    _SEAM.append(FirstDrafts(engine.core.scheduler, 0))


def _hand_over(
    engine: Engine, name: str, prompt: list[int], drafts: int
) -> tuple[dict[str, float], tuple[int, ...]]:
    """Hand over one prompt with `drafts` drafts. Return its figures and the start of its answer."""
    from baton.services.engine.patches import first_drafts

    seam = _SEAM[0]
    seam._most = drafts
    read = engine.add(f"{name}-read", prompt, 1, save_params(1))
    first_drafts.want(engine.core.scheduler.requests[f"{name}-read"])
    began = time.monotonic()
    made: dict[str, list[int]] = {}
    first_token = 0.0
    while engine.step():
        made |= seam.take()
        if read.tokens and not first_token:
            first_token = time.monotonic() - began
    if read.saved is None or read.saved.manifest is None:
        raise RuntimeError(f"the KV of {name} was not saved")
    load = load_params(1, read.saved.manifest.num_tokens, read.saved.manifest, f"{name}-read")
    answer = engine.add(name, prompt, ANSWER, load, written=read.tokens)
    first_drafts.give(engine.core.scheduler.requests[name], made.get(f"{name}-read", []))
    began, ends = time.monotonic(), list[float]()  # ends: when each token after the first arrived
    first_step = 0
    while engine.step():
        new = len(answer.tokens) - len(ends)
        first_step = first_step or new
        ends += [time.monotonic() - began] * new
    return {
        "first_step_tokens": float(first_step),
        "first_token_ms": 1e3 * first_token,
        "second_token_ms": 1e3 * ends[0],
        "third_token_ms": 1e3 * ends[1],
    }, tuple(answer.tokens)
