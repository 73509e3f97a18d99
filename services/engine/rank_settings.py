"""Carry our own settings to every rank of an engine, in vLLM's additional_config under one key.

Leans on: vllm.config.VllmConfig.additional_config, which vLLM carries to every rank as it is.
"""

from __future__ import annotations

from typing import Any

from baton.services.speculation import SpeculativeSettings

ADDITIONAL = "baton"  # our key in additional_config


def for_ranks(spec: SpeculativeSettings, method: str) -> dict[str, Any]:
    """Return our part of additional_config; `method`: the method's name, aliases resolved."""
    return {ADDITIONAL: {"speculative": {**spec.model_dump(), "method": method}}}


def settings_of(vllm_config: Any) -> SpeculativeSettings | None:
    """Return a rank's speculation settings; None if it does not draft."""
    settings = vllm_config.additional_config.get(ADDITIONAL, {}).get("speculative")
    return None if settings is None else SpeculativeSettings.model_validate(settings)
