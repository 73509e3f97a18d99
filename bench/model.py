"""The model of most benches: 80 M random parameters, as the demo model is too small to keep a core busy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MODEL_NAME = "qwen2-80m"
FOLDER = Path.home() / ".cache" / "baton" / "bench" / MODEL_NAME


def longer(tokens: int) -> Path:
    """Return a folder with the same weights, whose configuration takes so many tokens."""
    folder = FOLDER.with_name(f"{MODEL_NAME}-{tokens}")
    folder.mkdir(exist_ok=True)
    for file in FOLDER.iterdir():
        made = folder / file.name
        if file.suffix == ".json":
            made.write_text(file.read_text().replace(": 4096", f": {tokens}"))
        elif not made.exists():
            made.symlink_to(file)
    return folder


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
