"""Expand sampling parameters from requests to drafted tokens in place.

vLLM writes the expanded temperature, top-k and top-p into a copy unless they are int64, and then verifies
drafts against uninitialised memory. A worker registers the kernel after it has loaded plug-ins.
"""

from __future__ import annotations

from typing import Any

from baton.services.engine.patches.replace import replaces


@replaces(
    "vllm.utils.cpu_triton_utils:_expand_kernel_impl",
    *("output", "input_val", "cu_num_tokens", "replace_from", "replace_to", "MAX_NUM_TOKENS"),
)
def _expand(original: Any, output: Any, input_val: Any, cu_num_tokens: Any, *figures: int) -> None:
    """Fill output [tokens] from input_val [batch]. cu_num_tokens [batch]: where each request's tokens end."""
    del original
    replace_from, replace_to = figures[:2]
    values = input_val.masked_fill(input_val == replace_from, replace_to)
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    output.copy_(values.repeat_interleave(counts, output_size=output.shape[0]))
