"""Expand the requests' sampling parameters to their drafted tokens, into memory that is then read.

Leans on: vllm.utils.cpu_triton_utils._expand_kernel_impl, which a worker registers after it has loaded the
plug-ins (vllm.v1.worker.worker_base.WorkerWrapperBase.init_worker), and on Triton's order of its arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from baton.services.engine.patches.replace import replace


def install() -> None:
    from vllm.utils import cpu_triton_utils

    expects = ("output", "input_val", "cu_num_tokens", "replace_from", "replace_to", "MAX_NUM_TOKENS")
    replace(cpu_triton_utils, "_expand_kernel_impl", expanding, expects)


def expanding(shipped: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel that expands into `output` itself; vLLM's writes into a copy of it."""
    del shipped

    def expand_kernel_impl(output: Any, input_val: Any, cu_num_tokens: Any, *figures: int) -> None:
        """Fill output [tokens] from input_val [batch]; cu_num_tokens [batch] are the ends of their tokens."""
        replace_from, replace_to = figures[:2]
        values = input_val.masked_fill(input_val == replace_from, replace_to)
        counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
        output.copy_(values.repeat_interleave(counts, output_size=output.shape[0]))

    return expand_kernel_impl
