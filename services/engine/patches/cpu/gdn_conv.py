"""Correct Gated DeltaNet's convolution after a step with fewer drafts than the maximum.

A layer keeps the last inputs of its convolution in a buffer of kernel - 1 + maximum drafts columns, from
which the next step reads kernel - 1, shifted by the accepted drafts. vLLM writes a step's inputs to the
buffer's end, which is right only if the step had the maximum number of drafts. After any other step answers
are wrong, or the engine ends. On GPUs this fault is vllm#39273. Steps with the maximum number of drafts stay
with vLLM's C++ kernel.

conv_buf: [slots, channels, places]; a request's slot in it is the slot of its first state.
"""

from __future__ import annotations

from typing import Any

from baton.services.engine.cpu_convolution import convolved
from baton.services.engine.patches.replace import replaces


@replaces("vllm.model_executor.layers.mamba.ops.cpu.gdn_attention:_spec_forward")
def _of_any_length(  # noqa: PLR0917 (vLLM's parameters)
    original: Any,
    layer: Any,
    attn_metadata_i: Any,
    mixed_qkv_spec: Any,
    b_spec: Any,
    a_spec: Any,
    conv_buf: Any,
    ssm_state: Any,
    width: int,
    state_len: int,
) -> Any:
    rows = attn_metadata_i.num_spec_decodes
    ends = attn_metadata_i.spec_query_start_loc[: rows + 1]
    counts = ends.diff().tolist()
    if all(count == state_len - width + 2 for count in counts):
        return original(
            layer, attn_metadata_i, mixed_qkv_spec, b_spec, a_spec, conv_buf, ssm_state, width, state_len
        )
    from vllm import _custom_ops
    from vllm.model_executor.layers.mamba.ops.cpu.gdn_attention import _unpacked_conv_weight

    states = attn_metadata_i.spec_state_indices_tensor[:rows]
    accepted = attn_metadata_i.num_accepted_tokens[:rows]
    mixed = convolved(
        mixed_qkv_spec,
        _unpacked_conv_weight(layer),
        layer.conv1d.bias,
        layer.activation == "silu",
        counts,
        [conv_buf[slot] for slot in states[:, 0].tolist()],
        accepted.tolist(),
    )
    query, key, value = layer.rearrange_mixed_qkv(mixed)
    return _custom_ops.fused_sigmoid_gating_delta_rule_update_spec_cpu(
        A_log=layer.A_log,
        dt_bias=layer.dt_bias,
        q=query.squeeze(0),
        k=key.squeeze(0),
        v=value.squeeze(0),
        a=a_spec,
        b=b_spec,
        initial_state_source=ssm_state,
        spec_state_indices=states.int().contiguous(),
        num_accepted_tokens=accepted.int().contiguous(),
        cu_seqlens=ends.int().contiguous(),
        use_qk_l2norm_in_kernel=True,
    )
