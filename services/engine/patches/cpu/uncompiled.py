"""Run two small functions as written, for which vLLM has torch.compile generate C++.

Leans on: vllm.v1.sample.sampler.batched_count_greater_than and
vllm.model_executor.layers.vocab_parallel_embedding.get_masked_input_and_mask, which torch.compile wraps.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from baton.services.engine.patches.replace import replace


def install() -> None:
    from vllm.model_executor.layers import vocab_parallel_embedding
    from vllm.v1.sample import sampler

    replace(sampler, "batched_count_greater_than", uncompiled, ("x", "values"))
    expects = (
        *("input_", "org_vocab_start_index", "org_vocab_end_index", "num_org_vocab_padding"),
        *("added_vocab_start_index", "added_vocab_end_index"),
    )
    replace(vocab_parallel_embedding, "get_masked_input_and_mask", uncompiled, expects)


def uncompiled(shipped: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls the one given to torch.compile."""
    plain = inspect.unwrap(shipped)

    def function(*args: Any) -> Any:
        return plain(*args)

    return function
