"""Read the config.json of a target or a draft model, without vLLM."""

from __future__ import annotations

import json
from typing import Any

from baton.home import expanded
from baton.services.decode.proposers.method import refuse
from baton.services.errors import ConfigError
from baton.services.speculation import SpeculativeSettings


def config_of(model: str) -> dict[str, Any]:
    """Return the config.json of a model's folder, {} if the model is not a folder. Raises ConfigError."""
    file = expanded(model, "engine.speculative_config.model") / "config.json"
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text())
    except ValueError as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{file} holds no JSON object")
    return found


def draft_config(spec: SpeculativeSettings, what: str) -> dict[str, Any]:
    """Return the draft model's config.json, {} if the model is not a folder. `what` names it in errors."""
    if not spec.model:
        raise refuse("model", spec, f"method {spec.method!r} needs {what}: give its folder")
    folder = expanded(spec.model, "engine.speculative_config.model")
    if spec.model.startswith((".", "/", "~")) or folder.exists():
        if not folder.is_dir():
            raise refuse("model", spec, f"this folder does not exist; give the folder of {what}")
        if not (folder / "config.json").is_file():
            raise refuse("model", spec, f"this folder holds no config.json; give the folder of {what}")
    return config_of(spec.model)


# Words in a draft model's path from which vLLM 0.32 derives the method (config/speculative.py).
_MISLEADING = ("eagle-", "eagle3", "dflash", "dspark")


def check_path(spec: SpeculativeSettings, path: str) -> None:
    """Raise ConfigError if vLLM would derive another method from the draft model's path."""
    for word in _MISLEADING:
        if word in path.lower():
            raise refuse(
                "method",
                spec,
                f"vLLM uses another method for a draft model whose path contains {word!r}; "
                f"rename {path!r}, or give a link to it without that word",
            )


def number(config: dict[str, Any], *keys: str) -> int | None:
    """Return the largest value of `keys`, at the top or in text_config (multimodal models)."""
    levels = (config, config.get("text_config") or {})
    found = [value for level in levels for key in keys if type(value := level.get(key)) is int]
    return max(found, default=None)
