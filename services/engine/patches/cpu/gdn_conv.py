"""Correct the convolution in Gated DeltaNet when a step verifies fewer drafts than the most.

A layer keeps the last inputs of its convolution in a buffer of kernel - 1 + most drafts places. The next step
reads `kernel - 1` of them, shifted by the number of accepted drafts. So the step's own inputs belong behind
the `kernel - 2` before them. vLLM writes them to the buffer's end, which is the same place only if the step
had the most drafts. After any other step (n-grams that did not match, a chosen length below the most, 0) the
next one reads inputs that are too old, and greedy answers are wrong; a step of fewer tokens than the last one
had accepted ends the engine. The fault's form on GPUs is vllm#39273. Steps in which all requests have the
most drafts stay vLLM's: on CPUs with AMX a C++ kernel takes them.

Leans on: vllm.model_executor.layers.mamba.ops.cpu.gdn_attention (`_spec_forward`, `_unpacked_conv_weight`;
conv_buf [slots, channels, places], whose slot is that of a request's first state), GDNAttentionMetadata
(num_spec_decodes, spec_state_indices_tensor, spec_query_start_loc, num_accepted_tokens),
QwenGatedDeltaNetAttention (conv1d, activation, rearrange_mixed_qkv, A_log, dt_bias) and
vllm._custom_ops.fused_sigmoid_gating_delta_rule_update_spec_cpu.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from baton.services.engine.cpu_convolution import convolved
from baton.services.engine.patches.replace import replace


def install() -> None:
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    expects = (
        *("layer", "attn_metadata_i", "mixed_qkv_spec", "b_spec", "a_spec"),
        *("conv_buf", "ssm_state", "width", "state_len"),
    )
    replace(gdn_attention, "_spec_forward", _of_any_length, expects)


def _of_any_length(shipped: Callable[..., Any]) -> Callable[..., Any]:
    def _spec_forward(  # noqa: PLR0917 (vLLM's parameters)
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
            return shipped(
                layer, attn_metadata_i, mixed_qkv_spec, b_spec, a_spec, conv_buf, ssm_state, width, state_len
            )
        from vllm import _custom_ops
        from vllm.model_executor.layers.mamba.ops.cpu.gdn_attention import _unpacked_conv_weight

        states = attn_metadata_i.spec_state_indices_tensor[:rows]
        accepted = attn_metadata_i.num_accepted_tokens[:rows]
        buffers = [conv_buf[slot] for slot in states[:, 0].tolist()]
        mixed = convolved(
            mixed_qkv_spec,
            _unpacked_conv_weight(layer),
            layer.conv1d.bias,
            layer.activation == "silu",
            counts,
            buffers,
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

    return _spec_forward
