"""Whether two engines' KV means the same: a hash over everything that gives the bytes their meaning.

The number of blocks, the batch's limits and the number of drafted tokens are left out on purpose; so is the
form (forms.py): how many ranks divide the heads, and in which dtype KV travels.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from baton.handoff.groups import CacheGroup
from baton.handoff.layers import CacheLayer

# The form of manifests, offers and streams. It rises with each change that an older worker would misread:
# workers of two forms have different hashes, so that no scheduler pairs them.
PROTOCOL = 6
_SHORT = 8  # hex digits of a digest that a person compares


@dataclass(frozen=True)
class Facts:
    """Everything that decides the meaning of KV bytes, in whichever form they are."""

    vllm_version: str
    model: Mapping[str, Any]  # its configuration in Hugging Face's form
    model_fingerprint: str  # of the weights; empty where the worker does not know it
    dtype: str
    cache_dtype: str
    quantization: str
    groups: tuple[CacheGroup, ...]
    attention_kernels: str  # where each has a KV layout of its own (CPUs); empty elsewhere
    parallel_sizes: Mapping[str, int]  # in which workers must not differ, by vLLM's name
    speculative_method: str  # empty without a drafter that keeps KV
    drafter: Mapping[str, Any]  # its configuration
    drafter_fingerprint: str  # of its weights; empty where they are the model's
    drafter_quantization: str
    layers: tuple[CacheLayer, ...]  # the drafter's included


def in_words(facts: Facts) -> dict[str, str]:
    """Return the facts for people, absent ones left out. Two that differ here differ in their hash."""
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


def _digest(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:_SHORT]


# Keys of a Hugging Face configuration that say where it came from.
_INCIDENTAL = frozenset(
    {"_name_or_path", "name_or_path", "transformers_version", "_commit_hash", "_attn_implementation"}
)


def compatibility_hash(facts: Facts) -> str:
    """Return 32 hex digits. KV passes between workers whose hashes are equal, and no others."""
    content = asdict(facts) | {
        "protocol": PROTOCOL,
        "model": _essence(facts.model),
        "drafter": _essence(facts.drafter),
    }
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _essence(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _essence(below) for key, below in value.items() if key not in _INCIDENTAL}
    if isinstance(value, list | tuple):
        return [_essence(below) for below in value]
    return value
