"""Compare the greedy answers of many arms on one GPU with those of one engine, and time handoffs.

Where an answer differs, the reference reports the gap between its two best tokens at that position: in
bfloat16 another batch or attention backend sums in another order, which can flip a near-tie.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import aiohttp
from tokenizers import Tokenizer

from bench.gpu_fleet import Arm, Keep, Served, drafts, handoffs, killed
from bench.traffic import Answer, Prompt, stream
from harness.support import ROOT

FOLDER = ROOT / "deploy" / "demo-model"
DEMO, DEMO_MTP, EAGLE3 = (str(FOLDER / name) for name in ("weights", "weights-mtp", "eagle3"))
REFERENCE = "one"
PAIR, ONE = {"prefill": 1, "decode": 1}, {"mixed": 1}  # workers
KILLED, KILLED_MTP = "killed", "killed-mtp"  # their decode worker is killed mid-answer
LONG, KILLED_FROM = 512, 64  # tokens of the answer whose worker is killed, and how many it has by then
LOOKS, LOOK_S = 10, 0.1
REQUEST_S = 90.0  # the first requests compile
# CUDA graphs of decode steps, without torch.compile.
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
# PyTorch's and Triton's operators instead of vLLM's compiled ones.
NATIVE: dict[str, Any] = {
    "attention_backend": "TRITON_ATTN",
    "compilation_config": {"mode": 0, "custom_ops": ["none"], "cudagraph_mode": "NONE"},
    "kernel_config": {"ir_op_priority": {"rms_norm": ["native"], "fused_add_rms_norm": ["native"]}},
}
PROMPTS = (
    "<|user|>\nHello, how are you today?\n<|assistant|>\n",
    "The sea is wide and the mountains are high. Tell me about them.",
    "def add(a, b):\n    return",
    "Count from one to twenty: one, two, three, four,",
    "What is 12 plus 30?",
    "Once upon a time there was a small boat on a large lake, and in the boat sat",
    "List three colours and three animals, one a line:",
    "word " * 300 + "Now say what was repeated.",
    "The sea is wide. " * 350,
)
Requests = (aiohttp.ClientError, TimeoutError, RuntimeError)  # errors of a request


def arm(
    *,
    model: str = DEMO,
    pair: bool = True,
    drafts: dict[str, Any] | None = None,
    by: str = "",
    handoff: dict[str, Any] | None = None,
    **extra: Any,
) -> Arm:
    """Return an arm of one engine or of 1P1D.

    by: the transport; handoff: its further settings; extra: arguments for vLLM.
    """
    made: Arm = {"workers": dict(PAIR if pair else ONE)}
    made["engine"] = {"model": model, "speculative_config": drafts, "extra": {"enforce_eager": True, **extra}}
    made["handoff"] = {"staging_mib": 128, **({"transports": [by]} if by else {}), **(handoff or {})}
    return made


ARMS: dict[str, Arm] = {
    REFERENCE: arm(pair=False),
    "shm": arm(by="shm"),
    "tcp": arm(by="tcp"),
    "graphs": arm(enforce_eager=False, compilation_config=GRAPHS),
    "triton": arm(attention_backend="TRITON_ATTN"),
    "native": arm(**NATIVE),
    "one-mtp": arm(model=DEMO_MTP, pair=False, drafts={"method": "mtp"}),
    "mtp": arm(model=DEMO_MTP, drafts={"method": "mtp"}),
    "mtp-baton": arm(model=DEMO_MTP, drafts={"method": "mtp", "verifier": "baton"}),
    "mtp-ngram": arm(
        model=DEMO_MTP, drafts={"method": "mtp", "mtp_strategy": "with_ngram", "num_model_steps": 1}
    ),
    "eagle3": arm(drafts={"method": "eagle3", "model": EAGLE3, "verifier": "baton"}),
    "ngram": arm(drafts={"method": "ngram", "verifier": "baton"}),
    "fp8": arm(handoff={"kv_wire_dtype": "fp8_e4m3"}),
    "int8": arm(handoff={"kv_wire_dtype": "int8"}),
    "window": arm(handoff={"staging_mib": 4}),  # the longest prompt takes more than half of it
    KILLED: {**arm(), "workers": PAIR | {"decode": 2}},
    KILLED_MTP: {
        **arm(model=DEMO_MTP, drafts={"method": "mtp", "verifier": "baton"}),
        "workers": PAIR | {"decode": 2},
    },
    # vLLM's defaults: torch.compile and piecewise graphs.
    "compiled": arm(enforce_eager=False),
}
USUAL = [name for name in ARMS if name != "compiled"]
ENGINE = {
    "dtype": "bfloat16",
    "max_model_len": 2048,
    "max_num_seqs": 16,
    "kv_cache_gib": 0.5,
    "tool_call_parser": None,
}


async def compare(served: Served, tokens: int, keep: Keep) -> None:
    """Compare the arms' answers with the reference's, then measure their handoffs.

    All arms answer at the same time. Handoffs are measured one arm at a time, because the arms share the
    GPU, and with prompts that no worker has cached. `keep` gets the figures after each arm.
    """
    tokenizer = Tokenizer.from_file(f"{DEMO}/tokenizer.json")
    prompts = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    unseen = [[*tokenizer.encode("Again: ").ids, *prompt] for prompt in prompts]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=REQUEST_S)) as http:
        before = served.metrics()
        asked = [answers(http, served.url, name, prompts, tokens) for name in served.arms]
        found = dict(zip(served.arms, await asyncio.gather(*asked), strict=True))
        after = served.metrics()
        reference = REFERENCE if REFERENCE in found and any(found[REFERENCE]) else served.arms[0]
        arms: dict[str, Any] = {}
        figures = {"reference": reference, "tokens": tokens, "arms": arms}
        for name, given in found.items():
            arms[name] = await compared(http, served.url, reference, prompts, given, found[reference])
            arms[name] |= drafts(before[name], after[name])
            print(f"{name:>10}", arms[name], flush=True)
            keep(figures)
        for name in served.arms:
            if all(found[name]) and "decode" in served.one.config["models"][name]["workers"]:
                arms[name]["handoffs"] = await _handoffs(http, served, name, unseen)
                print(f"{name:>10}", arms[name]["handoffs"], flush=True)
                keep(figures)
        for name in served.arms:
            if served.one.config["models"][name]["workers"].get("decode", 0) > 1:
                [expected] = await answers(http, served.url, reference, prompts[:1], LONG)
                answer = Answer(0.0)
                at = await killed(http, served, name, prompts[0], (LONG, KILLED_FROM), answer)
                same = [one == other for one, other in zip(answer.token_ids, expected, strict=False)]
                arms[name]["killed"] = {"at": at, "equal": sum(same), "of": LONG}
                print(f"{name:>10}", arms[name]["killed"], flush=True)
                keep(figures)


async def compared(
    http: aiohttp.ClientSession,
    url: str,
    reference: str,
    prompts: list[list[int]],
    found: list[list[int]],
    expected: list[list[int]],
) -> dict[str, Any]:
    """Return the number of equal answers, and where and how narrowly each of the others first differs."""
    places = differences(found, expected)
    for place in places:
        at = [*prompts[place["prompt"]], *found[place["prompt"]][: place["at"]]]
        place["lead"] = await lead(http, url, reference, at)
    return {
        "equal": sum(a == b and bool(a) for a, b in zip(found, expected, strict=True)),
        "of": len(prompts),
        "unanswered": sum(not one for one in found),
        "differences": places,
    }


async def _handoffs(
    http: aiohttp.ClientSession, served: Served, name: str, unseen: list[list[int]]
) -> dict[str, Any]:
    """Return the times of an arm's handoffs of prompts that no worker has cached."""
    before = served.metrics()[name]
    await answers(http, served.url, name, unseen, 2)
    for _ in range(LOOKS):  # the last handoff may be counted after its answer
        moved = handoffs(before, served.metrics()[name])
        if sum(moved.get("loaded", {}).values()) == len(unseen):
            break
        await asyncio.sleep(LOOK_S)
    return moved


