"""Choose which of vLLM's two back ends computes multi-head latent attention (MLA) on a CPU.

CPU_MLA runs on every CPU, with every dtype, in blocks of 16 tokens. AMX_MLA, which vLLM prefers on CPUs with
AMX, takes only bfloat16 and blocks of 32 tokens. Baton uses CPU_MLA unless AMX_MLA is set, so that a model
can be served in every dtype on every machine, and machines with and without AMX can exchange KV.
"""

from __future__ import annotations

from typing import Any

from baton.services.errors import ConfigError

_ANY_CPU, _AMX = "CPU_MLA", "AMX_MLA"
_BLOCK_SIZES = {_ANY_CPU: 16, _AMX: 32}  # tokens; AMX_MLA also takes multiples of 32


def add_arguments(args: dict[str, Any], model_config: Any) -> None:
    """Add the back end and its block size. Raises ConfigError for a back end that cannot be used here."""
    asked = args.get("attention_backend") or dict(args.get("attention_config") or {}).get("backend")
    backend = str(asked or _ANY_CPU).upper()
    if backend not in _BLOCK_SIZES:
        raise ConfigError(
            f"engine.extra.attention_backend (value {asked!r}): on a CPU this model's attention is computed "
            f"by {_ANY_CPU} or {_AMX}"
        )
    if backend == _AMX:
        _check_amx(args, str(model_config.dtype).removeprefix("torch."))
    if not asked:
        args["attention_backend"] = backend
    if args.get("speculative_config") is not None:
        args["speculative_config"]["attention_backend"] = backend  # else vLLM chooses one for the drafter
    args.setdefault("block_size", _BLOCK_SIZES[backend])


def _check_amx(args: dict[str, Any], dtype: str) -> None:
    import torch

    if not torch.cpu._is_amx_tile_supported():
        problem = "this process has no AMX"
    elif dtype != "bfloat16":
        problem = f"it computes only in bfloat16, and engine.dtype is {dtype}"
    elif args.get("block_size", 0) % _BLOCK_SIZES[_AMX]:
        problem = (
            f"engine.extra.block_size (value {args['block_size']}) is no multiple of {_BLOCK_SIZES[_AMX]}"
        )
    else:
        return
    raise ConfigError(f"engine.extra.attention_backend (value {_AMX!r}): {problem}; use {_ANY_CPU}")
