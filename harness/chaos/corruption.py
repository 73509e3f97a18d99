"""Corrupt saved KV: flip a bit of a handoff in its owner's shared memory before the handoff is pulled."""

from __future__ import annotations

import json
import mmap
import random
from functools import cache
from pathlib import Path

import numpy as np

from baton.handoff import digests
from baton.handoff.memory import segments
from baton.handoff.memory.views import HEADER_BYTES, SaveView, records_at, slots_in
from harness.deployment import ENGINE

BLOCK_SIZE = 32  # tokens, on a CPU


def corrupt(pid: int, draw: random.Random, seen: set[int], record_bytes: int) -> int:
    """Flip a bit in each complete save of a worker that is not in `seen`. Return their number.

    These saves are added to `seen`. A save is complete when its digests are written; an earlier change could
    not be detected.
    """
    hit = 0
    for path in segments.DIRECTORY.glob(f"baton-kv-{pid}-*"):
        try:
            with path.open("r+b") as file:
                data = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
        except FileNotFoundError:
            continue  # the owner ended
        offset = records_at(slots_in(data.size, record_bytes))
        headers = data[:offset].view(np.uint64).reshape(-1, HEADER_BYTES // 8)
        for ticket in set(headers[:, 0].tolist()) - seen - {0}:
            slots = np.flatnonzero(headers[:, 0] == ticket)  # sorted by block
            view = SaveView(data, offset, record_bytes, [(int(slot), 1) for slot in slots])
            if view.whole < len(slots) or not _is_save(view, len(slots)):
                continue
            at = draw.randrange(len(slots))
            view.records(at, at + 1)[0, draw.randrange(record_bytes)] ^= 1 << draw.randrange(8)
            seen.add(ticket)
            hit += 1
    return hit


def _is_save(view: SaveView, blocks: int) -> bool:
    """Return whether the digests of the first and the last record have the same seed."""
    ends = (0, blocks - 1)
    seeds = [view.digests(at, at + 1) - digests.of_records(view.records(at, at + 1), 0, at) for at in ends]
    return bool(seeds[0] == seeds[1])


@cache
def record_bytes() -> int:
    """Return the bytes of one KV block of the deployed model, including its drafter's layer."""
    config = json.loads((Path(ENGINE["model"]) / "config.json").read_text())
    layers = config["num_hidden_layers"] + config["num_nextn_predict_layers"]
    head = config["hidden_size"] // config["num_attention_heads"]
    values = layers * 2 * config["num_key_value_heads"] * head * BLOCK_SIZE
    return int(values * np.dtype(ENGINE["dtype"]).itemsize)
