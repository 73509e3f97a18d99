"""Send V1's model runner a request's images even where the prefix cache or a handoff covers them.

vLLM leaves such images out, because that part of the prompt is not computed. But if the request is preempted,
V1 computes its prompt from what the runner has, and without the images that ends the engine. With several
ranks, each rank would get a copy of the images with every request. Then the scheduler drops them, too, and
the guard (handoff/vllm/ec_connector.py) ends a request that would need them.
"""

from __future__ import annotations

from typing import Any

from baton.services.engine.images import metadata_of
from baton.services.engine.patches.replace import replaces

several_ranks = False  # whether this process's engine has several ranks


@replaces("vllm.v1.core.sched.output:NewRequestData.from_request")
def _with_images(  # noqa: PLR0917 (vLLM's parameters)
    original: Any,
    cls: Any,
    request: Any,
    block_ids: Any,
    prefill_token_ids: Any = None,
    uses_mrope: bool = False,
) -> Any:
    data = original(cls, request, block_ids, prefill_token_ids, uses_mrope)
    if prefill_token_ids is not None:  # V2
        return data
    if several_ranks:
        pairs = zip(request.mm_features, data.mm_features, strict=True)
        request.mm_features = [here if here is sent else metadata_of(here) for here, sent in pairs]
    else:
        data.mm_features = request.mm_features
    return data
