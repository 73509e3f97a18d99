"""The scorer `prefix_affinity`: prompts that begin alike go to the worker whose prefix cache has them."""

from __future__ import annotations

import hashlib
from typing import ClassVar

from baton.scheduler.need import Need
from baton.scheduler.policy.base import Scorer, Side
from baton.scheduler.types import WorkerRecord


class PrefixAffinity(Scorer):
    """Rendezvous hashing: each prefix ranks the workers in its own order (Thaler and Ravishankar, 1998).

    Schedulers agree without talking to each other, and a worker that comes or goes moves its own share alone.
    """

    side: ClassVar[Side] = Side.PREFILL

    def score(self, worker: WorkerRecord, need: Need) -> float:
        if not need.prefix.keys:
            return 0.5  # shorter than one KV block: every worker is as good
        begins = need.prefix.keys[0].to_bytes(8) + worker.worker_id.encode()
        drawn = hashlib.blake2b(begins, digest_size=8).digest()
        return int.from_bytes(drawn) / 2**64
