"""Start the deployments of benches.

Most benches serve a model of 80 M random parameters, because the demo model is too small to keep a core busy.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from harness.deployment import Deployment, deployment

MODEL_NAME = "qwen2-80m"
FOLDER = Path.home() / ".cache" / "baton" / "bench" / MODEL_NAME
# Settings of aggregated engines, which prefill as vLLM does by default: a whole prompt if it fits in a step.
AGGREGATED: dict[str, Any] = {
    "max_num_batched_tokens": 2048,
    "extra": {"long_prefill_token_threshold": 0, "scheduling_policy": "fcfs"},
}
A = TypeVar("A")


def engine_settings() -> dict[str, Any]:
    """Return the `engine` section of the 80 M model. The first call writes the checkpoint."""
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


def longer(tokens: int) -> dict[str, Any]:
    """Return `engine_settings` for requests of up to `tokens` tokens: same weights, another configuration."""
    settings, folder = engine_settings(), FOLDER.with_name(f"{MODEL_NAME}-{tokens}")
    folder.mkdir(exist_ok=True)
    for file in FOLDER.iterdir():
        made = folder / file.name
        if file.suffix == ".json":
            made.write_text(file.read_text().replace(": 4096", f": {tokens}"))
        elif not made.exists():
            made.symlink_to(file)
    return settings | {"model": str(folder), "max_model_len": tokens}


@contextmanager
def up(prefill: int = 1, decode: int = 1, mixed: int = 0, *flags: str, **config: Any) -> Iterator[Deployment]:
    """Serve the 80 M model during the block, with `config` as further sections, `flags` for `baton up`."""
    config = {"engine": engine_settings(), **config} if "engine" not in config else config
    with tempfile.TemporaryDirectory() as folder, deployment(Path(folder), **config) as one:
        yield one.up(prefill, decode, mixed, *flags)


def in_turns(
    arms: Mapping[str, A], rounds: int, measure: Callable[[A, int], dict[str, float]]
) -> dict[str, list[dict[str, float]]]:
    """Measure every arm once per round, A B A B, so that other work on the machine affects all arms alike."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
    for number in range(rounds):
        for name, arm in arms.items():
            runs[name].append(measure(arm, number))
            shown = {key: round(value, 1) for key, value in runs[name][-1].items()}
            print(f"{name:>14}", shown, flush=True)
    return runs


@contextmanager
def no_pauses() -> Iterator[None]:
    """Disable garbage collection inside the block, so that its pauses are not attributed to the server."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
