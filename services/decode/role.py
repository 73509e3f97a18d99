"""A decode worker: pulls KV caches and writes answers; reads a prompt itself where no handoff came along."""

from __future__ import annotations

import math

from baton.protos import scheduler_pb2
from baton.services.config import Settings
from baton.services.roles import Role


def _max_requests(settings: Settings) -> int:
    """What the scheduler places here, and one batch more for placements from an old snapshot."""
    placed = math.ceil(settings.engine.max_num_seqs * settings.scheduler.max_queue_factor)
    return placed + settings.engine.max_num_seqs


DECODE = Role(
    name="decode",
    wire=scheduler_pb2.ROLE_DECODE,
    writes=True,
    max_requests=_max_requests,
)
