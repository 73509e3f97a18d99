"""The role that does both: the aggregated mode, and either side of a handoff."""

from __future__ import annotations

from baton.protos import scheduler_pb2
from baton.services.config import Settings
from baton.services.decode.role import DECODE
from baton.services.prefill.role import PREFILL
from baton.services.roles import Role


def _max_requests(settings: Settings) -> int:
    return PREFILL.max_requests(settings) + DECODE.max_requests(settings)


MIXED = Role(
    name="mixed",
    wire=scheduler_pb2.ROLE_MIXED,
    writes=True,
    max_requests=_max_requests,
    needs_handoffs=False,
)
