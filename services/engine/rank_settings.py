"""Pass our own settings to every rank of an engine, in VllmConfig.additional_config under one key."""

from __future__ import annotations

from typing import Any

from baton.services.speculation import SpeculativeSettings

ADDITIONAL = "baton"  # our key in additional_config


def for_ranks(spec: SpeculativeSettings, method: str) -> dict[str, Any]:
    """Return our part of additional_config. method: the method's name, with aliases resolved."""
    own = spec.model_dump(exclude={"acceptance_reference"})
    return {ADDITIONAL: {"speculative": own | {"method": method}}}


def settings_of(vllm_config: Any) -> SpeculativeSettings | None:
    """Return a rank's speculation settings, or None if it does not draft."""
    settings = vllm_config.additional_config.get(ADDITIONAL, {}).get("speculative")
    return None if settings is None else SpeculativeSettings.model_validate(settings)
