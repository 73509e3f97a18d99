"""A simulated worker: an engine, and what it reports to the scheduler."""

from __future__ import annotations

from collections.abc import Callable

from baton.block_log import BlockLog
from baton.protos import scheduler_pb2 as pb
from baton.services.simulate.engine import SimulatedEngine
from baton.services.simulate.profile import Profile

MODEL = "simulated"


class SimulatedWorker:
    """One worker."""

    def __init__(
        self, name: str, role: pb.Role, profile: Profile, block_tokens: int, engine: SimulatedEngine
    ) -> None:
        self.worker_id = name
        self.engine = engine
        self.link_free_at = 0.0  # KV transfers to it run one after another
        self.pinned = 0.0  # bytes of saved KV
        self.pinned_handoffs = 0
        self._now = 0.0
        self.log = BlockLog(lambda: round(1e9 * self._now) + 1)
        self._handoff = profile.handoff
        size = profile.engine
        capacity = pb.Capacity(
            compatibility_hash="aa",
            block_size=block_tokens,
            num_blocks=engine.cache.blocks + 1,
            max_num_seqs=size.batch,
            max_num_batched_tokens=size.step_tokens,
            max_model_len=size.max_model_len,
            lookahead_tokens=1,
            transports=["simulated"],
        )
        self.identity = pb.WorkerIdentity(
            worker_id=name,
            name=name,
            role=role,
            address="127.0.0.1:1",
            model=MODEL,
            model_fingerprint="f",
            capacity=capacity,
        )

    def load(self) -> pb.WorkerLoad:
        engine = self.engine
        return pb.WorkerLoad(
            running=engine.running,
            waiting=engine.waiting,
            free_blocks=max(0, engine.cache.free),
            pinned_handoffs=self.pinned_handoffs,
            pinned_bytes=round(self.pinned),
            staging_bytes=self._handoff.staging_bytes,
            counts=engine.counts,
        )

    def tell(self, now: float, hear: Callable[[str, pb.BlockOperations], pb.BlocksKnown]) -> None:
        """Report the cache's changes to the scheduler."""
        self._now = now
        self.log.take(self.engine.cache.take_changes())
        while True:
            self.log.heard(hear(self.worker_id, self.log.message()))
            if not self.log.behind:
                return

    def pin(self, size: float) -> None:
        """Hold `size` bytes of saved KV until `unpin`."""
        self.pinned += size
        self.pinned_handoffs += 1

    def unpin(self, size: float) -> None:
        self.pinned -= size
        self.pinned_handoffs -= 1
