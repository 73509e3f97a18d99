"""Read the goals of autoscaling from the configuration."""

from __future__ import annotations

from baton.autoscale.goals import Bounds, Goals
from baton.services.config import Settings

DOWN_AFTER_S = 120.0  # a worker is removed once fewer have sufficed for this long


def goals_of(settings: Settings) -> Goals:
    """Return the goals."""
    own, slo = settings.autoscale, settings.slo
    flip_after_s = max(1.0, DOWN_AFTER_S / 24)
    return Goals(
        mode=own.mode,
        first_token_s=slo.ttft_ms / 1_000,
        gap_s=slo.itl_ms / 1_000,
        prefill=Bounds(*own.bounds("prefill")),
        decode=Bounds(*own.bounds("decode")),
        interval_s=min(2.0, flip_after_s / 2),
        down_after_s=DOWN_AFTER_S,
        flip_after_s=flip_after_s,
        encode=Bounds(*own.bounds("encode")),
    )
