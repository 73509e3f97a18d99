"""The model of most benches: 80 M random parameters, as the demo model is too small to keep a core busy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MODEL_NAME = "qwen2-80m"
FOLDER = Path.home() / ".cache" / "baton" / "bench" / MODEL_NAME


def engine_settings() -> dict[str, Any]:
    """Return the `engine` section for it; the checkpoint is written on first use."""
    from harness.checkpoints import qwen2_80m

    if not (FOLDER / "config.json").exists():
        FOLDER.parent.mkdir(parents=True, exist_ok=True)
        qwen2_80m(FOLDER)
    return {
        "model": str(FOLDER),
        "served_model_name": MODEL_NAME,
        "dtype": "bfloat16",
        "max_model_len": 1024,
        "max_num_seqs": 16,
        "kv_cache_gib": 0.5,
        "tool_call_parser": None,
        "speculative_config": None,
    }
