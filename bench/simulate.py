"""Run the simulator: compare policies, simulate large fleets, and measure its error.

    python -m bench simulate                         compare policies, 32P32D, all kinds of traces
    python -m bench simulate --trace FILE --split 8 8 --profile FILE    a Mooncake trace, another fleet
    python -m bench simulate --size                  1,000 workers: how fast the simulator is
    python -m bench simulate --measure               measure the profile of the 80 M model on this machine
    python -m bench simulate --validate              compare its prediction for 2P2D with a real deployment

A simulation is reproducible from its seed; only its speed depends on the machine. docs/simulator.md describes
what is simulated. `baton tune` searches for the best split for a trace.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp

from baton.services.config import PolicySettings, SchedulerSettings
from baton.services.simulate import mooncake, profile
from baton.services.simulate.deployment import Setup, Split
from baton.services.simulate.figures import Goals
from baton.services.simulate.profile import Handoff, Profile
from baton.services.simulate.simulation import simulate
from baton.services.simulate.traces import KINDS, Conversations
from bench.options import options
from bench.report import markdown
from bench.served import MODEL_NAME, longer, up
from bench.traffic import Answer, stream
from harness.deployment import Deployment, deployment
from harness.simulate.compare import LOADS, Compared, Make, compare, conversations, named
from harness.simulate.measure import Sizes, measure
from harness.simulate.validate import CHATS, drive, errors, simulated
from harness.stats import save

TOKENS = 4_160  # longest request of the 80 M model
REAL = {
    "random": PolicySettings(scorers={}),
    "least loaded": PolicySettings(scorers={"queued_prompt_tokens": 1.0, "running_requests": 1.0}),
    "Baton": PolicySettings(),
}
SHOWN = (
    *("requests", "failed", "ttft_mean_ms", "ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms"),
    *("computed_share", "within_goals", "goodput_per_s", "busy_prefill", "busy_decode", "simulated_per_s"),
)


def main(arguments: list[str]) -> None:
    given = options(
        __doc__,
        arguments,
        size=(False, "a fleet of 1,000 workers"),
        measure=(False, "measure the profile of the 80 M model on this machine"),
        validate=(False, "predict a real 2P2D, run it, and print the error"),
        trace=([str], f"kinds ({', '.join(KINDS)}), or a Mooncake file"),
        split=([int], "numbers of prefill and decode workers"),
        rate=(float, "requests/s of a kind of trace; by default the harness's LOADS"),
        seconds=(float, "simulated time of a kind of trace, or real time with --validate"),
        speed=(1.0, "speed-up of a file's arrivals"),
        most=(0, "requests to take from a file; 0: all"),
        policies=([str], "all by default"),
        profile=(Path, "JSON with the speed and size of workers; a default is assumed"),
        goal_ttft=(0.5, "time to first token, s"),
        goal_itl=(0.05, "mean gap of an answer, s"),
        seeds=(1, "traces per kind; figures are medians"),
        routers=1,
        out=(Path, "write JSON with each worker's figures to this file"),
        save=(False, "write bench/results, for docs/benchmarks.md"),
    )
    if given.measure:
        _measure(given)
    elif given.validate:
        _validate(given)
    elif given.size:
        _compare(given, "simulate-size", named(given.policies or ["random", "Baton"]), ["chats"])
    else:
        _compare(given, "simulate", named(given.policies), list(KINDS))


def _compare(given: argparse.Namespace, name: str, arms: Mapping[str, Any], kinds: list[str]) -> None:
    pairs = 500 if given.size else 32
    split = Split(*(given.split or (pairs, pairs)))
    seconds = given.seconds or (90.0 if given.size else 150.0)
    shape = profile.load(given.profile) if given.profile else Profile()
    setup = Setup(split, shape, goals=Goals(given.goal_ttft, given.goal_itl), routers=given.routers)
    loads = {}
    everything = {}
    for kind in given.trace or kinds:
        make = _trace(given, kind, split, seconds, shape)
        found = compare(setup, make, arms, given.seeds)
        loads[kind] = {arm: one.figures for arm, one in found.items()}
        everything[kind] = {arm: [run.busy for run in one.runs] for arm, one in found.items()}
        _show(f"{kind}, {split} ({shape.name})", found)
    result = {
        "split": str(split),
        "profile": shape.name,
        "seconds": seconds,
        "seeds": given.seeds,
        "goals": vars(setup.goals),
        "loads": loads,
    }
    if given.out:
        given.out.write_text(json.dumps({**result, "busy": everything}, indent=2) + "\n")
    if given.save:
        save(name, result)


def _trace(given: argparse.Namespace, kind: str, split: Split, seconds: float, shape: Profile) -> Make:
    if kind in KINDS:
        rate = given.rate or LOADS[kind] * split.prefill
        return conversations(kind, rate, seconds, shape.engine.max_model_len)
    read = mooncake.read(Path(kind), speed=given.speed, most=given.most)
    return lambda _: read


def _show(title: str, found: dict[str, Compared]) -> None:
    rows = [[arm, *(f"{one.figures.get(key, 0.0):.4g}" for key in SHOWN)] for arm, one in found.items()]
    print(f"{title}\n{markdown([['policy', *SHOWN], *rows])}", flush=True)


def _measure(given: argparse.Namespace) -> Profile:
    found = asyncio.run(_measured())
    print(json.dumps(found.model_dump(), indent=2))
    if given.out:
        given.out.write_text(found.model_dump_json(indent=2) + "\n")
    return found


async def _measured() -> Profile:
    engine = longer(TOKENS)
    with tempfile.TemporaryDirectory() as folder, deployment(Path(folder), cold=True, engine=engine) as one:
        await asyncio.to_thread(_up_on_one_core, one)
        worker = one.describe().workers[0].identity.capacity
        sizes = Sizes(worker.max_num_batched_tokens, 8 * worker.max_num_batched_tokens)
        found = await measure(one, _sender(one), sizes, f"{MODEL_NAME}, a core")
    return found.model_copy(update={"handoff": Handoff(**_handoff(Path(engine["model"])))})


def _up_on_one_core(one: Deployment) -> None:
    """Start one worker on one core; by default a single worker gets all cores."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})  # this thread's and its children's
    try:
        one.up(0, 0, 1)
    finally:
        os.sched_setaffinity(0, cores)


