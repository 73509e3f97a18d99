"""Run two small functions as they are written, instead of compiling C++ for them.

torch.compile runs at the first request for log-probabilities, and in the first step of each of several ranks,
and stalls all streams for seconds.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from baton.services.engine.patches.replace import replaces


@replaces(
    "vllm.model_executor.layers.vocab_parallel_embedding:get_masked_input_and_mask",
    *("input_", "org_vocab_start_index", "org_vocab_end_index", "num_org_vocab_padding"),
    *("added_vocab_start_index", "added_vocab_end_index"),
)
@replaces("vllm.v1.sample.sampler:batched_count_greater_than", "x", "values")
def _call_uncompiled(original: Callable[..., Any], *args: Any) -> Any:
    return inspect.unwrap(original)(*args)
