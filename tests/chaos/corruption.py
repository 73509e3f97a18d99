"""Corrupts KV that waits to be pulled: one bit of a saved handoff, in the shared memory of its owner."""

from __future__ import annotations

import json
import mmap
import random
from functools import cache
from pathlib import Path

import numpy as np

from baton.handoff import digests, segments
from baton.handoff.arena import ALIGNMENT
from baton.handoff.views import View
from tests.e2e.deployment import ENGINE

BLOCK_SIZE = 32  # tokens, on a CPU
MOST_BLOCKS = 64  # of a save; the model has room for 32


def corrupt(pid: int, draw: random.Random, seen: set[int], record_bytes: int) -> int:
    """Flip a bit in each whole save of a worker that is not in `seen`, and note it there; how many.

    A save is found by its header and known by its first digest, so that its bytes are hit only after they
    were digested: what is broken before that no reader could notice.
    """
    hit = 0
    for path in segments.DIRECTORY.glob(f"baton-kv-{pid}-*"):
        try:
            with path.open("r+b") as file:
                data = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
        except FileNotFoundError:
            continue  # its owner ended
        lines = data.view(np.uint64).reshape(-1, ALIGNMENT // 8)
        for line in np.flatnonzero((lines[:, 0] != 0) & (lines[:, 1] > 0) & (lines[:, 1] <= MOST_BLOCKS)):
            ticket, offset = int(lines[line, 0]), (int(line) + 1) * ALIGNMENT
            view = View(data, offset)
            if ticket in seen or not _is_save(view, ticket, record_bytes, len(data) - offset):
                continue
            at = offset + draw.randrange(view.whole * record_bytes)
            data[at] ^= 1 << draw.randrange(8)
            seen.add(ticket)
            hit += 1
    return hit


def _is_save(view: View, ticket: int, record_bytes: int, room: int) -> bool:
    if view.whole * record_bytes > room:
        return False
    first = digests.of_records(view.records(0, 1, record_bytes), ticket, 0)
    return bool(first[0] == view.digests(0, 1)[0])


@cache
def record_bytes() -> int:
    """Of one block of the deployed model, its drafter's layer included."""
    config = json.loads((Path(ENGINE["model"]) / "config.json").read_text())
    layers = config["num_hidden_layers"] + config["num_nextn_predict_layers"]
    head = config["hidden_size"] // config["num_attention_heads"]
    values = layers * 2 * config["num_key_value_heads"] * head * BLOCK_SIZE
    return int(values * np.dtype(ENGINE["dtype"]).itemsize)