def _sender(one: Deployment) -> Any:
    async def send(http: aiohttp.ClientSession, prompt: list[int], output: int) -> Answer:
        return await stream(http, one.url, MODEL_NAME, prompt, output)

    return send


def _handoff(model: Path) -> dict[str, Any]:
    """Return the model's KV bytes per token and its handoff speed, from bench/results/handoff.json."""
    config = json.loads((model / "config.json").read_text())
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    token_bytes = 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head
    return {"token_bytes": token_bytes, "bytes_per_s": 1e9, "latency_s": 0.005, "staging_bytes": 128 << 20}


def _validate(given: argparse.Namespace) -> None:
    shape = profile.load(given.profile) if given.profile else _measure(given)
    cores = shape.engine.model_copy(update={"cores": 2})  # four workers share them
    shape = shape.model_copy(update={"engine": cores})
    seconds, rate = given.seconds or 60.0, given.rate or 2.0
    arms = {}
    for name, policy in REAL.items():
        real, block_tokens = asyncio.run(_real(policy, rate, seconds))
        trace = Conversations(CHATS, rate, seconds, most_tokens=TOKENS - 1, block_tokens=block_tokens)
        setup = Setup(Split(2, 2), shape, SchedulerSettings(policy=policy), warm_share=0.0)
        predicted = simulated(simulate(setup, trace))
        arms[name] = {"real": real, "simulated": predicted, "error_percent": errors(real, predicted)}
        print(name, json.dumps(arms[name]), flush=True)
    if given.save:
        save("simulate-validation", {"rate": rate, "seconds": seconds, "profile": shape.name, "arms": arms})


async def _real(policy: PolicySettings, rate: float, seconds: float) -> tuple[dict[str, float], int]:
    """Return the figures of a real 2P2D and its block size in tokens."""
    # The simulator does not pull prefixes from other workers.
    constants = {f"{SchedulerSettings.__module__}:PREFIX_PULL_S": 0.0}
    scheduler = {"policy": policy.model_dump()}
    with up(2, 2, engine=longer(TOKENS), scheduler=scheduler, constants=constants) as one:
        block_tokens = one.describe().workers[0].identity.capacity.block_size
        warm = Conversations(CHATS, rate, 8.0, seed=1, most_tokens=TOKENS - 1, block_tokens=block_tokens)
        await drive(one, warm, _sender(one))  # the first requests compile and allocate
        trace = Conversations(CHATS, rate, seconds, most_tokens=TOKENS - 1, block_tokens=block_tokens)
        return await drive(one, trace, _sender(one)), block_tokens
