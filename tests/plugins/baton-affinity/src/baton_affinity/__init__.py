"""The scorer `prefix_affinity`: prompts with the same prefix go to the same worker."""

from __future__ import annotations

import hashlib
from typing import ClassVar

from baton.scheduler.need import Need
from baton.scheduler.policy.base import Scorer, Side
from baton.scheduler.types import WorkerRecord


class PrefixAffinity(Scorer):
    """Rendezvous hashing (Thaler and Ravishankar, 1998): each prefix has its own order of the workers.

    Schedulers agree without communication, and only a joining or leaving worker's own share moves.
    """

    side: ClassVar[Side] = Side.PREFILL

    def score(self, worker: WorkerRecord, need: Need) -> float:
        if not need.prefix.keys:
            return 0.5  # shorter than a KV block
        begins = need.prefix.keys[0].to_bytes(8) + worker.worker_id.encode()
        drawn = hashlib.blake2b(begins, digest_size=8).digest()
        return int.from_bytes(drawn) / 2**64