async def answers(
    http: aiohttp.ClientSession, url: str, name: str, prompts: Sequence[Prompt], tokens: int
) -> list[list[int]]:
    """Return an arm's answers, one request at a time, empty from the first failed request on."""
    found: list[list[int]] = []
    for prompt in prompts:
        try:
            found.append((await stream(http, url, name, prompt, tokens)).token_ids)
        except Requests as error:
            print(f"{name:>10} {error!r}"[:600], flush=True)
            break
    return found + [[]] * (len(prompts) - len(found))


def differences(answers: list[list[int]], others: list[list[int]]) -> list[dict[str, Any]]:
    """Return the first position where each answer differs from the other, with both tokens."""
    return [
        {"prompt": number, "at": at, "token": mine, "reference": theirs}
        for number, (answer, other) in enumerate(zip(answers, others, strict=True))
        for at, (mine, theirs) in enumerate(zip(answer, other, strict=False))
        if mine != theirs and answer[:at] == other[:at]
    ]


async def lead(http: aiohttp.ClientSession, url: str, model: str, prompt: list[int]) -> float | None:
    """Return the log-probability gap between the two best next tokens; None if the request fails."""
    body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": 2}
    try:
        async with http.post(f"{url}/v1/completions", json=body) as response:
            answer = json.loads(await response.text())
            best: list[float] = sorted(answer["choices"][0]["logprobs"]["top_logprobs"][0].values())
    except (*Requests, KeyError, TypeError, ValueError) as error:
        print(f"no log-probabilities from {model}: {error!r}"[:300], flush=True)
        return None
    return round(best[-1] - best[-2], 4)
