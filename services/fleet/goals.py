"""Read the goals of autoscaling from the configuration."""

from __future__ import annotations

from baton.autoscale.goals import Bounds, Goals
from baton.services.config import Settings
from baton.services.errors import ConfigError

DECIDE_S = 2.0  # longest interval between decisions; at most half of the shortest wait in the settings


def goals_of(settings: Settings) -> Goals:
    """Return the goals. Raises ConfigError if rebalancing would change roles too."""
    own, slo = settings.autoscale, settings.slo
    if own.mode == "on" and settings.scheduler.rebalance_after_s:
        raise ConfigError(
            "autoscale.mode is on and scheduler.rebalance_after_s is set: both would change roles; "
            "leave one of them out"
        )
    return Goals(
        mode=own.mode,
        first_token_s=slo.ttft_ms / 1_000,
        gap_s=slo.itl_ms / 1_000,
        prefill=Bounds(own.min_prefill, own.max_prefill),
        decode=Bounds(own.min_decode, own.max_decode),
        interval_s=min(DECIDE_S, own.flip_after_s / 2, own.down_after_s / 2),
        down_after_s=own.down_after_s,
        flip_after_s=own.flip_after_s,
        encode=Bounds(own.min_encode, own.max_encode),
    )
