"""Derive the meaning of KV bytes from vLLM's configuration.

Leans on: vllm.__version__; VllmConfig: model_config (hf_config, dtype, quantization, get_total_num_kv_heads),
cache_config.cache_dtype, parallel_config.{_PARALLEL_SIZES, tensor_parallel_size}, speculative_config (method,
uses_draft_kv_cache, draft_model_config.{as of model_config}),
compilation_config.static_forward_context[layer].isa, which vllm.v1.attention.backends.cpu_attn sets before a
connector is given the caches; KVCacheConfig.kv_cache_groups[] (layer_names, kv_cache_spec),
vllm.v1.kv_cache_interface: AttentionSpec (block_size, num_kv_heads, head_size, head_size_v,
max_tp_shards), FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec (sliding_window,
extra_retained_tokens), ChunkedLocalAttentionSpec.attention_chunk_size, CircularBufferSpec (replicated on
every rank), MambaSpec (mamba_type, shapes, dtypes, mamba_cache_mode, tp_replicated),
UniformTypeKVCacheSpecs.kv_cache_specs; the tokens that
SingleTypeKVCacheManager.get_num_skipped_tokens drops for each of these;
vllm.model_executor.layers.mamba.mamba_utils.is_conv_state_dim_first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import vllm
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from baton.handoff.compatibility import Facts
from baton.handoff.config import HandoffConfig
from baton.handoff.errors import UnsupportedCache
from baton.handoff.groups import CacheGroup
from baton.handoff.memory.cache import BlockCache

# The sizes that decide which KV a rank has. Expert and data parallelism do not split attention. Tensor
# parallelism divides heads (forms.py), and workers may differ in it unless a layer's heads cannot be
# divided; stages divide layers.
_PARALLEL_SIZES = ("decode_context_parallel_size", "prefill_context_parallel_size")


_KNOWN = (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec, CircularBufferSpec, MambaSpec)


def groups(kv_cache_config: Any) -> tuple[CacheGroup, ...]:
    """Return each group's rule. Raises UnsupportedCache for a kind that cannot be handed over."""
    return tuple(_group(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups)


def _group(shared: Any) -> CacheGroup:
    specs = list(getattr(shared, "kv_cache_specs", {"": shared}).values())
    block_size = int(shared.block_size)
    unknown = next((spec for spec in specs if not isinstance(spec, _KNOWN)), None)
    if unknown is not None:
        raise UnsupportedCache(
            f"this model keeps a {type(unknown).__name__}, which cannot be handed over: serve it with mixed"
            " workers alone (--mixed)"
        )
    first = specs[0]
    if isinstance(first, SlidingWindowSpec):
        return CacheGroup(block_size, window=first.sliding_window + first.extra_retained_tokens)
    if isinstance(first, ChunkedLocalAttentionSpec):
        return CacheGroup(block_size, chunk=first.attention_chunk_size)
    if isinstance(first, CircularBufferSpec):
        # A request has one block, and writes token n to row n % block_size.
        return CacheGroup(block_size, state=f"ring of {block_size} tokens")
    if isinstance(first, MambaSpec):
        if first.mamba_cache_mode != "none":
            raise UnsupportedCache(
                "this model keeps states beside its KV cache, and the prefix cache keeps several of a request"
                f" (mode {first.mamba_cache_mode!r}): set engine.enable_prefix_caching to false, or serve it"
                " with mixed workers alone (--mixed)"
            )
        return CacheGroup(block_size, state=_form(specs))
    return CacheGroup(block_size)


def _form(specs: Sequence[MambaSpec]) -> str:
    """Describe a state's tensors, in memory order."""
    spec = specs[0]
    tensors = (
        f"{'x'.join(map(str, shape))} {str(dtype).removeprefix('torch.')}"
        for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
    )
    order = "channels" if is_conv_state_dim_first() else "tokens"
    return f"state of {spec.mamba_type.name.lower()} ({', '.join(tensors)}; convolution by {order})"


def layer_names(kv_cache_config: Any) -> list[list[str]]:
    return [list(group.layer_names) for group in kv_cache_config.kv_cache_groups]


def row_widths(kv_cache_config: Any) -> dict[str, int]:
    """Return, by layer, elements per token and head: the gcd of K and V. MLA: the elements of the latent."""
    return {
        name: math.gcd(int(spec.head_size), int(spec.head_size_v or 0))
        for name, spec in _specs(kv_cache_config)
        if not isinstance(spec, MambaSpec)
    }


def _specs(kv_cache_config: Any) -> Iterator[tuple[str, Any]]:
    for group in kv_cache_config.kv_cache_groups:
        shared = group.kv_cache_spec
        specs = getattr(shared, "kv_cache_specs", {})
        for name in group.layer_names:
            yield name, specs.get(name, shared)


def total_heads(vllm_config: Any, kv_cache_config: Any) -> dict[str, int]:
    """Return each layer's KV heads over all tensor-parallel ranks; 1 if every rank has all (MLA's latent).

    Divided states are left out, and so are layers with one head per rank if several ranks may have the same
    head.
    """
    ranks = vllm_config.parallel_config.tensor_parallel_size
    configs = [vllm_config.model_config, getattr(vllm_config.speculative_config, "draft_model_config", None)]
    totals = {int(config.get_total_num_kv_heads()) for config in configs if config is not None}
    found = {}
    for name, spec in _specs(kv_cache_config):
        if isinstance(spec, MambaSpec):
            if spec.tp_replicated:
                found[name] = 1
            continue
        own = int(spec.num_kv_heads)
        possible = {total for total in totals if max(1, total // ranks) == own}
        if spec.max_tp_shards is not None:
            found[name] = own * min(ranks, int(spec.max_tp_shards))
        elif isinstance(spec, MLAAttentionSpec | CircularBufferSpec):
            found[name] = 1
        elif own > 1 or ranks == 1:
            found[name] = own * ranks
        elif len(possible) == 1:
            found[name] = possible.pop()
    return found


def attention_kernels(vllm_config: Any, kv_cache_config: Any) -> set[str]:
    """Return the instruction sets of a CPU's attention, each with a layout of its own; empty for MLA."""
    layers = vllm_config.compilation_config.static_forward_context
    names = [name for group in kv_cache_config.kv_cache_groups for name in group.layer_names]
    return {getattr(layers.get(name), "isa", "") for name in names} - {""}


def parallel_sizes(vllm_config: Any, cache: BlockCache) -> dict[str, int]:
    """Return the sizes that must be equal on both workers, by name."""
    found = {name: int(getattr(vllm_config.parallel_config, name)) for name in _PARALLEL_SIZES}
    if undivided := next((layer.name for layer in cache.layers if not layer.heads), None):
        found[f"tensor_parallel_size (equal on both: {undivided} has no heads to divide)"] = cache.form.ranks
    return found


def facts(
    vllm_config: Any, kv_cache_config: Any, cache: BlockCache, kernels: set[str], config: HandoffConfig
) -> Facts:
    """Return a worker's facts. Raises UnsupportedCache. kernels: `attention_kernels` of all stages."""
    model, speculative = vllm_config.model_config, vllm_config.speculative_config
    if speculative is not None and not speculative.uses_draft_kv_cache():
        # the method drafts from tokens or hidden states and has no KV
        speculative = None
    drafter = speculative.draft_model_config if speculative is not None else None
    return Facts(
        vllm_version=vllm.__version__,
        model=model.hf_config.to_dict(),
        model_fingerprint=config.model_fingerprint,
        dtype=str(model.dtype),
        cache_dtype=str(vllm_config.cache_config.cache_dtype),
        quantization=str(model.quantization or ""),
        groups=groups(kv_cache_config),
        attention_kernels=", ".join(sorted(kernels)),
        parallel_sizes=parallel_sizes(vllm_config, cache),
        speculative_method=str(speculative.method) if speculative is not None else "",
        drafter=drafter.hf_config.to_dict() if drafter is not None else {},
        drafter_fingerprint=config.drafter_fingerprint if drafter is not None else "",
        drafter_quantization=str(drafter.quantization or "") if drafter is not None else "",
        layers=cache.layers,
    )
