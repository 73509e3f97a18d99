"""Give each request of a batch its own log-probabilities, of the best tokens or of the tokens that it names.

If one request sets `logprob_token_ids`, vLLM's V1 gives the whole batch that request's columns; with drafts
it raises, which ends the engine, or returns none. Here `max_num_logprobs` also carries the tokens that each
request names, which replace the columns of its rows: one per request in vLLM's sampler, several in its
rejection sampler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from baton.services.engine.patches.replace import replaces


class Wanted(int):
    """The number of best tokens, with the tokens that each row of the batch names."""

    named: Mapping[int, Sequence[int]]
    requests: int  # number of requests in the batch

    def __new__(cls, best: int, named: Mapping[int, Sequence[int]], requests: int) -> Wanted:
        made = super().__new__(cls, best)
        made.named = named
        made.requests = requests
        return made


@replaces("vllm.v1.worker.gpu_input_batch:InputBatch.refresh_metadata")
def _add_names(original: Any, self: Any) -> None:
    original(self)
    metadata = self.sampling_metadata
    if metadata.logprob_token_ids:
        best = metadata.max_num_logprobs or 0
        metadata.max_num_logprobs = Wanted(best, metadata.logprob_token_ids, self.num_reqs)
        metadata.logprob_token_ids = None


@replaces("vllm.v1.sample.sampler:Sampler.gather_logprobs")
def _gather(original: Any, logprobs: Any, num_logprobs: int, token_ids: Any) -> Any:
    best = original(logprobs, int(num_logprobs), token_ids)
    return _with_named(best, num_logprobs, logprobs) if isinstance(num_logprobs, Wanted) else best


def _with_named(best: Any, wanted: Wanted, logprobs: Any) -> Any:
    """Return the columns with named tokens; columns that a row does not need repeat its sampled token."""
    import torch

    width = 1 + max(int(wanted), *map(len, wanted.named.values()))
    ids, values = (
        torch.cat((one, one[:, :1].expand(-1, width - one.shape[1])), dim=1)
        for one in (best.logprob_token_ids, best.logprobs)
    )
    each = logprobs.shape[0] // wanted.requests
    for request, tokens in wanted.named.items():
        rows = slice(request * each, (request + 1) * each)
        named = torch.as_tensor(tokens, dtype=torch.int64, device=ids.device)
        columns = slice(1, 1 + len(tokens))
        ids[rows, 1:], values[rows, 1:] = ids[rows, :1], values[rows, :1]
        ids[rows, columns] = named.to(ids.dtype)
        values[rows, columns] = logprobs[rows][:, named]
    return best._replace(logprob_token_ids=ids, logprobs=values)
