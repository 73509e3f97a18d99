"""A seeded request is written without drafts: its seed then gives the same answer as without speculation.

Verification draws random numbers for each draft, and how many drafts there are depends on who else is in the
batch: vLLM's seeds do not reproduce under speculation, and differ from those without. A client that sends a
seed asks for reproduction, not for speed. Greedy requests keep their drafts: they draw nothing.

Only on model runner V1 without asynchronous scheduling, which takes a list of drafts a request.

Leans on: vllm.v1.worker.gpu_model_runner.GPUModelRunner.propose_draft_token_ids (gives a list, or a tensor
[requests, drafts], which its caller also takes as lists), its use_async_scheduling, and
vllm.v1.sample.metadata.SamplingMetadata.generators (by row, of requests that have a seed and are sampled).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_MARK = "_baton_seeds"


def install() -> None:
    """Patch vLLM in this process; a second call does nothing. After who else patches the same method."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if not hasattr(GPUModelRunner.propose_draft_token_ids, _MARK):
        GPUModelRunner.propose_draft_token_ids = _sparing_seeds(GPUModelRunner.propose_draft_token_ids)


def _sparing_seeds(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def propose_draft_token_ids(
        self: Any, scheduler_output: Any, sampled: Any, sampling_metadata: Any, *args: Any, **kwargs: Any
    ) -> Any:
        drafts = original(self, scheduler_output, sampled, sampling_metadata, *args, **kwargs)
        seeded = sampling_metadata.generators
        if not seeded or self.use_async_scheduling:
            return drafts
        rows: list[list[int]] = drafts if isinstance(drafts, list) else drafts.tolist()
        return [[] if row in seeded else tokens for row, tokens in enumerate(rows)]

    setattr(propose_draft_token_ids, _MARK, True)
    return propose_draft_token_ids
