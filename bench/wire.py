"""Measure how a quantised handoff changes the demo model's KV, answers and drafts, by wire format.

    python -m bench wire [--prompts 64] [--tokens 64] [--formats auto fp8_e4m3 int8]

KV errors: an engine prefills the prompts, and its cache is packed and unpacked. Answers: 1P1D that drafts
with the MTP layer, whose KV is handed over too, against one aggregated engine without drafts. Answers are
greedy, in float32, so only the format can change them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from baton.handoff.memory.cache import BlockCache
from baton.kernels.kv_pack import AS_IS, WIRE_DTYPES, KVTable, pack, unpack
from bench.options import options
from bench.prompts import FOLDER, held_out
from harness.engines import BLOCK_SIZE, Engine, EngineProcess, Options
from harness.speculation.fleets import FLEETS, Outcome, deployment, measure
from harness.stats import save

SHORTEST, LONGEST = 96, 700  # tokens of a prompt
HEAD = 64  # elements of a head, in every layer of the demo model
ENGINE: dict[str, Any] = {
    "model": str(FOLDER / "weights-mtp"),
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "kv_cache_gib": 0.25,
    "enable_prefix_caching": False,
}
MTP = {"method": "mtp", "num_speculative_tokens": 3}


def main(arguments: list[str]) -> None:
    given = options(
        __doc__,
        arguments,
        prompts=64,
        tokens=(64, "of each answer"),
        formats=(list(WIRE_DTYPES), None, WIRE_DTYPES),
    )
    drawn = held_out("chat", 20 * given.prompts, longest=LONGEST)
    prompts = [prompt for prompt in drawn if len(prompt) >= SHORTEST][: given.prompts]
    if len(prompts) < given.prompts:
        raise SystemExit(f"{len(prompts)} held-out prompts have {SHORTEST} tokens or more: choose fewer")
    kept: dict[str, dict[str, Any]] = kv_errors(prompts, given.formats)
    alone = answers("aggregated", AS_IS, prompts, given.tokens, speculate=False)
    for name in given.formats:
        found = answers("1P1D", name, prompts, given.tokens, speculate=True)
        kept[name] |= compare(found, alone)
        print(name, kept[name], flush=True)
    save(
        "handoff-wire",
        {
            "model": "deploy/demo-model/weights-mtp",
            "dtype": ENGINE["dtype"],
            "prompts": len(prompts),
            "prompt_tokens": sum(map(len, prompts)),
            "answer_tokens": given.tokens,
            "formats": kept,
        },
    )


def answers(fleet: str, wire: str, prompts: list[list[int]], tokens: int, *, speculate: bool) -> Outcome:
    """Start a deployment and return its answers."""
    engine = {**ENGINE, "speculative_config": MTP if speculate else None}
    with (
        tempfile.TemporaryDirectory() as folder,
        deployment(Path(folder) / fleet, FLEETS[fleet], engine, handoff={"kv_wire_dtype": wire}) as one,
    ):
        return measure(one, prompts, tokens)


def compare(found: Outcome, alone: Outcome) -> dict[str, Any]:
    """Count equal answers, alone and in batches, and say where the others diverge."""
    pairs = list(zip(found.answers, found.together, alone.answers, strict=True))
    changed = [number for number, (one, many, plain) in enumerate(pairs) if not one == many == plain]
    parted = [_parts(found.answers[n], alone.answers[n]) for n in changed]
    gaps = [alone.gaps[n][at] for n, at in zip(changed, parted, strict=True) if at < len(alone.gaps[n])]
    return {
        "unchanged": len(pairs) - len(changed),
        "tokens_before_the_first_change": sorted(parted),
        "largest_gap_overturned": round(max(gaps, default=0.0), 4),  # log-probability, best to second
        "drafted": found.drafted,
        "accepted": found.accepted,
        "acceptance": round(found.accepted / max(1, found.drafted), 4),
        "accepted_per_draft": round(found.accepted_per_draft, 3),
        "handoffs": found.handoffs,
    }


def _parts(left: Sequence[int], right: Sequence[int]) -> int:
    same = [a == b for a, b in zip(left, right, strict=False)]
    return same.index(False) if False in same else len(same)


def kv_errors(prompts: list[list[int]], formats: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the errors of the prompts' KV by format, MTP layer included."""
    engine = {"max_model_len": 1024, "dtype": "float32", "block_size": BLOCK_SIZE}
    spec = {"speculative_config": MTP}
    options = Options(Path(ENGINE["model"]), "bench", engine={**engine, **spec})
    with EngineProcess(options) as process:
        parts = [
            process.call(_read, f"kv-{number}", prompt, formats) for number, prompt in enumerate(prompts)
        ]
    return {name: _sum([part[name] for part in parts]) for name in formats}


def _sum(parts: list[dict[str, float]]) -> dict[str, Any]:
    elements, squares = (sum(part[key] for part in parts) for key in ("elements", "squares"))
    return {
        "bytes_a_token": round(parts[0]["bytes_a_token"], 1),
        "max_error_of_row": float(f"{max(part['most'] for part in parts):.3g}"),
        "mean_error_of_row": float(f"{sum(part['total'] for part in parts) / elements:.3g}"),
        "rms_relative": float(f"{(sum(part['error_squares'] for part in parts) / squares) ** 0.5:.3g}"),
    }


def _read(
    engine: Engine, name: str, prompt: list[int], formats: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Prefill a prompt in the engine's process and return its errors by format."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    answer = engine.add(name, prompt, 64)
    engine.run(until=lambda: bool(answer.tokens))
    (ids,) = engine.core.scheduler.kv_cache_manager.get_block_ids(name)
    cache = get_kv_transfer_group()._worker._cache
    whole = ids[: len(prompt) // BLOCK_SIZE]  # the last block may be partly filled
    found = {wire: _error(cache, whole, wire) for wire in formats}
    engine.core.abort_requests([name])
    engine.run()
    return found


def _error(cache: BlockCache, ids: Sequence[int], wire: str) -> dict[str, float]:
    """Return sums over all rows of all layers of the elements' errors, relative to their row's largest."""
    before = [layer[list(ids)] for layer in cache._tables[0].blocks]
    after = [torch.empty_like(layer) for layer in before]
    there, back = (KVTable(blocks, [HEAD] * len(blocks), wire) for blocks in (before, after))
    records = torch.empty(len(ids), there.record_bytes, dtype=torch.uint8)
    numbers, digests = torch.arange(len(ids)), torch.empty(len(ids), dtype=torch.int64)
    pack(there, numbers, records, digests)
    unpack(back, records, numbers, digests)
    result = dict.fromkeys(("most", "total", "elements", "squares", "error_squares"), 0.0)
    for left, right in zip(before, after, strict=True):
        was, now = (layer.double().reshape(-1, HEAD) for layer in (left, right))
        error = (now - was).abs()
        share = error / was.abs().amax(dim=1, keepdim=True).clamp(min=1e-30)
        result["most"] = max(result["most"], float(share.max()))
        result["total"] += float(share.sum())
        result["elements"] += share.numel()
        result["squares"] += float(was.square().sum())
        result["error_squares"] += float(error.square().sum())
    return {**result, "bytes_a_token": there.record_bytes / BLOCK_SIZE}
