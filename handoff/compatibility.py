"""The compatibility hash: two engines can exchange KV if everything that gives its bytes meaning is equal.

The hash deliberately leaves out the number of blocks, batch limits, the draft length and the form (forms.py:
the number of ranks, the pipeline's stages and the wire dtype).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from baton.handoff.forms import CacheLayer
from baton.handoff.groups import CacheGroup

# Version of manifests, offers and streams. Raise it with each change that an older worker would misread: it
# is part of the hash, so schedulers never pair workers of different versions.
PROTOCOL = 7
_SHORT = 8  # hex digits of a digest shown to people


@dataclass(frozen=True)
class Facts:
    """Everything that determines the meaning of KV bytes, apart from their form."""

    vllm_version: str
    model: Mapping[str, Any]  # its Hugging Face configuration
    model_fingerprint: str  # hash of the weights; empty if unknown
    dtype: str
    cache_dtype: str
    quantization: str
    groups: tuple[CacheGroup, ...]
    attention_kernels: str  # set on CPUs, where each kernel has its own KV layout; empty elsewhere
    parallel_sizes: Mapping[str, int]  # keyed by vLLM's name
    speculative_method: str  # empty without a drafter that keeps KV
    drafter: Mapping[str, Any]  # its configuration
    drafter_fingerprint: str  # hash of its weights; empty if they are part of the model's weights
    drafter_quantization: str
    layers: tuple[CacheLayer, ...]  # all stages' layers, including the drafter's


def in_words(facts: Facts) -> dict[str, str]:
    """Describe the facts for people, omitting absent ones. Different descriptions mean different hashes."""
    words = {
        "handoff protocol": str(PROTOCOL),
        "vLLM": facts.vllm_version,
        "model": facts.model_fingerprint[:_SHORT],
        "model's configuration": _digest(_essence(facts.model)),
        "dtype": facts.dtype,
        "KV cache's dtype": facts.cache_dtype,
        "quantization": facts.quantization,
        "block size": ", ".join(str(group) for group in facts.groups),
        "attention kernels": facts.attention_kernels,
        **{name: str(size) for name, size in facts.parallel_sizes.items()},
        "speculative method": facts.speculative_method,
        "draft model": facts.drafter_fingerprint[:_SHORT],
        "draft model's configuration": _digest(_essence(facts.drafter)) if facts.drafter else "",
        "draft model's quantization": facts.drafter_quantization,
        "KV layers": f"{len(facts.layers)} ({_digest([asdict(layer) for layer in facts.layers])})",
    }
    return {name: value for name, value in words.items() if value}


def _digest(content: Any, digits: int = _SHORT) -> str:
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:digits]


# keys of a Hugging Face configuration that only say where it came from
_INCIDENTAL = frozenset(
    {"_name_or_path", "name_or_path", "transformers_version", "_commit_hash", "_attn_implementation"}
)


def compatibility_hash(facts: Facts) -> str:
    """Return 32 hex digits. KV passes only between workers whose hashes are equal."""
    content = asdict(facts) | {
        "protocol": PROTOCOL,
        "model": _essence(facts.model),
        "drafter": _essence(facts.drafter),
    }
    return _digest(content, 32)


def embeddings_hash(
    vllm_version: str, model: Mapping[str, Any], model_fingerprint: str, dtype: str, quantization: str
) -> str:
    """Return 32 hex digits, equal for engines whose embeddings of an image are the same."""
    return _digest([PROTOCOL, vllm_version, _essence(model), model_fingerprint, dtype, quantization], 32)


def _essence(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _essence(below) for key, below in value.items() if key not in _INCIDENTAL}
    if isinstance(value, list | tuple):
        return [_essence(below) for below in value]
    return value
