"""Give each request of a batch the log-probabilities that it asked for: of the best or of named tokens.

vLLM's V1 gives the whole batch the columns that requests with `logprob_token_ids` need: their neighbours get
fewer than they asked for, and some invented ones. With drafts it raises, which ends the engine, or returns
none. Here the number of best tokens, which reaches every place that gathers columns, also carries the named
tokens of each request, and the rows of a request that names tokens are filled with those.

Leans on: vllm.v1.worker.gpu_input_batch.InputBatch._make_sampling_metadata (num_reqs; its result's
max_num_logprobs and logprob_token_ids, by row), vllm.v1.sample.sampler.Sampler.gather_logprobs (static; gets
that number from Sampler.forward, with a row a request, and from RejectionSampler, with as many rows for each
request, one behind the other; gives token ids [rows, 1 + number], values and ranks, the sampled token first).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from baton.services.engine.patches.replace import replace


def install() -> None:
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.worker.gpu_input_batch import InputBatch

    replace(InputBatch, "_make_sampling_metadata", _naming, ("self",))
    replace(Sampler, "gather_logprobs", _filled, ("logprobs", "num_logprobs", "token_ids"))


class Wanted(int):
    """A number of best tokens, and the named tokens of each row in the batch."""

    named: Mapping[int, Sequence[int]]
    requests: int  # number in the batch

    def __new__(cls, best: int, named: Mapping[int, Sequence[int]], requests: int) -> Wanted:
        made = super().__new__(cls, best)
        made.named = named
        made.requests = requests
        return made


def _naming(original: Callable[..., Any]) -> Callable[..., Any]:
    def _make_sampling_metadata(self: Any) -> Any:
        metadata = original(self)
        if metadata.logprob_token_ids:
            best = metadata.max_num_logprobs or 0
            metadata.max_num_logprobs = Wanted(best, metadata.logprob_token_ids, self.num_reqs)
            metadata.logprob_token_ids = None
        return metadata

    return _make_sampling_metadata


def _filled(original: Callable[..., Any]) -> Callable[..., Any]:
    def gather_logprobs(logprobs: Any, num_logprobs: int, token_ids: Any) -> Any:
        best = original(logprobs, int(num_logprobs), token_ids)
        return _with_named(best, num_logprobs, logprobs) if isinstance(num_logprobs, Wanted) else best

    return gather_logprobs


def _with_named(best: Any, wanted: Wanted, logprobs: Any) -> Any:
    """Return the columns, with named tokens in the rows of the requests that name them.

    Columns that a row does not need repeat its sampled token; nobody sees them.
    """
    import torch

    width = 1 + max(int(wanted), *map(len, wanted.named.values()))
    ids, values = (_widened(one, width) for one in (best.logprob_token_ids, best.logprobs))
    each = logprobs.shape[0] // wanted.requests
    for request, tokens in wanted.named.items():
        rows = slice(request * each, (request + 1) * each)
        named = torch.as_tensor(tokens, dtype=torch.int64, device=ids.device)
        columns = slice(1, 1 + len(tokens))
        ids[rows, 1:], values[rows, 1:] = ids[rows, :1], values[rows, :1]
        ids[rows, columns] = named.to(ids.dtype)
        values[rows, columns] = logprobs[rows][:, named]
    return best._replace(logprob_token_ids=ids, logprobs=values)


def _widened(columns: Any, width: int) -> Any:
    """Return a copy with this many columns, the new ones equal to the first."""
    import torch

    return torch.cat((columns, columns[:, :1].expand(-1, width - columns.shape[1])), dim=1)
